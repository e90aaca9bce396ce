"""Many slices at once.

A release needs every slice to pass: an intersection-union test.  Each slice is tested at the full
level alpha and *no correction applies*: releasing wrongly needs at least one bad slice, and that
slice alone passes by luck with probability at most alpha.  What it costs is power: the chance that
all pass falls with the number of slices.

Correct for the number of slices where each single rejection is acted on: alarms per slice, or
passes used one by one to route only that slice.  Slices share prompts, so only procedures that are
valid under any dependence are offered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kernel_contracts.confidence._checks import FloatArray, check_probability
from kernel_contracts.errors import InputError


@dataclass(frozen=True, slots=True)
class Rejections:
    """rejected[i]: hypothesis i falls at ``alpha``.  adjusted[i]: the smallest alpha at which it
    would (an adjusted p-value).  Same order as the input."""

    rejected: NDArray[np.bool_]
    adjusted: FloatArray
    alpha: float
    method: str


def _p_values(p_values: ArrayLike) -> FloatArray:
    p = np.asarray(p_values, dtype=np.float64)
    if p.ndim != 1 or not np.all((p >= 0) & (p <= 1)):  # NaN fails both comparisons
        raise InputError(
            "p-values must be a list of numbers in [0, 1]",
            where="p_values",
            fix="leave out slices without evidence: they are UNOBSERVED, not tested",
        )
    return p


def holm(p_values: ArrayLike, alpha: float) -> Rejections:
    """Holm's step-down: the chance of *any* false rejection is at most alpha, under any dependence.

    p_values: [K].  Holm, Scandinavian Journal of Statistics 6 (1979).
    """
    check_probability("alpha", alpha)
    p = _p_values(p_values)
    order = np.argsort(p, kind="stable")
    steps = np.minimum(1.0, p[order] * np.arange(p.size, 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(steps)
    return Rejections(adjusted <= alpha, adjusted, alpha, "holm")


def benjamini_yekutieli(p_values: ArrayLike, alpha: float) -> Rejections:
    """False discovery rate at most alpha under any dependence: for lists to look into first.

    p_values: [K].  Benjamini and Yekutieli, Annals of Statistics 29 (2001).
    """
    check_probability("alpha", alpha)
    p = _p_values(p_values)
    k = np.arange(1, p.size + 1)
    order = np.argsort(p, kind="stable")
    steps = p[order] * p.size * float(np.sum(1.0 / k)) / k
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(1.0, np.minimum.accumulate(steps[::-1])[::-1])
    return Rejections(adjusted <= alpha, adjusted, alpha, "benjamini-yekutieli")


def e_bh(log_e_values: ArrayLike, alpha: float) -> Rejections:
    """e-BH: false discovery rate at most alpha from e-values, under any dependence.

    log_e_values: [K], the *current* log wealth of each e-process at a stopping time, not its
    running maximum (the maximum is no e-value).  Wang and Ramdas, JRSS-B 84 (2022).
    """
    check_probability("alpha", alpha)
    e = np.asarray(log_e_values, dtype=np.float64)
    if e.ndim != 1 or np.any(np.isnan(e)):
        raise InputError("log e-values must be a list of numbers", where="log_e_values")
    order = np.argsort(-e, kind="stable")
    k = np.arange(1, e.size + 1)
    steps = np.exp(np.minimum(0.0, np.log(max(e.size, 1) / k) - e[order]))
    adjusted = np.empty_like(e)
    adjusted[order] = np.minimum.accumulate(steps[::-1])[::-1]
    return Rejections(adjusted <= alpha, adjusted, alpha, "e-BH")


def intersection_union(p_values: ArrayLike) -> float:
    """p-value of "every slice passes": the largest of the slices' p-values, uncorrected.

    No slices give 1: nothing was shown.
    """
    p = _p_values(p_values)
    return float(p.max()) if p.size else 1.0
