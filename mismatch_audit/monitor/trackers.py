"""Sequential tests of a contract's clauses, slice by slice: look as often as you like.

A clause on a slice has up to four e-processes: that its mean is beyond the limit (alarm) or within
it (pass), and the same of the share of prompts above the ceiling. A pass needs both, uncorrected
(every slice must pass). Alarms are corrected over a clause's slices by Holm; where traffic can
bring new slices, in blocks that share alpha as 1/2, 1/4, ..., so that the chance of *any* false
alarm of a clause, at any time and with any slices to come, is at most alpha.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kernel_contracts.confidence import EProcess, holm
from kernel_contracts.contract import Contract
from kernel_contracts.errors import InputError
from mismatch_audit.monitor.observe import BoundedClause, Observations, fixed_slices

BLOCK = 8
"""New slices in the first block; each later block takes twice as many at half the level."""

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE", "UNOBSERVED"]


@dataclass(frozen=True)
class Plan:
    """How the tests are tuned. horizon: prompts that the stakes are tuned to; validity does not
    depend on it.  max_rows: a-priori cap on a prompt's tokens, for clauses weighted by tokens."""

    alpha: float
    horizon: int = 300
    max_rows: int = 4096


class Tracker:
    """The e-processes of one clause on one slice."""

    def __init__(self, clause: BoundedClause, plan: Plan) -> None:
        self.clause, self.plan = clause, plan
        cap = float(plan.max_rows) if clause.weighted else None
        self.processes: dict[str, EProcess] = {
            side: EProcess(
                limit=clause.limit, ceiling=clause.ceiling, side=side, alpha=plan.alpha,
                horizon=plan.horizon, weight_cap=cap, remember=False,
            )
            for side in ("above", "below")
        }  # fmt: skip
        if clause.tail is not None:
            for side in ("above", "below"):
                self.processes[f"{side}_tail"] = EProcess(
                    limit=clause.tail, ceiling=1.0, side=side, alpha=plan.alpha,
                    horizon=plan.horizon, remember=False,
                )  # fmt: skip
        self.tokens = 0

    def update(self, value: float, rows: int) -> None:
        """Count one prompt. value: above the metric's floor.  The caller lets none in twice."""
        for name, process in self.processes.items():
            if name.endswith("_tail"):
                process.update(float(value > self.clause.ceiling), prompt_id="")
            else:
                weight = float(rows) if self.clause.weighted else None
                process.update(value, prompt_id="", weight=weight)
        self.tokens += rows

    @property
    def n(self) -> int:
        """Prompts counted."""
        return self.processes["above"].n

    @property
    def log_e(self) -> float:
        """log of the alarm's current wealth (of the mean)."""
        return self.processes["above"].log_e

    @property
    def p_fail(self) -> float:
        """p-value, at any time, of "the promise is kept"."""
        ps = [p.p_value for name, p in self.processes.items() if name.startswith("above")]
        return min(1.0, len(ps) * min(ps))

    @property
    def passed(self) -> bool:
        """The promise was shown to be kept, at alpha, and the prompts so far still speak for it:
        a pass that was earned before traffic drifted is not shown for ever."""
        sides = [p for name, p in self.processes.items() if name.startswith("below")]
        return all(p.rejects() and p.estimate <= p.limit for p in sides)

    @property
    def estimate(self) -> float | None:
        """In the metric's unit; None without evidence. Clipped at the ceiling."""
        if not self.n:
            return None
        value = self.processes["above"].estimate + self.clause.floor
        if self.clause.inverted:
            return min(1.0, 1.0 / value) if value > 0 else 1.0
        return value

    @property
    def limit(self) -> float:
        """As the contract writes it."""
        value = self.clause.limit + self.clause.floor
        return 1.0 / value if self.clause.inverted else value

    def to_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, **{n: p.to_dict() for n, p in self.processes.items()}}

    @classmethod
    def from_dict(cls, clause: BoundedClause, plan: Plan, state: Mapping[str, Any]) -> Tracker:
        """Raises InputError where the state is damaged or of other settings."""
        made = cls(clause, plan)
        try:
            read = {name: EProcess.from_dict(state[name]) for name in made.processes}
            made.tokens = int(state["tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"damaged: {error!r}", where=f"state of {clause.id}") from error
        for name, process in read.items():
            new = made.processes[name]
            if (process.limit, process.ceiling, process.alpha, process.horizon) != (
                new.limit, new.ceiling, new.alpha, new.horizon,
            ):  # fmt: skip
                raise InputError(
                    f"the state of {clause.id} was made by a contract with other limits",
                    fix="start a new state for a new contract",
                )
        made.processes = read
        return made


@dataclass(frozen=True)
class Standing:
    """Where a clause on a slice stands. p_fail: Holm-adjusted.  needed: which evidence lacks."""

    clause: str
    slice: str
    metric: str
    verdict: Verdict
    n: int
    tokens: int
    estimate: float | None
    limit: float
    p_fail: float
    log_e: float
    clipped: int = 0
    warn: bool = False

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dict(self.__dict__)


@dataclass
class Family:
    """One clause over its slices. fixed: slices that are there whatever the traffic holds.
    grows: definition -> how the names of the slices begin that traffic can bring."""

    clause: BoundedClause
    plan: Plan
    fixed: Sequence[str]
    grows: Mapping[str, str]
    trackers: dict[str, Tracker] = field(default_factory=dict)

    def update(self, values: Mapping[str, tuple[float, int]]) -> None:
        """Count one prompt on each slice that it has rows in."""
        for name, (value, rows) in values.items():
            if name not in self.trackers:
                self.trackers[name] = Tracker(self.clause, self.plan)
            self.trackers[name].update(value, rows)

    def adjusted(self) -> dict[str, float]:
        """slice -> adjusted p-value of "the promise is kept"."""
        fixed = [n for n in self.trackers if n in set(self.fixed)]
        if not self.grows:
            return self._holm(fixed, len(self.fixed), 1.0)
        new = [n for n in self.trackers if n not in set(self.fixed)]  # in order of appearance
        found = self._holm(fixed + new[:BLOCK], len(self.fixed) + BLOCK, 0.5)
        at, size, share = BLOCK, 2 * BLOCK, 0.25
        while at < len(new):
            found |= self._holm(new[at : at + size], size, share)
            at, size, share = at + size, 2 * size, share / 2
        return found

    def _holm(self, names: Sequence[str], size: int, share: float) -> dict[str, float]:
        """Slices of the block that have not been seen yet count as p = 1."""
        ps = [self.trackers[n].p_fail for n in names]
        adjusted = holm([*ps, *[1.0] * (size - len(ps))], self.plan.alpha).adjusted
        return {n: min(1.0, float(p) / share) for n, p in zip(names, adjusted, strict=False)}

    def standings(self) -> Iterator[Standing]:
        """Every slice, unseen ones of the contract too."""
        adjusted = self.adjusted()
        for name in dict.fromkeys((*self.fixed, *self.trackers)):
            yield self._standing(name, adjusted.get(name, 1.0))
        for definition, start in self.grows.items():
            if not any(name.startswith(start) for name in self.trackers):
                yield self._standing(definition, 1.0)

    def _standing(self, name: str, p_fail: float) -> Standing:
        tracker = self.trackers.get(name) or Tracker(self.clause, self.plan)
        verdict: Verdict = "INCONCLUSIVE"
        if p_fail <= self.plan.alpha:
            verdict = "FAIL"
        elif not tracker.n:
            verdict = "UNOBSERVED"
        elif tracker.passed:
            verdict = "PASS"
        estimate, warn = tracker.estimate, False
        if self.clause.warn is not None and estimate is not None:
            low_is_bad = self.clause.inverted
            warn = estimate < self.clause.warn if low_is_bad else estimate > self.clause.warn
        return Standing(
            self.clause.id, name, self.clause.metric, verdict, tracker.n, tracker.tokens, estimate,
            tracker.limit, p_fail, tracker.log_e, tracker.processes["above"].clipped, warn,
        )  # fmt: skip


class Book:
    """The sequential tests of a contract's clauses, and their whole state."""

    def __init__(self, contract: Contract, clauses: Sequence[BoundedClause], plan: Plan) -> None:
        self.plan = plan
        self.families = {c.id: Family(c, plan, *fixed_slices(contract, c)) for c in clauses}

    def update(self, seen: Observations) -> None:
        """Count one prompt. The caller lets none in twice."""
        for clause, values in seen.items():
            self.families[clause].update(values)

    def standings(self) -> list[Standing]:
        """Clause by clause, in the contract's order."""
        return [s for family in self.families.values() for s in family.standings()]

    def may_alarm(self) -> bool:
        """Cheap: False while no adjusted p-value can be at alpha."""
        return any(
            t.p_fail <= self.plan.alpha for f in self.families.values() for t in f.trackers.values()
        )

    def failing(self) -> list[Standing]:
        """Clauses and slices whose promise is broken."""
        return [s for s in self.standings() if s.verdict == "FAIL"] if self.may_alarm() else []

    def to_dict(self) -> dict[str, Any]:
        """clause -> slice -> state, JSON-ready, slices in order of appearance."""
        return {
            c: {n: t.to_dict() for n, t in f.trackers.items()} for c, f in self.families.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a state of `to_dict`. Raises InputError when it does not fit."""
        for clause, slices in state.items():
            if clause not in self.families:
                raise InputError(f"the state knows a clause {clause} that the contract does not")
            family = self.families[clause]
            family.trackers = {
                name: Tracker.from_dict(family.clause, self.plan, one)
                for name, one in slices.items()
            }
