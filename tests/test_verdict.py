"""Verdicts: a pass needs proof, a fail needs proof, and nothing seen is neither.

Together these tests argue that each clause kind passes clean evidence, fails a planted fault, and
never turns missing evidence into a pass.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from kernel_contracts.loading import parse_contract
from kernel_contracts.measurement import EXIT_CODES, Measurement, overall
from kernel_contracts.verdict import BiasEstimate, Evidence, judge

CONTRACT = """
schema: kernel-contracts/v1
name: t
slices:
  all: {}
  domain: {by: domain}
numerical:
  - {id: N0, metric: nonfinite, limit: 0}
  - {id: N1, metric: abs_dlp, exceeds: 0.5, share: 0.1}
statistical:
  - {id: S1, metric: kl_engine_reference, limit: 2.0e-3, ceiling: 1.0e-2}
  - {id: S2, metric: flip_rate, limit: 0.1}
  - {id: S3, metric: mult_prob_error, limit: 1.1}
  - {id: S4, metric: ess_ratio, at_least: 0.5}
  - {id: S5, metric: kl_engine_reference, limit: 2.0e-3, ceiling: 1.0e-2, weight: token}
observability:
  - {id: O1, min_prompts: 60, require: [engine_logprob, reference_logprob]}
"""


def table(prompts: int = 120, rows: int = 16, scale: float = 1e-3, seed: int = 0) -> pd.DataFrame:
    """Healthy rows: per-prompt KL around ``scale``, log-prob gaps of sqrt(2 KL)."""
    generator = np.random.default_rng(seed)
    level = scale * generator.lognormal(-0.1, 0.4, prompts)
    kl = np.repeat(level, rows) * generator.gamma(2.0, 0.5, prompts * rows)
    gap = np.sqrt(2 * kl) * generator.standard_normal(prompts * rows)
    reference = -generator.exponential(1.5, prompts * rows)
    return pd.DataFrame(
        {
            "prompt_id": np.repeat([f"p{i}" for i in range(prompts)], rows),
            "path": "decode",
            "position": np.tile(np.arange(rows), prompts),
            "engine_logprob": reference - gap,
            "reference_logprob": reference,
            "kl_engine_reference": kl,
            "flip": generator.random(prompts * rows) < 0.02,
            "nonfinite": 0,
            "domain": np.repeat([f"d{i % 2}" for i in range(prompts)], rows),
        }
    )


def judged(tokens: pd.DataFrame, **changes: object) -> dict[tuple[str, str], Measurement]:
    contract = parse_contract(CONTRACT)
    prompts = tokens[["prompt_id"]].drop_duplicates()
    evidence = replace(Evidence(tokens, prompts, max_rows=16), **changes)  # type: ignore[arg-type]
    return {(m.clause, m.slice): m for m in judge(contract, evidence)}


def test_clean_evidence_passes_every_clause() -> None:
    """The control: healthy rows, enough prompts."""
    found = judged(table())
    assert {m.verdict for m in found.values()} == {"PASS"}
    assert overall(list(found.values())) == "PASS"


@pytest.mark.parametrize(
    ("clause", "fault"),
    [
        ("N0", lambda t: t.assign(nonfinite=np.where(t.index == 7, 3, 0))),
        ("N1", lambda t: t.assign(engine_logprob=t["reference_logprob"] - 0.6)),
        ("S1", lambda t: t.assign(kl_engine_reference=t["kl_engine_reference"] * 6)),
        ("S2", lambda t: t.assign(flip=np.arange(len(t)) % 4 == 0)),
        ("S3", lambda t: t.assign(engine_logprob=t["reference_logprob"] - 0.3)),
        ("S4", lambda t: t.assign(engine_logprob=t["reference_logprob"] - 0.5)),
        ("S5", lambda t: t.assign(kl_engine_reference=t["kl_engine_reference"] * 6)),
    ],
)
def test_each_clause_fails_its_planted_fault(clause: str, fault) -> None:  # type: ignore[no-untyped-def]
    """One fault a clause, far beyond the limit."""
    found = judged(fault(table()))[clause, "all"]
    assert found.verdict == "FAIL"
    assert overall([found]) == "FAIL"


def test_a_value_near_the_limit_is_inconclusive_and_says_how_many_prompts_would_decide() -> None:
    """Estimate within the limit, bound beyond it."""
    found = judged(table(scale=1.75e-3, prompts=70))["S1", "all"]
    assert found.verdict == "INCONCLUSIVE"
    assert "more prompts would decide" in found.detail


@pytest.mark.parametrize(
    "fault",
    [
        lambda t: t.drop(columns="kl_engine_reference"),
        lambda t: t.assign(kl_engine_reference=np.where(t.index == 3, np.nan, 1e-4)),
        lambda t: t.iloc[:0],
        lambda t: t[t["prompt_id"].isin([f"p{i}" for i in range(20)])],
        lambda t: t.assign(path="prefill"),
    ],
    ids=["no column", "one NaN", "no rows", "too few prompts", "the other path only"],
)
def test_missing_evidence_is_unobserved(fault) -> None:  # type: ignore[no-untyped-def]
    """Never a pass, and the exit code is not zero."""
    found = judged(fault(table()))["S1", "all"]
    assert found.verdict == "UNOBSERVED"
    assert found.detail
    assert EXIT_CODES[overall([found])] == 3


def test_a_null_in_a_slice_column_hides_no_rows() -> None:
    """Rows that fall out of every group because their column is null leave the slice unproven."""
    tokens = table()
    tokens.loc[tokens["prompt_id"] == "p5", "domain"] = None
    contract = parse_contract(CONTRACT.replace("limit: 0.1}", "limit: 0.1, slices: [domain]}"))
    evidence = Evidence(tokens, tokens[["prompt_id"]].drop_duplicates(), max_rows=16)
    rows = [m for m in judge(contract, evidence) if m.clause == "S2"]
    assert rows
    assert {m.verdict for m in rows} == {"UNOBSERVED"}


def test_a_certain_violation_stands_on_few_prompts() -> None:
    """Twenty prompts cannot pass, but they can prove a violation."""
    few = table(prompts=20).assign(kl_engine_reference=0.05)
    assert judged(few)["S1", "all"].verdict == "FAIL"


def test_fails_are_corrected_over_slices_and_passes_are_not() -> None:
    """Holm: with many slices a lone borderline alarm is not a FAIL; the p-value says so."""
    tokens = table(prompts=200)
    tokens["domain"] = "d" + (tokens["prompt_id"].str[1:].astype(int) % 20).astype(str)
    contract = parse_contract(
        CONTRACT.replace("ceiling: 1.0e-2}", "ceiling: 1.0e-2, slices: [domain]}", 1)
    )
    evidence = Evidence(tokens, tokens[["prompt_id"]].drop_duplicates(), max_rows=16)
    rows = [m for m in judge(contract, evidence) if m.clause == "S1"]
    assert len(rows) == 20
    assert all(m.p_fail is not None and m.p_fail >= 0.05 for m in rows)


def test_token_weights_need_a_cap_that_was_stated_beforehand() -> None:
    """A cap read off the data would void the bound, so a prompt beyond it is no evidence."""
    found = judged(table(), max_rows=8)["S5", "all"]
    assert found.verdict == "UNOBSERVED"


def test_runtime_clauses_need_their_probe() -> None:
    """A probe that was not run is UNOBSERVED; clean passes; a fault fails."""
    text = CONTRACT + "runtime:\n  - {id: R1, probe: repetition, limit: 1.0e-3}\n"
    contract = parse_contract(text)
    tokens = table()
    prompts = tokens[["prompt_id"]].drop_duplicates()

    def verdict(kl: float | None) -> str:
        rows = [] if kl is None else [
            {"probe": "repetition", "prompt_id": f"p{i}", "n_tokens": 4, "kl": kl, "abs_dlp": 0.0,
             "flip_rate": 0.0} for i in range(30)
        ]  # fmt: skip
        evidence = Evidence(tokens, prompts, probes=pd.DataFrame(rows), max_rows=16)
        return next(m.verdict for m in judge(contract, evidence) if m.clause == "R1")

    assert verdict(None) == "UNOBSERVED"
    assert verdict(0.0) == "PASS"
    assert verdict(0.01) == "FAIL"
    assert verdict(float("nan")) == "UNOBSERVED"


def test_gradient_bias_is_judged_by_its_own_bounds() -> None:
    """Not measured: UNOBSERVED. Else the interval against the limit: three verdicts. The ratio to
    the noise is judged by its own estimates and by no others."""
    text = CONTRACT.replace(
        "observability:",
        "  - {id: S9, metric: policy_gradient_bias, limit: 0.05}\n"
        "  - {id: S10, metric: policy_gradient_bias_to_noise, limit: 0.05}\nobservability:",
    )
    contract = parse_contract(text)
    tokens = table()

    def verdict(**gradient: BiasEstimate) -> str:
        evidence = Evidence(
            tokens, tokens[["prompt_id"]].drop_duplicates(), max_rows=16, gradient=gradient
        )
        return next(m.verdict for m in judge(contract, evidence) if m.clause == "S9")

    assert verdict() == "UNOBSERVED"
    for lower, upper, expected in (
        (0, 0.04, "PASS"),
        (0.06, 0.1, "FAIL"),
        (0, 0.1, "INCONCLUSIVE"),
    ):
        estimate = BiasEstimate(upper / 2, lower, upper, 60, 900, "jackknife")
        assert verdict(all=estimate) == expected
        noise = Evidence(
            tokens, tokens[["prompt_id"]].drop_duplicates(), max_rows=16,
            gradient_noise={"all": estimate},
        )  # fmt: skip
        found = {m.clause: m.verdict for m in judge(contract, noise)}
        assert (found["S9"], found["S10"]) == ("UNOBSERVED", expected)


def test_nothing_measured_is_not_a_pass() -> None:
    """An empty contract or audit proves nothing."""
    assert overall([]) == "UNOBSERVED"
