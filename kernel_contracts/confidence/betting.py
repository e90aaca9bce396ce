"""Bounds for the mean of bounded per-prompt values, by betting against the mean.

To show that a mean lies under m, bet on "the next value is under m" with a stake that depends on
earlier values only.  If the mean were m or more, the wealth would be a supermartingale, so it
reaches 1/alpha at any time with probability at most alpha (Ville).  The upper bound is the
smallest m against which the wealth got that far; the lower bound bets the other way.  Valid at
every n, for every law on [0, ceiling], and at every stopping time.  Waudby-Smith and Ramdas,
"Estimating means of bounded random variables by betting", arXiv 2010.09686.

Which bets, and why the two sides differ (values scaled to [0, 1], L = log(1/alpha), n prompts;
mean bound divided by the true mean over 100 to 150 seeds at 5 %; "paper" is the predictable
plug-in with t log(1+t) in place of n and cap 3/4; "mixture" averages the wealth of a fixed grid):

                                      upper (want small)           lower (want large)
    law                         n    paper  plug-in  mixture      plug-in  mixture
    log-normal cv 1, mean .15   20    2.08    1.94     2.01          .49      .64
                                60    1.42    1.37     1.43          .73      .75
                                300   1.17    1.13     1.15          .89      .88
    log-normal cv 1.8, mean .03 20    6.39    5.67     6.06          .00      .50
                                60    3.02    2.68     3.03          .26      .64
                                300   1.43    1.38     1.48          .78      .82
    0/1 with rate .01           60    8.10    7.32     8.51          .01      .11
                                300   3.03    2.84     3.25          .10      .21
    token rate .02 per prompt   60    4.12    3.69     4.26          .04      .50
                                300   1.68    1.61     1.77          .68      .74

So the upper bound uses the plug-in, stake min(sqrt(2 L / (n var)), 0.9 / (1 - m)) with the
variance of earlier values, and the lower bound the mixture, stakes f / m for f in
(0.1, 0.25, 0.5, 1, 2) sqrt(2 L / n).  Below a mean of 0.1 of the ceiling the upper bound is ruled
by the ceiling, not by the spread: choose the ceiling close.  docs/error-rates.md repeats coverage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log
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

Side = Literal["above", "below"]

STAKE_CAP = 0.9
"""Largest share of the wealth staked against one value.  0.75 loses 5 to 15 % of tightness at
means under a tenth of the ceiling; 0.99 loses 10 to 20 % on rare 0/1 events."""

GRID = (0.1, 0.25, 0.5, 1.0, 2.0)
"""Stakes of the lower side in units of sqrt(2 L / n): 1/cv of the laws it must serve."""

WEIGHTED_GRID = (*GRID, 5.0)
"""With row counts far under their cap every stake shrinks, so one larger stake joins the grid."""

PRIOR_MEAN, PRIOR_VARIANCE = 0.5, 0.25


@dataclass(frozen=True, slots=True)
class MeanBounds:
    """One-sided bounds of a mean, each at level ``alpha`` (the pair covers 1 - 2 alpha).

    estimate: mean of the clipped values (ratio of sums when weighted); NaN without evidence.
    n: prompts.  clipped_low, clipped_high: values moved to 0 or to ``ceiling``.  The bounds are of
    the *clipped* mean: when clipped_high > 0 the unclipped mean may lie above ``upper``, so a
    limit on it also needs a clause on how often the ceiling is exceeded.
    """

    lower: float
    upper: float
    estimate: float
    n: int
    method: str
    ceiling: float
    alpha: float
    clipped_low: int = 0
    clipped_high: int = 0


@dataclass(frozen=True, slots=True)
class MeanTest:
    """Evidence that a mean lies on one side of a limit.

    log_e: log of the final wealth, an e-value (average or e-BH these).  log_e_max: log of the
    largest wealth on the way, whose inverse is a p-value but which is *not* an e-value.
    """

    log_e: float
    log_e_max: float

    @property
    def p_value(self) -> float:
        """min(1, 1 / largest wealth): valid at any stopping time."""
        return float(np.exp(-max(self.log_e_max, 0.0)))


def stakes_below(x: FloatArray, w: FloatArray | None, level: float, horizon: int) -> FloatArray:
    """Stakes of the upper side before their cap, from earlier values only.

    x: [..., n] in [0, 1].  w: [..., n] in [0, 1] or None.  level: log(1/alpha).  horizon: the
    number of prompts for which the stakes are tuned; validity does not depend on it.
    """
    t = np.arange(1, x.shape[-1] + 1)
    weights = np.ones_like(x) if w is None else w
    centre = (PRIOR_MEAN + np.cumsum(weights * x, -1)) / (1.0 + np.cumsum(weights, -1))
    residual = weights * (x - centre)
    variance = (PRIOR_VARIANCE + np.cumsum(residual**2, -1)) / (t + 1)
    earlier = np.empty_like(variance)
    earlier[..., :1] = PRIOR_VARIANCE
    earlier[..., 1:] = variance[..., :-1]
    stakes: FloatArray = np.sqrt(2.0 * level / (horizon * earlier))
    return stakes


def log_wealth_below(
    x: FloatArray, w: FloatArray | None, m: float, stakes: FloatArray
) -> FloatArray:
    """log wealth [..., n] after each value, betting that the mean is under m (0 <= m < 1)."""
    gap = x - m if w is None else w * (x - m)
    return np.cumsum(np.log1p(-np.minimum(stakes, STAKE_CAP / (1.0 - m)) * gap), -1)


def grid_above(level: float, horizon: int, *, weighted: bool) -> FloatArray:
    """Shares of the wealth staked by the lower side: a fixed grid, tuned to the horizon."""
    unit = np.sqrt(2.0 * level / horizon)
    shares: FloatArray = np.minimum(STAKE_CAP, unit * np.array(WEIGHTED_GRID if weighted else GRID))
    return shares


def log_wealth_above(x: FloatArray, w: FloatArray | None, m: float, grid: FloatArray) -> FloatArray:
    """log of the average wealth [..., n] over the grid, betting that the mean is above m > 0."""
    gain = x / m - 1.0 if w is None else w * (x / m - 1.0)
    total = np.full(x.shape, -np.inf)
    for share in grid:
        total = np.logaddexp(total, np.cumsum(np.log1p(share * gain), -1))
    wealth: FloatArray = total - log(len(grid))
    return wealth


def peak_above(x: FloatArray, w: FloatArray | None, m: float, grid: FloatArray) -> float:
    """Largest value of `log_wealth_above` on the way, for x with at least one value.

    The average over the grid lies at most log(len(grid)) under the best of it. So only where the
    best is that near to its own peak can the average peak: the rest needs no exponentials.
    """
    gain = x / m - 1.0 if w is None else w * (x / m - 1.0)
    paths = np.empty((len(grid), x.size))
    for path, share in zip(paths, grid, strict=True):
        np.multiply(gain, share, out=path)
        np.log1p(path, out=path)
        np.cumsum(path, out=path)
    best = paths.max(axis=0)
    near = best >= best.max() - log(len(grid))
    top = best[near]
    return float((top + np.log(np.exp(paths[:, near] - top).mean(axis=0))).max())


def mean_bounds(
    x: ArrayLike,
    *,
    ceiling: float,
    alpha: float,
    weights: ArrayLike | None = None,
    weight_cap: float | None = None,
) -> MeanBounds:
    """Lower and upper bound of a mean, each one-sided at ``alpha``.

    x: [n] one value a prompt, clipped into [0, ceiling] (how many is reported).  ceiling: known
    before the data, in the unit of x; say where it came from whenever the bound is quoted.
    weights, weight_cap: row counts and their known cap; then the bound is of the ratio of sums
    E[weight * x] / E[weight], the token-weighted mean, by testing theta on
    Y = weight * (x - theta).  Prompts must come in an order that is independent of the values
    (`by_prompt` sorts by a hash of the prompt id): the running maximum depends on the order.

    n = 0 gives (0, ceiling) and estimate NaN.  Raises InputError on NaN, inf, alpha outside
    (0, 1), a missing or exceeded weight cap.  1000 prompts take about 3 ms.
    """
    check_probability("alpha", alpha)
    check_positive("ceiling", ceiling)
    values = finite_vector("x", x)
    w = scaled_weights(weights, weight_cap, values.size)
    low, high = int(np.sum(values < 0)), int(np.sum(values > ceiling))
    scaled = np.clip(values / ceiling, 0.0, 1.0)
    total = float(scaled.size if w is None else w.sum())
    method = "betting" if w is None else "betting, ratio of sums"
    if total == 0.0:
        return MeanBounds(0.0, ceiling, float("nan"), values.size, method, ceiling, alpha)
    estimate = float((scaled if w is None else scaled * w).sum() / total)
    upper = _upper(scaled, w, estimate, alpha)
    lower = _lower(scaled, w, estimate, alpha)
    return MeanBounds(
        lower * ceiling, upper * ceiling, estimate * ceiling, values.size, method, ceiling, alpha,
        low, high,
    )  # fmt: skip


def _upper(x: FloatArray, w: FloatArray | None, estimate: float, alpha: float) -> float:
    # The wealth increases with m, as each factor does.  Starting at the estimate can only enlarge
    # the interval.
    level = log(1.0 / alpha)
    stakes = stakes_below(x, w, level, x.size)
    return _last_rejected(
        lambda m: float(log_wealth_below(x, w, m, stakes).max()) - level, 1.0, estimate
    )


def _lower(x: FloatArray, w: FloatArray | None, estimate: float, alpha: float) -> float:
    level = log(1.0 / alpha)
    grid = grid_above(level, x.size, weighted=w is not None)
    return _last_rejected(lambda m: peak_above(x, w, m, grid) - level, 0.0, estimate)


def _last_rejected(
    excess: Callable[[float], float], rejected: float, kept: float, precision: float = 1e-7
) -> float:
    """The mean nearest to ``kept`` that is refuted (excess >= 0), to a relative precision.

    excess is monotone, and ``rejected`` (0 or 1) refuted without asking.  Regula falsi in Illinois
    form, every fourth step a bisection: some 9 evaluations where bisection takes 25.  Both ends are
    values that were evaluated and the rejected one is returned, so rounding errs to the safe side.
    """
    smallest = 1e-12 * kept
    high = low = np.nan  # excess at the rejected end (>= 0) and at the other
    last, step = 0, 0
    while (gap := abs(rejected - kept)) > precision * (largest := max(rejected, kept)):
        if largest <= smallest:
            break
        share = 0.5  # of the way from kept to rejected
        if step % 4 < 3 and high - low > 0 and np.isfinite(high - low):
            # Not at an end itself: past the root by the precision, so that the bracket closes.
            inset = min(0.5, 0.4 * precision * largest / gap)
            share = min(max(-low / (high - low), inset), 1 - inset)
        m = kept + (rejected - kept) * share
        value = excess(m)
        side = 1 if value >= 0 else -1
        if side > 0:
            rejected, high = m, value
            low = low / 2 if last == side else low
        else:
            kept, low = m, value
            high = high / 2 if last == side else high
        last, step = side, step + 1
    return rejected


def mean_test(
    x: ArrayLike,
    *,
    limit: float,
    ceiling: float,
    side: Side,
    alpha: float,
    weights: ArrayLike | None = None,
    weight_cap: float | None = None,
) -> MeanTest:
    """Evidence that the mean is above (or below) ``limit``, from the same bets as `mean_bounds`.

    side "above": small p-value shows mean > limit.  side "below": shows mean < limit.  alpha only
    tunes the stakes; the p-value and the e-value hold at every level.  Use the p-values for Holm
    over slices, the e-values for e-BH.
    """
    check_probability("alpha", alpha)
    m = check_limit(limit, ceiling)
    values = finite_vector("x", x)
    w = scaled_weights(weights, weight_cap, values.size)
    if values.size == 0:
        return MeanTest(0.0, 0.0)
    scaled = np.clip(values / ceiling, 0.0, 1.0)
    level = log(1.0 / alpha)
    if side == "below":
        path = log_wealth_below(scaled, w, m, stakes_below(scaled, w, level, scaled.size))
    elif m > 0:
        path = log_wealth_above(
            scaled, w, m, grid_above(level, scaled.size, weighted=w is not None)
        )
    else:  # "the mean is 0" is refuted for certain by one positive value
        positive = bool(np.any(scaled > 0 if w is None else scaled * w > 0))
        return MeanTest(np.inf, np.inf) if positive else MeanTest(0.0, 0.0)
    return MeanTest(float(path[-1]), float(path.max()))
