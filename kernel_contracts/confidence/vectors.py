"""Noise-free size of a mean vector, for gradients measured one prompt at a time."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import ArrayLike

from kernel_contracts.confidence._checks import FloatArray
from kernel_contracts.errors import InputError


@dataclass(frozen=True, slots=True)
class SquaredNorm:
    """value: unbiased estimate of the squared norm of the mean vector; may be negative when the
    truth is near 0.  standard_error: by the jackknife over prompts.  plug_in: the squared norm of
    the average, which noise inflates by noise = trace(covariance) / n; never report it alone."""

    value: float
    standard_error: float
    plug_in: float
    noise: float
    n: int


def u_statistic_sq_norm(x_nd: ArrayLike) -> SquaredNorm:
    """Unbiased squared norm of the mean of n independent vectors.

    x_nd: [n, d], one vector a prompt, n >= 3.  value = (|sum x|^2 - sum |x|^2) / (n (n-1)), the
    average of all inner products of two *different* prompts, so no prompt's own noise enters.
    The jackknife error is on the safe side: at a true mean of 0 it is about sqrt(2) too large.
    Time O(n d).  Raises InputError on another shape or a non-finite entry.
    """
    x = _matrix(x_nd, 3)
    n = x.shape[0]
    total = x.sum(0)
    own = np.einsum("nd,nd->n", x, x)
    cross = x @ total
    all_pairs = float(total @ total)
    value = (all_pairs - float(own.sum())) / (n * (n - 1))
    left_out = (all_pairs - 2 * cross + own - (own.sum() - own)) / ((n - 1) * (n - 2))
    error = sqrt((n - 1) / n * float(((left_out - left_out.mean()) ** 2).sum()))
    plug_in = all_pairs / n**2
    return SquaredNorm(value, error, plug_in, plug_in - value, n)


def split_half_cosine(x_nd: ArrayLike, *, splits: int = 32, seed: int = 0) -> float:
    """Average cosine between the means of two random halves of the prompts.

    x_nd: [n, d], n >= 2.  Near 1: the direction is measured; near 0: it is noise, and no cosine
    to anything else means much.  A half whose mean is exactly 0 has no direction: NaN.
    """
    x = _matrix(x_nd, 2)
    rng = np.random.default_rng(seed)
    half = x.shape[0] // 2
    cosines = []
    for _ in range(splits):
        order = rng.permutation(x.shape[0])
        a, b = x[order[:half]].mean(0), x[order[half:]].mean(0)
        length = sqrt(float(a @ a) * float(b @ b))
        cosines.append(float(a @ b) / length if length > 0 else float("nan"))
    return float(np.mean(cosines))


def _matrix(x_nd: ArrayLike, fewest: int) -> FloatArray:
    x = np.asarray(x_nd, dtype=np.float64)
    if x.ndim != 2 or x.shape[0] < fewest:
        raise InputError(f"need [n >= {fewest}, d] vectors, got shape {x.shape}", where="vectors")
    if not np.all(np.isfinite(x)):
        raise InputError("vectors hold non-finite entries", where="vectors")
    return x
