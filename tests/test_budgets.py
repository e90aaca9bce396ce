"""Limits derived from budgets keep them, waste little, and show arithmetic that adds up.

The argument: at its limit each bound gives the budget back, and a hair above it does not. The flip
limit is statistical, so its coverage is simulated. The numbers printed are those computed.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_contracts import bounds as b
from kernel_contracts import budgets
from kernel_contracts.errors import InputError

shares = st.floats(1e-4, 0.999)
horizons = st.integers(1, 100_000)


@given(shares, st.floats(0.1, 100), horizons)
def test_reward_limits_round_trip(share, reward_range, horizon):
    beta = share * reward_range
    for route, bound in (
        (budgets.reward_budget_kl, b.sequence_tv_from_mean_kl),
        (budgets.reward_budget_drift, b.sequence_tv_from_drift),
        (budgets.reward_budget_tv, lambda tv, t: min(tv * t, 1)),
    ):
        limit = route(beta, reward_range, horizon)
        lost = b.reward_drift(bound(limit.limit, horizon), reward_range)
        assert lost == pytest.approx(beta, rel=1e-6)
        more = b.reward_drift(bound(limit.limit * 1.01, horizon), reward_range)
        assert more > beta


def test_the_better_route_is_taken():
    """Pinsker's 2 b^2 up to b = 0.893, Bretagnolle-Huber's beyond."""
    small, large = budgets.reward_budget_kl(0.1, 1, 512), budgets.reward_budget_kl(0.95, 1, 512)
    assert small.limit == pytest.approx(2 * 0.01 / 512)
    assert large.limit == pytest.approx(-math.log(1 - 0.95**2) / 512)
    assert large.limit > 2 * 0.95**2 / 512
    assert "(2 b^2)" in "".join(small.arithmetic)
    assert "(-ln(1 - b^2))" in "".join(large.arithmetic)


@given(st.floats(1e-4, 10), st.floats(0.01, 100), horizons)
def test_bias_limits_round_trip(bias, advantage, horizon):
    limit = budgets.bias_budget_drift(bias, advantage, horizon).limit
    assert b.natural_bias_from_drift(limit, horizon, advantage) == pytest.approx(bias, rel=1e-6)
    assert b.natural_bias_from_drift(limit * 1.01, horizon, advantage) > bias
    closed = 2 * np.arccosh((1 + (bias / advantage) ** 2) ** (1 / (2 * horizon)))
    assert limit == pytest.approx(closed, rel=1e-3, abs=1e-6)  # which itself cancels


def test_flip_rate_limits():
    assert budgets.flip_budget_rate(0.02).limit == 0.02
    text = budgets.flip_budget_rate(0.2, tokens=100)
    assert b.sequence_flip_rate(text.limit, 100) == pytest.approx(0.2)


@pytest.mark.parametrize("ties", [False, True])
def test_the_flip_limit_covers(ties):
    """2000 audits of 300 prompts: P(m <= limit) exceeds the budget in at most 5% of them; with
    margins in steps of a bf16 head too. The plain quantile, the fault, exceeds it in half."""
    rng = np.random.default_rng(0)
    budget, n, step = 0.1, 300, 0.125
    missed = plain = 0
    for _ in range(2000):
        margins = rng.exponential(2.0, n)
        if ties:
            margins = np.round(margins / step) * step
        try:
            limit = budgets.flip_budget_drift(budget, margins).limit
        except InputError:
            continue  # all ties: refusing is no miss
        quantile = np.quantile(margins, budget)
        if ties:
            largest = np.floor(limit / step) * step + step / 2
            missed += -np.expm1(-largest / 2) > budget
        else:
            missed += -np.expm1(-limit / 2) > budget
            plain += -np.expm1(-quantile / 2) > budget
    assert missed / 2000 < 0.06
    if not ties:
        assert missed / 2000 > 0.02  # nor is it wasteful
        assert plain / 2000 > 0.4


def test_no_certified_flip_beyond_the_flip_budget():
    """At the limit the share of uncertified contexts is within the budget on the sample itself."""
    margins = np.random.default_rng(1).exponential(2.0, 1000)
    limit = budgets.flip_budget_drift(0.05, margins).limit
    assert (~b.flip_certified(margins, limit)).mean() <= 0.05
    shared = budgets.flip_budget_drift(0.05, margins, exceed_share=0.02)
    assert shared.limit < limit
    assert (~b.flip_certified(margins, shared.limit)).mean() <= 0.03


def test_flip_limits_are_refused_without_evidence():
    with pytest.raises(InputError, match="at least 299 prompts"):
        budgets.flip_budget_drift(0.01, np.ones(298))
    assert budgets.flip_budget_drift(0.01, np.ones(299)).limit < 1
    with pytest.raises(InputError, match="ties"):
        budgets.flip_budget_drift(0.1, [0.0] * 200 + [1.0] * 100)
    with pytest.raises(InputError, match="NaN"):
        budgets.flip_budget_drift(0.1, [np.nan] + [1.0] * 100)
    with pytest.raises(InputError):
        budgets.flip_budget_drift(0.1, [])


def test_tis_thresholds():
    limit = budgets.tis_noop_threshold(0.25, threshold=2.0)
    assert limit.limit == pytest.approx(math.exp(0.25))
    assert b.truncation_is_noop(limit.limit * (1 + 1e-12), 0.25)
    assert not b.truncation_is_noop(limit.limit * 0.999, 0.25)
    assert "is a no-op" in limit.arithmetic[-1]
    assert "can act" in budgets.tis_noop_threshold(1.0, threshold=2.0).arithmetic[-1]


def test_the_arithmetic_shows_the_numbers():
    """A reader with a pocket calculator: 2 (0.1/1)^2 / 512 = 3.906e-05."""
    text = "\n".join(budgets.reward_budget_kl(0.1, 1.0, 512).arithmetic)
    assert "0.1 / 1 = 0.1" in text
    assert "0.02 / 512 = 3.906e-05" in text
    for limit in budgets.derive_limits(
        reward_drift=0.1, horizon=64, flip_budget=0.05, margins=np.linspace(0.01, 3, 500),
        bias_budget=0.2, tis_threshold=2.0,
    ):  # fmt: skip
        assert f"{limit.limit:.4g}" in limit.arithmetic[-1] + limit.arithmetic[-2]


def test_all_limits_of_a_job_together():
    limits = budgets.derive_limits(
        reward_drift=0.1, reward_range=1.0, horizon=512, flip_budget=0.02, bias_budget=0.5,
        tis_threshold=2.0,
    )  # fmt: skip
    metrics = [limit.metric for limit in limits]
    assert metrics == ["kl_engine_reference", "tv", "drift", "flip_rate", "drift", "tis_threshold"]
    tightest = min(limit.limit for limit in limits if limit.metric == "drift")
    assert limits[-1].limit == pytest.approx(math.exp(tightest))
    assert len(budgets.derive_limits(flip_budget=0.1, tis_threshold=2.0)) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda: budgets.derive_limits(),
        lambda: budgets.derive_limits(reward_drift=0.1),
        lambda: budgets.reward_budget_kl(1.0, 1.0, 5),
        lambda: budgets.reward_budget_kl(0.1, 1.0, 0),
        lambda: budgets.reward_budget_kl(0.1, -1.0, 5),
        lambda: budgets.flip_budget_rate(0.0),
        lambda: budgets.flip_budget_rate(0.1, 1.5),
        lambda: budgets.flip_budget_drift(0.1, np.ones(100), exceed_share=0.1),
        lambda: budgets.bias_budget_drift(0.0),
        lambda: budgets.tis_noop_threshold(0.1, threshold=0.5),
        lambda: budgets.tis_noop_threshold(math.inf),
        lambda: budgets.tis_noop_threshold(math.nan),
    ],
)
def test_budgets_that_limit_nothing_are_refused(call):
    with pytest.raises(InputError):
        call()
