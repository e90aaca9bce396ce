"""The betting bound: valid at every sample size and law, and tight enough to be used.

Validity: simulated coverage of each side over laws that look like per-prompt KL, rare events and
token rates, with the normal interval as the injected fault.  Order, clipping and weights: stated
properties.  Tightness: against Hoeffding and the empirical Bernstein bound on the same data.
"""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kernel_contracts.confidence import (
    hoeffding,
    maurer_pontil,
    mean_bounds,
    mean_test,
    normal_bounds,
)
from kernel_contracts.confidence.betting import grid_above, log_wealth_above, peak_above
from kernel_contracts.errors import InputError

values = st.integers(1, 40).flatmap(lambda n: arrays(np.float64, n, elements=st.floats(0, 2)))
weighted = st.integers(1, 40).flatmap(
    lambda n: st.tuples(
        arrays(np.float64, n, elements=st.floats(0, 2)),
        arrays(np.float64, n, elements=st.integers(1, 50).map(float)),
    )
)


def lognormal(rng, shape, sigma=1.2, mean=1.6e-3, ceiling=0.05):
    return np.minimum(mean * np.exp(sigma * rng.standard_normal(shape) - sigma**2 / 2), ceiling)


LAWS = {
    "kl": (lambda g, s: lognormal(g, s), 0.05),
    "kl, close ceiling": (lambda g, s: lognormal(g, s, ceiling=0.01), 0.01),
    "rare prompts": (lambda g, s: (g.random(s) < 0.02).astype(float), 1.0),
    "token rates": (lambda g, s: g.binomial(100, g.beta(0.9, 8.1, s)) / 100, 1.0),
}


def coverage(law, ceiling, n, bound, audits=400, seed=0):
    """(share of lower <= truth, share of upper >= truth); the truth is the law's mean over 2M."""
    rng = np.random.default_rng(seed)
    truth = law(rng, 2_000_000).mean()
    pairs = np.array([bound(law(rng, n), ceiling) for _ in range(audits)])
    return np.mean(pairs[:, 0] <= truth), np.mean(pairs[:, 1] >= truth)


def betting(x, ceiling):
    found = mean_bounds(x, ceiling=ceiling, alpha=0.05)
    return found.lower, found.upper


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("n", [20, 200])
def test_both_sides_keep_their_level(name, n):
    """Clean control: 400 audits each; true coverage of 95 % would fall under 92.5 % with
    probability about 1 %, and the bound is conservative."""
    law, ceiling = LAWS[name]
    low, high = coverage(law, ceiling, n, betting)
    assert low >= 0.925
    assert high >= 0.925


def test_normal_interval_does_not():
    """Fault: on 50 prompts of log-normal KL the normal upper bound covers about 84 %."""
    law, ceiling = LAWS["kl"]
    _, high = coverage(law, ceiling, 50, lambda x, _: normal_bounds(x, 0.05))
    assert high < 0.89


@pytest.mark.parametrize(("n", "most"), [(50, 3.4), (200, 1.7), (1000, 1.17)])
def test_tighter_than_the_other_valid_bounds(n, most):
    """Average upper bound over the true mean: no looser than the published bets' 3.31, 1.63, 1.16
    allow for, and under both closed-form bounds."""
    rng = np.random.default_rng(3)
    truth = lognormal(rng, 2_000_000).mean()
    sample = lognormal(rng, (60, n))
    ours = np.mean([betting(x, 0.05)[1] for x in sample]) / truth
    bernstein = np.mean([maurer_pontil(x, ceiling=0.05, alpha=0.05)[1] for x in sample]) / truth
    flat = np.mean([hoeffding(x, ceiling=0.05, alpha=0.05)[1] for x in sample]) / truth
    assert ours < most
    assert ours < min(bernstein, flat)


def test_ratio_of_sums_covers_the_token_mean():
    """Prompts with more tokens drift more.  The weighted bound covers the token-weighted mean;
    fault: the unweighted bound, of the mean of prompt means, lies below it almost always."""
    rng = np.random.default_rng(5)
    n, cap, ceiling = 150, 200, 0.2

    def batch(size):
        count = rng.integers(1, cap + 1, size)
        return np.minimum(ceiling, rng.exponential(0.04 * count / cap + 0.002)), count

    x, count = batch(2_000_000)
    truth = (x * count).sum() / count.sum()
    audits = [batch(n) for _ in range(300)]
    right = [
        mean_bounds(x, ceiling=ceiling, alpha=0.05, weights=c, weight_cap=cap) for x, c in audits
    ]
    wrong = [mean_bounds(x, ceiling=ceiling, alpha=0.05) for x, _ in audits]
    assert np.mean([b.upper >= truth for b in right]) >= 0.925
    assert np.mean([b.lower <= truth for b in right]) >= 0.925
    assert np.mean([b.upper >= truth for b in wrong]) < 0.5
    assert np.mean([b.upper for b in right]) < 1.5 * truth


@settings(max_examples=60)
@given(values, st.floats(0.005, 0.2))
def test_bounds_bracket_the_estimate_and_widen_with_confidence(x, alpha):
    b = mean_bounds(x, ceiling=2.0, alpha=alpha)
    wide = mean_bounds(x, ceiling=2.0, alpha=alpha / 2)
    assert 0 <= b.lower <= b.estimate * (1 + 1e-9) + 1e-300
    assert b.estimate <= b.upper * (1 + 1e-9) <= 2.0 * (1 + 1e-9)
    # Stakes are tuned to alpha, so monotony holds up to that tuning: never by more than 5 % of
    # the interval's width.
    slack = 0.05 * (b.upper - b.lower) + 1e-6
    assert wide.lower <= b.lower + slack
    assert wide.upper >= b.upper - slack


@settings(max_examples=60)
@given(values, st.floats(0.05, 1.9))
def test_p_value_and_bound_decide_alike(x, limit):
    """The bound is the inversion of the test: it clears the limit where the test rejects."""
    b = mean_bounds(x, ceiling=2.0, alpha=0.05)
    below = mean_test(x, limit=limit, ceiling=2.0, side="below", alpha=0.05)
    above = mean_test(x, limit=limit, ceiling=2.0, side="above", alpha=0.05)
    near = 1e-5 * limit
    if b.upper < limit - near:
        assert below.p_value <= 0.05
    if b.lower > limit + near:
        assert above.p_value <= 0.05
    if limit + near < b.upper and limit > b.estimate:
        assert below.p_value > 0.05
    if b.lower < limit - near and limit < b.estimate:
        assert above.p_value > 0.05


@given(values)
def test_the_reported_bound_itself_is_refuted(x):
    """A PASS at limit = upper must be backed by a p-value at that very limit, so the search has to
    return the refuted end of its bracket."""
    x = np.minimum(x, 1.0)
    b = mean_bounds(x, ceiling=1.0, alpha=0.05)
    if b.upper < 1.0:
        assert mean_test(x, limit=b.upper, ceiling=1.0, side="below", alpha=0.05).p_value <= 0.05
    if b.lower > 0.0:
        assert mean_test(x, limit=b.lower, ceiling=1.0, side="above", alpha=0.05).p_value <= 0.05


@settings(max_examples=60)
@given(values, st.sampled_from([0.05, 0.01, 1e-4]))
def test_the_search_ends_where_bisection_would(x, alpha):
    """The edge of what is refuted, within the precision asked for, on both sides."""
    x = np.clip(x, 0.0, 1.0)
    b = mean_bounds(x, ceiling=1.0, alpha=alpha)
    step = 2e-7
    for edge, beyond, side in (
        (b.upper, b.upper * (1 - step), "below"),
        (b.lower, b.lower * (1 + step), "above"),
    ):
        between = b.estimate < beyond < 1.0 if side == "below" else 0.0 < beyond < b.estimate
        if between and edge > 1e-9:
            refuted = mean_test(x, limit=beyond, ceiling=1.0, side=side, alpha=alpha).p_value
            assert refuted > alpha


@settings(max_examples=60)
@given(values, st.floats(0.01, 0.9), st.booleans())
def test_the_peak_of_the_wealth_is_its_paths_largest_value(x, m, weighted_):
    x = np.clip(x, 0.0, 1.0)
    w = np.linspace(0.1, 1.0, x.size) if weighted_ else None
    grid = grid_above(3.0, x.size, weighted=weighted_)
    assert peak_above(x, w, m, grid) == pytest.approx(
        log_wealth_above(x, w, m, grid).max(), rel=1e-12, abs=1e-12
    )


@settings(max_examples=40)
@given(weighted)
def test_equal_weights_at_the_cap_are_no_weights_above(xw):
    """With every prompt at the cap, the upper bound is exactly the unweighted one."""
    x, _ = xw
    plain = mean_bounds(x, ceiling=2.0, alpha=0.05)
    full = mean_bounds(x, ceiling=2.0, alpha=0.05, weights=np.full(x.size, 7.0), weight_cap=7.0)
    assert full.upper == pytest.approx(plain.upper, rel=1e-9)
    assert full.estimate == pytest.approx(plain.estimate, rel=1e-12)


@settings(max_examples=40)
@given(weighted, st.floats(0.1, 1000))
def test_units_do_not_matter(xw, scale):
    """Nats or millinats, tokens or kilotokens: the bounds scale along."""
    x, w = xw
    a = mean_bounds(x, ceiling=2.0, alpha=0.05, weights=w, weight_cap=50)
    b = mean_bounds(
        x * scale, ceiling=2.0 * scale, alpha=0.05, weights=w * scale, weight_cap=50 * scale
    )
    assert b.upper == pytest.approx(a.upper * scale, rel=1e-5)
    assert b.lower == pytest.approx(a.lower * scale, rel=1e-5, abs=1e-12)


def test_raising_a_value_raises_the_limit_needed():
    """Replacing values by larger ones never lowers the estimate nor turns a FAIL into a PASS."""
    rng = np.random.default_rng(2)
    x = lognormal(rng, 200)
    low = mean_bounds(x, ceiling=0.05, alpha=0.05)
    high = mean_bounds(np.minimum(3 * x, 0.05), ceiling=0.05, alpha=0.05)
    assert low.upper < high.lower


def test_clipping_is_counted_and_the_bound_is_of_the_clipped_mean():
    b = mean_bounds([-0.1, 0.2, 5.0, 7.0], ceiling=1.0, alpha=0.05)
    assert (b.clipped_low, b.clipped_high) == (1, 2)
    assert b.estimate == pytest.approx((0 + 0.2 + 1 + 1) / 4)
    clean = mean_bounds([0.0, 0.2, 1.0], ceiling=1.0, alpha=0.05)
    assert (clean.clipped_low, clean.clipped_high) == (0, 0)


def test_no_evidence_gives_the_whole_range():
    """Neither an empty slice nor prompts without rows can pass or fail any limit."""
    for b in (
        mean_bounds([], ceiling=3.0, alpha=0.05),
        mean_bounds([1.0], ceiling=3.0, alpha=0.05, weights=[0.0], weight_cap=5),
    ):
        assert (b.lower, b.upper) == (0.0, 3.0)
        assert np.isnan(b.estimate)
    assert mean_test([], limit=1.0, ceiling=3.0, side="below", alpha=0.05).p_value == 1.0


def test_a_limit_of_zero_falls_with_one_positive_value():
    """Fault and control of the "must never happen" clause."""
    kwargs = {"limit": 0.0, "ceiling": 1.0, "side": "above", "alpha": 0.05}
    assert mean_test([0, 0, 0.5], **kwargs).p_value == 0.0
    assert mean_test([0, 0, 0], **kwargs).p_value == 1.0


def test_all_clean_is_close_to_the_exact_bound():
    """300 prompts without any event: the exact bound is 3/n.  Betting stakes at most 0.9 of the
    wealth, which costs a factor 1 / 0.9 = 1.11, plus the first prompts before it dares to."""
    upper = mean_bounds(np.zeros(300), ceiling=1.0, alpha=0.05).upper
    assert 1 - 0.05 ** (1 / 300) <= upper <= 1.15 * (1 - 0.05 ** (1 / 300))


@pytest.mark.parametrize(
    "change",
    [
        {"x": [0.1, np.nan]},
        {"x": [[0.1, 0.2]]},
        {"ceiling": 0.0},
        {"ceiling": np.inf},
        {"alpha": 0.0},
        {"weights": [1.0, 1.0]},
        {"weights": [1.0, 3.0], "weight_cap": 2.0},
        {"weights": [1.0, -1.0], "weight_cap": 2.0},
        {"weights": [1.0], "weight_cap": 2.0},
        {"weight_cap": 2.0},
    ],
)
def test_unusable_input_is_named(change):
    arguments = {"x": [0.1, 0.2], "ceiling": 1.0, "alpha": 0.05} | change
    with pytest.raises(InputError):
        mean_bounds(arguments.pop("x"), **arguments)


@pytest.mark.parametrize("limit", [-0.1, 1.0, 2.0])
def test_a_limit_outside_the_range_is_refused(limit):
    with pytest.raises(InputError, match="ceiling"):
        mean_test([0.1], limit=limit, ceiling=1.0, side="below", alpha=0.05)


def test_a_thousand_prompts_take_milliseconds():
    """Median processor time of 9 calls under 20 ms, what an interactive report affords a slice."""
    x = lognormal(np.random.default_rng(0), 1000)
    took = []
    for _ in range(9):
        start = time.process_time()
        mean_bounds(x, ceiling=0.05, alpha=0.05)
        took.append(time.process_time() - start)
    assert sorted(took)[4] < 0.020
