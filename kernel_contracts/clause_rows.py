"""A clause's measurement on one slice, from each prompt's numbers: where rows and sums meet."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kernel_contracts.bounded import bounded_mean
from kernel_contracts.clauses import Clause, NumericalClause, StatisticalClause
from kernel_contracts.measurement import Measurement
from kernel_contracts.metrics import Array
from kernel_contracts.vocabulary import METRIC_WORDS

__all__ = [
    "count_row",
    "finished_row",
    "mean_row",
    "over_cap",
    "share_row",
    "share_unit",
    "unobserved",
]


def unobserved(clause: Clause, name: str, metric: str, why: str) -> Measurement:
    """No evidence, and why."""
    limit = getattr(clause, "limit", None)
    return Measurement(
        clause=clause.id, slice=name, metric=metric, section="", value=None, lower=None,
        upper=None, limit=limit, n_prompts=0, n_tokens=0, verdict="UNOBSERVED", detail=why,
    )  # fmt: skip


def share_row(
    clause: NumericalClause, name: str, shares: Array, n_tokens: int, alpha: float
) -> Measurement:
    """A numerical clause from each prompt's share of tokens above its threshold, ``[prompts]`` in
    `prompt_order`."""
    return bounded_mean(
        clause.id, name, clause.metric, shares, clause.share or 0.0, 1.0, alpha, n_tokens=n_tokens
    )


def share_unit(clause: NumericalClause) -> str:
    """Unit of a numerical clause's value."""
    return f"share of tokens > {clause.exceeds:g}"


def count_row(
    clause: NumericalClause, name: str, total: int, rows: int, n_prompts: int, n_tokens: int
) -> Measurement:
    """An exact count against its limit. rows: with at least one of them."""
    limit = clause.limit or 0
    return Measurement(
        clause=clause.id, slice=name, metric=clause.metric, section="", value=float(total),
        lower=float(total), upper=float(total), limit=float(limit), n_prompts=n_prompts,
        n_tokens=n_tokens, verdict="PASS" if total <= limit else "FAIL", method="exact count",
        unit="values", path=clause.path, detail=f"in {rows} rows" if rows else "",
    )  # fmt: skip


def over_cap(cap: float) -> str:
    """Why a token-weighted mean has no bound."""
    return f"a prompt has more rows than the cap of {cap:g} that was stated beforehand"


def mean_row(
    clause: StatisticalClause,
    name: str,
    means: Array,
    counts: npt.NDArray[np.int64],
    alpha: float,
    cap: float,
) -> Measurement:
    """A statistical clause from each prompt's mean *less the metric's floor*, and its rows, both
    ``[prompts]`` in `prompt_order`. cap: most rows that a prompt could have, known beforehand."""
    by_token = clause.weight == "token"
    return bounded_mean(
        clause.id, name, clause.metric, means, (clause.target or 0.0) - clause.floor,
        clause.upper_end - clause.floor, alpha, n_tokens=int(counts.sum()),
        weights=counts.astype(np.float64) if by_token else None, cap=cap if by_token else None,
        tail=clause.tail if clause.needs_tail else None, floor=clause.floor,
    )  # fmt: skip


def finished_row(
    clause: StatisticalClause, row: Measurement, noise_floor: float | None
) -> Measurement:
    """A row of `mean_row` in the metric's own unit, with its warning."""
    row = replace(
        row,
        path=clause.path,
        unit=METRIC_WORDS[clause.metric].unit,
        noise_floor=noise_floor,
    )
    row = _shift(row, clause.floor)
    if clause.at_least is not None:
        return _invert(row, clause)
    warned = clause.warn is not None and row.value is not None and row.value > clause.warn
    return replace(row, warn=warned)


def _shift(row: Measurement, floor: float) -> Measurement:
    if floor == 0.0:
        return row
    shifted = {
        name: None if (v := getattr(row, name)) is None else v + floor
        for name in ("value", "lower", "upper", "limit")
    }
    return replace(row, **shifted)  # type: ignore[arg-type]


def _invert(row: Measurement, clause: StatisticalClause) -> Measurement:
    """Bounds of the mean of w^2 -> bounds of ESS / n = 1 / E[w^2] (weights of mean one)."""
    lower = None if not row.upper else 1.0 / row.upper
    upper = None if not row.lower else min(1.0, 1.0 / row.lower)
    value = None if not row.value else min(1.0, 1.0 / row.value)
    warned = clause.warn is not None and value is not None and value < clause.warn
    return replace(
        row, value=value, lower=lower, upper=upper, limit=clause.at_least, warn=warned,
        method=row.method + " on w^2",
    )  # fmt: skip
