"""Argument checks shared by the statistics: a bad number is named, never silently repaired."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kernel_contracts.errors import InputError

FloatArray = NDArray[np.float64]


def check_probability(name: str, value: float) -> float:
    """Return ``value`` if it lies strictly between 0 and 1; raise InputError otherwise."""
    if not 0.0 < value < 1.0:
        raise InputError(f"must lie strictly between 0 and 1, got {value}", where=name)
    return float(value)


def check_positive(name: str, value: float) -> float:
    """Return ``value`` if it is finite and above 0; raise InputError otherwise."""
    if not (np.isfinite(value) and value > 0):
        raise InputError(f"must be a finite number above 0, got {value}", where=name)
    return float(value)


def check_limit(limit: float, ceiling: float) -> float:
    """Return ``limit / ceiling`` for 0 <= limit < ceiling; raise InputError otherwise."""
    check_positive("ceiling", ceiling)
    if not 0.0 <= limit < ceiling:
        raise InputError(
            f"must lie in [0, ceiling), got limit {limit} with ceiling {ceiling}",
            where="limit",
            fix="raise the ceiling: values are clipped to it, so no mean can exceed it",
        )
    return float(limit) / float(ceiling)


def finite_vector(name: str, values: ArrayLike) -> FloatArray:
    """Return ``values`` as a 1-D float64 array; raise InputError on another shape or a NaN or inf.

    Non-finite values are evidence of a fault and must be counted by their own clause; dropping
    them here would turn a fault into a smaller sample.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise InputError(f"must be one-dimensional, got shape {array.shape}", where=name)
    bad = int(array.size - np.count_nonzero(np.isfinite(array)))
    if bad:
        raise InputError(
            f"{bad} of {array.size} values are not finite",
            where=name,
            fix="count non-finite rows in a `nonfinite` clause and pass only scored rows",
        )
    return array


def scaled_weights(
    weights: ArrayLike | None, weight_cap: float | None, n: int
) -> FloatArray | None:
    """Row counts divided by their cap, in [0, 1]; None when every prompt weighs the same.

    weights: [n], each >= 0.  weight_cap: the largest count a prompt *could* have had, known before
    the data (for example max_new_tokens times rollouts per prompt).  Raises InputError when the
    cap is missing, or is exceeded: a cap read off the data is not a cap.
    """
    if weights is None:
        if weight_cap is not None:
            raise InputError("given without weights", where="weight_cap")
        return None
    if weight_cap is None:
        raise InputError(
            "weights need a cap that was known before the data",
            where="weight_cap",
            fix="pass max_new_tokens * rollouts per prompt",
        )
    check_positive("weight_cap", weight_cap)
    array = finite_vector("weights", weights)
    if array.size != n:
        raise InputError(f"{array.size} weights for {n} prompts", where="weights")
    if array.size and (array.min() < 0 or array.max() > weight_cap):
        raise InputError(
            f"must lie in [0, {weight_cap}], got [{array.min()}, {array.max()}]",
            where="weights",
            fix="raise weight_cap to the largest count a prompt could have had",
        )
    return array / weight_cap
