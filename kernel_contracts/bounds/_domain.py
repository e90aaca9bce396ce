"""Domain checks shared by every bound, and two functions that must not overflow or cancel."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernel_contracts.errors import InputError

Array = npt.NDArray[np.float64]


def between(
    values: npt.ArrayLike, name: str, low: float, high: float = np.inf, *, above: bool = False
) -> Array:
    """``values`` as float64, all in [low, high] (``above``: in (low, high]).

    NaN passes, and every bound of NaN is NaN: what was not measured is not bounded.
    Raises InputError for anything outside.
    """
    array = np.asarray(values, np.float64)
    outside = (array <= low if above else array < low) | (array > high)
    if bool(outside.any()):
        worst = float(array[outside].flat[0])
        left = "(" if above else "["
        raise InputError(f"{name} must lie in {left}{low:g}, {high:g}], got {worst:g}")
    return array


def nonnegative(values: npt.ArrayLike, name: str) -> Array:
    """``values`` as float64, all in [0, inf]. Raises InputError."""
    return between(values, name, 0.0)


def share(values: npt.ArrayLike, name: str) -> Array:
    """``values`` as float64, all in [0, 1]. Raises InputError."""
    return between(values, name, 0.0, 1.0)


def steps(values: npt.ArrayLike, name: str = "the number of tokens T") -> Array:
    """Whole numbers >= 1 as float64. Raises InputError."""
    array = between(values, name, 1.0)
    if bool((array != np.floor(array)).any()):
        raise InputError(f"{name} must be a whole number")
    return array


def log_cosh(x: Array) -> Array:
    """ln cosh x for x >= 0: neither overflows at 1000 nor cancels at 1e-8."""
    small = np.minimum(x, 1.0)
    near = np.log1p(np.sinh(small) ** 2) / 2
    far = x + np.log1p(np.exp(-2 * x)) - np.log(2.0)
    return np.where(x <= 1, near, far)


def product(*factors: npt.ArrayLike) -> Array:
    """Product in which 0 * inf is 0: no tokens, no reward or no mass leaves nothing to bound."""
    arrays = [np.asarray(f, np.float64) for f in factors]
    zero = np.zeros(np.broadcast_shapes(*(a.shape for a in arrays)), bool)
    missing = zero.copy()
    result = np.ones(zero.shape)
    for a in arrays:
        zero = zero | (a == 0)
        missing = missing | np.isnan(a)
        with np.errstate(invalid="ignore", over="ignore"):
            result = result * a
    return np.where(missing, np.nan, np.where(zero, 0.0, result))
