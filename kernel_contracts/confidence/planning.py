"""How many prompts a clause needs, before and after a first look."""

from __future__ import annotations

from math import ceil, log, log1p, sqrt
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from kernel_contracts.confidence._checks import (
    FloatArray,
    check_limit,
    check_positive,
    check_probability,
    finite_vector,
    scaled_weights,
)
from kernel_contracts.confidence.betting import (
    PRIOR_VARIANCE,
    STAKE_CAP,
    Side,
    grid_above,
    log_wealth_above,
    log_wealth_below,
    mean_bounds,
    stakes_below,
)
from kernel_contracts.confidence.laws import binomial_cdf, normal_quantile
from kernel_contracts.errors import InputError

MOST_PROMPTS = 1_000_000
Decision = Literal["PASS", "FAIL"]
Law = Literal["lognormal", "beta"]


def zero_failure_n(p1: float, alpha: float) -> int:
    """Prompts that must all be clean to show, at level alpha, that the proportion is under p1.

    ceil(log alpha / log(1 - p1)): 299 for p1 = 1 % at 5 %.
    """
    check_probability("p1", p1)
    check_probability("alpha", alpha)
    return max(1, ceil(log(alpha) / log1p(-p1) - 1e-9))


def power_n(limit: float, p0: float, alpha: float, power: float) -> tuple[int, int] | None:
    """Fewest prompts, and the failures then allowed, for a proportion clause to pass.

    With n prompts and at most c failures the Clopper-Pearson upper bound is within ``limit``; if
    the true proportion is ``p0`` < limit, that happens with probability at least ``power``.
    None when it would take more than a million prompts.
    """
    check_probability("limit", limit)
    check_probability("alpha", alpha)
    check_probability("power", power)
    if not 0.0 <= p0 < limit:
        raise InputError(f"must lie in [0, limit), got {p0} with limit {limit}", where="p0")
    n = zero_failure_n(limit, alpha)
    c = 0
    while n <= MOST_PROMPTS:
        if binomial_cdf(c, n, p0) >= power:
            return n, c
        c += 1
        n = _fewest_for(c, n, limit, alpha)
    return None


def _fewest_for(c: int, start: int, limit: float, alpha: float) -> int:
    # Smallest n >= start with P(Bin(n, limit) <= c) <= alpha; that probability falls with n.
    low, high = start, start
    while binomial_cdf(c, high, limit) > alpha:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if binomial_cdf(c, middle, limit) > alpha:
            low = middle
        else:
            high = middle
    return high


def mean_n(cv: float, fraction: float, alpha: float = 0.05, power: float = 0.9) -> int:
    """Prompts for a mean at ``fraction`` of its limit, by normal theory: a first guess.

    cv: standard deviation over mean of the per-prompt values.  n = ((z_alpha + z_power) cv f /
    (1 - f))^2, also for f > 1 (to fail).  The betting bound of the verdict needs about 2 to 3
    times as many; `betting_n` simulates it.
    """
    check_positive("cv", cv)
    check_positive("fraction", fraction)
    check_probability("alpha", alpha)
    check_probability("power", power)
    if fraction == 1.0:
        raise InputError("a mean equal to its limit is never decided", where="fraction")
    z = normal_quantile(1 - alpha) + normal_quantile(power)
    return ceil((z * cv * fraction / (1 - fraction)) ** 2)


def betting_n(
    *,
    mean: float,
    cv: float,
    limit: float,
    ceiling: float,
    alpha: float = 0.05,
    power: float = 0.9,
    law: Law = "lognormal",
    most: int = 20_000,
    simulations: int = 300,
    seed: int = 0,
) -> int | None:
    """Prompts with which the betting test decides with probability ``power``, by simulation.

    mean, limit, ceiling: in one unit; mean < limit plans a PASS, mean > limit a FAIL.  law:
    "lognormal" (clipped at the ceiling) for KL and other divergences, "beta" for per-prompt rates.
    Within about 2 % plus the noise of ``simulations`` draws; the same seed gives the same n.
    None when ``most`` prompts do not suffice.
    """
    check_probability("power", power)
    check_probability("alpha", alpha)
    check_positive("mean", mean)
    check_positive("cv", cv)
    m = check_limit(limit, ceiling)
    if mean == limit:
        raise InputError("a mean equal to its limit is never decided", where="mean")
    side: Side = "below" if mean < limit else "above"

    def decides(n: int) -> bool:
        draws = _draw(law, mean / ceiling, cv, np.random.default_rng(seed), (simulations, n))
        return _share_decided(draws, m, side, log(1.0 / alpha)) >= power

    low, high = 1, 8
    while not decides(high):
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > max(1, high // 50):
        middle = (low + high) // 2
        if decides(middle):
            high = middle
        else:
            low = middle
    return high


def _draw(
    law: Law, mean: float, cv: float, rng: np.random.Generator, shape: tuple[int, int]
) -> FloatArray:
    if law == "lognormal":
        sigma = sqrt(log1p(cv * cv))
        draws = mean * np.exp(sigma * rng.standard_normal(shape) - sigma * sigma / 2)
        return np.minimum(draws, 1.0)
    size = (1 - mean) / (mean * cv * cv) - 1
    if not (mean < 1 and size > 0):
        raise InputError(
            f"no rate with mean {mean} has coefficient of variation {cv}",
            where="cv",
            fix=f"use a cv under {sqrt(max(0.0, (1 - mean) / mean)):.3g}",
        )
    rates: FloatArray = rng.beta(mean * size, (1 - mean) * size, shape)
    return rates


def _share_decided(draws: FloatArray, m: float, side: Side, level: float) -> float:
    n = draws.shape[1]
    decided = 0
    for part in np.array_split(draws, max(1, draws.size // 500_000)):  # keeps memory to ~20 MB
        if side == "below":
            path = log_wealth_below(part, None, m, stakes_below(part, None, level, n))
        else:
            path = log_wealth_above(part, None, m, grid_above(level, n, weighted=False))
        decided += int(np.sum(path.max(-1) >= level))
    return decided / int(draws.shape[0])


def prompts_to_decide(
    x: ArrayLike,
    limit: float,
    ceiling: float,
    alpha: float,
    *,
    power: float = 0.8,
    weights: ArrayLike | None = None,
    weight_cap: float | None = None,
) -> tuple[int | None, Decision | None]:
    """Total number of prompts that would decide a mean clause, and which way, from a first sample.

    x, weights: as for `mean_bounds`.  Extrapolates the observed values as if they were the law:
    the log wealth at N prompts has mean N g and standard deviation sqrt(N) s, with g and s of the
    log factor over the observed values, and N is the first for which it exceeds log(1/alpha) with
    probability ``power``.  A plan, never a verdict: a sample that has not yet met its rare large
    values promises too much.

    Returns (n observed, side) when the sample decides already, (None, side) when a million
    prompts would not do, (None, None) without evidence or with the estimate on the limit.
    """
    m = check_limit(limit, ceiling)
    check_probability("power", power)
    bounds = mean_bounds(x, ceiling=ceiling, alpha=alpha, weights=weights, weight_cap=weight_cap)
    if bounds.upper <= limit:
        return bounds.n, "PASS"
    if bounds.lower > limit:
        return bounds.n, "FAIL"
    if np.isnan(bounds.estimate) or bounds.estimate == limit or m == 0.0:
        return None, None
    side: Decision = "PASS" if bounds.estimate < limit else "FAIL"
    values = np.clip(finite_vector("x", x) / ceiling, 0.0, 1.0)
    w = scaled_weights(weights, weight_cap, values.size)
    z, level = normal_quantile(power), log(1.0 / alpha)

    def enough(n: int) -> bool:
        if side == "PASS":
            drift, spread = _growth_below(values, w, m, level, n)
        else:
            drift, spread = _growth_above(values, w, m, level, n)
        return bool(np.any(n * drift - z * sqrt(n) * spread >= level))

    low = bounds.n
    high = low + 1
    while not enough(high):
        if high >= MOST_PROMPTS:
            return None, side
        low, high = high, min(2 * high, MOST_PROMPTS)
    while high - low > 1:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return high, side


def _growth_below(
    x: FloatArray, w: FloatArray | None, m: float, level: float, n: int
) -> tuple[FloatArray, FloatArray]:
    # Mean and spread of the log factor per prompt.  The stake learns the variance on the way, so
    # the mean is taken along t = 1..n, at 32 evenly spaced shares of the path.
    weights = np.ones_like(x) if w is None else w
    centre = float((weights * x).sum() / weights.sum())
    variance = float(np.mean((weights * (x - centre)) ** 2))
    t = np.linspace(0, n, 33)[:-1] + n / 64
    expected = (PRIOR_VARIANCE + t * variance) / (t + 1)
    stakes = np.minimum(np.sqrt(2 * level / (n * expected)), STAKE_CAP / (1 - m))
    logs = np.log1p(-np.multiply.outer(stakes, weights * (x - m)))
    return np.array([logs.mean()]), np.array([logs.std(axis=1).mean()])


def _growth_above(
    x: FloatArray, w: FloatArray | None, m: float, level: float, n: int
) -> tuple[FloatArray, FloatArray]:
    # One entry a stake; the mixture is at least its best stake divided by the grid's size, which
    # is charged to the drift.
    weights = np.ones_like(x) if w is None else w
    grid = grid_above(level, n, weighted=w is not None)
    logs = np.log1p(np.multiply.outer(grid, weights * (x / m - 1)))
    return logs.mean(axis=1) - log(len(grid)) / n, logs.std(axis=1)
