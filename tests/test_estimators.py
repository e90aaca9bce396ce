"""KL from sampled tokens: exact expectations by enumeration, digits at tiny drift, honest domains.

The expectation of each estimator over the engine's distribution is a finite sum, so bias claims are
checked exactly.  The faults: a biased estimator, the wrong direction, and text from elsewhere.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kernel_contracts.errors import InputError
from kernel_contracts.estimators import (
    k1,
    k2,
    k3,
    kl_from_samples,
    log_ratio,
    reference_direction,
    weight_summary,
    weighted_mean,
)

logits = arrays(np.float64, 6, elements=st.floats(-4, 4))


def log_softmax(z):
    return z - np.logaddexp.reduce(z)


def pair(rms, seed=0, vocabulary=500):
    """Log-probs (p, q) whose log-ratio has about the given root mean square under q."""
    rng = np.random.default_rng(seed)
    q = log_softmax(2 * rng.standard_normal(vocabulary))
    p = log_softmax(q + rms * rng.standard_normal(vocabulary))
    return p, q


@given(logits, logits)
def test_expectations_are_the_kl_of_the_named_direction(a, b):
    """Sum over all tokens, weighted by q: k1 and k3 give KL(q||p), the fourth gives KL(p||q)."""
    p, q = log_softmax(a), log_softmax(b)
    weight, delta = np.exp(q), log_ratio(q, p)
    engine = float((np.exp(q) * (q - p)).sum())
    reference = float((np.exp(p) * (p - q)).sum())
    assert (weight * k1(delta)).sum() == pytest.approx(engine, abs=1e-10)
    assert (weight * k3(delta)).sum() == pytest.approx(engine, abs=1e-10)
    assert (weight * reference_direction(delta)).sum() == pytest.approx(reference, abs=1e-9)


@given(st.floats(-40, 40))
def test_non_negative_and_zero_only_without_a_gap(delta):
    assert k3(delta) >= 0
    assert reference_direction(delta) >= 0
    if abs(delta) > 1e-150:
        assert k3(delta) > 0


@pytest.mark.parametrize("delta", [0.3, 1e-2, 1.1e-3, 0.9e-3, 1e-4, 1e-6, 1e-9, 1e-12])
@pytest.mark.parametrize("sign", [1, -1])
def test_digits_survive_tiny_drift(delta, sign):
    """Against the power series summed exactly.  Fault: exp(d) - 1 - d in float64 keeps 4 digits at
    1e-6 and none at 1e-9."""
    d = sign * delta
    exact_k3 = math.fsum(d**k / math.factorial(k) for k in range(2, 30))
    exact_reference = math.fsum(d**k * (k - 1) / math.factorial(k) for k in range(2, 30))
    assert float(k3(d)) == pytest.approx(exact_k3, rel=1e-12)
    assert float(reference_direction(d)) == pytest.approx(exact_reference, rel=1e-12)
    if delta <= 1e-9:
        assert abs((math.exp(d) - 1 - d) / exact_k3 - 1) > 0.1


def test_k2_is_biased_and_k3_is_not():
    """At rms 0.5 the exact expectation of k2 is off by percents; at 0.04 by under one percent."""
    for rms, least, most in ((0.5, 0.005, 0.15), (0.04, 0.0, 0.01)):
        p, q = pair(rms)
        delta = log_ratio(q, p)
        truth = (np.exp(q) * k3(delta)).sum()
        off = abs((np.exp(q) * k2(delta)).sum() / truth - 1)
        assert least <= off <= most


def test_k3_needs_a_thousandth_of_the_tokens():
    """Exact standard deviation over KL at bf16-sized drift: about 50 for k1 and 1.4 for k3."""
    p, q = pair(0.04)
    delta, weight = log_ratio(q, p), np.exp(q)

    def ratio(estimator):
        values = estimator(delta)
        mean = (weight * values).sum()
        return np.sqrt((weight * (values - mean) ** 2).sum()) / mean

    assert ratio(k1) > 35
    assert ratio(k3) < 2.5
    assert (ratio(k1) / ratio(k3)) ** 2 > 300


def test_tokens_from_the_reference_swap_the_direction():
    """Fault: using engine formulas on the reference's own tokens gives neither KL.  Control: naming
    the source gives KL(p||q)."""
    p, q = pair(0.8, seed=2)
    truth = (np.exp(p) * (p - q)).sum()
    right = (np.exp(p) * kl_from_samples(q, p, sampled_from="reference")).sum()
    wrong = (np.exp(p) * kl_from_samples(q, p, sampled_from="engine")).sum()
    assert right == pytest.approx(truth, rel=1e-10)
    assert abs(wrong / truth - 1) > 0.05
    with pytest.raises(InputError, match="neither"):
        kl_from_samples(q, p, sampled_from="other")


def test_a_token_that_the_reference_excludes():
    """p = 0: infinite KL(q||p), and exactly 1 in the other direction; neither becomes a number that
    averages away."""
    delta = log_ratio([-1.0], [-np.inf])
    assert k1(delta)[0] == k2(delta)[0] == k3(delta)[0] == np.inf
    assert reference_direction(delta)[0] == 1.0


def test_a_broken_kernel_overflows_to_infinity_not_to_nan():
    assert k3(800.0) == np.inf
    assert reference_direction(800.0) == np.inf
    assert np.isfinite(k3(46.0))


@pytest.mark.parametrize(
    ("q", "p"),
    [
        ([np.nan], [-1.0]),
        ([-1.0], [np.nan]),
        ([-np.inf], [-1.0]),
        ([-1.0], [np.inf]),
        ([0.9], [-1.0]),
        ([-1.0, -2.0], [-1.0]),
    ],
)
def test_what_is_no_log_probability_is_refused(q, p):
    with pytest.raises(InputError):
        log_ratio(q, p)


def test_rounding_just_above_zero_is_accepted():
    """A bf16 log-softmax can return +0.03 for a sure token: a fault to measure, not to refuse."""
    assert log_ratio([0.03], [-0.001])[0] == pytest.approx(-0.031)


def test_unknown_estimator_is_named():
    with pytest.raises(InputError, match="k9"):
        kl_from_samples([-1.0], [-1.0], estimator="k9", sampled_from="engine")


@given(arrays(np.float64, st.integers(1, 30), elements=st.floats(-5, 5)), st.floats(-2000, 2000))
def test_effective_sample_size_ignores_scale_and_stays_in_range(log_w, shift):
    a, b = weight_summary(log_w), weight_summary(log_w + shift)
    assert 1 - 1e-9 <= a.ess <= a.n * (1 + 1e-9)
    assert 1 / a.n - 1e-12 <= a.max_share <= 1
    assert b.ess == pytest.approx(a.ess, rel=1e-6)
    assert a.ess == pytest.approx(np.exp(log_w).sum() ** 2 / np.exp(2 * log_w).sum(), rel=1e-9)


def test_equal_weights_and_one_heavy_weight():
    """Control: equal weights keep all samples.  Fault: one weight of e^20 leaves one sample, and
    max_share says so."""
    even = weight_summary(np.zeros(50))
    assert (even.ess, even.ess_share, even.max_share, even.mean) == pytest.approx((50, 1, 0.02, 1))
    heavy = weight_summary([20.0] + [0.0] * 49)
    assert heavy.ess == pytest.approx(1.0, abs=1e-5)
    assert heavy.max_share > 0.999


def test_weighted_mean_is_an_average_under_the_reference():
    """Exact: weights p/q on all tokens drawn in proportion to q give the mean under p."""
    p, q = pair(0.5, seed=3, vocabulary=40)
    value = np.arange(40.0)
    assert weighted_mean(value, p) == pytest.approx((np.exp(p) * value).sum())
    assert weighted_mean([1.0, 5.0], [0.0, -np.inf]) == 1.0
    counts = np.random.default_rng(0).choice(40, 200_000, p=np.exp(q))
    sampled = weighted_mean(value[counts], (p - q)[counts])
    assert sampled == pytest.approx((np.exp(p) * value).sum(), rel=0.01)


@pytest.mark.parametrize("bad", [[], [-np.inf, -np.inf], [np.nan], [np.inf], [[0.0]]])
def test_unusable_weights_are_named(bad):
    with pytest.raises(InputError):
        weight_summary(bad)
    with pytest.raises(InputError):
        weighted_mean(np.zeros(np.shape(bad)), bad)


def test_values_must_be_finite_and_fit():
    for values in ([1.0], [1.0, np.nan]):
        with pytest.raises(InputError):
            weighted_mean(values, [0.0, 0.0])
