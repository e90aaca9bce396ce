"""Verdicts from per-prompt sums are those from the rows, and no more."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from rollout_logs import frame, log

from kernel_contracts.loading import parse_contract
from kernel_contracts.measurement import Measurement, overall
from kernel_contracts.verdict import Evidence, judge
from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.judge import judged, thresholds
from mismatch_audit.rollouts.stream import Stream

CONTRACT = """
schema: kernel-contracts/v1
name: t
slices:
  step: {by: step}
  probability: {bins: {engine_prob: [0, 0.5, 1]}}
numerical:
  - {id: N1, metric: nonfinite, limit: 0}
  - {id: N2, metric: abs_dlp, exceeds: 0.03, share: 0.2, slices: [all, step]}
statistical:
  - {id: S1, metric: abs_dlp, limit: 0.03, warn: 0.01, slices: [all, step, probability]}
  - {id: S2, metric: k3, limit: 1.0e-3, slices: [all, probability]}
  - {id: S3, metric: mult_prob_error, limit: 1.05}
  - {id: S4, metric: ess_ratio, at_least: 0.5, ceiling: 4.0}
  - {id: S5, metric: abs_dp, limit: 0.02}
  - {id: S6, metric: abs_dlp, limit: 0.03, weight: token}
observability:
  - {id: O1, min_prompts: 20, slices: [all, step]}
"""


def both(text: str, batch: pa.RecordBatch) -> tuple[list[Measurement], list[Measurement]]:
    contract = parse_contract(text)
    stream = Stream(contract, thresholds(contract))
    for start in range(0, batch.num_rows, 11):
        stream.update(TokenBatch(batch.slice(start, 11)))
    sums, _ = judged(contract, stream, {}, missing_columns={}, max_rows=400)
    stream.close()
    table = frame(batch)
    prompts = table[["prompt_id"]].drop_duplicates()
    return sums, judge(contract, Evidence(table, pd.DataFrame(prompts), max_rows=400))


@pytest.mark.parametrize("sd", [0.01, 0.035, 0.3])
def test_the_same_measurements_as_from_the_rows(sd):
    """Every field of every measurement, for a log that keeps the contract, one that is undecided
    and one that breaks it: there is one way of judging."""
    sums, rows = both(CONTRACT, log(80, sd=sd))
    assert len(sums) == len(rows) > 15
    for a, b in zip(sums, rows, strict=True):
        left, right = dataclasses.asdict(a), dataclasses.asdict(b)
        for name, value in right.items():
            if isinstance(value, float):
                assert left[name] == pytest.approx(value, rel=1e-6, abs=1e-9), (a.clause, name)
            else:
                assert left[name] == value, (a.clause, a.slice, name)


def test_missing_log_probs_are_no_evidence():
    """One in ten tokens without the trainer's log-prob: UNOBSERVED, though the rest is perfect."""
    batch = log(80, sd=0.0)
    column = batch.column("trainer_logprob")
    values = column.flatten().to_numpy(zero_copy_only=False).copy()
    values[::10] = np.nan
    at = batch.schema.names.index("trainer_logprob")
    holes = pa.ListArray.from_arrays(column.offsets, pa.array(values, mask=np.isnan(values)))
    sums, _ = both(CONTRACT, log(80, sd=0.0))
    assert overall(sums) in ("PASS", "INCONCLUSIVE")
    contract = parse_contract(CONTRACT)
    stream = Stream(contract, thresholds(contract))
    stream.update(TokenBatch(batch.set_column(at, "trainer_logprob", holes)))
    found, _ = judged(contract, stream, {}, missing_columns={}, max_rows=400)
    stream.close()
    assert {m.verdict for m in found if m.clause.startswith("S")} == {"UNOBSERVED"}
    assert overall(found) == "UNOBSERVED"


def test_an_infinite_log_prob_fails_its_clause():
    """-inf on a sampled token is counted, and 0 are allowed."""
    batch = log(80)
    column = batch.column("trainer_logprob")
    values = column.flatten().to_numpy(zero_copy_only=False).copy()
    values[np.flatnonzero(~np.isnan(values))[5]] = -np.inf
    at = batch.schema.names.index("trainer_logprob")
    broken = pa.ListArray.from_arrays(column.offsets, pa.array(values, mask=np.isnan(values)))
    contract = parse_contract(CONTRACT)
    stream = Stream(contract, thresholds(contract))
    stream.update(TokenBatch(batch.set_column(at, "trainer_logprob", broken)))
    found, _ = judged(contract, stream, {}, missing_columns={}, max_rows=400)
    stream.close()
    of = {(m.clause, m.slice): m for m in found}
    assert (of["N1", "all"].verdict, of["N1", "all"].value) == ("FAIL", 1.0)


def test_an_empty_log_is_unobserved():
    """No rollouts at all: nothing passes."""
    contract = parse_contract(CONTRACT)
    stream = Stream(contract, thresholds(contract))
    found, _ = judged(contract, stream, {}, missing_columns={})
    stream.close()
    assert {m.verdict for m in found} == {"UNOBSERVED"}


def test_only_a_failure_counts_on_an_optional_slice():
    """Missing evidence on an optional slice is told and decides nothing; a violation there does;
    and a contract of optional slices alone is no pass without evidence."""
    row = Measurement(
        clause="S", slice="x", metric="k3", section="statistical", value=None, lower=None,
        upper=None, limit=1.0, n_prompts=0, n_tokens=0, verdict="PASS",
    )  # fmt: skip

    def with_verdict(verdict, optional):
        return dataclasses.replace(row, verdict=verdict, optional=optional)

    passed = with_verdict("PASS", False)
    assert overall([passed, with_verdict("UNOBSERVED", True)]) == "PASS"
    assert overall([passed, with_verdict("INCONCLUSIVE", True)]) == "PASS"
    assert overall([passed, with_verdict("FAIL", True)]) == "FAIL"
    assert overall([passed, with_verdict("UNOBSERVED", False)]) == "UNOBSERVED"
    assert overall([with_verdict("UNOBSERVED", True)]) == "UNOBSERVED"
    assert overall([with_verdict("PASS", True), with_verdict("UNOBSERVED", True)]) == "UNOBSERVED"


def test_clauses_that_recorded_rollouts_cannot_show():
    """Full-vocabulary metrics, probes and prefill rows: UNOBSERVED, each with its reason."""
    text = """
schema: kernel-contracts/v1
name: t
numerical: [{id: N1, metric: drift, exceeds: 1.0, share: 0.1}]
statistical:
  - {id: S1, metric: tv, limit: 0.1}
  - {id: S2, metric: k3, limit: 0.1, path: prefill}
runtime: [{id: R1, probe: repetition, limit: 0.01}]
"""
    contract = parse_contract(text)
    stream = Stream(contract)
    stream.update(TokenBatch(log(40)))
    found, _ = judged(contract, stream, {}, missing_columns={})
    stream.close()
    assert {m.clause: m.verdict for m in found} == dict.fromkeys(
        ("N1", "S1", "S2", "R1"), "UNOBSERVED"
    )
    told = {m.clause: m.detail for m in found}
    assert "full distributions" in told["S1"]
    assert "decode" in told["S2"]
    assert "audit run" in told["R1"]
