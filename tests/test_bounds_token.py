"""Token-level bounds: never violated, reached within 1% by their extremal pair, honest outside.

The argument has two halves that hold each other. 8,000 random and adversarial pairs find no
violation: so no bound is too small. The extremal pair of each reaches 99% of it: so none is too
large. Slips that are easily made in a formula must fail on the same pairs.
"""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from bounds_pairs import DRIFTS, random_pairs, two_blocks
from hypothesis import given
from hypothesis import strategies as st

from kernel_contracts import bounds as b
from kernel_contracts import divergence as dv
from kernel_contracts.errors import InputError


def drift(z_p, z_q):
    return dv.drift(z_p, z_q, eta=0.0)


def ratio_error(z_p, z_q):
    return np.abs(np.expm1(dv.log_ratio(z_p, z_q))).max(-1)


# name: (what is true, its bound), both of (z_p, z_q) rows.
UPPER = {
    "log ratio": (
        lambda p, q: np.abs(dv.log_ratio(p, q)).max(-1),
        lambda p, q: b.log_ratio_from_drift(drift(p, q)),
    ),
    "ratio above": (
        lambda p, q: np.expm1(dv.log_ratio(p, q)).max(-1),
        lambda p, q: b.ratio_from_drift(drift(p, q))[1],
    ),
    "ratio below": (
        lambda p, q: -np.expm1(dv.log_ratio(p, q)).min(-1),
        lambda p, q: -b.ratio_from_drift(drift(p, q))[0],
    ),
    "tv": (dv.total_variation, lambda p, q: b.tv_from_drift(drift(p, q))),
    "kl(q||p)": (lambda p, q: dv.kl_divergence(q, p), lambda p, q: b.kl_from_drift(drift(p, q))),
    "kl(p||q)": (dv.kl_divergence, lambda p, q: b.kl_from_drift(drift(p, q))),
    "jeffreys": (
        lambda p, q: dv.kl_divergence(p, q) + dv.kl_divergence(q, p),
        lambda p, q: b.jeffreys_from_drift(drift(p, q)),
    ),
    "chi2(p||q)": (dv.chi_squared, lambda p, q: b.chi2_from_drift(drift(p, q))),
    "chi2(q||p)": (
        lambda p, q: dv.chi_squared(q, p), lambda p, q: b.chi2_from_drift(drift(p, q)),
    ),
    "hellinger": (
        lambda p, q: _hellinger2(p, q),
        lambda p, q: b.hellinger2_from_drift(drift(p, q)),
    ),
    "variance": (
        lambda p, q: dv.kl_divergence(q, p),
        lambda p, q: b.kl_from_variance(dv.logit_variance(p, q), drift(p, q)),
    ),
    "tv from kl(q||p)": (dv.total_variation, lambda p, q: b.tv_from_kl(dv.kl_divergence(q, p))),
    "tv from kl(p||q)": (dv.total_variation, lambda p, q: b.tv_from_kl(dv.kl_divergence(p, q))),
    "tv from ratio": (dv.total_variation, lambda p, q: b.tv_from_ratio(ratio_error(p, q))),
    "chi2 from ratio": (dv.chi_squared, lambda p, q: b.chi2_from_ratio(ratio_error(p, q))),
    "kl(q||p) from ratio": (
        lambda p, q: dv.kl_divergence(q, p),
        lambda p, q: b.kl_engine_reference_from_ratio(ratio_error(p, q)),
    ),
    "kl(p||q) from ratio": (
        dv.kl_divergence,
        lambda p, q: b.kl_reference_engine_from_ratio(ratio_error(p, q)),
    ),
    "movement": (lambda p, q: _movement_ratio(p, q), lambda p, q: np.ones(p.shape[:-1])),
    **{
        f"hockey stick {c}": (
            lambda p, q, c=c: dv.hockey_stick(p, q, c),
            lambda p, q, c=c: b.hockey_stick_from_drift(drift(p, q), c),
        )
        for c in (1.0, 1.05, 2.0, 20.0)
    },
    **{
        f"hockey stick from chi2 {c}": (
            lambda p, q, c=c: dv.hockey_stick(p, q, c),
            lambda p, q, c=c: b.hockey_stick_from_chi2(dv.chi_squared(p, q), c),
        )
        for c in (1.01, 2.0)
    },
}  # fmt: skip


def _hellinger2(p, q):
    """sum (sqrt p - sqrt q)^2 / 2: 1 - BC without cancellation."""
    q_v = np.exp(dv.log_softmax(q))
    return (q_v * np.expm1(dv.log_ratio(p, q) / 2) ** 2).sum(-1) / 2


def _movement_ratio(p, q):
    """Largest |p(v) - q(v)| over its bound, over tokens whose 1 - q has digits left."""
    q_v = np.exp(dv.log_softmax(q))
    moved = q_v * np.abs(np.expm1(dv.log_ratio(p, q)))
    limit = b.movement_from_drift(q_v, drift(p, q)[..., None])
    clear = (q_v > 1e-9) & (q_v < 1 - 1e-7)
    return np.divide(moved, limit, out=np.zeros_like(moved), where=clear).max(-1)


@pytest.mark.parametrize("name", UPPER)
def test_no_pair_violates_the_bound(name):
    truth, bound = UPPER[name]
    for z_p, z_q in random_pairs(seed=len(name)):
        value, limit = truth(z_p, z_q), bound(z_p, z_q)
        assert not np.isnan(value).any()
        assert (value <= limit * (1 + 1e-7)).all(), np.max(value - limit)


def test_lower_bounds_are_never_violated():
    for z_p, z_q in random_pairs(seed=1):
        d = drift(z_p, z_q)
        assert (dv.bhattacharyya(z_p, z_q) >= b.bhattacharyya_from_drift(d) * (1 - 1e-9)).all()
        ess = b.ess_from_chi2(dv.chi_squared(z_p, z_q))
        assert (ess >= b.ess_from_drift(d) * (1 - 1e-9)).all()
        p, q = np.exp(dv.log_softmax(z_p)), np.exp(dv.log_softmax(z_q))
        low, high = b.probability_range_from_drift(q, d[:, None])
        assert (p >= low * (1 - 1e-7)).all()
        assert (p <= high * (1 + 1e-7) + 1e-300).all()


def _extremes(d):
    """name -> the pair that attains the bound at a drift of d, where one does."""
    tv = two_blocks(d, 1 / (1 + np.exp(d / 2)))
    # 1/D - 1/(e^D - 1); at small D its series, 1/2 - D/12
    kl_mass = 1 / d - 1 / np.expm1(d) if d > 0.01 else 0.5 - d / 12
    low_p, low_q = two_blocks(d, 1 / (1 + np.exp(d)))
    pairs = {
        "tv": tv, "jeffreys": tv, "hellinger": tv, "hockey stick 1.0": tv,
        "log ratio": two_blocks(d, 1e-14), "ratio above": two_blocks(d, 1e-14),
        "ratio below": two_blocks(d, 1 - 1e-14),
        "kl(q||p)": two_blocks(d, kl_mass),
        "kl(p||q)": two_blocks(d, kl_mass)[::-1],
        # The first argument has 1/2 on each block.
        "chi2(p||q)": (low_p, low_q), "chi2(q||p)": (low_q, low_p),
        "variance": two_blocks(d, 1e-9),
        "movement": tv,
    }  # fmt: skip
    rho = np.tanh(d / 2)
    ratio = (np.log([0.5 * (1 - rho), 0.5 * (1 + rho)]), np.log([0.5, 0.5]))
    if rho < 1 - 1e-6:
        pairs |= dict.fromkeys(
            ("tv from ratio", "chi2 from ratio", "kl(q||p) from ratio", "kl(p||q) from ratio"),
            ratio,
        )
    for c in (1.05, 2.0, 20.0):
        if d > np.log(c):
            mass = (np.exp((d - np.log(c)) / 2) - 1) / np.expm1(d)
            pairs[f"hockey stick {c}"] = two_blocks(d, mass)
    return pairs


@pytest.mark.parametrize("d", DRIFTS)
def test_the_extremal_pair_reaches_the_bound(d):
    for name, (z_p, z_q) in _extremes(d).items():
        truth, bound = UPPER[name]
        value, limit = truth(z_p, z_q), bound(z_p, z_q)
        assert value >= 0.99 * limit, (name, float(value / limit))
        assert value <= limit * (1 + 1e-7), (name, float(value / limit))
    z_p, z_q = two_blocks(d, 1 / (1 + np.exp(d / 2)))
    assert dv.bhattacharyya(z_p, z_q) <= b.bhattacharyya_from_drift(d) * 1.01


def test_bounds_in_other_quantities_are_approached():
    """Pinsker by two halves that barely move; Bretagnolle-Huber by a point mass at large KL; the
    chi2 form of the excess weight by w = 2C - 1 on a vanishing mass."""
    z_p, z_q = two_blocks(1e-3, 0.5)
    assert dv.total_variation(z_p, z_q) >= 0.99 * b.tv_from_kl(dv.kl_divergence(z_q, z_p))
    z_q, z_p = np.array([0.0, -80.0]), np.log([np.exp(-5.0), -np.expm1(-5.0)])
    assert dv.total_variation(z_p, z_q) >= 0.99 * b.tv_from_kl(dv.kl_divergence(z_q, z_p))
    for c in (1.01, 2.0):
        q = 1e-6
        z_q, z_p = np.log([1 - q, q]), np.log([1 - q * (2 * c - 1), q * (2 * c - 1)])
        bound = b.hockey_stick_from_chi2(dv.chi_squared(z_p, z_q), c)
        assert dv.hockey_stick(z_p, z_q, c) >= 0.99 * bound


def test_ratio_bounds_beyond_one():
    """|w - 1| <= rho with rho = 3: w is 0 or 4, since no ratio is negative."""
    p, q = np.array([1.0, 0.0]), np.array([0.25, 0.75])
    with np.errstate(divide="ignore"):
        z_p, z_q = np.log(p), np.log(q)
    assert dv.total_variation(z_p, z_q) == pytest.approx(b.tv_from_ratio(3.0))
    assert dv.chi_squared(z_p, z_q) == pytest.approx(b.chi2_from_ratio(3.0))
    assert dv.kl_divergence(z_p, z_q) == pytest.approx(b.kl_reference_engine_from_ratio(3.0))
    assert b.kl_engine_reference_from_ratio(3.0) == np.inf


def test_pinsker_and_bretagnolle_huber_cross_where_said():
    assert b.tv_from_pinsker(1.593) < b.tv_from_bretagnolle_huber(1.593)
    assert b.tv_from_pinsker(1.595) > b.tv_from_bretagnolle_huber(1.595)


def test_falls_of_a_confident_token_need_the_smaller_of_q_and_its_rest():
    """The formula with q(v) below the line bounds rises only: a token at 0.9 falls further."""
    z_q = np.log([0.9, 0.1])
    z_p = z_q + np.array([0.0, 3.0])
    fall = dv.total_variation(z_p, z_q)
    rises_only = 0.9 * 0.1 * np.expm1(3) / (1 + 0.9 * np.expm1(3))
    assert fall > 5 * rises_only
    assert fall == pytest.approx(b.movement_from_drift(0.9, 3.0))
    grid = np.linspace(0, 1, 20_001)
    assert b.movement_from_drift(grid, 3.0).max() == pytest.approx(np.tanh(0.75), rel=1e-6)


@given(st.floats(1e-7, 600))
def test_kl_of_drift_to_full_precision(d):
    """The closed form loses every digit at a drift of 1e-8; the branch at 0.1 must not show."""
    with mpmath.workdps(60):
        x = mpmath.mpf(d)
        want = float(mpmath.log(mpmath.expm1(x) / x) - 1 + x / mpmath.expm1(x))
    assert b.kl_from_drift(d) == pytest.approx(want, rel=1e-12)
    assert b.kl_from_drift(d) <= min(d * d / 8, d) * (1 + 1e-12)


def test_nucleus_versions():
    """Random sets S on random pairs, and the pairs that attain both forms."""
    rng = np.random.default_rng(7)
    for z_p, z_q in random_pairs(seed=5, batches=20):
        x, logp, logq = dv.log_ratio(z_p, z_q), dv.log_softmax(z_p), dv.log_softmax(z_q)
        p, q = np.exp(logp), np.exp(logq)
        inside = rng.uniform(size=x.shape) < 0.6
        inside[:, 0], inside[:, 1] = True, False
        d_in, d_out = (
            np.where(m, x, -np.inf).max(1) - np.where(m, x, np.inf).min(1)
            for m in (inside, ~inside)
        )
        tail_p, tail_q = (p * ~inside).sum(1), (q * ~inside).sum(1)
        tv = b.tv_from_nucleus(d_in, np.minimum(np.maximum(tail_p, tail_q), 1))
        assert (dv.total_variation(z_p, z_q) <= tv + 1e-9).all()
        kl = b.kl_from_nucleus(np.minimum(tail_q, 1), np.minimum(tail_p, 1), d_in, d_out)
        assert (dv.kl_divergence(z_q, z_p) <= kl * (1 + 1e-6) + 1e-12).all()
    p, q = two_blocks(1.0, 1 / (1 + np.exp(0.5)))
    p, q = np.exp(dv.log_softmax(p)), np.exp(dv.log_softmax(q))
    apart = np.abs(np.array([*(0.7 * p), 0.3, 0]) - np.array([*(0.7 * q), 0, 0.3])).sum() / 2
    assert apart == pytest.approx(b.tv_from_nucleus(1.0, 0.3))
    high = two_blocks(1.0, 1 - 1 / np.expm1(1.0))
    p, q = np.exp(dv.log_softmax(high[0])), np.exp(dv.log_softmax(high[1]))
    z_p, z_q = np.log([*(0.8 * p), *(0.2 * p)]), np.log([*(0.9 * q), *(0.1 * q)])
    assert dv.kl_divergence(z_q, z_p) == pytest.approx(b.kl_from_nucleus(0.1, 0.2, 1.0, 1.0))


def test_clause_on_a_share_of_contexts():
    """900 contexts at the drift limit and 100 without anything in common: the mean is the bound."""
    mean = 0.9 * np.tanh(0.25) + 0.1
    assert b.tv_mean_from_clause(1.0, 0.1) == pytest.approx(mean)
    assert b.exceedance_upper(299, 0.05) == pytest.approx(0.01, rel=0.01)
    assert b.exceedance_upper(2995, 0.05) == pytest.approx(0.001, rel=0.01)
    # Coverage: the largest of n uniform drifts; P(drift > M) = 1 - M.
    largest = np.random.default_rng(0).uniform(size=(4000, 50)).max(1)
    missed = (1 - largest > b.exceedance_upper(50, 0.05)).mean()
    assert 0.03 < missed < 0.065


def test_identities():
    assert b.drift_from_sup_norm(0.3) == 0.6
    assert b.drift_at_temperature(1.0, 0.5) == 2.0
    z_p, z_q = two_blocks(1.0, 0.3)
    assert drift(z_p / 0.5, z_q / 0.5) == pytest.approx(b.drift_at_temperature(1.0, 0.5))
    assert b.hockey_stick_from_drift(0.7, 1.0) == pytest.approx(b.tv_from_drift(0.7))
    q, p = np.log([0.2, 0.8]), np.log([0.3, 0.7])
    assert b.binary_kl(0.2, 0.3) == pytest.approx(dv.kl_divergence(q, p))
    assert b.ess_from_chi2(0.25) == 0.8  # (E w)^2 / E w^2


def test_ends_of_the_domain():
    """No drift bounds everything by nothing; infinite drift by everything; NaN by NaN."""
    for bound, worst in [
        (b.tv_from_drift, 1), (b.kl_from_drift, np.inf), (b.chi2_from_drift, np.inf),
        (b.hellinger2_from_drift, 1), (b.jeffreys_from_drift, np.inf),
        (lambda d: b.hockey_stick_from_drift(d, 1.0), 1),
        (lambda d: b.kl_from_variance(1.0, d) - 0.5, np.inf),
        (lambda d: 1 - b.ess_from_drift(d), 1),
        (lambda d: 1 - b.bhattacharyya_from_drift(d), 1),
    ]:  # fmt: skip
        low, high, missing = bound(np.array([0.0, np.inf, np.nan]))
        assert (low, high) == (0, worst)
        assert np.isnan(missing)


@pytest.mark.parametrize(
    "call",
    [
        lambda: b.tv_from_drift(-0.1),
        lambda: b.kl_from_drift([0.1, -1e-9]),
        lambda: b.hockey_stick_from_drift(1.0, 0.9),
        lambda: b.hockey_stick_from_chi2(1.0, 1.0),
        lambda: b.movement_from_drift(1.1, 0.1),
        lambda: b.tv_from_ratio(-1.0),
        lambda: b.tv_from_kl(-1e-12),
        lambda: b.tv_from_nucleus(0.1, 1.5),
        lambda: b.drift_at_temperature(1.0, 0.0),
        lambda: b.exceedance_upper(0, 0.05),
        lambda: b.exceedance_upper(10, 1.0),
    ],
)
def test_outside_the_domain_is_refused(call):
    with pytest.raises(InputError):
        call()


SLIPS = {
    "tv": lambda p, q: np.tanh(drift(p, q) / 8),  # max |d| taken for the drift
    "kl(q||p)": lambda p, q: drift(p, q) ** 2 / 16,
    "chi2(p||q)": lambda p, q: np.sinh(drift(p, q) / 2),
    "hellinger": lambda p, q: 1 - 1 / np.cosh(drift(p, q) / 8),
    "variance": lambda p, q: dv.logit_variance(p, q) / 2,  # the leading order as if it bounded
    "tv from kl(q||p)": lambda p, q: dv.kl_divergence(q, p) / 2,
    "hockey stick 1.05": lambda p, q: b.hockey_stick_from_drift(drift(p, q), 1.1),
}


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_in_a_formula_would_be_caught(name):
    """The suite's own fault: mistakes that are easily made are violated by the random pairs."""
    truth, _ = UPPER[name]
    pairs = random_pairs(seed=len(name))
    assert any((truth(p, q) > SLIPS[name](p, q) * (1 + 1e-7) + 1e-15).any() for p, q in pairs)


def test_every_bound_is_in_the_registry_once():
    names = [bound.name for bound in b.BOUNDS]
    assert len(set(names)) == len(names)
    functions = {bound.function for bound in b.BOUNDS}
    assert b.tv_from_drift in functions
    for bound in b.BOUNDS:
        assert bound.function.__name__ in b.__all__
        assert bound.function.__doc__
        assert bound.vacuous(float("nan"))
        assert bound.vacuous(bound.trivial)
    by_name = {bound.name: bound for bound in b.BOUNDS}
    assert not by_name["token TV"].vacuous(0.99)
    assert not by_name["token ESS"].vacuous(0.01)
