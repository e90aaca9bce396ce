"""What the steps so far say about a contract: one sequential test per clause and slice.

The promises are those of ``kernel_contracts.verdict``; only the tests differ: there a table is
judged once, here evidence comes step by step and may be read at any time. The unit is the prompt
of a step: its rollouts' tokens give one value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from kernel_contracts.clauses import (
    Clause,
    NumericalClause,
    ObservabilityClause,
    RuntimeClause,
    StatisticalClause,
)
from kernel_contracts.confidence import by_prompt
from kernel_contracts.contract import Contract
from kernel_contracts.errors import AuditError
from kernel_contracts.measurement import Measurement
from kernel_contracts.metrics import METRICS
from kernel_contracts.slices import Slice, resolve
from kernel_contracts.verdict import judge_views
from kernel_contracts.vocabulary import GRADIENT_METRICS, METRIC_WORDS
from mismatch_audit.trainers.sequential import PromiseTest

Measured = NumericalClause | StatisticalClause
NOT_SAMPLED = "needs the engine's whole distribution; on live rollouts promise k3 or abs_dlp"
FULL_ROWS = frozenset(
    {"kl_engine_reference", "kl_reference_engine", "tv", "chi2", "drift", "tail_mass", "flip_rate"}
)
"""Metrics that a sampled token's two log-probs cannot give."""


@dataclass
class Seen:
    """A clause on a slice: its test, and what could not be tested."""

    test: PromiseTest | None = None
    count: int = 0
    prompts: int = 0
    tokens: int = 0
    steps: int = 0
    unobserved: int = 0
    why: str = ""
    missing_rows: int = 0
    rows: int = 0


@dataclass
class Evidence:
    """Counts one step after another. ``max_rows``: a-priori cap on a prompt's tokens in a step, for
    clauses weighted by token; None leaves those UNOBSERVED."""

    contract: Contract
    max_rows: int | None = None
    alarm_window: int = 16
    pass_window: int = 300
    seen: dict[tuple[str, str], Seen] = field(default_factory=dict)
    definition: dict[str, str] = field(default_factory=dict)
    failed_steps: int = 0
    steps: int = 0

    def add(self, frame: pd.DataFrame) -> list[Slice]:
        """Count one step's token frame; its slices. Raises nothing for a slice that cannot be made
        of these columns: what it names is UNOBSERVED."""
        self.steps += 1
        found: list[Slice] = []
        for name in self.contract.slices:
            try:
                found += resolve(self.contract, frame, names=[name])
            except AuditError as error:
                self._refuse(name, error.what)
        self.definition |= {one.name: one.definition for one in found}
        for clause in self.contract.clauses():
            if isinstance(clause, RuntimeClause):
                continue
            for one in found:
                if any(one.answers_to(name) for name in clause.slices):
                    self._count(clause, one, frame)
        return found

    @property
    def allowed(self) -> float:
        """Share of rows, and of steps, that the contract lets go missing."""
        return max((c.max_missing for c in self.contract.observability), default=0.0)

    def fail_step(self) -> None:
        """A step of which nothing could be read: it happened, and nobody saw it."""
        self.steps += 1
        self.failed_steps += 1

    def _refuse(self, name: str, why: str) -> None:
        for clause in self.contract.clauses():
            if name in getattr(clause, "slices", ()):
                seen = self.seen.setdefault((clause.id, name), Seen())
                seen.steps, seen.unobserved, seen.why = seen.steps + 1, seen.unobserved + 1, why

    def _count(
        self,
        clause: Measured | ObservabilityClause,
        one: Slice,
        frame: pd.DataFrame,
    ) -> None:
        seen = self.seen.setdefault((clause.id, one.name), Seen())
        rows = frame[one.mask]
        seen.steps += 1
        if isinstance(clause, ObservabilityClause):
            absent = [c for c in clause.require if c not in rows.columns]
            nulls = [int(rows[c].isna().sum()) for c in clause.require if c in rows.columns]
            seen.missing_rows += len(rows) if absent else max(nulls, default=0)
            seen.rows += len(rows)
            seen.prompts += int(rows["prompt_id"].nunique())
            seen.tokens += len(rows)
            seen.why = "no column " + ", ".join(absent) if absent else ""
            return
        if clause.path == "prefill":
            rows = rows[:0]
        if len(rows) == 0:
            return
        if why := self._test(clause, seen, rows):
            seen.unobserved, seen.why = seen.unobserved + 1, why

    def _test(self, clause: Measured, seen: Seen, rows: pd.DataFrame) -> str:
        """Feed the step's prompts to the clause's test; why not, where that cannot be done."""
        if clause.metric in FULL_ROWS:
            return NOT_SAMPLED
        if clause.metric in GRADIENT_METRICS:
            return "not measured on live rollouts"
        if clause.metric == "nonfinite":
            if "nonfinite" not in rows:
                return "non-finite values were not counted"
            seen.count += int(rows["nonfinite"].sum())
            seen.prompts += int(rows["prompt_id"].nunique())
            seen.tokens += len(rows)
            return ""
        spec = METRICS[clause.metric]
        absent = [c for c in spec.columns if c not in rows.columns]
        if absent:
            return "no column " + ", ".join(absent)
        with np.errstate(over="ignore"):
            values = spec.values(rows)
        # Two finite log-probs that are further apart than exp() can say are no gap in the evidence.
        values = np.where(np.isposinf(values) & _finite(rows, spec.columns), 1e12, values)
        bad = ~np.isfinite(values)
        if bad.mean() > self.allowed:
            return f"{int(bad.sum())} of {len(bad)} tokens have no finite value on both sides"
        if seen.test is None:
            seen.test = self._new_test(clause)
        if isinstance(clause, NumericalClause):
            values, floor = (values > (clause.exceeds or 0.0)).astype(np.float64), 0.0
        else:
            floor = clause.floor
        ids = rows["prompt_id"].to_numpy()[~bad]
        sums = by_prompt(values[~bad] - floor, ids)
        weighted = isinstance(clause, StatisticalClause) and clause.weight == "token"
        if weighted and (self.max_rows is None or sums.count.max() > self.max_rows):
            return "weighted by token, and no cap on a prompt's tokens was given (max_rows)"
        for value, size in zip(sums.mean, sums.count, strict=True):
            weight = float(size) if weighted else None
            # Rounding alone takes k3 or exp|dlp| - 1 below their floor of 0.
            seen.test.update(max(float(value), 0.0), weight)
        seen.prompts += len(sums.mean)
        seen.tokens += int((~bad).sum())
        return ""

    def _new_test(self, clause: Measured) -> PromiseTest:
        options = {
            "alpha": self.contract.alpha,
            "alarm_window": self.alarm_window,
            "pass_window": self.pass_window,
        }
        if isinstance(clause, NumericalClause):
            return PromiseTest(clause.share or 0.0, 1.0, **options)  # type: ignore[arg-type]
        floor = clause.floor
        return PromiseTest(
            (clause.target or 0.0) - floor,
            clause.upper_end - floor,
            tail=clause.tail if clause.needs_tail else None,
            weight_cap=float(self.max_rows or 1) if clause.weight == "token" else None,
            **options,  # type: ignore[arg-type]
        )

    def measurements(self) -> list[Measurement]:
        """Every clause on every slice that was seen, in the contract's order."""
        names = dict.fromkeys(name for _, name in self.seen)
        views = [_View(self, name, self.definition.get(name, name)) for name in names]
        return judge_views(self.contract, views, _not_run)


@dataclass(frozen=True)
class _View:
    """A slice as ``judge_views`` asks for it."""

    evidence: Evidence
    name: str
    definition: str

    def _seen(self, clause: Clause) -> Seen:
        return self.evidence.seen.get((clause.id, self.name), Seen())

    def numerical(self, clause: NumericalClause) -> Measurement:
        """The share of tokens beyond the threshold; an exact count of non-finite values."""
        seen, row = self._seen(clause), self._row(clause, clause.share)
        if clause.metric == "nonfinite" and not seen.prompts:
            return row
        if clause.metric != "nonfinite":
            return self._tested(row, seen, clause, f"share of tokens > {clause.exceeds:g}")
        count, limit = float(seen.count), float(clause.limit or 0)
        return replace(
            row, value=count, lower=count, upper=count, limit=limit, unit="values", detail="",
            verdict="PASS" if count <= limit else "FAIL", method="exact count",
        )  # fmt: skip

    def statistical(self, clause: StatisticalClause) -> Measurement:
        """The mean over prompts of a step."""
        word = METRIC_WORDS[clause.metric]
        row = self._row(clause, clause.at_least or clause.limit)
        row = self._tested(row, self._seen(clause), clause, word.unit)
        if row.value is None or clause.warn is None:
            return row
        beyond = row.value < clause.warn if word.at_least else row.value > clause.warn
        return replace(row, warn=beyond)

    def observability(self, clause: ObservabilityClause) -> Measurement:
        """Rows with a null in a required column, and prompts seen."""
        seen = self._seen(clause)
        missing = seen.missing_rows / seen.rows if seen.rows else 1.0
        reasons = [seen.why] if seen.why else []
        if seen.prompts < clause.min_prompts:
            reasons.append(f"{seen.prompts} prompts of {clause.min_prompts}")
        if seen.rows and missing > clause.max_missing and not seen.why:
            reasons.append(f"missing values in {', '.join(clause.require)}")
        if self.evidence.failed_steps > self.evidence.allowed * self.evidence.steps:
            reasons.append(f"{self.evidence.failed_steps} steps were not observed")
        return replace(
            _blank(clause.id, self.name, "missing", clause.max_missing), value=missing,
            n_prompts=seen.prompts, n_tokens=seen.tokens, method="exact",
            verdict="UNOBSERVED" if reasons or not seen.rows else "PASS",
            detail="; ".join(reasons),
        )  # fmt: skip

    def too_few(self) -> str:
        """Why there is no pass on this slice: steps that were not seen, or too few prompts."""
        evidence = self.evidence
        mine = [seen for (_, name), seen in evidence.seen.items() if name == self.name]
        lost = evidence.failed_steps + max((seen.unobserved for seen in mine), default=0)
        if lost > evidence.allowed * evidence.steps:
            why = next((f": {seen.why}" for seen in mine if seen.unobserved), "")
            return f"{lost} of {evidence.steps} steps were not observed{why}"
        prompts = max((seen.prompts for seen in mine), default=0)
        for clause in evidence.contract.observability:
            asked = {self.name, self.definition}.intersection(clause.slices)
            if asked and prompts < clause.min_prompts:
                return f"{prompts} prompts, {clause.id} asks for {clause.min_prompts}"
        return ""

    def _row(self, clause: Measured, limit: float | None) -> Measurement:
        seen = self._seen(clause)
        return replace(
            _blank(clause.id, self.name, clause.metric, limit), path="decode",
            n_prompts=seen.prompts, n_tokens=seen.tokens, detail=seen.why or "no tokens yet",
        )  # fmt: skip

    def _tested(self, row: Measurement, seen: Seen, clause: Measured, unit: str) -> Measurement:
        test = seen.test
        if test is None or test.n == 0:
            return row
        notes = []
        if test.clipped:
            notes.append(f"{test.clipped} of {test.n} prompts above the ceiling")
        if seen.unobserved:
            notes.append(f"{seen.unobserved} of {seen.steps} steps unobserved: {seen.why}")
        # A promise that was certainly broken once is no pass, however good the last steps are.
        passed = test.passes and test.p_value > self.evidence.contract.alpha
        return replace(
            row, value=_shown(clause, test.mean), verdict="PASS" if passed else "INCONCLUSIVE",
            method="e-process, valid at any time", p_fail=test.p_value, clipped=test.clipped,
            detail="; ".join(notes), unit=unit,
        )  # fmt: skip


def _not_run(clause: RuntimeClause) -> Measurement:
    row = _blank(clause.id, f"probe {clause.probe}", clause.metric, clause.limit)
    return replace(row, detail="probes are not run inside a trainer")


def _finite(rows: pd.DataFrame, columns: Iterable[str]) -> npt.NDArray[np.bool_]:
    return np.asarray(np.isfinite(rows[list(columns)].to_numpy(dtype=np.float64)).all(axis=1))


def _shown(clause: Measured, mean: float) -> float:
    """The tested mean in the clause's own unit."""
    if isinstance(clause, NumericalClause):
        return mean
    if clause.at_least is not None:
        return min(1.0, 1.0 / mean) if mean > 0 else 1.0
    return mean + clause.floor


def _blank(clause: str, name: str, metric: str, limit: float | None) -> Measurement:
    return Measurement(
        clause=clause, slice=name, metric=metric, section="", value=None, lower=None, upper=None,
        limit=limit, n_prompts=0, n_tokens=0, verdict="UNOBSERVED",
    )  # fmt: skip
