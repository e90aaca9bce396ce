"""Staleness by lag, its split, its bounds, and the trend, on logs whose lag is known.

The policy moves a fixed step a version, so mismatch must grow with lag and with nothing else; the
engine's noise is known, so the split must give it back.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from public_report_cases import BF16, each
from rollout_fixtures import Log, Rows, make_log

from mismatch_audit.rollouts.checks.view import view
from mismatch_audit.rollouts.staleness import Staleness, token_lag
from mismatch_audit.rollouts.trend import MOST_STEPS, TIMES, Trend, change_point


def measure(log: Log, **settings: Any) -> dict[str, Any]:
    staleness = Staleness(**settings)
    for batch in log.batches():
        staleness.update(batch)
    out = staleness.finish()
    json.dumps(out, allow_nan=False)  # JSON-ready, and no NaN in it
    return out


@pytest.fixture(scope="module")
def lagging() -> dict[str, Any]:
    """Lags 0, 1 and 2 in turn."""
    return measure(make_log(steps=12, engine_version=lambda s: s - s % 3, **BF16))


def test_everything_grows_with_the_lag(lagging: dict[str, Any]) -> None:
    """Mean |d|, its q90, KL, TV, and gated share rise with lag; ESS falls; E_q[p/q] stays 1."""
    rows = lagging["lags"]
    assert [r["lag"] for r in rows] == [0, 1, 2]
    for name in (
        "mean_abs_log_ratio",
        "q90_abs_log_ratio",
        "kl_engine_reference",
        "tv",
        "share_outside_clip",
    ):
        values = [r[name] for r in rows]
        assert values == sorted(values)
        assert values[2] > values[0]
    assert rows[0]["ess_raw"] > rows[1]["ess_raw"] > rows[2]["ess_raw"]
    for r in rows:
        assert r["mean_ratio"] == pytest.approx(1.0, abs=0.02)


def test_the_sums_are_those_of_the_tokens() -> None:
    """Against a direct computation from all tokens of one lag."""
    log = make_log(steps=2, engine_version=lambda s: 0, **BF16)
    out = measure(log)
    for lag in (0, 1):
        d = np.concatenate([
            (r["trainer_logprob"] - r["sampler_logprob"]).astype(np.float64)[r["prompt_len"]:]
            for r in log.rows if r["step"] == lag
        ])  # fmt: skip
        row = out["lags"][lag]
        ratio = np.exp(d)
        assert row["tokens"] == len(d)
        assert row["mean_abs_log_ratio"] == pytest.approx(np.abs(d).mean(), rel=1e-5)
        assert row["kl_engine_reference"] == pytest.approx((ratio - 1 - d).mean(), rel=1e-4)
        assert row["tv"] == pytest.approx(np.abs(ratio - 1).mean() / 2, rel=1e-5)
        assert row["ess_raw"] == pytest.approx(ratio.sum() ** 2 / len(d) / (ratio**2).sum())
        q90 = np.quantile(np.abs(d), 0.9)
        assert q90 <= row["q90_abs_log_ratio"] * 1.001 <= q90 * 1.1
        assert row["share_outside_clip"] == pytest.approx((np.abs(ratio - 1) > 0.2).mean())


def test_gated_tokens_follow_the_advantage() -> None:
    """PPO's clip removes a ratio that is too high only where A > 0, too low only where A < 0."""
    log = make_log(steps=3, engine_version=lambda s: 0, **BF16)
    gated = total = 0
    for r in log.rows:
        ratio = np.exp(r["trainer_logprob"] - r["sampler_logprob"])[r["prompt_len"] :]
        sign = r["sequence_advantage"]
        gated += int((((ratio - 1) * sign) > 0.2).sum())
        total += len(ratio)
    out = measure(log)
    got = sum(r["share_gated_by_clip"] * r["tokens"] for r in out["lags"])
    assert got == pytest.approx(gated, abs=0.5)
    assert gated > 0
    assert total == sum(r["tokens"] for r in out["lags"])


def test_the_split_gives_the_kernel_error_back() -> None:
    """trainer - rescore has the same size at every lag; rescore - sampler, above what decode and
    prefill differ by at lag 0, is the policy's move."""
    rows = measure(make_log(steps=12, engine_version=lambda s: s - s % 3, **BF16))["decomposition"]
    errors = [r["rms_implementation_error"] for r in rows]
    assert max(errors) < 1.15 * min(errors)
    assert rows[0]["rms_policy_lag_above_floor"] == 0.0
    assert rows[2]["rms_policy_lag_above_floor"] > 1.5 * rows[1]["rms_policy_lag_above_floor"] > 0
    assert rows[2]["share_of_policy_lag"] > 0.9


def test_bounds_hold_for_the_expected_reward() -> None:
    """The bound of the longest response covers that of shorter ones, and a horizon is given."""
    rows = measure(make_log(steps=4, engine_version=lambda s: max(0, s - 1), **BF16))["lags"]
    for row in rows:
        drift = [b["reward_drift_over_range"] for b in row["bounds"]]
        assert drift == sorted(drift)
        assert row["horizon_for_reward_drift_0.1"] > 0
    assert rows[0]["horizon_for_reward_drift_0.1"] > rows[1]["horizon_for_reward_drift_0.1"]


def test_token_versions_are_used_token_by_token() -> None:
    """A rollout resumed under newer weights has two lags in one sequence."""

    def edit(i: int, row: Rows) -> None:
        n = len(row["token_ids"])
        row["token_version"] = np.where(np.arange(n) < n - 4, row["step"] - 1, row["step"])
        row["weights_version_min"] = row["step"] - 1

    log = each(edit)(make_log(steps=3))
    log.rows = [r for r in log.rows if r["step"] > 0]
    batch = next(log.batches())
    lag, known = token_lag(view(batch))
    assert known is not None
    assert set(lag[known].tolist()) == {0, 1}
    out = measure(log)
    assert {r["lag"] for r in out["lags"]} == {0, 1}
    assert out["sequences_of_several_versions"] == len(log.rows)


def test_what_is_missing_is_said() -> None:
    """Without versions no lags, without re-scoring no split, without log-probs nothing."""
    log = make_log(steps=2)
    out = measure(log.without("trainer_version", "rescore_logprob"))
    assert out["lags"] == []
    assert "trainer_version" in out["unobserved"]["lags"]
    assert "rescore_logprob" in out["unobserved"]["decomposition"]
    assert out["tokens_of_unknown_lag"] == out["tokens"] > 0
    assert "sampler_logprob" in measure(log.without("sampler_logprob"))["unobserved"]["all"]


def test_ages_are_shown_by_slice() -> None:
    """The environment that answers late is the old one."""

    def late_code(rows: Rows) -> np.ndarray:
        return np.where(rows["prompt"] % 2 == 1, np.maximum(rows["step"] - 2, 0), rows["step"])

    ages = measure(make_log(steps=6, row_version=late_code, **BF16))["age"]["environment"]
    assert [r["environment"] for r in ages] == ["code", "maths"]
    assert ages[0]["mean_lag"] > 1 > ages[1]["mean_lag"] == 0


def test_a_lasting_rise_is_dated_and_a_spike_is_not() -> None:
    """At step 40 of 80 the level trebles: the alarm comes within 25 steps, dated within 3. One wild
    sequence a step moves the mean and not the median: a spike, and no change."""
    rng = np.random.default_rng(0)
    rise, spiky = Trend(), Trend()
    for step in range(80):
        x = rng.lognormal(-4, 0.3, 20)
        rise.add(np.full(20, step), np.ones(20), x * (3.0 if step >= 40 else 1.0))
        if step == 50:
            x[0] = 100.0
        spiky.add(np.full(20, step), np.ones(20), x)
    change = rise.finish()["change"]
    assert 40 <= change["alarm"] <= 65
    assert abs(change["since"] - 40) <= 3
    assert change["still"]
    assert change["times_baseline"] == pytest.approx(3.0, rel=0.2)
    out = spiky.finish()
    assert out["change"]["alarm"] is None
    assert [s["step"] for s in out["spikes"]] == [50]
    assert out["spikes"][0]["mean"] > 10 * out["spikes"][0]["median"]


def test_alarms_are_rare_at_a_level_within_the_limit() -> None:
    """A level 1.5 times the baseline is within the limit of 2: over 60 runs of 100 steps at most
    60 * 100 / 1000 = 6 alarms are promised on average; a run at 4 times always alarms."""
    rng = np.random.default_rng(1)
    alarms = 0
    for _ in range(60):
        values = np.r_[np.ones(8), 1.5 * rng.lognormal(-0.02, 0.2, 100)]
        alarms += change_point(values, list(range(108)))["alarm"] is not None
        high = np.r_[np.ones(8), 2 * TIMES * rng.lognormal(-0.02, 0.2, 100)]
        assert change_point(high, list(range(108)))["alarm"] is not None
    assert alarms <= 6


def test_the_trend_is_bounded_and_short_logs_say_so() -> None:
    """Twice the most steps are merged in pairs; 5 steps are too few for a trend."""
    trend = Trend()
    ones = np.ones(1)
    for step in range(MOST_STEPS + 10):
        trend.add(np.array([step]), ones, ones)
    out = trend.finish()
    assert out["steps_a_point"] == 2
    assert out["steps"] <= MOST_STEPS
    assert len(out["points"]) <= 256
    short = Trend()
    for step in range(5):
        short.add(np.array([step]), ones, ones)
    assert "needs 10 steps" in short.finish()["unobserved"]
