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
    NumericalClause,
    ObservabilityClause,
    RuntimeClause,
    StatisticalClause,
)
from kernel_contracts.confidence import by_prompt, holm
from kernel_contracts.contract import Contract
from kernel_contracts.errors import AuditError
from kernel_contracts.measurement import Measurement, Verdict
from kernel_contracts.metrics import METRICS
from kernel_contracts.slices import Slice, resolve
from kernel_contracts.vocabulary import METRIC_WORDS
from mismatch_audit.trainers.sequential import PromiseTest

Measured = NumericalClause | StatisticalClause
NOT_SAMPLED = "needs the engine's whole distribution; on live rollouts promise k3 or abs_dlp"
FULL_ROWS = frozenset(
    {"kl_engine_reference", "kl_reference_engine", "tv", "chi2", "drift", "tail_mass", "flip_rate"}
)
"""Metrics that a sampled token's two log-probs cannot give."""


@dataclass
class _Seen:
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
    seen: dict[tuple[str, str], _Seen] = field(default_factory=dict)
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

    def fail_step(self) -> None:
        """A step of which nothing could be read: it happened, and nobody saw it."""
        self.steps += 1
        self.failed_steps += 1

    def _refuse(self, name: str, why: str) -> None:
        for clause in self.contract.clauses():
            if name in getattr(clause, "slices", ()):
                seen = self.seen.setdefault((clause.id, name), _Seen())
                seen.steps, seen.unobserved, seen.why = seen.steps + 1, seen.unobserved + 1, why

    def _count(
        self,
        clause: Measured | ObservabilityClause,
        one: Slice,
        frame: pd.DataFrame,
    ) -> None:
        seen = self.seen.setdefault((clause.id, one.name), _Seen())
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

    def _test(self, clause: Measured, seen: _Seen, rows: pd.DataFrame) -> str:
        """Feed the step's prompts to the clause's test; why not, where that cannot be done."""
        if clause.metric in FULL_ROWS:
            return NOT_SAMPLED
        if clause.metric == "policy_gradient_bias":
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
        if bad.mean() > max((c.max_missing for c in self.contract.observability), default=0.0):
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
        found: list[Measurement] = []
        for clause in self.contract.clauses():
            section = self.contract.section_of(clause)
            if isinstance(clause, RuntimeClause):
                row = _blank(clause.id, f"probe {clause.probe}", clause.metric, clause.limit)
                rows = [replace(row, detail="probes are not run inside a trainer")]
            else:
                mine = [(s, x) for (c, s), x in self.seen.items() if c == clause.id]
                mine = mine or [(name, _Seen()) for name in clause.slices]
                if isinstance(clause, ObservabilityClause):
                    rows = [self._observability(clause, name, x) for name, x in mine]
                else:
                    rows = self._corrected([self._row(clause, name, x) for name, x in mine])
            found += [replace(row, section=section) for row in rows]
        return [self._withheld(row) for row in found]

    def _row(self, clause: Measured, name: str, seen: _Seen) -> Measurement:
        limit = clause.share if isinstance(clause, NumericalClause) else clause.limit
        row = replace(
            _blank(clause.id, name, clause.metric, limit), path="decode",
            n_prompts=seen.prompts, n_tokens=seen.tokens, detail=seen.why or "no tokens yet",
        )  # fmt: skip
        if clause.metric == "nonfinite" and seen.prompts:
            limit = float(clause.limit or 0)
            verdict: Verdict = "PASS" if seen.count <= limit else "FAIL"
            return replace(
                row, value=float(seen.count), limit=limit, verdict=verdict, method="exact count",
                lower=float(seen.count), upper=float(seen.count), unit="values", detail="",
            )  # fmt: skip
        test = seen.test
        if test is None or test.n == 0:
            return row
        notes = []
        if test.clipped:
            notes.append(f"{test.clipped} of {test.n} prompts above the ceiling")
        if seen.unobserved:
            notes.append(f"{seen.unobserved} of {seen.steps} steps unobserved: {seen.why}")
        value = _shown(clause, test.mean)
        warn = getattr(clause, "warn", None)
        above = warn is not None and (
            value < warn if METRIC_WORDS[clause.metric].at_least else value > warn
        )
        return replace(
            row,
            value=value,
            limit=getattr(clause, "at_least", None) or limit,
            verdict="PASS" if test.passes else "INCONCLUSIVE",
            method="e-process, valid at any time",
            p_fail=test.p_value,
            clipped=test.clipped,
            warn=above,
            detail="; ".join(notes),
            unit=f"share of tokens > {clause.exceeds:g}"
            if isinstance(clause, NumericalClause)
            else METRIC_WORDS[clause.metric].unit,
        )

    def _corrected(self, rows: list[Measurement]) -> list[Measurement]:
        """FAIL where the alarm survives Holm over the clause's slices."""
        tested = [i for i, row in enumerate(rows) if row.p_fail is not None]
        if not tested:
            return rows
        adjusted = holm([rows[i].p_fail or 0.0 for i in tested], self.contract.alpha).adjusted
        out = list(rows)
        for i, p in zip(tested, adjusted, strict=True):
            verdict: Verdict = "FAIL" if p <= self.contract.alpha else rows[i].verdict
            out[i] = replace(rows[i], p_fail=float(p), verdict=verdict)
        return out

    def _observability(self, clause: ObservabilityClause, name: str, seen: _Seen) -> Measurement:
        missing = seen.missing_rows / seen.rows if seen.rows else 1.0
        reasons = [seen.why] if seen.why else []
        if seen.prompts < clause.min_prompts:
            reasons.append(f"{seen.prompts} prompts of {clause.min_prompts}")
        if seen.rows and missing > clause.max_missing and not seen.why:
            reasons.append(f"missing values in {', '.join(clause.require)}")
        met = not reasons and seen.rows > 0
        return replace(
            _blank(clause.id, name, "missing", clause.max_missing), value=missing,
            n_prompts=seen.prompts, n_tokens=seen.tokens, method="exact",
            verdict="PASS" if met else "UNOBSERVED", detail="; ".join(reasons),
        )  # fmt: skip

    def _withheld(self, row: Measurement) -> Measurement:
        """No pass where steps were not seen, or fewer prompts than the contract asks for."""
        if row.verdict != "PASS":
            return row
        allowed = max((c.max_missing for c in self.contract.observability), default=0.0)
        seen = self.seen.get((row.clause, row.slice), _Seen())
        lost = self.failed_steps + seen.unobserved
        if lost > allowed * self.steps:
            why = f"{lost} of {self.steps} steps were not observed"
            return replace(
                row, verdict="UNOBSERVED", detail="; ".join(filter(None, [row.detail, why]))
            )
        names = (row.slice, self.definition.get(row.slice, row.slice))
        for clause in self.contract.observability:
            if row.n_prompts < clause.min_prompts and any(n in clause.slices for n in names):
                why = f"{row.n_prompts} prompts, {clause.id} asks for {clause.min_prompts}"
                return replace(row, verdict="UNOBSERVED", detail=why)
        return row


def _finite(rows: pd.DataFrame, columns: Iterable[str]) -> npt.NDArray[np.bool_]:
    return np.isfinite(rows[list(columns)].to_numpy(dtype=np.float64)).all(axis=1)


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


def verdict_words(rows: Iterable[Measurement]) -> dict[str, int]:
    """How many rows have each verdict, for a log."""
    words: dict[str, int] = {}
    for row in rows:
        words[row.verdict] = words.get(row.verdict, 0) + 1
    return words
