"""Binomial and normal laws from scipy.special: importing scipy.stats for them takes a second, which
every command of the CLI that judges would pay."""

from __future__ import annotations

from math import ceil

from scipy.special import bdtr, bdtrc, bdtrik, betaincinv, ndtr, ndtri, stdtr

__all__ = [
    "beta_quantile",
    "binomial_cdf",
    "binomial_quantile",
    "binomial_sf",
    "normal_quantile",
    "normal_sf",
    "student_sf",
]


def binomial_cdf(k: int, n: int, p: float) -> float:
    """P(X <= k), X of n trials with chance p."""
    return float(bdtr(k, n, p)) if k < n else 1.0


def binomial_sf(k: int, n: int, p: float) -> float:
    """P(X > k)."""
    if k < 0:
        return 1.0
    return float(bdtrc(k, n, p)) if k < n else 0.0


def binomial_quantile(level: float, n: int, p: float) -> int:
    """The smallest k with P(X <= k) >= level, for level in (0, 1)."""
    k = max(0, ceil(bdtrik(level, n, p)))
    while k > 0 and binomial_cdf(k - 1, n, p) >= level:
        k -= 1
    while k < n and binomial_cdf(k, n, p) < level:
        k += 1
    return k


def beta_quantile(level: float, a: float, b: float) -> float:
    """Of Beta(a, b)."""
    return float(betaincinv(a, b, level))


def normal_quantile(level: float) -> float:
    """Of the standard normal law."""
    return float(ndtri(level))


def normal_sf(z: float) -> float:
    """P(Z > z)."""
    return float(ndtr(-z))


def student_sf(t: float, df: float) -> float:
    """P(T > t) by Student's law."""
    return float(stdtr(df, -t))
