"""Intervals to look at and to compare with, never for a verdict.

Each promises a level that it keeps only asymptotically, or keeps at a price.  docs/error-rates.md
shows by how much: with 30 prompts of log-normal KL, the "95 %" upper bounds of the normal and the
bootstrap interval hold 88 % of the time, and 80 % under a heavier tail.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt

import numpy as np
from numpy.typing import ArrayLike

from kernel_contracts.confidence._checks import (
    FloatArray,
    check_positive,
    check_probability,
    finite_vector,
)
from kernel_contracts.confidence.laws import normal_quantile
from kernel_contracts.confidence.proportions import check_counts
from kernel_contracts.errors import InputError


def wilson(k: int, n: int, alpha: float) -> tuple[float, float]:
    """Wilson score bounds of a proportion, each one-sided at ``alpha``; (0, 1) for n = 0.

    Shorter than Clopper-Pearson, but covers less than promised for some proportions.
    """
    check_probability("alpha", alpha)
    check_counts(k, n)
    if n == 0:
        return 0.0, 1.0
    z = normal_quantile(1 - alpha)
    p = k / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # At p = 0 and p = 1 the bound is p itself; rounding must not put it on the wrong side.
    return max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))


def normal_bounds(x: ArrayLike, alpha: float) -> tuple[float, float]:
    """mean -+ z * standard error, each one-sided at ``alpha``; needs two values."""
    check_probability("alpha", alpha)
    values = _at_least("x", finite_vector("x", x), 2)
    half = normal_quantile(1 - alpha) * float(values.std(ddof=1)) / sqrt(values.size)
    return float(values.mean()) - half, float(values.mean()) + half


def hoeffding(x: ArrayLike, *, ceiling: float, alpha: float) -> tuple[float, float]:
    """mean -+ ceiling sqrt(log(1/alpha) / 2n) for values in [0, ceiling]: valid, blind to spread.

    Values are clipped into [0, ceiling].  Hoeffding, JASA 58 (1963).
    """
    values = _clipped(x, ceiling, alpha)
    half = ceiling * sqrt(log(1 / alpha) / (2 * values.size))
    mean = float(values.mean())
    return max(0.0, mean - half), min(ceiling, mean + half)


def maurer_pontil(x: ArrayLike, *, ceiling: float, alpha: float) -> tuple[float, float]:
    """Empirical Bernstein: mean -+ sqrt(2 V L / n) + 7 ceiling L / (3 (n-1)), L = log(2/alpha).

    V is the unbiased sample variance.  Valid, but the last term costs a factor of 2 to 7 at 50 to
    200 prompts.  Values are clipped into [0, ceiling].  Maurer and Pontil, arXiv 0907.3740.
    """
    values = _at_least("x", _clipped(x, ceiling, alpha), 2)
    n, level = values.size, log(2 / alpha)
    half = sqrt(2 * float(values.var(ddof=1)) * level / n) + 7 * ceiling * level / (3 * (n - 1))
    mean = float(values.mean())
    return max(0.0, mean - half), min(ceiling, mean + half)


def cluster_bootstrap(
    x: ArrayLike,
    alpha: float,
    *,
    weights: ArrayLike | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap over prompts, each bound one-sided at ``alpha``.  Display only.

    x: [n] per-prompt means.  weights: [n] row counts, for the ratio of sums.  Same seed, same
    bounds.  A resample without any weight cannot be evaluated and is an InputError.
    """
    check_probability("alpha", alpha)
    values = _at_least("x", finite_vector("x", x), 2)
    w = np.ones_like(values) if weights is None else finite_vector("weights", weights)
    if w.size != values.size or w.min() < 0:
        raise InputError("need one weight >= 0 for each prompt", where="weights")
    picks = np.random.default_rng(seed).integers(0, values.size, (resamples, values.size))
    totals = w[picks].sum(1)
    if totals.min() <= 0:
        raise InputError("too few prompts carry any weight", where="weights")
    means = (values * w)[picks].sum(1) / totals
    return float(np.quantile(means, alpha)), float(np.quantile(means, 1 - alpha))


@dataclass(frozen=True, slots=True)
class DesignEffect:
    """icc: share of variance between prompts (can be slightly negative).  deff: factor by which
    clustering inflates the variance of a mean over rows.  effective_rows: rows / deff."""

    icc: float
    deff: float
    effective_rows: float


def design_effect(values: ArrayLike, prompt_ids: ArrayLike) -> DesignEffect:
    """One-way ANOVA ICC of row values within prompts, and deff = 1 + (m - 1) max(ICC, 0).

    m is the count-weighted mean cluster size sum(n_i^2) / sum(n_i).  Needs two prompts and one
    prompt with two rows; values without any spread have ICC 0.
    """
    rows = finite_vector("values", values)
    names, codes = np.unique(np.asarray(prompt_ids).astype(str), return_inverse=True)
    if codes.size != rows.size:
        raise InputError(f"{codes.size} prompt ids for {rows.size} values", where="prompt_ids")
    n, k = rows.size, names.size
    if k < 2 or n <= k:
        raise InputError("needs two prompts, and one prompt with two rows", where="values")
    count = np.bincount(codes).astype(np.float64)
    means = np.bincount(codes, weights=rows) / count
    between = float((count * (means - rows.mean()) ** 2).sum()) / (k - 1)
    within = float(((rows - means[codes]) ** 2).sum()) / (n - k)
    typical = (n - float((count**2).sum()) / n) / (k - 1)
    spread = between + (typical - 1) * within
    icc = (between - within) / spread if spread > 0 else 0.0
    deff = 1 + (float((count**2).sum()) / n - 1) * max(icc, 0.0)
    return DesignEffect(icc, deff, n / deff)


def _clipped(x: ArrayLike, ceiling: float, alpha: float) -> FloatArray:
    check_probability("alpha", alpha)
    check_positive("ceiling", ceiling)
    return np.clip(_at_least("x", finite_vector("x", x), 1), 0.0, ceiling)


def _at_least(name: str, values: FloatArray, n: int) -> FloatArray:
    if values.size < n:
        raise InputError(f"needs at least {n} values, got {values.size}", where=name)
    return values
