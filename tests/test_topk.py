"""Intervals from k logged log-probs hold the truth, whatever the rest hides.

The argument: full rows are known here, so the truth is; only k of their tokens are shown. The
interval must hold it for random, peaked and adversarial rests, its lower end must be reachable
(rest tokens that move together) and its upper end too (rest laws that attain K), and the partial
sum that others use is shown to be neither.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from bounds_pairs import random_pairs, two_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_contracts import divergence as dv
from kernel_contracts.errors import InputError
from kernel_contracts.topk import topk_intervals


def shown(z_p, z_q, k):
    """Log-probs of q's k largest tokens, and the drift of the others, ``[rows]``."""
    order = (-z_q).argsort(-1)
    logp, logq = (np.take_along_axis(dv.log_softmax(z), order, -1) for z in (z_p, z_q))
    rest = (logp - logq)[..., k:]
    return logp[..., :k], logq[..., :k], rest.max(-1) - rest.min(-1)


def pairs():
    for seed in range(4):
        for z_p, z_q in random_pairs(seed=seed, batches=10):
            if z_p.shape[1] > 2:
                yield z_p, z_q


@pytest.mark.parametrize("resolution", [0.0, 1e-6])
@pytest.mark.parametrize("known", ["nothing", "rest_drift", "drift"])
def test_the_interval_holds_the_truth(known, resolution):
    tolerance = 1e-13  # float64 log-probs down to -40, and 1 minus a sum of their exponentials
    for z_p, z_q in pairs():
        for k in {1, 2, z_p.shape[1] - 1}:
            logp, logq, rest_drift = shown(z_p, z_q, k)
            options = {
                "nothing": {}, "rest_drift": {"rest_drift": rest_drift},
                "drift": {"drift": dv.drift(z_p, z_q, eta=0.0)},
            }[known]  # fmt: skip
            got = topk_intervals(logp, logq, resolution=max(resolution, tolerance), **options)
            kl, tv = dv.kl_divergence(z_q, z_p), dv.total_variation(z_p, z_q)
            assert (got.kl_lower <= kl * (1 + 1e-7) + 1e-30).all()
            assert (got.kl_upper >= kl * (1 - 1e-7)).all()
            assert (got.tv_lower <= tv + tolerance).all()
            assert (got.tv_upper >= tv - tolerance).all()
            if known == "nothing":
                assert (got.kl_upper == np.inf).all()
                assert np.isfinite(got.tv_upper).all()
            if known == "drift":
                assert np.isfinite(got.kl_upper).all()


def test_both_ends_are_reached():
    """A rest that moves as one is the lower end; a rest of two blocks that attain K the upper."""
    d = 1.0
    z_q = np.log([0.5, 0.2, 0.2, 0.1])
    z_p = z_q + np.array([0.0, 0.3, -0.4, -0.4])
    logp, logq = dv.log_softmax(z_p)[:2], dv.log_softmax(z_q)[:2]
    got = topk_intervals(logp, logq, rest_drift=0.0, resolution=0.0)
    assert got.kl_lower == pytest.approx(dv.kl_divergence(z_q, z_p))
    assert got.kl_upper == pytest.approx(got.kl_lower)
    assert got.tv_lower == pytest.approx(dv.total_variation(z_p, z_q))
    assert got.tv_upper == pytest.approx(got.tv_lower)

    for mass, low, high, truth in (
        (1 / d - 1 / np.expm1(d), "kl_upper", "kl_lower", dv.kl_divergence),
        (1 / (1 + np.exp(d / 2)), "tv_upper", "tv_lower", dv.total_variation),
    ):
        b_p, b_q = (np.exp(dv.log_softmax(z)) for z in two_blocks(d, mass))
        p, q = np.log([0.5, *(0.5 * b_p)]), np.log([0.6, *(0.4 * b_q)])
        got = topk_intervals(p[:1], q[:1], rest_drift=d, resolution=0.0)
        value = truth(q, p) if truth is dv.kl_divergence else truth(p, q)
        assert getattr(got, high) < 0.9 * value
        if truth is dv.kl_divergence:
            assert value == pytest.approx(getattr(got, low))
    # TV: rest tokens that cross over (equal masses, so nothing of it shows in the bucket).
    b_p, b_q = (np.exp(dv.log_softmax(z)) for z in two_blocks(d, 1 / (1 + np.exp(d / 2))))
    p, q = np.log([0.5, *(0.5 * b_p)]), np.log([0.5, *(0.5 * b_q)])
    got = topk_intervals(p[:1], q[:1], rest_drift=d, resolution=0.0)
    assert dv.total_variation(p, q) == pytest.approx(got.tv_upper)
    # Nothing known: disjoint rests.
    got = topk_intervals(np.log([0.7]), np.log([0.7]), resolution=0.0)
    assert (got.tv_lower, got.tv_upper, got.kl_upper) == (0, pytest.approx(0.3), np.inf)


def test_the_partial_sum_is_neither_bound():
    """Why it is never used: sum q ln(q/p) over the logged tokens is -0.11 here and the KL 0.03;
    with the sides exchanged it is 0.13 and the KL 0.03."""
    p, q = np.log([0.6, 0.4]), np.log([0.48, 0.52])
    below = float(np.exp(q[0]) * (q[0] - p[0]))
    above = float(np.exp(p[0]) * (p[0] - q[0]))
    assert below < 0 < dv.kl_divergence(q, p)
    assert above > dv.kl_divergence(p, q)
    got = topk_intervals(p[:1], q[:1], drift=5.0, resolution=0.0)
    assert 0 <= got.kl_lower <= dv.kl_divergence(q, p) * (1 + 1e-12)


def test_more_tokens_and_less_drift_narrow_the_interval():
    z_p, z_q = next(iter(random_pairs(seed=8)))
    z_p = z_q + 0.3 * (z_p - z_q) / np.maximum(np.abs(z_p - z_q).max(), 1e-9)
    rows = [topk_intervals(*shown(z_p, z_q, k)[:2], drift=0.6) for k in range(1, z_p.shape[1])]
    for few, many in pairwise(rows):
        assert (few.kl_lower <= many.kl_lower + 1e-9).all()
        assert (few.tv_upper >= many.tv_upper - 1e-9).all()
    logp, logq, _ = shown(z_p, z_q, 2)
    wide, narrow = (topk_intervals(logp, logq, rest_drift=d) for d in (1.0, 0.1))
    assert (narrow.kl_upper <= wide.kl_upper).all()
    assert (narrow.kl_lower == wide.kl_lower).all()


def test_a_complete_row_is_exact():
    rng = np.random.default_rng(0)
    z_p, z_q = rng.normal(0, 1, (2, 5, 4))
    logp, logq = dv.log_softmax(z_p), dv.log_softmax(z_q)
    got = topk_intervals(logp, logq, drift=5.0, resolution=1e-12)
    np.testing.assert_allclose(got.kl_lower, dv.kl_divergence(z_q, z_p), rtol=1e-6)
    np.testing.assert_allclose(got.kl_upper, dv.kl_divergence(z_q, z_p), rtol=1e-6)
    np.testing.assert_allclose(got.tv_upper, dv.total_variation(z_p, z_q), rtol=1e-6)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_single_precision_cannot_prove_a_failure(seed):
    """Equal laws logged in fp32 by both sides with independent rounding: the lower end stays at the
    rounding's own size, also where the rest mass is all rounding error. Unwidened it is infinite
    in some rows: P_t rounds to 0, Q_t does not."""
    rng = np.random.default_rng(seed)
    z = rng.normal(0, 8, (50, 6))
    exact = dv.log_softmax(z)[:, :5]
    one, other = (
        (exact * (1 + 6e-8 * rng.uniform(-1, 1, exact.shape))).astype(np.float32) for _ in range(2)
    )
    got = topk_intervals(one, other, drift=0.01)
    assert (got.kl_lower < 1e-10).all()
    assert np.isfinite(got.kl_upper).all()


def test_without_the_resolution_rounding_would_look_like_a_failure():
    p, q = np.array([0.0]), np.array([-6e-8])
    assert topk_intervals(p, q, resolution=0.0).kl_lower == np.inf
    assert topk_intervals(p, q).kl_lower < 1e-10


def test_a_drift_that_the_row_refutes_is_dropped():
    p, q = np.log([0.5, 0.2]), np.log([0.3, 0.4])
    assert topk_intervals(p, q, drift=0.1).kl_upper == np.inf
    assert np.isfinite(topk_intervals(p, q, drift=1.3).kl_upper)


def test_rows_that_are_not_finite_are_counted():
    p = np.log([[0.5, 0.2], [0.5, 0.2]])
    bad = p.copy()
    bad[1, 0] = np.nan
    got = topk_intervals(bad, p, drift=1.0)
    assert got.nonfinite.tolist() == [0, 1]
    for name in ("kl_lower", "kl_upper", "tv_lower", "tv_upper"):
        assert np.isnan(getattr(got, name)).tolist() == [False, True]


@pytest.mark.parametrize(
    ("p", "q", "options"),
    [
        (np.log([0.5]), np.log([0.5, 0.2]), {}),
        (np.log([0.8, 0.3]), np.log([0.5, 0.2]), {}),  # sums to 1.1: renormalised, or doubled ids
        (np.log([0.5]), np.log([0.5]), {"drift": -1.0}),
        (np.log([0.5]), np.log([0.5]), {"resolution": -1.0}),
        (np.log([[0.5]]), np.log([[0.5]]), {"rest_drift": [0.1, 0.2]}),
        ([], [], {}),
    ],
)
def test_inputs_that_do_not_fit_are_refused(p, q, options):
    with pytest.raises(InputError):
        topk_intervals(p, q, **options)
