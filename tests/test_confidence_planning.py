"""Sample sizes: closed forms against brute force, simulated ones against fresh draws.

A plan that promises too few prompts is the fault to find, so each plan is checked on both sides:
its n reaches the promised power, and clearly fewer prompts do not.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from kernel_contracts.confidence import (
    betting_n,
    clopper_pearson,
    mean_bounds,
    mean_n,
    power_n,
    prompts_to_decide,
    zero_failure_n,
)
from kernel_contracts.errors import InputError


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [(0.05, [29, 59, 149, 299, 598, 2995]), (0.01, [44, 90, 228, 459, 919, 4603])],
)
def test_zero_failure_table(alpha, expected):
    rates = (0.10, 0.05, 0.02, 0.01, 0.005, 0.001)
    assert [zero_failure_n(p, alpha) for p in rates] == expected


@given(st.floats(0.001, 0.5), st.floats(0.001, 0.2))
def test_zero_failure_n_is_the_fewest(p1, alpha):
    n = zero_failure_n(p1, alpha)
    assert clopper_pearson(0, n, alpha)[1] <= p1 * (1 + 1e-9)
    if n > 1:
        assert clopper_pearson(0, n - 1, alpha)[1] > p1 * (1 - 1e-9)


@pytest.mark.parametrize(
    ("limit", "p0", "expected"),
    [(0.01, 0.002, (773, 3)), (0.01, 0.005, (2546, 17)), (0.02, 0.01, (1271, 17)),
     (0.05, 0.03, (832, 31))],
)  # fmt: skip
def test_power_table(limit, p0, expected):
    assert power_n(limit, p0, 0.05, 0.9) == expected


@settings(max_examples=25, deadline=None)
@given(st.floats(0.05, 0.5), st.floats(0.0, 0.6), st.sampled_from([0.05, 0.1]))
def test_power_n_is_the_fewest_by_brute_force(limit, share, alpha):
    """Every smaller n is tried; power is not monotone in n, so the first that suffices counts."""
    p0, power = limit * share, 0.8
    n, allowed = power_n(limit, p0, alpha, power)
    assert clopper_pearson(allowed, n, alpha)[1] <= limit * (1 + 1e-9)
    assert binom.cdf(allowed, n, p0) >= power
    for smaller in range(1, n):
        passing = binom.cdf(np.arange(smaller + 1), smaller, limit) <= alpha
        if passing.any():
            best = int(np.flatnonzero(passing).max())
            assert binom.cdf(best, smaller, p0) < power


def test_too_close_to_the_limit_is_no_plan():
    assert power_n(0.001, 0.0009999, 0.05, 0.9) is None


def test_mean_table():
    """Normal theory: cv 2 and 3 at half, 0.7 and 0.9 of the limit."""
    assert [mean_n(cv, f) for cv in (2, 3) for f in (0.5, 0.7, 0.9)] == [
        35, 187, 2775, 78, 420, 6244,
    ]  # fmt: skip


def decided_share(n, mean, cv, limit, ceiling, audits=300, seed=99):
    rng = np.random.default_rng(seed)
    sigma = np.sqrt(np.log1p(cv * cv))
    draws = mean * np.exp(sigma * rng.standard_normal((audits, n)) - sigma**2 / 2)
    found = [mean_bounds(x, ceiling=ceiling, alpha=0.05) for x in draws]
    if mean < limit:
        return np.mean([b.upper <= limit for b in found])
    return np.mean([b.lower > limit for b in found])


@pytest.mark.parametrize("mean", [0.5, 0.7, 1.6, 2.5])
def test_simulated_plan_reaches_its_power_on_fresh_draws(mean):
    """At n: 90 % up to noise.  At half of n: clearly less, so the plan is not merely large."""
    n = betting_n(mean=mean, cv=1.0, limit=1.0, ceiling=10.0)
    assert decided_share(n, mean, 1.0, 1.0, 10.0) >= 0.85
    assert decided_share(n // 2, mean, 1.0, 1.0, 10.0) < 0.75


def test_simulated_plan_for_rates_and_for_hopeless_cases():
    rate = betting_n(mean=0.02, cv=1.0, limit=0.04, ceiling=1.0, law="beta")
    assert 60 < rate < 400
    assert betting_n(mean=0.99, cv=1.0, limit=1.0, ceiling=10.0, most=200) is None
    assert rate == betting_n(mean=0.02, cv=1.0, limit=0.04, ceiling=1.0, law="beta")


@pytest.mark.parametrize("scale", [0.6, 0.75, 1.5])
def test_extrapolation_from_a_first_sample_is_calibrated(scale):
    """Adding prompts up to the announced total decides, the announced way, in about the announced
    80 % of audits: the true law's own draws, not a resample."""
    rng = np.random.default_rng(6)
    hits, announced = [], []
    for _ in range(150):
        x = np.minimum(scale * rng.lognormal(-0.32, 0.8, 40), 6.0)
        n, side = prompts_to_decide(x, 1.0, 6.0, 0.05)
        expected = "PASS" if scale < 1 else "FAIL"
        if n is None or n == 40 or n > 3000 or side != expected:
            continue
        more = np.minimum(scale * rng.lognormal(-0.32, 0.8, n - 40), 6.0)
        b = mean_bounds(np.concatenate([x, more]), ceiling=6.0, alpha=0.05)
        hits.append(b.upper <= 1.0 if expected == "PASS" else b.lower > 1.0)
        announced.append(n)
    assert len(hits) > 40
    assert 0.55 <= np.mean(hits) <= 0.98
    assert np.median(announced) < 400


def test_extrapolation_with_row_counts():
    rng = np.random.default_rng(7)
    w = rng.integers(20, 101, 60)
    x = np.minimum(rng.lognormal(-0.75, 0.7, 60), 6.0)
    n, side = prompts_to_decide(x, 1.0, 6.0, 0.05, weights=w, weight_cap=100)
    loose, _ = prompts_to_decide(x, 1.0, 6.0, 0.05, weights=w, weight_cap=1000)
    assert side == "PASS"
    assert 60 <= n < 1000
    assert loose > 3 * n  # a cap far over the counts costs prompts, and the plan says so


def test_a_decided_sample_needs_no_more():
    assert prompts_to_decide(np.full(300, 0.1), 1.0, 2.0, 0.05) == (300, "PASS")
    assert prompts_to_decide(np.full(300, 1.9), 1.0, 2.0, 0.05) == (300, "FAIL")


def test_undecidable_samples_say_so():
    """On the limit, without evidence, or nearer to the limit than a million prompts resolve."""
    assert prompts_to_decide([], 1.0, 2.0, 0.05) == (None, None)
    assert prompts_to_decide([0.5, 1.5], 1.0, 2.0, 0.05) == (None, None)
    assert prompts_to_decide([0.9990, 1.0008], 1.0, 2.0, 0.05)[1] == "PASS"
    assert prompts_to_decide([0.0, 1.99999], 1.0, 2.0, 0.05) == (None, "PASS")


@pytest.mark.parametrize(
    "call",
    [
        lambda: zero_failure_n(0.0, 0.05),
        lambda: power_n(0.01, 0.01, 0.05, 0.9),
        lambda: power_n(0.01, 0.001, 0.05, 1.0),
        lambda: mean_n(1.0, 1.0),
        lambda: mean_n(0.0, 0.5),
        lambda: betting_n(mean=1.0, cv=1.0, limit=1.0, ceiling=2.0),
        lambda: betting_n(mean=0.5, cv=9.0, limit=0.6, ceiling=1.0, law="beta"),
        lambda: prompts_to_decide([0.1], 2.0, 1.0, 0.05),
        lambda: prompts_to_decide([np.nan], 0.5, 1.0, 0.05),
    ],
)
def test_unusable_plans_are_named(call):
    with pytest.raises(InputError):
        call()
