"""The interval of a relative bias, from vectors alone: it holds the truth on synthetic pairs with a
known bias, says zero where there is none, and claims nothing where the gradient is noise."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_contracts.confidence import u_statistic_sq_norm
from kernel_contracts.errors import InputError
from mismatch_audit.gradient.mean_vectors import MeanVector
from mismatch_audit.gradient.relative import cosine_without_noise, relative_bias

SEEDS = 200


def pair(seed, ratio, *, n=100, d=100, noise=2.0, heavy=0.0, shared=True):
    """(b, g) per prompt, |E b| / |E g| = ratio: noise over a spectrum of directions, the strongest
    along the gradient itself, b's noise partly g's (as weights times the same scores are)."""
    rng = np.random.default_rng([seed, n])
    mean_g, mean_b = np.zeros(d), np.zeros(d)
    mean_g[0], mean_b[0 if shared else 1] = 1.0, ratio
    spectrum = 1 / np.sqrt(np.arange(1, d + 1))
    spectrum *= noise / np.linalg.norm(spectrum)
    size = rng.lognormal(-(heavy**2) / 2, heavy, (n, 1))
    z = rng.standard_normal((n, d)) * spectrum * size
    own = rng.standard_normal((n, d)) * spectrum * size
    b = mean_b * size + 0.3 * (rng.standard_normal((n, 1)) * z if shared else own)
    return b, mean_g * size + z


@pytest.mark.parametrize(
    ("ratio", "options"),
    [
        (0.05, {"n": 60}),
        (0.05, {"n": 200}),
        (0.1, {"n": 60, "shared": False}),
        (0.2, {"n": 60, "heavy": 1.0}),
        (0.2, {"n": 200}),
        (1.0, {"n": 60}),
    ],
)
def test_a_known_bias_is_recovered_in_95_of_100(ratio, options):
    """At least 95 % of 200 seeds, in the middle ground too, where the bias is as large as its own
    noise and an interval with the jackknife's error alone holds the truth in 89 % only."""
    found = [relative_bias(*pair(seed, ratio, **options)) for seed in range(SEEDS)]
    held = np.mean([r.lower <= ratio <= r.upper for r in found])
    assert held >= 0.95
    # An interval from zero to infinity would hold everything: most of these have two ends.
    assert np.mean([r.resolved for r in found]) > 0.7
    assert np.median([r.value for r in found]) == pytest.approx(ratio, rel=0.3)


def test_a_large_bias_is_seen_and_a_small_one_bounded():
    """Power, at 200 prompts: a bias of 0.2 is never compatible with 0, 0 mostly below 0.1."""
    assert all(relative_bias(*pair(s, 0.2, n=200)).lower > 0 for s in range(40))
    assert np.mean([relative_bias(*pair(s, 0.0, n=200)).upper < 0.1 for s in range(40)]) > 0.9


def test_no_bias_is_covered_and_the_plug_in_is_not_used():
    """Control. Fault: the plug-in norm, which reports pure noise as a bias every time."""
    found, plug_in = [], []
    for seed in range(SEEDS):
        b, g = pair(seed, 0.0, n=60)
        found.append(relative_bias(b, g))
        plug_in.append(np.linalg.norm(b.mean(0)) / np.linalg.norm(g.mean(0)))
    assert np.mean([r.lower == 0.0 for r in found]) >= 0.975
    squares = np.array([r.squared_bias for r in found])
    assert abs(squares.mean()) < 3 * squares.std() / math.sqrt(SEEDS)
    assert min(plug_in) > 0.03
    assert np.median([r.noise_floor for r in found]) == pytest.approx(np.median(plug_in), rel=0.3)


def test_identical_programs_have_a_bias_of_exactly_zero():
    _, g = pair(0, 0.0)
    found = relative_bias(np.zeros_like(g), g)
    assert (found.value, found.lower, found.upper) == (0.0, 0.0, 0.0)


def test_a_gradient_lost_in_noise_gives_no_upper_end():
    """Control: the same numbers of prompts with less noise do."""
    lost = [relative_bias(*pair(s, 0.1, n=20, noise=20.0)) for s in range(20)]
    assert np.mean([r.upper == math.inf for r in lost]) > 0.85
    assert np.mean([r.lower <= 0.1 for r in lost]) >= 0.95
    assert all(relative_bias(*pair(s, 0.1, n=20, noise=0.3)).resolved for s in range(20))


def test_a_large_bias_shows_even_where_the_gradient_is_lost():
    """Ten times the gradient, clear by itself: no upper end, yet a lower one that is not 0."""
    found = []
    for seed in range(40):
        b, g = pair(seed, 0.0, n=60, noise=8.0)
        b = 0.05 * b
        b[:, 2] += 10.0
        found.append(relative_bias(b, g))
    assert np.mean([r.lower <= 10.0 <= r.upper for r in found]) >= 0.95
    assert np.mean([r.upper == math.inf and r.lower > 1.0 for r in found]) > 0.5


def test_beside_the_size_of_one_prompts_gradient_there_is_always_an_upper_end():
    """|E b| / sqrt(E|g|^2), where |E b| / |E g| has none: the truth is held."""
    held, ends = [], []
    for seed in range(SEEDS):
        b, g = pair(seed, 0.5, n=60, noise=20.0)
        b = b - 0.29 * (b - b.mean(0))
        found = relative_bias(b, MeanVector.of(g).size())
        truth = 0.5 / math.sqrt(1 + 20.0**2)
        held.append(found.lower <= truth <= found.upper)
        ends.append(found.upper)
    assert np.mean(held) >= 0.95
    assert max(ends) < 1.0


def test_projections_that_disagree_widen_the_interval():
    """b lies along other columns than g in one projection: its error is in the interval."""
    b, g = pair(3, 0.2, n=200)
    alike = np.concatenate([b] * 4, 1) / 2, np.concatenate([g] * 4, 1) / 2
    odd = np.concatenate([b, 3 * b, b, 0 * b], 1) / 2
    one = relative_bias(*alike, replicas=4)
    other = relative_bias(odd, alike[1], replicas=4)
    assert one.value == pytest.approx(relative_bias(b, g).value)
    assert one.upper - one.lower == pytest.approx(
        relative_bias(b, g).upper - relative_bias(b, g).lower, rel=0.02
    )
    assert other.upper - other.lower > 2 * (one.upper - one.lower)


@given(st.integers(0, 500), st.floats(0.01, 100))
def test_units_cancel_and_norms_are_the_u_statistics(seed, scale):
    b, g = pair(seed, 0.3, n=12, d=7, noise=0.5)
    one, other = relative_bias(b, g), relative_bias(scale * b, scale * g)
    assert other.value == pytest.approx(one.value)
    assert other.upper == pytest.approx(one.upper, rel=1e-6)
    assert one.squared_bias == pytest.approx(u_statistic_sq_norm(b).value)
    assert one.lower <= one.value <= one.upper


def test_the_cosine_has_no_shared_noise():
    """Two means at 90 degrees, measured with the same noise: the plug-in cosine says nearly 1."""
    found, plug_in = [], []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        noise = rng.standard_normal((60, 300))
        a, b = noise.copy(), noise.copy()
        a[:, 0] += 1.5
        b[:, 1] += 1.5
        found.append(cosine_without_noise(a, b))
        x, y = a.mean(0), b.mean(0)
        plug_in.append(x @ y / np.linalg.norm(x) / np.linalg.norm(y))
    assert abs(np.mean(found)) < 0.05
    assert min(plug_in) > 0.5


def test_bad_vectors_say_so():
    b, g = pair(0, 0.1)
    with pytest.raises(InputError, match="pair up"):
        relative_bias(b, g[:50])
    with pytest.raises(InputError, match="3 equal parts"):
        relative_bias(b, g, replicas=3)
    with pytest.raises(InputError, match="at least 8"):
        relative_bias(b[:7], g[:7])
    g[0, 0] = np.nan
    with pytest.raises(InputError, match="non-finite"):
        relative_bias(b, g)
