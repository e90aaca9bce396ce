"""Rows that are known only as an interval: what they can prove, and what they cannot.

Where an engine gives k log-probs a row (``kl_method`` is not ``full``), KL(q || p) and TV of that
row lie in [lower, upper] (``kernel_contracts.topk``). A mean of lower ends beyond the limit is a
FAIL; a PASS needs the mean of upper ends within it. KL's upper end is infinite unless the rest's
drift is known, so a truncated KL never passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from kernel_contracts.measurement import Measurement
from kernel_contracts.metrics import Array

__all__ = ["ENDS", "Ends", "ends_of", "interval_verdict"]

ENDS: dict[str, tuple[str, str]] = {
    "kl_engine_reference": ("kl_lower", "kl_upper"),
    "tv": ("tv_lower", "tv_upper"),
}
"""Metric -> the token table's columns of its interval."""


@dataclass(frozen=True)
class Ends:
    """lower, upper ``[rows]``; equal where the row is exact. upper may be infinite. method: how the
    rows were cut, as the table says it."""

    lower: Array
    upper: Array
    method: str

    @property
    def width(self) -> float:
        """Mean of upper - lower; infinite where one row has no upper end."""
        return float(np.mean(self.upper - self.lower)) if len(self.lower) else 0.0


def ends_of(metric: str, frame: pd.DataFrame) -> Ends | None:
    """The metric's interval per row, or None where every row is exact (or has none)."""
    if metric not in ENDS or "kl_method" not in frame or frame.empty:
        return None
    cut = (frame["kl_method"] != "full").to_numpy()
    names = ENDS[metric]
    if not cut.any() or any(name not in frame for name in names):
        return None
    exact = (
        frame[metric].to_numpy(dtype=np.float64) if metric in frame else np.full(len(frame), np.nan)
    )
    low, high = (np.where(cut, frame[name].to_numpy(dtype=np.float64), exact) for name in names)
    methods = sorted({str(m) for m in frame["kl_method"][cut]})
    return Ends(low, high, ", ".join(methods))


def interval_verdict(
    ends: Ends, judge: Callable[[Array], Measurement], unit: str = ""
) -> Measurement:
    """One measurement from two: the lower ends may fail the clause, the upper ends may pass it.

    judge: ``[rows]`` values -> the clause's measurement on them.  value is the mean of the lower
    ends; upper is None where it does not exist.
    """
    low = judge(ends.lower)
    high = judge(ends.upper) if np.isfinite(ends.upper).all() else None
    passed = high is not None and high.verdict == "PASS"
    if high is None:
        said = "no upper end: these rows can fail the clause, never pass it"
    else:
        said = f"interval, mean width {ends.width:.3g} {unit}".rstrip()
    return replace(
        low,
        upper=None if high is None else high.upper,
        verdict="PASS" if passed else "INCONCLUSIVE",
        clipped=0 if high is None else high.clipped,
        method=f"{low.method}; rows: {ends.method}",
        detail=said,
    )
