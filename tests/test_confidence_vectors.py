"""The size of a mean vector without the noise that inflates it: unbiased where the plug-in is off
by two orders of magnitude, with an error that covers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kernel_contracts.confidence import split_half_cosine, u_statistic_sq_norm
from kernel_contracts.errors import InputError

matrices = st.tuples(st.integers(3, 9), st.integers(1, 5)).flatmap(
    lambda nd: arrays(np.float64, nd, elements=st.floats(-10, 10))
)


@given(matrices)
def test_it_is_the_average_inner_product_of_different_prompts(x):
    """The formula and its jackknife by brute force over pairs."""

    def pairs(rows):
        g = rows @ rows.T
        n = len(rows)
        return (g.sum() - np.trace(g)) / (n * (n - 1))

    found = u_statistic_sq_norm(x)
    n = len(x)
    left_out = np.array([pairs(np.delete(x, i, 0)) for i in range(n)])
    error = np.sqrt((n - 1) / n * ((left_out - left_out.mean()) ** 2).sum())
    assert found.value == pytest.approx(pairs(x), abs=1e-8)
    assert found.standard_error == pytest.approx(error, abs=1e-7)
    assert found.plug_in == pytest.approx(float(x.mean(0) @ x.mean(0)), abs=1e-9)


def samples(norm_sq, repeats, n=64, d=2000, seed=0):
    rng = np.random.default_rng(seed)
    mean = np.zeros(d)
    mean[0] = np.sqrt(norm_sq)
    noise = np.sqrt(2.84 * n / d)
    for _ in range(repeats):
        yield mean + noise * rng.standard_normal((n, d)).astype(np.float32)


def test_unbiased_where_the_plug_in_is_noise():
    """d = 2000, n = 64, truth 0.025.  Fault: the plug-in says 2.9.  Control: the U-statistic's
    average over 150 seeds is the truth within 3 of its own standard errors."""
    found = [u_statistic_sq_norm(x) for x in samples(0.025, 150)]
    value = np.array([f.value for f in found])
    assert np.mean([f.plug_in for f in found]) > 50 * 0.025
    assert abs(value.mean() - 0.025) < 3 * value.std() / np.sqrt(150)
    assert np.mean([f.noise for f in found]) == pytest.approx(2.84, rel=0.02)


@pytest.mark.parametrize("norm_sq", [0.0, 0.025, 1.0])
def test_two_standard_errors_cover(norm_sq):
    """At least 95 % of 200 seeds up to noise, at a true norm of 0 too, where the jackknife is
    sqrt(2) too wide and never too narrow."""
    found = [u_statistic_sq_norm(x) for x in samples(norm_sq, 200, n=40, d=200, seed=1)]
    held = [abs(f.value - norm_sq) <= 1.96 * f.standard_error for f in found]
    spread = np.std([f.value for f in found])
    assert np.mean(held) >= 0.93
    assert 0.9 < np.mean([f.standard_error for f in found]) / spread < 1.7


def test_cosine_of_halves_tells_direction_from_noise():
    """Fault: pure noise has no direction.  Control: a mean well over the noise has one."""
    noise = next(samples(0.0, 1, n=64, d=500))
    assert abs(split_half_cosine(noise)) < 0.15
    clear = noise + 3.0
    assert split_half_cosine(clear) > 0.9
    assert split_half_cosine(clear) == split_half_cosine(clear)
    assert np.isnan(split_half_cosine(np.zeros((4, 3))))


@pytest.mark.parametrize("bad", [np.zeros(4), np.zeros((1, 4)), np.full((4, 2), np.nan)])
def test_unusable_vectors_are_named(bad):
    with pytest.raises(InputError):
        u_statistic_sq_norm(bad)
    with pytest.raises(InputError):
        split_half_cosine(bad)
