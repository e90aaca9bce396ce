"""The policy-gradient bias of a real run: measured, kept, judged by contracts, and printed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import SAMPLES, CommandResult, audit

pytestmark = pytest.mark.engine

CLAUSES = """
  - {id: S8, metric: policy_gradient_bias, limit: 0.5}
  - {id: S9, metric: policy_gradient_bias_to_noise, limit: 0.05}
runtime:
"""


def test_two_exact_programs_have_no_bias_that_the_noise_of_a_batch_would_not_hide(
    exact: CommandResult, tmp_path: Path
) -> None:
    """float32 on both sides: `audit run --gradient` adds the measurement to a finished run, and a
    judged contract passes on the ratio to the noise. The ratio to the gradient itself may stay
    open with so few rewards, but nothing claims a violation, and nothing is unobserved."""
    folder = tmp_path / "run"
    shutil.copytree(exact.folder, folder)
    done = audit(
        "run", "--model", "sample", "--prompts", SAMPLES / "prompts.jsonl", "--limit", "60",
        "--contract", SAMPLES / "contracts" / "fp32-exact.yaml", "--engine-dtype", "float32",
        "--max-tokens", "16", "--out", folder, "--resume", "--gradient",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "POLICY GRADIENT" in done.out
    text = (SAMPLES / "contracts" / "fp32-exact.yaml").read_text(encoding="utf-8")
    contract = tmp_path / "gradient.yaml"
    contract.write_text(text.replace("\nruntime:\n", CLAUSES), encoding="utf-8")
    judged = audit("judge", folder, "--contract", contract, "--out", tmp_path / "judged")
    record = json.loads((tmp_path / "judged" / "report.json").read_text(encoding="utf-8"))
    verdict = {m["clause"]: m for m in record["measurements"]}
    assert verdict["S9"]["verdict"] == "PASS", judged.out
    assert verdict["S9"]["upper"] < 0.01
    assert verdict["S8"]["verdict"] in ("PASS", "INCONCLUSIVE")
    assert {row["slice"] for row in record["gradient"]} >= {"all", "advantage > 0"}


def test_a_finished_run_against_itself_and_against_another(
    exact: CommandResult, quickstart: CommandResult, tmp_path: Path
) -> None:
    """A baseline on real runs: no change is none to the last bit; bfloat16 after float32 keeps its
    contract and is still a step back."""
    contract = SAMPLES / "contracts" / "bf16-serving.yaml"
    same = audit(
        "judge", quickstart.folder, "--contract", contract, "--out", tmp_path / "same",
        "--baseline", quickstart.folder,
    )  # fmt: skip
    rows = json.loads((tmp_path / "same" / "report.json").read_text(encoding="utf-8"))
    change = [m for m in rows["measurements"] if m["clause"].endswith(" vs baseline")]
    assert change, same.err
    assert {m["value"] for m in change} == {0.0}
    assert "FAIL" not in {m["verdict"] for m in change}
    worse = audit(
        "judge", quickstart.folder, "--contract", contract, "--out", tmp_path / "worse",
        "--baseline", exact.folder, "--baseline-margin", "0.1",
    )  # fmt: skip
    rows = json.loads((tmp_path / "worse" / "report.json").read_text(encoding="utf-8"))
    change = {(m["clause"], m["slice"]): m for m in rows["measurements"]}
    assert change["S3", "all"]["verdict"] == "PASS", worse.err
    assert change["S3 vs baseline", "all"]["verdict"] == "FAIL"
    assert rows["exit_code"] == worse.code == 1


def test_public_logprobs_fail_a_broken_engine_and_pass_none(tmp_path: Path) -> None:
    """Only 20 log-probs a row, from a real engine whose weights are off: the lower ends of the
    intervals prove it. Every interval has an end below and none above."""
    folder = tmp_path / "top"
    done = audit(
        "run", "--model", "sample", "--prompts", SAMPLES / "prompts.jsonl", "--limit", "60",
        "--contract", SAMPLES / "contracts" / "public-logprobs.yaml", "--engine-dtype", "float32",
        "--max-tokens", "8", "--top-logprobs", "20", "--inject", "stale_weights=0.03",
        "--out", folder,
    )  # fmt: skip
    assert done.code == 1, done.err + done.out
    record = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    kl = next(m for m in record["measurements"] if m["metric"] == "kl_engine_reference")
    assert kl["verdict"] == "FAIL"
    assert kl["upper"] is None
    assert "top-20" in kl["method"]
    assert record["identities"]["engine"]["route"] == "top-20"
