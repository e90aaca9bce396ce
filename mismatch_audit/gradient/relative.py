"""How large is one mean vector beside another, with an interval, from n prompts.

b_i and g_i are a prompt's bias vector and its weighted gradient. The norm of an average is inflated
by noise (E|mean b|^2 = |E b|^2 + trace(cov)/n), so every squared norm here is the average inner
product of two *different* prompts. The interval inverts a test (Fieller's way): for each candidate
ratio r, U_b - r^2 U_g has mean zero at the truth; candidates that it does not reject are kept. No
delta method, so it holds where the bias is zero and where the gradient is not resolved (infinite).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats
from scipy.optimize import brentq

from kernel_contracts.errors import InputError
from mismatch_audit.gradient.mean_vectors import FEWEST_PROMPTS, MeanVector

Array = npt.NDArray[np.float64]

__all__ = ["FEWEST_PROMPTS", "RelativeBias", "cosine_without_noise", "relative_bias"]


@dataclass(frozen=True, slots=True)
class RelativeBias:
    """|E b| / |E g| and what is known about it.

    value: from noise-free squared norms; 0 where that of the bias is not positive, infinite where
    that of the gradient is not.  lower, upper: two-sided interval at 1 - alpha; upper is infinite
    where the gradient is not resolved, lower is 0 where the bias is not.  squared_bias,
    squared_gradient: U-statistics.  noise_floor: what two halves of the same prompts, in place of
    two programs, would give by the plug-in norm, on the same scale.  split_half: cosine between
    the mean bias of two random halves.
    """

    value: float
    lower: float
    upper: float
    squared_bias: float
    squared_gradient: float
    noise_floor: float
    split_half: float
    n: int

    @property
    def resolved(self) -> bool:
        """The gradient is larger than its noise, so that a ratio to it has an upper end."""
        return math.isfinite(self.upper)


def relative_bias(
    bias_nd: npt.ArrayLike | MeanVector,
    gradient_nd: npt.ArrayLike | MeanVector,
    *,
    alpha: float = 0.05,
    replicas: int = 1,
    seed: int = 0,
) -> RelativeBias:
    """``|E b| / |E g|`` with a two-sided interval, from vectors ``[n, d]`` of the same n prompts.

    replicas: the d columns are that many independent random projections of equal width; the spread
    between them is the projection's own error and widens the interval (1: no projection).
    Raises InputError for fewer than ``FEWEST_PROMPTS`` rows, shapes that differ, or non-finite
    entries.
    """
    b, g = (
        x if isinstance(x, MeanVector) else MeanVector.of(x, replicas)
        for x in (bias_nd, gradient_nd)
    )
    if b.n != g.n or len(b.parts) != len(g.parts):
        raise InputError(f"vectors must pair up: {b.n} and {g.n} prompts")
    quantile = float(stats.t.ppf(1 - alpha / 2, b.n - 1))
    spread = quantile**2 * _jackknife(b, g)
    if len(b.parts) > 1:
        wide = float(stats.t.ppf(1 - alpha / 2, len(b.parts) - 1))
        # Some of the prompts' own noise is in it a second time: on the wide side.
        spread = spread + wide**2 * np.cov([b.parts, g.parts]) / len(b.parts)
    side_b = _Side(b, float(spread[0, 0]), quantile)
    side_g = _Side(g, float(spread[1, 1]), quantile)
    cross = float(spread[0, 1])
    upper = _upper(side_b, side_g, cross)
    inverse = _upper(side_g, side_b, cross)
    noise, cosine = b.split_halves(seed=seed)

    def scaled(square: float) -> float:
        return math.sqrt(max(square, 0.0) / g.square) if g.square > 0 else math.inf

    return RelativeBias(
        value=scaled(b.square) if b.plug_in > 0 else 0.0,
        lower=1 / math.sqrt(inverse) if inverse > 0 else 0.0,
        upper=math.sqrt(upper),
        squared_bias=b.square,
        squared_gradient=g.square,
        noise_floor=scaled(noise),
        split_half=cosine,
        n=b.n,
    )


def cosine_without_noise(a_nd: npt.ArrayLike, b_nd: npt.ArrayLike) -> float:
    """Cosine of E a and E b from products of different prompts; NaN where a norm is not resolved.

    A plug-in cosine of two estimates from the same prompts is near 1 whatever the truth, for they
    share their noise. This one is consistent, and may leave [-1, 1] by its sampling error.
    """
    a, b = np.asarray(a_nd, np.float64), np.asarray(b_nd, np.float64)

    def product(x: Array, y: Array) -> float:
        return float(x.sum(0) @ y.sum(0)) - float(np.einsum("nd,nd->", x, y))

    squares = product(a, a), product(b, b)
    return product(a, b) / math.sqrt(squares[0] * squares[1]) if min(squares) > 0 else math.nan


def _jackknife(b: MeanVector, g: MeanVector) -> Array:
    """Jackknife covariance of (U_b, U_g) over prompts, ``[2, 2]``."""
    left = np.stack([b.left_out, g.left_out])
    left -= left.mean(1, keepdims=True)
    return np.asarray((b.n - 1) / b.n * left @ left.T)


@dataclass(frozen=True)
class _Side:
    """A mean vector and how far its U-statistic may lie below the truth.

    spread: (t x error)^2 as seen, by jackknife and between projections; quantile: t.
    """

    mean: MeanVector
    spread: float
    quantile: float

    @property
    def seen(self) -> float:
        """Its U-statistic, but a very negative one is noise that a bound must not profit from."""
        return max(self.mean.square, -self.mean.largest_variance)

    def spread_at(self, square: float) -> float:
        """(Largest shortfall of the U-statistic)^2 if the true squared norm is ``square``.

        Along the noisiest direction the mean is normal about sqrt(square), so its square falls
        short by up to square - (sqrt(square) - t sd)_+^2, plus the noise taken off.
        """
        variance = self.mean.largest_variance
        left = max(math.sqrt(square) - self.quantile * math.sqrt(variance), 0.0)
        rest = self.quantile**2 * self.mean.rest
        return max(self.spread, (square - left**2 + variance) ** 2 + rest)


def _upper(x: _Side, y: _Side, cross: float) -> float:
    """Largest r^2 for which U_x - r^2 U_y is not clearly negative; infinite if y is not resolved.

    The spread of U_x is the one it has if |E x|^2 = r^2 U_y. The jackknife's alone is small when
    U_x is: with it the end missed the truth in 11 % of simulated batches, nominal 2.5 %.
    """
    if x.mean.plug_in == 0.0:
        return 0.0  # every x_i is 0: identical programs, whatever the gradient
    square = y.mean.square
    if square <= 0 or square**2 <= y.spread:
        return math.inf

    def slack(ratio: float) -> float:
        spread = x.spread_at(ratio * square)
        along = cross * math.sqrt(spread / x.spread) if x.spread > 0 else 0.0
        variance = spread - 2 * ratio * along + ratio**2 * y.spread
        return x.seen - ratio * square + math.sqrt(max(variance, 0.0))

    kept = max(x.mean.square, 0.0) / square
    beyond = kept + math.sqrt(x.spread_at(0.0)) / square
    while slack(beyond) > 0:
        kept, beyond = beyond, 2 * beyond
        if not math.isfinite(beyond):
            return math.inf
    return float(brentq(slack, kept, beyond)) if slack(kept) > 0 else kept
