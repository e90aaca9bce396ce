"""The trainer-independent monitor: verdicts at any time, actions; nothing unseen passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_contracts.contract import Contract
from kernel_contracts.errors import InputError
from kernel_contracts.loading import parse_contract
from mismatch_audit.reports.record import load_record
from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.schema import HEADER_KEY, sequence_schema
from mismatch_audit.trainers.monitor import Monitor
from mismatch_audit.trainers.sequential import ChangeAlarm, PromiseTest, _share
from mismatch_audit.trainers.step import from_padded, from_sequences

CONTRACT = """
schema: kernel-contracts/v1
name: live
slices: {SLICES}
numerical:
  - {id: N1, metric: nonfinite, limit: 0}
  - {id: N2, metric: abs_dlp, exceeds: 0.5, share: 0.1}
statistical:
  - {id: S1, metric: abs_dlp, limit: 0.02, ceiling: 0.04, tail: 0.2, slices: [NAMES]}
observability:
  - {id: O1, min_prompts: 20}
escalation:
  - {when: {clause: S1, verdict: FAIL}, action: ACTION}
"""


def contract(action: str = "log", slices: str = "all: {}", names: str = "all") -> Contract:
    text = CONTRACT.replace("{SLICES}", "{" + slices + "}").replace("NAMES", names)
    return parse_contract(text.replace("ACTION", action))


def step_of(
    seed: int, gap: float, *, groups: int = 8, bad: Any = None, **columns: Any
) -> TokenBatch:
    """16 sequences of 12 tokens; log-probs of the two sides differ by a normal of scale ``gap``;
    those in ``bad`` by a further 0.4."""
    rng = np.random.default_rng(seed)
    shape = (groups * 2, 12)
    sampler = -rng.exponential(1.0, shape)
    trainer = sampler + gap * rng.standard_normal(shape)
    if bad is not None:
        trainer[bad] -= 0.4
    tokens = {"sampler_logprob": sampler, "trainer_logprob": trainer} | columns.pop("tokens", {})
    return from_padded(
        np.ones((len(sampler), 5), dtype=int),
        np.ones((len(sampler), 5), dtype=int),
        rng.integers(0, 50, shape),
        np.ones(shape, dtype=int),
        tokens=tokens,
        scalars={"step": seed, "group_id": [str(g // 2) for g in range(len(sampler))], **columns},
    )


def watch(monitor: Monitor, gaps: list[float], **options: Any) -> list[Any]:
    return [monitor.observe(step_of(k, gap, **options), step=k) for k, gap in enumerate(gaps)]


def verdicts(monitor: Monitor) -> dict[str, str]:
    return {m.clause: m.verdict for m in monitor.measurements}


def test_a_clean_run_passes_once_enough_prompts_were_seen() -> None:
    """Four steps of eight prompts within a quarter of the limit decide every clause; before O1's
    twenty prompts nothing passes."""
    monitor = Monitor(contract(), strict=True)
    early = watch(monitor, [0.004] * 2)
    assert early[-1].verdict == "UNOBSERVED"
    late = watch(monitor, [0.004] * 6)
    assert verdicts(monitor) == dict.fromkeys(("N1", "N2", "S1", "O1"), "PASS")
    assert late[-1].verdict == "PASS"
    assert late[-1].actions == ()
    assert late[-1].metrics["mismatch/abs_dlp"] == pytest.approx(0.0032, rel=0.2)


def test_a_fault_after_a_long_healthy_time_is_found_within_two_steps() -> None:
    """Sixty healthy steps cost a single e-process so much wealth that it would need dozens of bad
    ones; the alarm starts anew every few prompts."""
    monitor = Monitor(contract(), strict=True)
    watch(monitor, [0.004] * 60)
    assert monitor.verdict == "PASS"
    watch(monitor, [0.1] * 2)
    assert verdicts(monitor)["S1"] == "FAIL"


def test_the_alarm_is_an_e_process_at_any_time() -> None:
    """With every prompt's mean exactly at the limit the largest wealth ever exceeds 1/alpha in at
    most a share alpha of runs. 150 runs of 200 prompts; more than 17 alarms have a probability of
    about 1e-3 if the true rate were 5 %."""
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(150):
        test = ChangeAlarm(0.5, 1.0, alpha=0.05, window=32)
        top = -np.inf
        for x in rng.integers(0, 2, 200):
            test.update(float(x))
            top = max(top, test.log_e)
        alarms += top >= np.log(20)
    assert alarms <= 17


def test_the_alarm_has_expectation_at_most_one_under_the_null() -> None:
    """Exactly, over all 1024 ways that ten prompts of mean 0.3 can be 0 or 1, through four starts:
    the mean of the wealth is at most 1, and not far below (a test that never bets is one too)."""
    mean = 0.0
    for word in range(2**10):
        bits = [word >> k & 1 for k in range(10)]
        alarm = ChangeAlarm(0.3, 1.0, alpha=0.05, window=3)
        for bit in bits:
            alarm.update(float(bit))
        mean += 0.3 ** sum(bits) * 0.7 ** (10 - sum(bits)) * np.exp(alarm.log_e)
    assert 0.97 < mean <= 1 + 1e-9


def test_the_shares_of_all_starts_never_sum_to_more_than_one() -> None:
    """The first million, and by the integral of 1 / (x ln^2 x) all that follow."""
    k = np.arange(2, 10**6)
    rest = 1 / (2.11 * np.log(10**6 - 1))
    assert (1 / (2.11 * k * np.log(k) ** 2)).sum() + rest < 1
    assert _share(5) == pytest.approx(1 / (2.11 * 6 * np.log(6) ** 2))


def test_a_pass_is_lost_when_the_recent_prompts_do_not_show_it() -> None:
    """A pass is about now: values just above the limit take it back long before they alarm."""
    test = PromiseTest(0.5, 1.0, alpha=0.05, pass_window=100)
    for _ in range(60):
        test.update(0.1)
    assert test.passes
    for _ in range(400):
        test.update(0.55)
    assert not test.passes


@pytest.mark.parametrize("missing", ["sampler_logprob", "trainer_logprob"])
def test_a_missing_side_is_unobserved(missing: str) -> None:
    """However many steps pass, one side alone shows nothing."""
    monitor = Monitor(contract(), strict=True)
    for k in range(6):
        decision = monitor.observe(step_of(k, 0.0, tokens={missing: None}), step=k)
        assert decision.metrics["mismatch/unobserved"] == 1.0
    assert set(verdicts(monitor).values()) == {"UNOBSERVED"}
    assert monitor.report().exit_code == 3


def test_a_missing_value_in_a_step_withholds_the_pass() -> None:
    """A NaN log-prob is missing evidence for its step; the contract allows none."""
    monitor = Monitor(contract(), strict=True)
    watch(monitor, [0.004] * 8)
    hole = step_of(9, 0.004)
    spoilt = hole.tokens("sampler_logprob").copy()
    spoilt[hole.sampled.nonzero()[0][3]] = np.nan
    rows = spoilt.reshape(hole.n_sequences, -1)[:, 5:]
    monitor.observe(step_of(9, 0.004, tokens={"sampler_logprob": rows}), step=9)
    assert verdicts(monitor)["S1"] == "UNOBSERVED"
    assert "1 of 9 steps" in next(m.detail for m in monitor.measurements if m.clause == "S1")


def test_an_infinite_log_prob_is_a_violation_and_not_a_gap() -> None:
    """nonfinite counts exactly: one is one too many."""
    monitor = Monitor(contract(), strict=True)
    batch = step_of(0, 0.004)
    rows = batch.tokens("sampler_logprob").reshape(batch.n_sequences, -1)[:, 5:].copy()
    rows[2, 3] = -np.inf
    decision = monitor.observe(step_of(0, 0.004, tokens={"sampler_logprob": rows}), step=0)
    assert verdicts(monitor)["N1"] == "FAIL"
    assert decision.metrics["mismatch/nonfinite"] == 1.0


def test_an_error_of_the_monitor_does_not_kill_training_and_is_no_pass(tmp_path: Path) -> None:
    """A broken folder for the record: logged, counted, UNOBSERVED; raised when strict."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monitor = Monitor(contract(), record=blocked / "rollouts")
    decision = monitor.observe(step_of(0, 0.004), step=0)
    assert decision.error
    assert decision.metrics["mismatch/errors"] == 1.0
    monitor.record = None
    watch(monitor, [0.004] * 8)
    assert "PASS" not in verdicts(monitor).values()
    assert monitor.report().verdict == "UNOBSERVED"
    assert any(f.code == "MONITOR_ERROR" for f in monitor.report().findings)
    with pytest.raises(InputError, match="cannot write"):
        Monitor(contract(), record=blocked / "rollouts", strict=True).observe(
            step_of(0, 0.004), step=0
        )


def test_mask_names_the_bad_sequences_and_only_those() -> None:
    """Three of sixteen sequences are off by 0.4 nats a token."""
    bad = [1, 6, 11]
    monitor = Monitor(contract("mask"), strict=True)
    decisions = watch(monitor, [0.004] * 12, bad=bad)
    assert decisions[-1].actions == ("mask",)
    assert np.flatnonzero(decisions[-1].masked).tolist() == bad
    assert decisions[-1].metrics["mismatch/masked_sequences"] == 3.0


@pytest.mark.parametrize("action", ["skip_step", "hold_push"])
def test_a_step_that_is_itself_within_the_limit_is_not_punished(action: str) -> None:
    """The verdict stays FAIL; the action ends with the fault."""
    monitor = Monitor(contract(action), strict=True)
    during = watch(monitor, [0.3] * 3)
    after = monitor.observe(step_of(9, 0.001), step=9)
    assert during[-1].asks(action)
    assert after.actions == ()
    assert after.verdict == "FAIL"


def test_stop_stays() -> None:
    """A run that must stop is not saved by a good step."""
    monitor = Monitor(contract("stop"), strict=True)
    watch(monitor, [0.3] * 3)
    assert monitor.observe(step_of(9, 0.001), step=9).asks("stop")


def test_actions_that_are_not_allowed_become_warnings() -> None:
    """``actions=("warn",)`` is a dry run."""
    monitor = Monitor(contract("stop"), actions=("warn",), strict=True)
    assert watch(monitor, [0.3] * 3)[-1].actions == ("warn",)
    with pytest.raises(InputError, match="no action halt"):
        Monitor(contract(), actions=("halt",))


def test_slices_are_judged_by_themselves() -> None:
    """One environment in two is broken; the other passes, and the mean of both would say FAIL for
    both."""
    one = contract(slices="env: {by: environment}", names="env")
    monitor = Monitor(one, strict=True)
    names = ["good" if g < 8 else "bad" for g in range(16)]
    for k in range(12):
        monitor.observe(step_of(k, 0.004, bad=list(range(8, 16)), environment=names), step=k)
    found = {m.slice: m.verdict for m in monitor.measurements if m.clause == "S1"}
    assert found == {"environment=good": "PASS", "environment=bad": "FAIL"}


def test_a_slice_of_a_column_that_the_trainer_lacks_is_unobserved() -> None:
    """No environment is recorded, so nothing is known about environments."""
    monitor = Monitor(contract(slices="env: {by: environment}", names="env"), strict=True)
    watch(monitor, [0.004] * 8)
    row = next(m for m in monitor.measurements if m.clause == "S1")
    assert row.verdict == "UNOBSERVED"
    assert "environment" in row.detail


def test_a_metric_of_whole_distributions_is_unobserved() -> None:
    """A sampled token's log-probs give no KL of the distributions."""
    text = CONTRACT.replace("{SLICES}", "{all: {}}").replace("NAMES", "all")
    text = text.replace("ACTION", "log").replace("metric: abs_dlp, limit", "metric: tv, limit")
    monitor = Monitor(parse_contract(text.replace("ceiling: 0.04, tail: 0.2, ", "")), strict=True)
    watch(monitor, [0.004] * 8)
    assert verdicts(monitor)["S1"] == "UNOBSERVED"


def test_reports_come_every_n_steps_and_at_the_first_failure(tmp_path: Path) -> None:
    """Both files, valid, and the verdict of the sequential tests in them."""
    monitor = Monitor(contract(), every=4, out=tmp_path, strict=True)
    watch(monitor, [0.004] * 3)
    assert not list(tmp_path.iterdir())
    watch(monitor, [0.004])
    assert (tmp_path / "report.html").is_file()
    assert load_record(tmp_path).counts.prompts == 32
    watch(monitor, [0.3])
    assert load_record(tmp_path).verdict == "FAIL"


def test_observed_steps_are_recorded_as_a_sequence_table(tmp_path: Path) -> None:
    """What is written has the published schema and reads back to the same numbers."""
    monitor = Monitor(contract(), record=tmp_path, strict=True)
    watch(monitor, [0.004] * 3)
    files = sorted(tmp_path.glob("*.parquet"))
    assert [f.name for f in files] == [f"step-{k:08d}-rank-0000-00.parquet" for k in range(3)]
    table = pq.read_table(files[1])
    assert table.schema.names == sequence_schema().names
    assert json.loads(table.schema.metadata[HEADER_KEY])["framework"] == "unknown"
    again = TokenBatch(table.to_batches()[0])
    first = step_of(1, 0.004)
    np.testing.assert_array_equal(
        again.tokens("sampler_logprob")[again.sampled],
        first.tokens("sampler_logprob")[first.sampled],
    )
    assert again.sampled.sum() == first.sampled.sum() == 16 * 12


def test_release_starts_anew() -> None:
    """After a fault was mended, the old evidence says nothing about the run."""
    monitor = Monitor(contract("stop"), strict=True)
    watch(monitor, [0.3] * 3)
    monitor.release()
    assert watch(monitor, [0.004] * 8)[-1].verdict == "PASS"


def test_padding_sides_and_masks_give_the_same_rows() -> None:
    """Left-padded prompts, right-padded responses, a tool's answer inside: positions, log-probs and
    the sampled mask are those of the ragged sequences."""
    padded = from_padded(
        [[0, 7, 8], [5, 6, 7]],
        [[0, 1, 1], [1, 1, 1]],
        [[1, 2, 3], [4, 0, 0]],
        [[1, 1, 1], [1, 0, 0]],
        loss_mask=[[1, 0, 1], [1, 1, 1]],
        tokens={"sampler_logprob": np.array([[-1.0, 0.0, -3.0], [-4.0, 9.0, 9.0]])},
        scalars={"group_id": ["a", "b"]},
    )
    ragged = from_sequences(
        [[7, 8, 1, 2, 3], [5, 6, 7, 4]],
        [2, 3],
        tokens={"sampler_logprob": [[-1.0, 0.0, -3.0], [-4.0]], "loss_mask": [[1, 0, 1], [1]]},
        scalars={"group_id": ["a", "b"]},
    )
    for batch in (padded, ragged):
        assert batch.tokens("token_ids").tolist() == [7, 8, 1, 2, 3, 5, 6, 7, 4]
        assert batch.position[batch.sampled].tolist() == [0, 2, 0]
        assert batch.tokens("sampler_logprob")[batch.sampled].tolist() == [-1, -3, -4]
    with pytest.raises(InputError, match="3 values for a response of 2 tokens"):
        from_sequences([[1, 2, 3]], [1], tokens={"sampler_logprob": [[-1.0, -2.0, -3.0]]})
    with pytest.raises(InputError, match="sampler is no column"):
        from_sequences([[1, 2]], [1], tokens={"sampler": [[-1.0]]})


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_padding_gives_the_rows_of_the_ragged_sequences(data: st.DataObject) -> None:
    """Prompts and responses of any length, padded on any side by any amount, are the same rows."""
    n = data.draw(st.integers(1, 4))
    prompts = [data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)) for _ in range(n)]
    answers = [data.draw(st.lists(st.integers(1, 9), min_size=0, max_size=4)) for _ in range(n)]
    left, right = data.draw(st.booleans()), data.draw(st.booleans())
    extra = data.draw(st.integers(0, 2))

    def pad(rows: list[list[int]], on_left: bool) -> tuple[Any, Any]:
        width = max(map(len, rows)) + extra
        ids, mask = np.zeros((n, width), int), np.zeros((n, width), int)
        for i, row in enumerate(rows):
            where = slice(width - len(row), width) if on_left else slice(0, len(row))
            ids[i, where], mask[i, where] = row, 1
        return ids, mask

    (p, p_mask), (r, r_mask) = pad(prompts, left), pad(answers, right)
    padded = from_padded(p, p_mask, r, r_mask, tokens={"sampler_logprob": -r.astype(float)})
    ragged = from_sequences(
        [a + b for a, b in zip(prompts, answers, strict=True)],
        [len(a) for a in prompts],
        tokens={"sampler_logprob": [[-float(t) for t in b] for b in answers]},
    )
    for batch in (padded, ragged):
        assert batch.tokens("token_ids").tolist() == [
            t for a, b in zip(prompts, answers, strict=True) for t in a + b
        ]
        assert batch.tokens("sampler_logprob")[batch.sampled].tolist() == [
            -float(t) for b in answers for t in b
        ]
