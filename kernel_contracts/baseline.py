"""Is this run worse than the last one that was accepted? Change as well as level.

The same prompts went through both runs, so each prompt is compared with itself: the spread between
prompts, which is most of the spread, cancels. Per statistical clause and slice

    d_i = min(a_i, c) - min(b_i, c)        a_i, b_i: a prompt's mean now and then, c: the ceiling

and the promise is mean d <= margin, tested by betting on d in [-(c - floor), c - floor]. The margin
is a share of the clause's limit: a run may use up that much of what is left, and no more.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from kernel_contracts.bounded import bounded_mean
from kernel_contracts.clauses import StatisticalClause
from kernel_contracts.confidence import by_prompt
from kernel_contracts.contract import Contract
from kernel_contracts.errors import InputError
from kernel_contracts.measurement import Measurement
from kernel_contracts.metrics import METRICS
from kernel_contracts.row_values import finite_values, holm_over_slices, rows_on_path
from kernel_contracts.slices import Slice, resolve
from kernel_contracts.verdict import Evidence
from kernel_contracts.vocabulary import METRIC_WORDS

__all__ = ["CHANGE", "compare_with_baseline"]

CHANGE = " vs baseline"
"""Put behind a clause's id in the rows of the comparison."""


def compare_with_baseline(
    contract: Contract, current: Evidence, baseline: Evidence, *, margin: float = 0.25
) -> list[Measurement]:
    """One measurement for each statistical clause on each slice that both runs have.

    margin: the share of a clause's limit by which its mean may rise. Each run draws the slices by
    its own rows; prompts that only one run has on a slice are left out and counted. Clauses whose
    metric has no per-prompt mean (``policy_gradient_bias``) are not compared.
    Raises InputError for a margin that is not positive.
    """
    if not margin > 0:
        raise InputError(f"the margin must be positive, got {margin:g}")
    now = {s.name: s for s in resolve(contract, current.tokens, current.prompts)}
    then = {s.name: s for s in resolve(contract, baseline.tokens, baseline.prompts)}
    found: list[Measurement] = []
    for clause in contract.statistical:
        if clause.metric not in METRICS:
            continue
        rows = [
            _change(contract, clause, one, then.get(name), current, baseline, margin)
            for name, one in now.items()
            if any(one.answers_to(asked) for asked in clause.slices)
        ]
        found += holm_over_slices(rows, contract.alpha)
    return found


def _change(
    contract: Contract,
    clause: StatisticalClause,
    one: Slice,
    other: Slice | None,
    current: Evidence,
    baseline: Evidence,
    margin: float,
) -> Measurement:
    name = clause.id + CHANGE
    allowed = margin * ((clause.target or 0.0) - clause.floor)
    if other is None:
        return _none(name, one.name, clause, allowed, "the baseline has no such slice")
    means = []
    for side, evidence in ((one, current), (other, baseline)):
        values, frame, why = finite_values(
            contract, clause.metric, rows_on_path(clause, side, evidence.tokens)
        )
        if why or not isinstance(values, np.ndarray):
            why = why or "rows are intervals, whose change is not known"
            return _none(name, one.name, clause, allowed, why)
        sums = by_prompt(values, frame["prompt_id"].to_numpy())
        clipped = np.minimum(sums.mean, clause.upper_end)
        means.append(pd.Series(clipped, index=list(sums.prompt_ids)))
    shared = means[0].index.intersection(means[1].index)
    alone = len(means[0].index.union(means[1].index)) - len(shared)
    if len(shared) == 0:
        return _none(name, one.name, clause, allowed, "no prompt is in both runs")
    change = (means[0][shared] - means[1][shared]).to_numpy(dtype=np.float64)
    reach = clause.upper_end - clause.floor
    row = bounded_mean(
        name, one.name, clause.metric, change + reach, allowed + reach, 2 * reach, contract.alpha,
        n_tokens=int(one.mask.sum()), floor=-reach,
    )  # fmt: skip
    notes = [row.detail, f"{alone} prompts are in one run only" if alone else ""]
    return replace(
        row,
        section="statistical",
        value=float(change.mean()),
        lower=_less(row.lower, reach),
        upper=_less(row.upper, reach),
        limit=allowed,
        path=clause.path,
        unit=METRIC_WORDS[clause.metric].unit,
        method=f"{row.method}, paired by prompt",
        detail="; ".join(n for n in notes if n),
    )


def _less(value: float | None, reach: float) -> float | None:
    return None if value is None else value - reach


def _none(
    name: str, where: str, clause: StatisticalClause, allowed: float, why: str
) -> Measurement:
    return Measurement(
        clause=name, slice=where, metric=clause.metric, section="statistical", value=None,
        lower=None, upper=None, limit=allowed, n_prompts=0, n_tokens=0, verdict="UNOBSERVED",
        detail=why,
    )  # fmt: skip
