"""Measurements and a contract -> verdicts. Was each promise kept, on each slice, for certain?

PASS needs the upper confidence bound within the limit, FAIL a lower bound beyond it; missing
evidence is UNOBSERVED, anything between is INCONCLUSIVE. A release needs every slice to pass, an
intersection-union test, so passes are not corrected; each FAIL is acted on by itself, so fails are
Holm-corrected over a clause's slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from typing import Protocol

import numpy as np
import pandas as pd

from kernel_contracts.acknowledge import acknowledge
from kernel_contracts.bounded import bounded_mean
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
    Clause,
    NumericalClause,
    ObservabilityClause,
    RuntimeClause,
    StatisticalClause,
)
from kernel_contracts.confidence import by_prompt
from kernel_contracts.contract import Contract
from kernel_contracts.measurement import Measurement
from kernel_contracts.metrics import Array
from kernel_contracts.row_values import (
    finite_values,
    holm_over_slices,
    judged_rows,
    rows_on_path,
)
from kernel_contracts.slices import Slice, resolve
from kernel_contracts.vocabulary import GRADIENT_METRICS, METRIC_WORDS

Each = Callable[
    [Callable[["SliceView"], Measurement], Iterable["SliceView"]], Iterable[Measurement]
]


@dataclass(frozen=True)
class BiasEstimate:
    """A measured policy-gradient bias with its one-sided bounds (relative, no unit)."""

    value: float
    lower: float
    upper: float
    n_prompts: int
    n_tokens: int
    method: str


@dataclass(frozen=True)
class Evidence:
    """All that an audit has seen.

    tokens: token table (both paths).  prompts: one row a prompt with metadata.  probes: one row a
    probe and prompt: ``probe, prompt_id, n_tokens, kl, abs_dlp, flip_rate``.  noise: metric -> its
    mean for a program against itself.  max_rows: a-priori cap on a prompt's rows (the horizon).
    gradient: slice -> measured policy-gradient bias, relative to the gradient.  gradient_noise: the
    same bias relative to the rms of one prompt's gradient.
    """

    tokens: pd.DataFrame
    prompts: pd.DataFrame
    probes: pd.DataFrame = field(default_factory=pd.DataFrame)
    noise: Mapping[str, float] = field(default_factory=dict)
    max_rows: int = 0
    gradient: Mapping[str, BiasEstimate] = field(default_factory=dict)
    gradient_noise: Mapping[str, BiasEstimate] = field(default_factory=dict)


class SliceView(Protocol):
    """What an audit has seen of one slice, in whatever form it keeps it: a token table's rows
    (here), or per-prompt sums (``kernel_contracts.sums``)."""

    @property
    def name(self) -> str: ...

    @property
    def definition(self) -> str: ...

    def observability(self, clause: ObservabilityClause) -> Measurement: ...

    def numerical(self, clause: NumericalClause) -> Measurement: ...

    def statistical(self, clause: StatisticalClause) -> Measurement: ...

    def too_few(self) -> str:
        """Why an observability clause forbids a pass on this slice, or nothing."""
        ...


def judge(
    contract: Contract, evidence: Evidence, *, today: date | None = None
) -> list[Measurement]:
    """Every clause on every one of its slices, in the contract's order.

    today: of the contract's acknowledgements; the day of the call (UTC) where it is not given.
    """
    slices = resolve(contract, evidence.tokens, evidence.prompts)
    views = [_Rows(contract, one, evidence) for one in slices]
    return judge_views(
        contract, views, lambda clause: _runtime(clause, evidence, contract.alpha), today=today
    )


def judge_views(
    contract: Contract,
    views: Sequence[SliceView],
    runtime: Callable[[RuntimeClause], Measurement],
    *,
    today: date | None = None,
    each: Each = map,
) -> list[Measurement]:
    """As `judge`, from slices in any form. runtime: judges a clause on the engine's own probes.
    each: maps over a clause's slices in order; an executor's ``map`` judges them in threads."""
    found: list[Measurement] = []
    for clause in contract.clauses():
        found += _judge_clause(contract, clause, views, runtime, each)
    definition = {view.name: view.definition for view in views}
    day = today or datetime.now(UTC).date()
    return acknowledge(contract.acknowledge, found, definition, day)


def _judge_clause(
    contract: Contract,
    clause: Clause,
    views: Sequence[SliceView],
    runtime: Callable[[RuntimeClause], Measurement],
    each: Each,
) -> list[Measurement]:
    section, alpha = contract.section_of(clause), contract.alpha
    asked = (
        {}
        if isinstance(clause, RuntimeClause)
        else {
            view.name: view
            for view in views
            if not {view.name, view.definition}.isdisjoint(clause.slices)
        }
    )
    rows = []
    if isinstance(clause, RuntimeClause):
        rows = [runtime(clause)]
    elif isinstance(clause, ObservabilityClause):
        rows = list(each(lambda view: view.observability(clause), asked.values()))
    elif isinstance(clause, NumericalClause):
        rows = list(each(lambda view: view.numerical(clause), asked.values()))
    else:
        rows = list(each(lambda view: view.statistical(clause), asked.values()))
    if not rows:
        names = ", ".join(getattr(clause, "slices", ("all",)))
        rows = [unobserved(clause, names, "", "no slice")]
    judged = [replace(m, section=section) for m in holm_over_slices(rows, alpha)]
    if not isinstance(clause, RuntimeClause | ObservabilityClause):
        judged = [_withheld(m, asked[m.slice].too_few() if asked else "") for m in judged]
    optional = {name for name, v in asked.items() if contract.slices[v.definition].optional}
    return [replace(m, optional=m.slice in optional) for m in judged]


def _withheld(row: Measurement, why: str) -> Measurement:
    """Too little was seen for a pass; a violation that is certain all the same stands."""
    if not why or row.verdict in ("FAIL", "UNOBSERVED"):
        return row
    return replace(row, verdict="UNOBSERVED", detail=why)


@dataclass(frozen=True, eq=False)
class _Rows:
    """A slice of a token table."""

    contract: Contract
    slice: Slice
    evidence: Evidence

    @property
    def name(self) -> str:
        return self.slice.name

    @property
    def definition(self) -> str:
        return self.slice.definition

    def observability(self, clause: ObservabilityClause) -> Measurement:
        return _observability(clause, self.slice, self.evidence)

    def numerical(self, clause: NumericalClause) -> Measurement:
        return _numerical(self.contract, clause, self.slice, self.evidence)

    def statistical(self, clause: StatisticalClause) -> Measurement:
        return _statistical(self.contract, clause, self.slice, self.evidence)

    def too_few(self) -> str:
        return _too_few(self.contract, self.slice, self.evidence)


def _too_few(contract: Contract, one: Slice, evidence: Evidence) -> str:
    allowed = max((c.max_missing for c in contract.observability), default=0.0)
    if one.missing > allowed * len(evidence.tokens):
        return f"{one.missing} rows have a null in a column that decides the slice"
    n = evidence.tokens["prompt_id"][one.mask].nunique() if one.rows else 0
    for clause in contract.observability:
        if any(one.answers_to(name) for name in clause.slices) and n < clause.min_prompts:
            return f"{n} prompts, {clause.id} asks for {clause.min_prompts}"
    return ""


def _observability(clause: ObservabilityClause, one: Slice, evidence: Evidence) -> Measurement:
    frame = evidence.tokens[one.mask]
    n = int(frame["prompt_id"].nunique()) if len(frame) else 0
    absent = [c for c in clause.require if c not in frame.columns]
    missing = (
        max((float(frame[c].isna().mean()) for c in clause.require), default=0.0)
        if len(frame) and not absent
        else 1.0
    )
    worst = [
        c for c in clause.require if c in frame and frame[c].isna().mean() > clause.max_missing
    ]
    met = n >= clause.min_prompts and not absent and missing <= clause.max_missing and n > 0
    reasons = []
    if n < clause.min_prompts:
        reasons.append(f"{n} prompts of {clause.min_prompts}")
    if absent:
        reasons.append("no column " + ", ".join(absent))
    if worst:
        reasons.append("missing values in " + ", ".join(worst))
    return Measurement(
        clause=clause.id, slice=one.name, metric="missing", section="", value=missing, lower=None,
        upper=None, limit=clause.max_missing, n_prompts=n, n_tokens=len(frame),
        verdict="PASS" if met else "UNOBSERVED", method="exact", detail="; ".join(reasons),
    )  # fmt: skip


def _numerical(
    contract: Contract, clause: NumericalClause, one: Slice, evidence: Evidence
) -> Measurement:
    frame = rows_on_path(clause, one, evidence.tokens)
    if clause.metric == "nonfinite":
        return _count(clause, one, frame)
    values, frame, why = finite_values(contract, clause.metric, frame)
    if why:
        return unobserved(clause, one.name, clause.metric, why)

    def judged(rows: Array) -> Measurement:
        exceed = (rows > (clause.exceeds or 0.0)).astype(np.float64)
        sums = by_prompt(exceed, frame["prompt_id"].to_numpy())
        return share_row(clause, one.name, sums.mean, len(rows), contract.alpha)

    return replace(judged_rows(values, judged), path=clause.path, unit=share_unit(clause))


def _count(clause: NumericalClause, one: Slice, frame: pd.DataFrame) -> Measurement:
    if frame.empty or "nonfinite" not in frame or frame["nonfinite"].isna().any():
        return unobserved(clause, one.name, clause.metric, "non-finite values were not counted")
    counts = frame["nonfinite"]
    return count_row(
        clause, one.name, int(counts.sum()), int((counts > 0).sum()),
        int(frame["prompt_id"].nunique()), len(frame),
    )  # fmt: skip


def _statistical(
    contract: Contract, clause: StatisticalClause, one: Slice, evidence: Evidence
) -> Measurement:
    if clause.metric in GRADIENT_METRICS:
        return _gradient(clause, one, evidence)
    values, frame, why = finite_values(
        contract, clause.metric, rows_on_path(clause, one, evidence.tokens)
    )
    if why:
        return unobserved(clause, one.name, clause.metric, why)
    ids = frame["prompt_id"].to_numpy()
    cap = float(evidence.max_rows * (2 if clause.path == "both" else 1))
    if clause.weight == "token" and int(by_prompt(np.ones(len(ids)), ids).count.max()) > cap:
        return unobserved(clause, one.name, clause.metric, over_cap(cap))

    def judged(rows: Array) -> Measurement:
        sums = by_prompt(rows - clause.floor, ids)
        return mean_row(clause, one.name, sums.mean, sums.count, contract.alpha, cap)

    row = judged_rows(values, judged)
    return finished_row(clause, row, evidence.noise.get(clause.metric))


def _gradient(clause: StatisticalClause, one: Slice, evidence: Evidence) -> Measurement:
    relative = clause.metric == "policy_gradient_bias"
    estimate = (evidence.gradient if relative else evidence.gradient_noise).get(one.name)
    if estimate is None:
        return unobserved(clause, one.name, clause.metric, "not measured: run with --gradient")
    limit = clause.limit or 0.0
    verdict = (
        "PASS" if estimate.upper <= limit else "FAIL" if estimate.lower > limit else "INCONCLUSIVE"
    )
    return Measurement(
        clause=clause.id, slice=one.name, metric=clause.metric, section="", value=estimate.value,
        lower=estimate.lower, upper=estimate.upper, limit=limit, n_prompts=estimate.n_prompts,
        n_tokens=estimate.n_tokens, verdict=verdict, method=estimate.method,  # type: ignore[arg-type]
        path=clause.path, warn=clause.warn is not None and estimate.value > clause.warn,
    )  # fmt: skip


def _runtime(clause: RuntimeClause, evidence: Evidence, alpha: float) -> Measurement:
    probes = evidence.probes
    rows = probes[probes["probe"] == clause.probe] if len(probes) else probes
    name = f"probe {clause.probe}"
    if not len(rows):
        return unobserved(clause, name, clause.metric, "the probe was not run")
    values = rows[clause.metric].to_numpy(dtype=np.float64)
    if not np.isfinite(values).all():
        return unobserved(clause, name, clause.metric, "the probe met non-finite values")
    sums = by_prompt(values, rows["prompt_id"].to_numpy())
    row = bounded_mean(
        clause.id, name, clause.metric, sums.mean, clause.limit, clause.upper_end, alpha,
        n_tokens=int(rows["n_tokens"].sum()), tail=clause.tail if clause.needs_tail else None,
    )  # fmt: skip
    warned = clause.warn is not None and row.value is not None and row.value > clause.warn
    return replace(row, warn=warned, unit=METRIC_WORDS[clause.metric].unit)
