"""A slice's condition -> one over what a request shows, that covers the slice.

Sent to the reference must be every row of a failing slice, so the condition is replaced by an
*outer* approximation: true wherever the original is. Under ``not`` it takes an *inner* one (true
only where the original is). What has no counterpart becomes true (outer) or false (inner): the
rest of the condition, the parent, decides alone.

A drift D bounds every difference of logit differences, so the margins of both programs differ by
at most D: were the engine's margin above m + D, its first choice would lead in the reference by
more than m. Hence ``reference_margin <= m`` is covered by ``engine_margin <= m + D``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kernel_contracts.expressions import (
    Both,
    Column,
    Comparison,
    Condition,
    Either,
    Not,
    Number,
    Truth,
)
from mismatch_audit.routing.features import never_known

Mapping = Literal["exact", "counterpart", "parent"]

_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}


@dataclass(frozen=True)
class Approximation:
    """condition: over columns that a request shows.  mapping: exact, counterpart (the reference's
    margin became the engine's with the drift as safety), or parent (a part had no counterpart).
    dropped: columns that had none."""

    condition: Condition
    mapping: Mapping
    dropped: tuple[str, ...] = ()


def outer(condition: Condition, drift: float | None) -> Approximation:
    """Covers the condition.

    drift: nats by which margins may differ; None where nothing bounds it.
    """
    walk = _Walk(drift)
    covered = simplify(walk.approximate(condition, outside=True))
    mapping: Mapping = "parent" if walk.dropped else "counterpart" if walk.mapped else "exact"
    return Approximation(covered, mapping, tuple(dict.fromkeys(walk.dropped)))


class _Walk:
    def __init__(self, drift: float | None) -> None:
        self.drift = drift
        self.mapped = False
        self.dropped: list[str] = []

    def approximate(self, node: Condition, *, outside: bool) -> Condition:
        if not never_known(node):
            return node
        match node:
            case Both(operands):
                return Both(tuple(self.approximate(o, outside=outside) for o in operands))
            case Either(operands):
                return Either(tuple(self.approximate(o, outside=outside) for o in operands))
            case Not(operand):
                return Not(self.approximate(operand, outside=not outside))
            case Comparison():
                found = self.margin(node, outside=outside)
                if found is not None:
                    self.mapped = True
                    return found
        self.dropped += never_known(node)
        return Truth(outside)

    def margin(self, node: Comparison, *, outside: bool) -> Condition | None:
        """``reference_margin`` against a number as ``engine_margin`` against a moved one."""
        operator, left, right = node.operator, node.left, node.right
        if isinstance(left, Number) and isinstance(right, Column):
            operator, left, right = _FLIPPED[operator], right, left
        if left != Column("reference_margin") or not isinstance(right, Number):
            return None
        if self.drift is None or operator not in ("<", "<=", ">", ">="):
            return None
        widen = self.drift if outside else -self.drift
        moved = right.value + widen if operator in ("<", "<=") else right.value - widen
        return Comparison(operator, Column("engine_margin"), Number(round(moved, 12)))


def simplify(node: Condition) -> Condition:
    """The same condition without constants and nested ``and``/``or`` inside it. Two-valued logic is
    used: a null that a constant decides is decided."""
    match node:
        case Not(operand):
            inner = simplify(operand)
            return Truth(not inner.value) if isinstance(inner, Truth) else Not(inner)
        case Both(operands):
            return _joined(Both, operands, neutral=True)
        case Either(operands):
            return _joined(Either, operands, neutral=False)
    return node


def _joined(
    kind: type[Both] | type[Either], operands: tuple[Condition, ...], *, neutral: bool
) -> Condition:
    flat: list[Condition] = []
    for operand in map(simplify, operands):
        if isinstance(operand, Truth):
            if operand.value is not neutral:
                return operand
            continue
        parts = operand.operands if isinstance(operand, kind) else (operand,)
        flat += [part for part in parts if part not in flat]
    if not flat:
        return Truth(neutral)
    return flat[0] if len(flat) == 1 else kind(tuple(flat))
