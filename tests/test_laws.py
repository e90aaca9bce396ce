"""Laws from scipy.special are those of scipy.stats, at the edges too."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kernel_contracts.confidence import laws

SHARES = st.floats(1e-6, 1 - 1e-6)
COUNTS = st.integers(1, 5000)


def close(value: float) -> object:
    """To 7 digits; below 1e-200 the two differ in the third, and no verdict looks there."""
    return pytest.approx(value, rel=1e-7, abs=1e-200)


@given(COUNTS, st.floats(0, 1), SHARES)
def test_binomial(n: int, at: float, p: float) -> None:
    for k in {-1, 0, round(at * n), n - 1, n}:
        if k >= 0:
            assert laws.binomial_cdf(k, n, p) == close(stats.binom.cdf(k, n, p))
        assert laws.binomial_sf(k, n, p) == close(stats.binom.sf(k, n, p))


@given(COUNTS, SHARES, SHARES)
def test_a_binomial_quantile_is_the_smallest_that_holds(n: int, level: float, p: float) -> None:
    k = laws.binomial_quantile(level, n, p)
    assert 0 <= k <= n
    assert k == n or laws.binomial_cdf(k, n, p) >= level
    assert k == 0 or laws.binomial_cdf(k - 1, n, p) < level


@given(st.integers(1, 500), st.integers(1, 500), SHARES)
def test_beta(a: int, b: int, level: float) -> None:
    assert laws.beta_quantile(level, a, b) == pytest.approx(stats.beta.ppf(level, a, b), rel=1e-7)


@given(st.floats(-30, 30), st.floats(1, 1e6), SHARES)
def test_normal_and_student(z: float, df: float, level: float) -> None:
    assert laws.normal_sf(z) == pytest.approx(stats.norm.sf(z), rel=1e-9)
    assert laws.normal_quantile(level) == pytest.approx(stats.norm.ppf(level), rel=1e-9, abs=1e-9)
    assert laws.student_sf(z, df) == pytest.approx(stats.t.sf(z, df), rel=1e-6)
