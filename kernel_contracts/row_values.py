"""From a slice's rows to the values that a clause judges, and from many tests to one level."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd

from kernel_contracts.clauses import NumericalClause, StatisticalClause
from kernel_contracts.confidence import holm
from kernel_contracts.contract import Contract
from kernel_contracts.intervals import Ends, ends_of, interval_verdict
from kernel_contracts.measurement import Measurement
from kernel_contracts.metrics import METRICS, Array
from kernel_contracts.slices import Slice

__all__ = ["finite_values", "holm_over_slices", "judged_rows", "rows_on_path"]


def rows_on_path(
    clause: NumericalClause | StatisticalClause, one: Slice, tokens: pd.DataFrame
) -> pd.DataFrame:
    """The slice's rows on the clause's path."""
    frame = tokens[one.mask]
    return frame if clause.path == "both" else frame[frame["path"] == clause.path]


def finite_values(
    contract: Contract, metric: str, frame: pd.DataFrame
) -> tuple[Array | Ends, pd.DataFrame, str]:
    """(values, their rows, why there is no evidence). Missing values beyond what the contract's
    observability clauses allow mean that there is none."""
    spec = METRICS[metric]
    if frame.empty:
        return np.empty(0), frame, "no rows"
    ends = ends_of(metric, frame)
    absent = [c for c in spec.columns if c not in frame.columns]
    if absent and ends is None:
        return np.empty(0), frame, "no column " + ", ".join(absent)
    values = spec.values(frame) if ends is None else ends.lower
    bad = ~np.isfinite(values)
    if bad.any():
        allowed = max((c.max_missing for c in contract.observability), default=0.0)
        if bad.mean() > allowed:
            return np.empty(0), frame, f"{int(bad.sum())} of {len(bad)} rows have no finite value"
        values, frame = values[~bad], frame[~bad]
    if ends is not None:
        return Ends(values, ends.upper[~bad], ends.method), frame, ""
    return values, frame, ""


def judged_rows(values: Array | Ends, judge: Callable[[Array], Measurement]) -> Measurement:
    """One measurement of exact values, or of both ends of intervals."""
    return interval_verdict(values, judge) if isinstance(values, Ends) else judge(values)


def holm_over_slices(rows: list[Measurement], alpha: float) -> list[Measurement]:
    """Holm over the slices of one clause; a FAIL that does not survive is INCONCLUSIVE."""
    tested = [i for i, m in enumerate(rows) if m.p_fail is not None]
    if not tested:
        return rows
    adjusted = holm([rows[i].p_fail or 0.0 for i in tested], alpha).adjusted
    out = list(rows)
    for i, p in zip(tested, adjusted, strict=True):
        verdict = rows[i].verdict
        if verdict != "PASS":
            verdict = "FAIL" if p <= alpha else "INCONCLUSIVE"
        detail = rows[i].detail if verdict != "FAIL" else _fail_detail(rows[i])
        # Clipped at the ceiling, a broken mean is known to be large, not how large.
        upper = None if verdict == "FAIL" and rows[i].clipped else rows[i].upper
        out[i] = replace(rows[i], p_fail=float(p), verdict=verdict, detail=detail, upper=upper)
    return out


def _fail_detail(row: Measurement) -> str:
    kept = ("above the ceiling", "upper end", "mean width")
    return "; ".join(p for p in row.detail.split("; ") if any(word in p for word in kept))
