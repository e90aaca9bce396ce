"""Proportions of prompts: the verdict's interval keeps its level for every truth and sample size.

Coverage of a binomial interval can be summed exactly, so there is no simulation noise where it
matters.  Two faults must show: the display interval under-covers, and so does the exact interval
when it is fed correlated tokens instead of prompts.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from kernel_contracts.confidence import clopper_pearson, proportion_p_value, wilson
from kernel_contracts.errors import InputError

counts = st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
levels = st.floats(0.001, 0.2)


def exact_coverage(interval, n, p, alpha):
    """P(lower <= p) and P(p <= upper), summed over all outcomes."""
    mass = binom.pmf(np.arange(n + 1), n, p)
    bounds = np.array([interval(k, n, alpha) for k in range(n + 1)])
    return mass[bounds[:, 0] <= p].sum(), mass[bounds[:, 1] >= p].sum()


@pytest.mark.parametrize("n", [5, 30, 120])
def test_exact_interval_keeps_its_level_for_every_proportion(n):
    """Clean control: each one-sided bound holds with at least 1 - alpha over a grid of truths."""
    worst = min(
        min(exact_coverage(clopper_pearson, n, p, 0.05)) for p in np.linspace(0.003, 0.997, 60)
    )
    assert worst >= 0.95 - 1e-12


def test_display_interval_does_not_keep_it():
    """Fault: Wilson's lower bound covers far less than 95 % at some small proportion, which is why
    no verdict may use it."""
    worst = min(min(exact_coverage(wilson, 30, p, 0.05)) for p in np.linspace(0.003, 0.997, 60))
    assert worst < 0.90


def test_tokens_are_not_prompts():
    """Fault: the exact upper bound on tokens with ICC 0.05 holds about 73 % of the time where it
    promises 95 % (deff 5.95, so z shrinks from 1.645 to 0.674: 75 %).
    Clean control: on one coin per prompt it keeps its level."""
    rng = np.random.default_rng(1)
    rate, icc, prompts, tokens, audits = 0.1, 0.05, 200, 100, 400
    size = 1 / icc - 1
    per_prompt = rng.beta(rate * size, (1 - rate) * size, (audits, prompts))
    flips = rng.binomial(tokens, per_prompt).sum(1)
    token_hits = [clopper_pearson(int(k), prompts * tokens, 0.05)[1] >= rate for k in flips]
    coins = (rng.random((audits, prompts)) < per_prompt).sum(1)
    prompt_hits = [clopper_pearson(int(k), prompts, 0.05)[1] >= rate for k in coins]
    assert 0.68 < np.mean(token_hits) < 0.82
    assert np.mean(prompt_hits) >= 0.925


def test_zero_failures_is_the_closed_form():
    """0 of n gives 1 - alpha^(1/n); all of n mirrors it; no prompts give no evidence."""
    for n in (1, 29, 299, 2995):
        assert clopper_pearson(0, n, 0.05)[1] == pytest.approx(1 - 0.05 ** (1 / n), rel=1e-9)
        assert clopper_pearson(n, n, 0.05)[0] == pytest.approx(0.05 ** (1 / n), rel=1e-9)
    assert clopper_pearson(0, 299, 0.05)[1] <= 0.01 < clopper_pearson(0, 298, 0.05)[1]
    assert clopper_pearson(0, 0, 0.05) == wilson(0, 0, 0.05) == (0.0, 1.0)


@given(counts, levels)
def test_bounds_bracket_the_estimate_and_widen_with_confidence(kn, alpha):
    k, n = kn
    for interval in (clopper_pearson, wilson):
        low, high = interval(k, n, alpha)
        wide_low, wide_high = interval(k, n, alpha / 2)
        assert 0 <= wide_low <= low <= high <= wide_high <= 1
        assert low - 1e-12 <= k / n <= high + 1e-12


@given(counts, levels)
def test_events_and_non_events_mirror(kn, alpha):
    k, n = kn
    low, high = clopper_pearson(k, n, alpha)
    other_low, other_high = clopper_pearson(n - k, n, alpha)
    assert low == pytest.approx(1 - other_high, abs=1e-9)
    assert high == pytest.approx(1 - other_low, abs=1e-9)


@given(counts, st.floats(0.01, 0.99), levels)
def test_p_value_and_bound_decide_alike(kn, limit, alpha):
    """Rejecting by p-value is the same event as the bound clearing the limit (away from ties)."""
    k, n = kn
    low, high = clopper_pearson(k, n, alpha)
    kept = proportion_p_value(k, n, limit, above=False)
    broken = proportion_p_value(k, n, limit, above=True)
    if abs(kept - alpha) > 1e-9:
        assert (kept < alpha) == (high < limit)
    if abs(broken - alpha) > 1e-9:
        assert (broken < alpha) == (low > limit)


def test_no_prompts_prove_nothing():
    assert proportion_p_value(0, 0, 0.5, above=True) == 1.0
    assert proportion_p_value(0, 0, 0.5, above=False) == 1.0


@pytest.mark.parametrize(
    ("k", "n", "alpha"), [(3, 2, 0.05), (-1, 2, 0.05), (1.5, 2, 0.05), (1, 2, 0.0), (1, 2, 1.0)]
)
def test_impossible_input_is_named(k, n, alpha):
    for interval in (clopper_pearson, wilson):
        with pytest.raises(InputError):
            interval(k, n, alpha)
