"""Verdicts -> actions: the first rule of the contract that matches a measurement decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernel_contracts.contract import Contract
from kernel_contracts.definitions import EscalationRule
from kernel_contracts.measurement import Measurement
from kernel_contracts.slices import Slice


@dataclass(frozen=True)
class Action:
    """What the policy asks for, and the measurement that asked."""

    action: str
    to: str
    slice: str
    clause: str
    verdict: str
    description: str


def actions_of(
    contract: Contract, measurements: Sequence[Measurement], slices: Sequence[Slice]
) -> list[Action]:
    """One action per measurement that a rule answers, in the measurements' order, no repeats."""
    definition = {s.name: s.definition for s in slices}
    found: list[Action] = []
    for m in measurements:
        words = {m.verdict} | ({"WARN"} if m.warn and m.verdict == "PASS" else set())
        rule = next((r for r in contract.escalation if _answers(r, m, words, definition)), None)
        if rule is None:
            continue
        action = Action(
            rule.action, rule.to or "", rule.slice or m.slice, m.clause, m.verdict,
            rule.description,
        )  # fmt: skip
        if action not in found:
            found.append(action)
    return found


def _answers(
    rule: EscalationRule, m: Measurement, words: set[str], definition: dict[str, str]
) -> bool:
    when = rule.when
    if when.verdict not in words:
        return False
    if when.clause is not None and when.clause != m.clause:
        return False
    return when.slice is None or when.slice in (m.slice, definition.get(m.slice))
