"""Three-state calibration: may a contract's verdicts be believed?

A contract is SOUND when the reference against itself passes it *and* every injected fault, though
it passes ordinary checks, fails it. An undetected fault or a refused control makes it UNSOUND;
where the sample is too small to tell even for the control it is INCONCLUSIVE. The idea is that of
three-state calibration, arXiv 2604.22032; faults and rows come from the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from kernel_contracts.clauses import NumericalClause, StatisticalClause
from kernel_contracts.contract import Contract
from kernel_contracts.errors import InputError
from kernel_contracts.measurement import Measurement, Verdict, overall
from kernel_contracts.planning import clean_n
from kernel_contracts.verdict import Evidence, judge
from kernel_contracts.vocabulary import GRADIENT_METRICS

__all__ = [
    "Calibration",
    "Injection",
    "OrdinaryCheck",
    "Testable",
    "Trial",
    "calibrate",
    "smallest_detected",
    "summary",
    "testable",
]

_C = TypeVar("_C", NumericalClause, StatisticalClause)
State = Literal["SOUND", "INCONCLUSIVE", "UNSOUND"]

REPORTED_METRICS = frozenset({"abs_dlp", "k3", "mult_prob_error", "ess_ratio"})
"""Metrics made of the sampled token's log-probs; all others are made of whole rows."""


@dataclass(frozen=True)
class OrdinaryCheck:
    """What a functional test would have asked. value: as measured; wanted: in words."""

    name: str
    value: float
    wanted: str
    passed: bool


@dataclass(frozen=True)
class Injection:
    """A fault and its rows. moves: ``rows`` (the engine's distribution is wrong) or ``reported``
    (only the log-prob that it reports for the sampled token is)."""

    name: str
    meaning: str
    moves: Literal["rows", "reported"]
    evidence: Evidence
    ordinary: tuple[OrdinaryCheck, ...] = ()


@dataclass(frozen=True)
class Testable:
    """The part of a contract that the self-test can judge, and in words what it leaves out."""

    contract: Contract
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class Trial:
    """One candidate judged. caught_by: (clause, slice) that failed.  reason: why it was not caught,
    or why the control does not pass.  tolerated: named by the caller as borne by design."""

    name: str
    meaning: str
    verdict: Verdict
    measurements: tuple[Measurement, ...]
    ordinary: tuple[OrdinaryCheck, ...] = ()
    caught_by: tuple[tuple[str, str], ...] = ()
    reason: str = ""
    tolerated: bool = False

    @property
    def detected(self) -> bool:
        return self.verdict == "FAIL"

    @property
    def ordinary_passed(self) -> bool:
        """Ordinary checks see nothing; a fault that they see proves less."""
        return all(check.passed for check in self.ordinary)


@dataclass(frozen=True)
class Calibration:
    """A contract's self-test."""

    contract: str
    n_prompts: int
    n_tokens: int
    control: Trial
    faults: tuple[Trial, ...]
    left_out: tuple[str, ...]

    @property
    def undetected(self) -> tuple[Trial, ...]:
        return tuple(t for t in self.faults if not t.detected and not t.tolerated)

    @property
    def state(self) -> State:
        """UNSOUND before INCONCLUSIVE: what is wrong outweighs what is not known."""
        if self.control.verdict == "FAIL" or self.undetected or not self.faults:
            return "UNSOUND"
        return "SOUND" if self.control.verdict == "PASS" else "INCONCLUSIVE"

    @property
    def exit_code(self) -> int:
        return {"SOUND": 0, "INCONCLUSIVE": 3, "UNSOUND": 4}[self.state]


def testable(contract: Contract, prompts: int) -> Testable:
    """Numerical and statistical clauses, on teacher-forced rows, for so many prompts.

    Left out: runtime clauses (they need an engine), policy_gradient_bias (rewards), escalation.
    ``min_prompts`` is lowered to the prompts there are. Raises InputError where nothing is left.
    """
    left_out = [f"{c.id}: probes need an engine" for c in contract.runtime]
    statistical: list[StatisticalClause] = []
    for clause in contract.statistical:
        if clause.metric in GRADIENT_METRICS:
            left_out.append(f"{clause.id}: the gradient's bias needs rewards")
        else:
            statistical.append(_on_decode(clause, left_out))
    numerical = [_on_decode(clause, left_out) for clause in contract.numerical]
    if not statistical and all(c.share is None for c in numerical):
        raise InputError(
            "the contract has no numerical or statistical clause that a self-test can judge",
            where=f"contract {contract.name}",
        )
    observability = []
    for seen in contract.observability:
        if seen.min_prompts > prompts:
            left_out.append(f"{seen.id}: asks for {seen.min_prompts} prompts, here {prompts}")
        asked = max(1, min(seen.min_prompts, prompts))
        observability.append(seen.model_copy(update={"min_prompts": asked, "slices": ("all",)}))
    part = contract.model_copy(
        update={
            "numerical": tuple(numerical),
            "statistical": tuple(statistical),
            "runtime": (),
            "observability": tuple(observability),
            "escalation": (),
        }
    )
    return Testable(part, tuple(left_out))


def _on_decode(clause: _C, left_out: list[str]) -> _C:
    if clause.path != "prefill":
        return clause
    left_out.append(f"{clause.id}: written for the prefill path, judged on the rows there are")
    return clause.model_copy(update={"path": "both"})


def calibrate(
    contract: Contract,
    control: Evidence,
    injections: Iterable[Injection],
    *,
    tolerate: Collection[str] = (),
) -> Calibration:
    """Judge the control and every fault by the testable part of a contract.

    control: the reference against itself.  tolerate: faults that the contract bears by design;
    they are judged and reported all the same. A slice on which the control's prompts are too few
    to pass even without any drift cannot be tested for passing; it is told, and a fault that fails
    it is detected all the same. Raises InputError for a tolerated fault that is not in the menu.
    """
    n = int(control.tokens["prompt_id"].nunique()) if len(control.tokens) else 0
    part = testable(contract, n)
    trial, untestable, short = _control(part.contract, control)
    faults = tuple(_trial(part.contract, one, one.name in tolerate, short) for one in injections)
    unknown = sorted(set(tolerate) - {t.name for t in faults})
    if unknown:
        raise InputError(
            f"no fault {unknown[0]!r} in this self-test",
            fix=f"faults: {', '.join(t.name for t in faults)}",
        )
    return Calibration(
        contract.name, n, len(control.tokens), trial, faults, part.left_out + untestable
    )


def _control(
    contract: Contract, evidence: Evidence
) -> tuple[Trial, tuple[str, ...], frozenset[tuple[str, str]]]:
    """The control judged; what it is too small for, in words and as (clause, slice)."""
    rows = judge(contract, evidence)
    kept: list[Measurement] = []
    left: set[tuple[str, str]] = set()
    short: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        needed = clean_n(contract.clause(row.clause), contract.alpha)
        if _only_short(row) and row.n_prompts < needed:
            left.add((row.clause, row.slice))
            short.setdefault((row.clause, needed), []).append(f"{row.slice} ({row.n_prompts})")
        else:
            kept.append(row)
    untestable = tuple(
        f"{clause} for passing on {', '.join(slices)}: takes {needed} prompts"
        for (clause, needed), slices in short.items()
    )
    promises = [
        m for m in kept if m.section in ("numerical", "statistical") and m.p_fail is not None
    ]
    verdict: Verdict = overall(kept) if promises else "INCONCLUSIVE"
    reason = ""
    if not promises:
        reason = "no clause can pass with so few prompts"
    elif verdict != "PASS":
        reason = "; ".join(_said(m) for m in kept if m.verdict != "PASS")
    caught = tuple((m.clause, m.slice) for m in kept if m.verdict == "FAIL")
    meaning = "the reference against itself, otherwise batched and padded"
    return (
        Trial("control", meaning, verdict, tuple(rows), (), caught, reason),
        untestable,
        frozenset(left),
    )


def _only_short(row: Measurement) -> bool:
    """Undecided for want of rows; a missing column is another matter."""
    return row.verdict == "INCONCLUSIVE" or row.detail in ("no rows", "no slice")


def _trial(
    contract: Contract, one: Injection, tolerated: bool, short: frozenset[tuple[str, str]]
) -> Trial:
    """short: (clause, slice) that cannot pass at this size; they can only catch."""
    rows = judge(contract, one.evidence)
    caught = tuple((m.clause, m.slice) for m in rows if m.verdict == "FAIL")
    kept = [m for m in rows if (m.clause, m.slice) not in short]
    verdict: Verdict = "FAIL" if caught else overall(kept)
    reason = "" if caught else _why_missed(contract, one, rows)
    return Trial(
        one.name, one.meaning, verdict, tuple(rows), one.ordinary, caught, reason, tolerated
    )


def _why_missed(contract: Contract, one: Injection, rows: Sequence[Measurement]) -> str:
    """Which promise came nearest, or that none looks where the fault is."""
    metrics = {c.metric for c in contract.numerical} | {c.metric for c in contract.statistical}
    if one.moves == "reported" and not metrics & REPORTED_METRICS:
        return (
            "only the reported log-prob of the sampled token is wrong, and no clause looks at it: "
            f"add one on {', '.join(sorted(REPORTED_METRICS))}"
        )
    measured = [m for m in rows if m.value is not None and m.limit]
    if not measured:
        return "nothing was measured: " + "; ".join({m.detail for m in rows if m.detail})
    nearest = max(measured, key=_share_of_limit)
    return f"nearest to failing: {_said(nearest)}"


def _share_of_limit(row: Measurement) -> float:
    value, limit = row.value or 0.0, row.limit or math.inf
    if row.metric == "ess_ratio":
        return limit / value if value else math.inf
    if row.metric == "mult_prob_error":
        return (value - 1) / (limit - 1) if limit > 1 else math.inf
    return value / limit


def _said(row: Measurement) -> str:
    if row.value is None:
        return f"{row.clause} on {row.slice}: {row.verdict}, {row.detail}"
    ends = ["-" if end is None else f"{end:.3g}" for end in (row.lower, row.upper)]
    limit = "" if row.limit is None else f" of {row.limit:.3g}"
    return (
        f"{row.clause} on {row.slice}: {row.metric} {row.value:.3g} [{', '.join(ends)}]{limit} "
        f"({row.verdict})"
    )


def smallest_detected(
    detected: Callable[[float], bool], *, low: float, high: float, steps: int = 6
) -> tuple[float | None, float | None]:
    """(largest size tried that was missed, smallest that was detected), by bisection in log size.

    detected: size -> whether the contract fails it, taken to be monotone.  (None, low) when even
    ``low`` is detected, (high, None) when ``high`` is not.
    """
    if not 0 < low < high:
        raise InputError(f"sizes must rise from above 0, got {low:g} to {high:g}")
    if not detected(high):
        return high, None
    if detected(low):
        return None, low
    missed, caught = low, high
    for _ in range(steps):
        middle = math.sqrt(missed * caught)
        if detected(middle):
            caught = middle
        else:
            missed = middle
    return missed, caught


def summary(calibration: Calibration) -> str:
    """One line: the state and what it rests on."""
    c = calibration
    found = sum(t.detected for t in c.faults)
    text = (
        f"{c.contract}: {c.state} at {c.n_prompts} prompts, {c.n_tokens} tokens: control "
        f"{c.control.verdict}, {found} of {len(c.faults)} faults detected"
    )
    missed = [t.name for t in c.undetected]
    borne = [t.name for t in c.faults if t.tolerated and not t.detected]
    for word, names in (("missed", missed), ("borne", borne)):
        text += f"; {word}: {', '.join(names)}" if names else ""
    return text
