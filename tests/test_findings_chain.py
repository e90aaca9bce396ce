"""What is said beside the verdicts: causes, the chain with slack, actions, charts.

Each finding has a planted cause that it names and a clean table on which it is quiet.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from kernel_contracts import divergence
from kernel_contracts.chain import chain_of
from kernel_contracts.escalation import actions_of
from kernel_contracts.loading import parse_contract
from kernel_contracts.measurement import Measurement
from kernel_contracts.slices import resolve
from kernel_contracts.verdict import Evidence
from mismatch_audit import views
from mismatch_audit.findings import find

ENGINE = {"kv_cache_dtype": ["auto"], "linear_methods": {}, "requested": {}, "dtype": "bfloat16",
          "unrepresentable_weights": 0.0, "route": "head"}  # fmt: skip


def real_rows(drift: float = 0.1, prompts: int = 6, rows: int = 8, seed: int = 0) -> pd.DataFrame:
    """Token rows of random pairs of distributions, by the float64 reference."""
    generator = np.random.default_rng(seed)
    n = prompts * rows
    reference = generator.normal(0, 2, (n, 40))
    engine = reference + drift * generator.normal(0, 1, (n, 40))
    targets = generator.integers(0, 40, n)
    columns = divergence.compare_rows(reference, engine, token_ids=targets)
    frame = pd.DataFrame({k: np.asarray(v) for k, v in columns.items()})
    frame["prompt_id"] = np.repeat([f"p{i}" for i in range(prompts)], rows)
    frame["position"] = np.tile(np.arange(rows), prompts)
    frame["path"] = "decode"
    return frame


def codes(tokens: pd.DataFrame, engine: dict, **more: object) -> set[str]:  # type: ignore[type-arg]
    evidence = replace(Evidence(tokens, tokens[["prompt_id"]].drop_duplicates()), **more)  # type: ignore[arg-type]
    return {f.code for f in find({"engine": engine, "reference": {}}, evidence, [])}


def test_a_clean_run_has_no_findings() -> None:
    """The control for every case below."""
    assert codes(real_rows(), ENGINE) == set()


@pytest.mark.parametrize(
    ("code", "tokens", "engine"),
    [
        ("NONFINITE", lambda t: t.assign(nonfinite=np.where(t.index == 2, 1, 0)), {}),
        ("CERTIFICATE", lambda t: t.assign(flip=True, reference_margin=9.0), {}),
        ("HEAD_ROUTE", lambda t: t, {"route": "engine_logits"}),
        ("ROUNDED_COPY", lambda t: t, {"unrepresentable_weights": 0.4}),
        ("NO_OP_SETTING", lambda t: t, {"requested": {"kv_cache_dtype": "fp8"}}),
    ],
)
def test_each_cause_is_named(code: str, tokens, engine: dict) -> None:  # type: ignore[no-untyped-def,type-arg]
    """One planted cause, one code."""
    assert codes(tokens(real_rows()), {**ENGINE, **engine}) == {code}


def test_a_batch_variant_engine_is_named() -> None:
    """The probe's KL is above what rounding of a float32 kernel gives."""
    probes = pd.DataFrame(
        [{"probe": "batch_invariance", "prompt_id": "p", "n_tokens": 4, "kl": 1e-3}]
    )
    assert codes(real_rows(), ENGINE, probes=probes) == {"BATCH_VARIANT"}


CONTRACT = """
schema: kernel-contracts/v1
name: t
slices: {all: {}, tight: {where: "reference_margin > 1"}}
statistical:
  - {id: S1, metric: kl_engine_reference, limit: 1.0e-2, slices: [all, tight]}
budget: {reward_range: 2.0, reward_drift: 0.2, horizon: 64}
escalation:
  - {when: {clause: S1, verdict: FAIL, slice: tight}, action: route, to: reference}
  - {when: {verdict: FAIL}, action: block}
  - {when: {verdict: WARN}, action: log}
"""


def test_the_chain_bounds_what_was_measured_and_flags_vacuity() -> None:
    """Bounds hold on real rows; a large drift over many tokens says nothing, and that is said."""
    contract = parse_contract(CONTRACT)
    for drift, vacuous in ((0.02, False), (3.0, True)):
        tokens = real_rows(drift)
        one = resolve(contract, tokens)[0]
        chain = chain_of(contract, one, tokens, [], 16)
        for route in ("rms", "sup"):
            for link in chain[route]:
                if link.measured is not None and link.bound is not None:
                    assert link.bound >= link.measured * (1 - 1e-12), (route, link)
        reward = next(r for r in chain["sup"] if r.quantity == "reward drift")
        assert reward.vacuous == vacuous
        assert reward.useful_horizon is not None
    empty = tokens.assign(path="prefill")
    assert chain_of(contract, resolve(contract, empty)[0], empty, [], 16) == {}


def measurement(verdict: str, name: str, *, warn: bool = False) -> Measurement:
    return Measurement(
        "S1", name, "kl_engine_reference", "statistical", 0.1, 0.1, 0.2, 0.01, 9, 99,
        verdict, warn=warn,  # type: ignore[arg-type]
    )  # fmt: skip


def test_the_first_matching_rule_decides() -> None:
    """Order matters: the slice's own rule before the general one; a pass asks for nothing."""
    contract = parse_contract(CONTRACT)
    slices = resolve(contract, real_rows())
    rows = [measurement("FAIL", "tight"), measurement("FAIL", "all"), measurement("PASS", "all"),
            measurement("PASS", "all", warn=True)]  # fmt: skip
    actions = [(a.action, a.slice, a.to) for a in actions_of(contract, rows, slices)]
    assert actions == [("route", "tight", "reference"), ("block", "all", ""), ("log", "all", "")]


def test_views_count_every_token_once() -> None:
    """Bins partition the rows: nothing is dropped and nothing counted twice."""
    tokens = real_rows(0.5)
    assert sum(r["n"] for r in views.flip_by_margin(tokens, 0.05)) == len(tokens)
    assert sum(r["n"] for r in views.kl_by_position(tokens)) == len(tokens)
    assert sum(r["n"] for r in views.kl_by_reference_prob(tokens)) == len(tokens)
    assert len(views.scatter(tokens)["engine"]) == len(tokens)
    flips = sum(r["rate"] * r["n"] for r in views.flip_by_margin(tokens, 0.05))
    assert round(flips) == tokens["flip"].sum()
