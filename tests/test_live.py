"""The main job on the real model and the real engine.

Together these tests argue: the two programs agree where they must (float32 on both sides), differ
where they do differ (bfloat16 kernels), and the verdict tells a healthy engine from a broken one.
Each engine setting is started once a session.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import NO_PROBES, ROOT, SAMPLES, CommandResult, audit, write_settings

from kernel_contracts import bounds
from mismatch_audit.tokens import read_parts

pytestmark = pytest.mark.engine


def record_of(result: CommandResult) -> dict[str, Any]:
    return json.loads((result.folder / "report.json").read_text(encoding="utf-8"))


def tokens_of(result: CommandResult) -> pd.DataFrame:
    return read_parts(sorted((result.folder / "tokens").glob("part-*.parquet")))


def test_float32_on_both_sides_is_exact(exact: CommandResult) -> None:
    """Same weights, same precision, other kernels: only rounding may differ, and nothing flips."""
    assert exact.code == 0, exact.err + exact.out
    tokens = tokens_of(exact)
    assert tokens["prompt_id"].nunique() == 60
    gap = (tokens["reference_logprob"] - tokens["engine_logprob"]).abs()
    assert gap.mean() <= 1e-4
    assert not tokens["flip"].any()
    assert record_of(exact)["verdict"] == "PASS"


def test_full_vocabulary_rows_agree_with_what_the_engine_reports(
    exact: CommandResult, quickstart: CommandResult
) -> None:
    """Sampled log-probs and prompt log-probs are another path through vLLM: on every row of both
    paths they must equal ours, and the top 20 of the self-check too."""
    for result in (exact, quickstart):
        tokens = tokens_of(result)
        assert set(tokens["path"]) == {"decode", "prefill"}
        gap = (tokens["engine_logprob"] - tokens["engine_reported_logprob"]).abs()
        assert gap.notna().all()
        assert gap.max() <= 1e-3
        engine = record_of(result)["identities"]["engine"]
        assert engine["self_check"]["values"] >= 20
        assert engine["self_check"]["largest_difference"] <= 1e-3


def test_the_main_job_passes_its_contract(quickstart: CommandResult) -> None:
    """bfloat16 serving differs, flips happen, the decided slice keeps its tokens, and a contract
    whose limits come from a budget and cited defaults holds."""
    assert quickstart.code == 0, quickstart.err + quickstart.out
    tokens = tokens_of(quickstart)
    decode = tokens[tokens["path"] == "decode"]
    assert decode["prompt_id"].nunique() >= 120
    assert decode["flip"].any()
    decided = decode[decode["reference_margin"] > 0.5]
    assert len(decided) > 500
    assert decided["flip"].mean() <= 0.001
    record = record_of(quickstart)
    schema = json.loads(
        (ROOT / "mismatch_audit" / "reports" / "report.schema.json").read_text(encoding="utf-8")
    )
    jsonschema.validate(record, schema)
    floors = [m["noise_floor"] for m in record["measurements"] if m["section"] == "statistical"]
    assert len(floors) >= 10
    assert all(floor is not None for floor in floors)
    assert "PASS" in quickstart.out
    assert (quickstart.folder / "report.html").stat().st_size > 10_000


def test_every_certified_statement_holds_token_by_token(quickstart: CommandResult) -> None:
    """The bounds are theorems: one token that breaks one would show a wrong table or formula."""
    tokens = tokens_of(quickstart)
    certified = tokens["reference_margin"] > tokens["drift"]
    assert certified.any()
    assert not (tokens["flip"] & certified).any()
    limit = bounds.tv_from_nucleus(tokens["drift"].to_numpy(), tokens["tail_mass"].to_numpy())
    assert (tokens["tv"].to_numpy() <= limit + 1e-12).all()
    pinsker = bounds.tv_from_kl(tokens["kl_engine_reference"].to_numpy())
    assert (tokens["tv"].to_numpy() <= pinsker + 1e-7).all()
    for chain in record_of(quickstart)["chain"]:
        for row in chain["rows"]:
            if row["measured"] is not None and row["slack"] is not None:
                assert row["bound"] >= row["measured"] * (1 - 1e-9), (chain["slice"], row)


def test_a_strict_contract_is_violated_with_names_and_numbers(
    quickstart: CommandResult, tmp_path: Path
) -> None:
    """The same rows under the limits of an exact engine: exit 1, naming slice, number and token."""
    contract = SAMPLES / "contracts" / "bf16-strict.yaml"
    result = audit("judge", quickstart.folder, "--contract", contract, "--out", tmp_path / "strict")
    assert result.code == 1, result.err + result.out
    record = json.loads((tmp_path / "strict" / "report.json").read_text(encoding="utf-8"))
    failed = [m for m in record["measurements"] if m["verdict"] == "FAIL"]
    assert failed
    assert all(m["lower"] > m["limit"] for m in failed if m["method"].startswith("betting"))
    assert failed[0]["slice"] in result.out
    assert record["views"]["worst_tokens"][0]["prompt_id"] in result.out


def run_with_engine(engine: dict[str, Any], folder: Path) -> CommandResult:
    """A short run under the serving contract; certain violations need no more than 32 prompts."""
    settings = write_settings(
        folder.with_suffix(".yaml"),
        limit=32,
        engine={"program": "vllm", "dtype": "bfloat16", **engine},
        probes=NO_PROBES,
    )
    return audit("run", settings, "--out", folder, folder=folder)


def assert_violated(result: CommandResult) -> None:
    assert result.code == 1, result.err + result.out
    kl = next(m for m in record_of(result)["measurements"] if m["clause"] == "S1")
    assert kl["verdict"] == "FAIL"
    assert kl["lower"] > kl["limit"]


def test_an_engine_with_stale_weights_violates_the_contract(tmp_path: Path) -> None:
    """The contract that the healthy engine keeps is broken by 2 % noise on one load of weights."""
    assert_violated(run_with_engine({"inject": {"stale_weights": 0.02}}, tmp_path / "run"))


def test_an_engine_with_an_fp8_cache_violates_the_contract(tmp_path: Path) -> None:
    """An fp8 KV cache breaks it too. vLLM has such a cache on CUDA and, on a CPU, with AVX-512;
    elsewhere its refusal must reach the user as one message, with the engine's own words."""
    result = run_with_engine({"args": {"kv_cache_dtype": "fp8"}}, tmp_path / "run")
    if torch.cuda.is_available() or "AVX512" in torch.backends.cpu.get_cpu_capability():
        assert_violated(result)
        assert record_of(result)["identities"]["engine"]["kv_cache_dtype"] == ["fp8"]
    else:
        assert result.code == 2
        assert "FP8 KV cache on CPU requires" in result.err
        assert "Traceback" not in result.err.split("its last log lines")[0]


def test_kl_in_the_table_is_float64_accurate(exact: CommandResult) -> None:
    """KL and TV of every row obey relations that rounding errors of naive sums would break at this
    drift of 1e-5 nats: KL > 0 and TV^2 <= KL/2, with TV above 0."""
    tokens = tokens_of(exact)
    kl, tv = tokens["kl_engine_reference"].to_numpy(), tokens["tv"].to_numpy()
    assert (kl >= 0).all()
    assert (tv > 0).any()
    assert (tv**2 <= kl / 2 * (1 + 1e-3) + 1e-16).all()
    assert np.median(kl) < 1e-9
