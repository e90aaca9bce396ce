"""Flips, same-seed sampling and truncated sampling.

The argument: a certificate is worth what its worst case shows. So each certified statement is
checked on random and adversarial pairs (no flip where the margin exceeds the drift), and just
inside its edge a pair is built that flips. Statistical bounds are checked for coverage by
simulation, next to the uncorrected variant that fails.
"""

from __future__ import annotations

import numpy as np
import pytest
from bounds_pairs import random_pairs, two_blocks
from hypothesis import given
from hypothesis import strategies as st

from kernel_contracts import bounds as b
from kernel_contracts import divergence as dv
from kernel_contracts.confidence import clopper_pearson
from kernel_contracts.errors import InputError


def test_no_certified_row_flips_whichever_margin_is_used():
    certified = flips = 0
    for z_p, z_q in random_pairs(seed=11):
        row = dv.compare_rows(z_p, z_q, eta=0.0)
        for side in ("reference_margin", "engine_margin"):
            safe = b.flip_certified(row[side], row["drift"])
            certified += safe.sum()
            assert not (safe & row["flip"]).any()
        flips += row["flip"].sum()
        moved = row["flip"] & np.isfinite(row["drift"])
        top = np.exp(row["reference_top1_logprob"])[moved]
        assert (top <= b.flip_needs_top1_below(row["drift"][moved]) * (1 + 1e-9)).all()
        logp = dv.log_softmax(z_p)
        chosen = np.take_along_axis(logp, row["engine_top1"][:, None], 1)[:, 0]
        regret = row["reference_top1_logprob"] - chosen
        assert (regret <= b.flip_regret_from_drift(row["drift"]) + 1e-12).all()
        could = b.contenders(z_p, row["drift"] * (1 + 1e-9) + 1e-12)
        assert np.take_along_axis(could, row["engine_top1"][:, None], 1)[row["flip"], 0].all()
        assert not np.take_along_axis(could, row["reference_top1"][:, None], 1).any()
    assert certified > 1000
    assert flips > 500  # the pairs do flip: the certificate is not vacuously true


@pytest.mark.parametrize("drift", [1e-3, 0.1, 1.0, 5.0])
def test_the_certificate_is_tight(drift):
    """Top-1 down by D/2, runner-up up by D/2: every margin under D flips, none over D does."""
    for margin, flips in ((drift * 0.99, True), (drift * 1.01, False)):
        z_p = np.array([margin, 0.0, -9.0])
        z_q = z_p + np.array([-drift / 2, drift / 2, 0.0])
        row = dv.compare_rows(z_p, z_q, eta=0.0)
        assert row["flip"] == flips
        assert b.flip_certified(margin, drift) != flips
        if flips:
            assert row["reference_top1_logprob"] > np.log(
                0.98 * b.flip_needs_top1_below(drift) * (1 - np.exp(-9))
            )
            regret = row["reference_top1_logprob"] - dv.log_softmax(z_p)[1]
            assert regret >= 0.98 * b.flip_regret_from_drift(drift)


def test_ties_and_missing_values_are_never_certified():
    assert not b.flip_certified(0.0, 0.0)
    assert not b.flip_certified(0.5, 0.5)
    assert not b.flip_certified(np.nan, 0.1)
    assert not b.flip_certified(0.1, np.nan)
    assert b.flip_certified(0.5, 0.0)


def test_predicted_flip_rate_against_a_simulation():
    """Two leading tokens at a drift of spread s: predicted within 4 standard errors, and the
    certificate's rate is several times higher."""
    rng = np.random.default_rng(0)
    margins = rng.exponential(3.0, 200_000)
    spread = 0.06
    rate = (rng.normal(0, spread, margins.size) > margins).mean()
    predicted = b.flip_rate_predicted(margins, spread)
    assert abs(rate - predicted) < 4 * np.sqrt(rate / margins.size)
    assert predicted == pytest.approx(spread / 3 / np.sqrt(2 * np.pi), rel=0.05)
    assert (margins <= 4 * spread).mean() > 5 * rate
    assert b.flip_rate_predicted([0.06, 0.0], 0.06) == pytest.approx((0.158655 + 0.5) / 2)


def _split_failures(thresholds, corrected, *, audits=1500, n=2000):
    """Share of audits whose bound is under min over t of P(m <= t) + P(D > t) = 1 (for all t)."""
    rng = np.random.default_rng(4)
    part = 0.05 / 2 / (len(thresholds) if corrected else 1)
    table = np.array([clopper_pearson(k, n, part)[1] for k in range(n + 1)])
    failures = 0
    for _ in range(audits):
        margins, drifts = np.sort(rng.uniform(size=n)), np.sort(rng.uniform(size=n))
        low = table[np.searchsorted(margins, thresholds, side="right")]
        high = table[n - np.searchsorted(drifts, thresholds, side="right")]
        failures += (low + high).min() < 1
    return failures / audits


def test_choosing_the_threshold_after_looking_is_paid_for():
    """P(m <= t) + P(D > t) is the same at every t here, so choosing picks the luckiest: parts at
    alpha/2 fail more often than promised, parts at alpha/(2K) do not."""
    assert _split_failures(np.linspace(0, 1, 400), corrected=False) > 0.055
    assert _split_failures(np.linspace(0, 1, 8), corrected=True) < 0.02


def test_flip_rate_bounds_hold_and_are_what_they_say():
    rng = np.random.default_rng(1)
    margins, drifts = rng.exponential(2, 400), rng.gamma(4, 0.05, 400)
    joint = b.flip_rate_from_certificate(margins, drifts)
    count = int((margins <= drifts).sum())
    assert joint == clopper_pearson(count, 400, 0.05)[1]
    split = b.flip_rate_from_split(margins, rng.gamma(4, 0.05, 700))
    assert split.upper == split.margin_part + split.drift_part > joint
    alone = b.flip_rate_from_split(margins, drifts, thresholds=(0.5,))
    assert alone.margin_part == clopper_pearson(int((margins <= 0.5).sum()), 400, 0.025)[1]
    assert alone.drift_part == clopper_pearson(int((drifts > 0.5).sum()), 400, 0.025)[1]
    # A row that was not measured counts against the bound.
    hole = margins.copy()
    hole[:40] = np.nan
    assert b.flip_rate_from_certificate(hole, drifts) > joint
    assert (
        b.flip_rate_from_split(hole, drifts).upper > b.flip_rate_from_split(margins, drifts).upper
    )


def test_texts_and_heads():
    assert b.sequence_flip_rate(0.01, 30) == pytest.approx(0.3)
    assert b.sequence_flip_rate(0.01, 300) == 1.0
    np.testing.assert_array_equal(
        b.head_spacing([8.0, 15.9, 16.0, 33.0]), [0.0625, 0.0625, 0.125, 0.25]
    )
    assert b.head_spacing(16.0, significand_bits=11) == 0.015625


def test_same_seed_disagreement_lies_between_and_reaches_both_ends():
    for z_p, z_q in random_pairs(seed=3, batches=10):
        rate, tv = dv.race_disagreement(z_p, z_q), dv.total_variation(z_p, z_q)
        low, high = b.race_disagreement_from_tv(tv)
        assert (rate >= low - 1e-9).all()
        assert (rate <= high + 1e-9).all()
        low, high = b.tv_from_race_disagreement(np.clip(rate, 0, 1))
        assert (tv >= low - 1e-9).all()
        assert (tv <= high + 1e-9).all()
    p, q = two_blocks(1.0, 0.3)
    assert dv.race_disagreement(p, q) == pytest.approx(dv.total_variation(p, q))
    with np.errstate(divide="ignore"):
        apart = np.log([[0.8, 0.2, 0.0], [0.8, 0.0, 0.2]])
    assert dv.race_disagreement(*apart) == pytest.approx(b.race_disagreement_from_tv(0.2)[1])


def _cut(p, kept):
    cut = np.where(kept, p, 0.0)
    return cut / cut.sum(-1, keepdims=True)


def test_truncated_sampling_bounds():
    """Random kept sets on random pairs; exact for one law; attained where said."""
    rng = np.random.default_rng(2)
    for z_p, z_q in random_pairs(seed=9, batches=20):
        p, q = np.exp(dv.log_softmax(z_p)), np.exp(dv.log_softmax(z_q))
        kept_a, kept_b = (rng.uniform(size=p.shape) < 0.7 for _ in range(2))
        kept_a[:, 0] = kept_b[:, 1] = True
        usable = (p * kept_a).sum(1).clip(max=1) * (p * kept_b).sum(1) > 1e-200
        p, q, x = p[usable], q[usable], dv.log_ratio(z_p, z_q)[usable]
        kept_a, kept_b = kept_a[usable], kept_b[usable]
        mass = [(p * m).sum(1).clip(max=1) for m in (kept_a, kept_b, kept_a & kept_b)]
        exact = np.abs(_cut(p, kept_a) - _cut(p, kept_b)).sum(1) / 2
        np.testing.assert_allclose(exact, b.tv_between_kept_sets(*mass), atol=1e-9)
        d = np.where(kept_b, x, -np.inf).max(1) - np.where(kept_b, x, np.inf).min(1)
        p_cut, q_cut = _cut(p, kept_a), _cut(q, kept_b)
        tv = np.abs(p_cut - q_cut).sum(1) / 2
        assert (tv <= b.tv_from_truncation(d, *mass) + 1e-9).all()
        lost = np.where(kept_b, 0.0, p_cut).sum(1)
        np.testing.assert_allclose(lost, b.unsupported_mass(mass[0], mass[2]), atol=1e-9)
    z_p, z_q = two_blocks(1.0, 1 / (1 + np.exp(0.5)))
    assert dv.total_variation(z_p, z_q) == pytest.approx(b.tv_from_truncation(1.0, 1, 1, 1))


def test_drift_on_the_wrong_kept_set_is_no_bound():
    """A = {1}, B = {1, 2}: the drift on A is 0, masses under p give 0.44, the truth is 0.99."""
    p, q = np.array([0.5, 0.4, 0.1]), np.array([0.0098, 0.97, 0.0202])
    p_cut, q_cut = _cut(p, [True, False, False]), _cut(q, [True, True, False])
    tv = np.abs(p_cut - q_cut).sum() / 2
    on_b = np.log(p / q)[:2]
    assert tv > 0.98
    assert b.tv_from_truncation(0.0, 0.5, 0.9, 0.5) < 0.45
    assert b.tv_from_truncation(np.ptp(on_b), 0.5, 0.9, 0.5) >= tv


@given(st.floats(0, 1))
def test_inverting_the_disagreement_is_exact(tv):
    low, high = b.race_disagreement_from_tv(tv)
    assert b.tv_from_race_disagreement(high)[0] == pytest.approx(tv)
    assert b.tv_from_race_disagreement(low)[1] == tv


@pytest.mark.parametrize(
    "call",
    [
        lambda: b.flip_certified(-0.1, 0.1),
        lambda: b.flip_rate_predicted([0.1], 0.0),
        lambda: b.flip_rate_predicted([], 0.1),
        lambda: b.flip_rate_from_certificate([0.1], [0.1, 0.2]),
        lambda: b.flip_rate_from_certificate([], []),
        lambda: b.flip_rate_from_split([], [0.1]),
        lambda: b.sequence_flip_rate(0.1, 2.5),
        lambda: b.race_disagreement_from_tv(1.1),
        lambda: b.tv_between_kept_sets(0.5, 0.5, 0.6),
        lambda: b.tv_between_kept_sets(0.0, 0.5, 0.0),
    ],
)
def test_outside_the_domain_is_refused(call):
    with pytest.raises(InputError):
        call()
