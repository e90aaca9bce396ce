"""What the audit says about each slice, and whether the engine may have it now.

A slice may be served by the engine when every promise about it was kept. A failure sends it away at
once; a slice that failed comes back after ``passes_to_return`` passes in a row, or when every bound
is well within its limit. What was never seen is away too, and comes with the first pass; between
(INCONCLUSIVE), a slice stays where it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kernel_contracts.contract import Contract
from kernel_contracts.definitions import EscalationRule
from kernel_contracts.escalation import Action, actions_of
from kernel_contracts.measurement import SEVERITY
from kernel_contracts.slices import Slice
from kernel_contracts.vocabulary import METRIC_WORDS
from mismatch_audit.reports.rows import MeasurementRow
from mismatch_audit.routing.conditions import named
from mismatch_audit.routing.table import REFERENCE, Policy, SliceState, Verdict

WHOLE = "all"

_WHOLE_RUN = frozenset({"block", "stop", "hold_push", "rollback"})
_TOLERATED = frozenset({"FAIL", "INCONCLUSIVE", "PASS"})
"""What a rule ``log`` may let pass: a number that was seen. Missing evidence it may not."""


@dataclass
class Evidence:
    """All that bears on a slice. against: (verdict, where to, why) of each promise that was not
    shown to be kept.  rows: measurements about it."""

    name: str
    rows: list[MeasurementRow] = field(default_factory=list)
    against: list[tuple[Verdict, str, str]] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """The worst that stands against it; PASS with rows and nothing against it."""
        worst = [v for v, _, _ in self.against]
        if not worst:
            return "PASS" if self.rows else "UNOBSERVED"
        return min(worst, key=SEVERITY.index)

    @property
    def to(self) -> str:
        """Where its traffic goes: to another engine only if all that asks for a move says so."""
        targets = {to for _, to, _ in self.against}
        return targets.pop() if len(targets) == 1 else REFERENCE

    @property
    def reason(self) -> str:
        return "; ".join(dict.fromkeys(why for _, _, why in self.against))


def gather(
    contract: Contract, rows: Sequence[MeasurementRow], remembered: Collection[str] = ()
) -> dict[str, Evidence]:
    """Slice -> evidence, in the report's order; ``all`` stands for every request, and is there
    without evidence when the report has no row.

    remembered: slices of the previous table. One that only a ``route`` rule names, such as
    ``slice: undecided`` for a clause on all rows, is judged by that clause.
    """
    found: dict[str, Evidence] = {}

    def at(name: str) -> Evidence:
        return found.setdefault(name, Evidence(name))

    for row in rows:
        home = at(row.slice)
        home.rows.append(row)
        if row.verdict == "ACKNOWLEDGED":
            continue  # a failure that somebody answers for, for a time
        action = _action(contract, row)
        if row.verdict == "PASS" and (action is None or action.action not in _MOVES):
            continue
        where, to, tolerated = _effect(action, row)
        if not tolerated:
            verdict: Verdict = "FAIL" if row.verdict == "PASS" else row.verdict
            at(where).against.append((verdict, to, _why(row, action)))
    for name in remembered:
        if name not in found:
            found |= _by_rules(contract, rows, name)
    return found or {WHOLE: Evidence(WHOLE)}


def _by_rules(contract: Contract, rows: Sequence[MeasurementRow], name: str) -> dict[str, Evidence]:
    """The evidence about a slice that has no row of its own, from rows that would send it away."""
    evidence = Evidence(name)
    for rule in contract.escalation:
        if rule.action == "route" and rule.slice == name:
            evidence.rows += [row for row in rows if _about(rule, row, contract)]
    for row in evidence.rows:
        if row.verdict != "PASS" and row.verdict != "ACKNOWLEDGED":
            evidence.against.append((row.verdict, REFERENCE, _why(row, None)))
    return {name: evidence} if evidence.rows else {}


_MOVES = _WHOLE_RUN | {"route", "quarantine"}


def _effect(action: Action | None, row: MeasurementRow) -> tuple[str, str, bool]:
    """(slice, where to, tolerated). Without a rule that says otherwise the slice falls back."""
    if action is None:
        return row.slice, REFERENCE, False
    if action.action in _WHOLE_RUN:
        return WHOLE, REFERENCE, False
    if action.action == "route":
        return action.slice, action.to, False
    if action.action == "log" and row.verdict in _TOLERATED:
        return row.slice, REFERENCE, True
    return action.slice or row.slice, REFERENCE, False


def _why(row: MeasurementRow, action: Action | None) -> str:
    word = "WARN" if row.verdict == "PASS" else row.verdict
    said = f" ({action.action})" if action else ""
    about = "" if row.slice == WHOLE else f" on {row.slice}"
    return f"{row.clause} {word}{about}{said}"


def _light(contract: Contract, name: str) -> Slice:
    found = named(contract, name)
    return Slice(name, found.definition if found else "", np.zeros(0, dtype=bool))


def _action(contract: Contract, row: MeasurementRow) -> Action | None:
    """What the contract's policy asks for about one row."""
    asked = actions_of(contract, [row], [_light(contract, row.slice)])  # type: ignore[list-item]
    return asked[0] if asked else None


def _about(rule: EscalationRule, row: MeasurementRow, contract: Contract) -> bool:
    """The rule would answer this row, were its verdict the rule's."""
    when = rule.when
    if when.clause is not None and when.clause != row.clause:
        return False
    return when.slice is None or _light(contract, row.slice).answers_to(when.slice)


def stand(
    evidence: Evidence,
    before: SliceState | None,
    policy: Policy,
    *,
    engine: str,
    share: float | None,
    same_report: bool = False,
) -> SliceState:
    """The slice's state after this audit.

    engine: its name.  before: the slice's state in the previous table.  same_report: that table
    was made from this very report, which then counts once.
    """
    verdict = evidence.verdict
    held = before.held if before else False
    passes = before.passes if before else 0
    to, reason = evidence.to, evidence.reason
    if verdict in ("FAIL", "UNSOUND"):
        held, passes = True, 0
    elif verdict == "UNOBSERVED":
        passes = 0
        reason = reason or "no evidence"
    elif verdict == "INCONCLUSIVE":
        passes = 0
        if before is not None and before.to == engine and not held:
            to, reason = before.to, f"{reason}; stays where it was"
    else:
        passes = passes if same_report and before else passes + 1
        to, held, reason = _after_pass(engine, before, held, passes, policy, evidence)
    return SliceState(
        slice=evidence.name, to=to, verdict=verdict, held=held, passes=passes, share=share,
        reason=reason[:2000],
    )  # fmt: skip


def _after_pass(
    engine: str,
    before: SliceState | None,
    held: bool,
    passes: int,
    policy: Policy,
    evidence: Evidence,
) -> tuple[str, bool, str]:
    if not held:
        return engine, False, ""
    if passes >= policy.passes_to_return:
        return engine, False, f"back after {passes} passes in a row"
    if well_within(evidence.rows, policy.return_at):
        return engine, False, f"back: every bound within {policy.return_at:g} of its limit"
    target = before.to if before else REFERENCE
    return target, True, (
        f"failed before; {passes} of {policy.passes_to_return} passes, and a bound is above "
        f"{policy.return_at:g} of its limit"
    )  # fmt: skip


def well_within(rows: Iterable[MeasurementRow], share: float) -> bool:
    """Every row has an upper bound within ``share`` of its limit, counted from the least value that
    its metric can take. A promise of the kind at-least has none and is not well within."""
    some = False
    for row in rows:
        word = METRIC_WORDS.get(row.metric)
        if row.section == "observability":
            continue
        if word is None or word.at_least or row.upper is None or row.limit is None or row.clipped:
            return False
        floor = 0.0 if row.section == "numerical" else word.floor
        if row.upper - floor > share * (row.limit - floor):
            return False
        some = True
    return some


def stale(before: Mapping[str, SliceState], seen: Iterable[str]) -> list[Evidence]:
    """Slices that the previous table knew and this audit says nothing about: unobserved now."""
    known = set(seen)
    return [
        Evidence(name, [], [("UNOBSERVED", REFERENCE, "not in this audit")])
        for name in before
        if name not in known and not name.startswith("unseen ")
    ]
