"""Judging from per-prompt sums, where the rows themselves are too many to keep.

Verdicts need no more of a slice than each prompt's sum and count: the bounds are of means over
prompts. The same clauses, bounds and corrections as on a token table, and the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date

import numpy as np
import numpy.typing as npt

from kernel_contracts.clause_rows import (
    count_row,
    finished_row,
    mean_row,
    over_cap,
    share_row,
    share_unit,
    unobserved,
)
from kernel_contracts.clauses import (
    NumericalClause,
    ObservabilityClause,
    RuntimeClause,
    StatisticalClause,
)
from kernel_contracts.contract import Contract
from kernel_contracts.measurement import Measurement
from kernel_contracts.metrics import Array
from kernel_contracts.verdict import Each, judge_views
from kernel_contracts.vocabulary import GRADIENT_METRICS

Counts = npt.NDArray[np.int64]

PATH = "decode"
"""Recorded rollouts were drawn token by token: all their rows are decode rows."""


@dataclass(frozen=True)
class PromptTotals:
    """A slice's prompts, in `confidence.prompt_order` (or rising 64-bit prefixes of the same hash).

    usable: [P] rows with a value.  rows: [P] all rows, those without a value included.
    sums: metric -> [P] sum of its values over usable rows.  above: (metric, threshold) -> [P] how
    many usable rows exceed it.
    """

    usable: Counts
    rows: Counts
    sums: Mapping[str, Array]
    above: Mapping[tuple[str, float], Array]


@dataclass(frozen=True)
class SumSlice:
    """One slice of a log.

    totals: reads its sums (they may lie on disk), each time anew.  n_prompts, n_rows: of them, rows
    without a value included.  why: says that there are none, and why.
    unknown: rows that a null keeps out of every slice of the definition.  missing: column of the
    token table -> share of rows without a value; a column that is not there is absent.  nonfinite:
    (values, rows with one), None where they were not counted.
    """

    name: str
    definition: str
    totals: Callable[[], PromptTotals]
    n_prompts: int
    n_rows: int
    why: str = ""
    unknown: int = 0
    missing: Mapping[str, float] = field(default_factory=dict)
    nonfinite: tuple[int, int] | None = None


def judge_sums(
    contract: Contract,
    slices: Sequence[SumSlice],
    *,
    total_rows: int,
    max_rows: int = 0,
    today: date | None = None,
    each: Each = map,
) -> list[Measurement]:
    """Every clause on every slice, as `verdict.judge` does it from a token table.

    total_rows: of the whole log.  max_rows: most rows that a prompt could have, known beforehand
    (for token-weighted clauses).  Runtime clauses and a policy gradient cannot be judged on
    recorded rollouts: UNOBSERVED.
    """
    views = [_Sums(contract, one, total_rows, max_rows) for one in slices]
    return judge_views(contract, views, _no_probe, today=today, each=each)


def _no_probe(clause: RuntimeClause) -> Measurement:
    why = "recorded rollouts hold no probe: use `audit run`"
    return unobserved(clause, f"probe {clause.probe}", clause.metric, why)


class _Sums:
    def __init__(self, contract: Contract, one: SumSlice, total_rows: int, max_rows: int) -> None:
        self.contract, self.slice = contract, one
        self.total_rows, self.max_rows = total_rows, max_rows
        self.name, self.definition = one.name, one.definition
        self.n_prompts, self.n_rows = one.n_prompts, one.n_rows
        self.allowed = max((c.max_missing for c in contract.observability), default=0.0)

    def observability(self, clause: ObservabilityClause) -> Measurement:
        shares = {c: self.slice.missing.get(c) for c in clause.require}
        absent = [c for c, share in shares.items() if share is None]
        known = [share for share in shares.values() if share is not None]
        n = self.n_prompts
        missing = max(known, default=0.0) if n and not absent else 1.0
        worst = [c for c, share in shares.items() if share and share > clause.max_missing]
        reasons = [self.slice.why] if self.slice.why else []
        if n < clause.min_prompts:
            reasons.append(f"{n} prompts of {clause.min_prompts}")
        if absent and not self.slice.why:
            reasons.append("no column " + ", ".join(absent))
        if worst and n:
            reasons.append("missing values in " + ", ".join(worst))
        met = n > 0 and n >= clause.min_prompts and not absent and missing <= clause.max_missing
        return Measurement(
            clause=clause.id, slice=self.name, metric="missing", section="", value=missing,
            lower=None, upper=None, limit=clause.max_missing, n_prompts=n, n_tokens=self.n_rows,
            verdict="PASS" if met else "UNOBSERVED", method="exact", detail="; ".join(reasons),
        )  # fmt: skip

    def numerical(self, clause: NumericalClause) -> Measurement:
        if why := self._no_rows(clause):
            return unobserved(clause, self.name, clause.metric, why)
        if clause.metric == "nonfinite":
            if self.slice.nonfinite is None:
                why = "non-finite values were not counted"
                return unobserved(clause, self.name, clause.metric, why)
            total, rows = self.slice.nonfinite
            return count_row(clause, self.name, total, rows, self.n_prompts, self.n_rows)
        totals = self.slice.totals()
        above, usable = totals.above.get((clause.metric, clause.exceeds or 0.0)), totals.usable
        if above is None:
            return unobserved(clause, self.name, clause.metric, _not_kept(clause.metric))
        if why := self._too_many_missing(usable):
            return unobserved(clause, self.name, clause.metric, why)
        seen = usable > 0
        row = share_row(
            clause, self.name, above[seen] / usable[seen], int(usable.sum()), self.contract.alpha
        )
        return replace(row, path=clause.path, unit=share_unit(clause))

    def statistical(self, clause: StatisticalClause) -> Measurement:
        if why := self._no_rows(clause):
            return unobserved(clause, self.name, clause.metric, why)
        totals = self.slice.totals()
        sums, usable = totals.sums.get(clause.metric), totals.usable
        if sums is None:
            return unobserved(clause, self.name, clause.metric, _not_kept(clause.metric))
        if why := self._too_many_missing(usable):
            return unobserved(clause, self.name, clause.metric, why)
        seen = usable > 0
        counts = usable[seen]
        if clause.weight == "token" and int(counts.max()) > self.max_rows:
            return unobserved(clause, self.name, clause.metric, over_cap(self.max_rows))
        means = sums[seen] / counts - clause.floor
        row = mean_row(clause, self.name, means, counts, self.contract.alpha, float(self.max_rows))
        return finished_row(clause, row, None)

    def too_few(self) -> str:
        if self.slice.unknown > self.allowed * self.total_rows:
            return f"{self.slice.unknown} rows have a null in a column that decides the slice"
        n = self.n_prompts
        for clause in self.contract.observability:
            asked = not {self.name, self.definition}.isdisjoint(clause.slices)
            if asked and n < clause.min_prompts:
                return f"{n} prompts, {clause.id} asks for {clause.min_prompts}"
        return ""

    def _no_rows(self, clause: NumericalClause | StatisticalClause) -> str:
        if clause.path not in (PATH, "both"):
            return f"recorded rollouts have {PATH} rows only"
        if self.slice.why:
            return self.slice.why
        return "" if self.n_prompts else "no rows"

    def _too_many_missing(self, usable: Counts) -> str:
        """As on a token table: missing values beyond what is allowed mean that nothing is known."""
        seen = int(usable.sum())
        if self.n_rows - seen > self.allowed * self.n_rows or seen == 0:
            return f"{self.n_rows - seen} of {self.n_rows} rows have no finite value"
        return ""


def _not_kept(metric: str) -> str:
    if metric in GRADIENT_METRICS:
        return "not measured on recorded rollouts: `audit run --gradient`"
    return f"{metric} needs full distributions: recorded rollouts keep the sampled token's log-prob"
