"""The tree that a ``where`` expression becomes: its nodes, the columns it names, its text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Number:
    """A finite float64."""

    value: float


@dataclass(frozen=True)
class Text:
    """A quoted text."""

    value: str


@dataclass(frozen=True)
class Truth:
    """true or false: a value to compare with, and a condition by itself."""

    value: bool


@dataclass(frozen=True)
class Column:
    """A column by name: a value, and a condition by itself when it holds booleans."""

    name: str


@dataclass(frozen=True)
class Negate:
    """Minus the operand."""

    operand: Value


@dataclass(frozen=True)
class Absolute:
    """The operand's absolute value."""

    operand: Value


@dataclass(frozen=True)
class Arithmetic:
    """``left operator right`` with + - * /. A division by zero is null."""

    operator: str
    left: Value
    right: Value


@dataclass(frozen=True)
class Comparison:
    """``left operator right`` with == != < <= > >=. Unknown where a side is null."""

    operator: str
    left: Value
    right: Value


@dataclass(frozen=True)
class In:
    """The operand equals (negated: none of) the items. Unknown where it is null."""

    operand: Value
    items: tuple[Number | Text | Truth, ...]
    negated: bool


@dataclass(frozen=True)
class IsNull:
    """The operand is (negated: is not) null. Never unknown."""

    operand: Value
    negated: bool


@dataclass(frozen=True)
class Not:
    """Unknown stays unknown."""

    operand: Condition


@dataclass(frozen=True)
class Both:
    """All operands hold; false if one is false, whatever the unknown ones would be."""

    operands: tuple[Condition, ...]


@dataclass(frozen=True)
class Either:
    """An operand holds; true if one is true, whatever the unknown ones would be."""

    operands: tuple[Condition, ...]


Value = Number | Text | Truth | Column | Negate | Absolute | Arithmetic
Condition = Comparison | In | IsNull | Not | Both | Either | Column | Truth
Expression = Value | Condition

KEYWORDS = ("and", "or", "not", "in", "is", "null", "true", "false", "abs")
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*\Z")


def children(node: Expression) -> tuple[Expression, ...]:
    """Direct sub-expressions, left to right."""
    match node:
        case Negate() | Absolute() | Not() | IsNull():
            return (node.operand,)
        case In():
            return (node.operand, *node.items)
        case Arithmetic() | Comparison():
            return (node.left, node.right)
        case Both() | Either():
            return node.operands
    return ()


def walk(node: Expression) -> Iterator[Expression]:
    """The node and everything below it, left to right."""
    yield node
    for child in children(node):
        yield from walk(child)


def columns(node: Expression) -> tuple[str, ...]:
    """Names of the columns that an expression needs, in order of first use."""
    return tuple(dict.fromkeys(n.name for n in walk(node) if isinstance(n, Column)))


def to_text(node: Expression) -> str:
    """The canonical text of a tree: it parses back to the same tree."""
    match node:
        case Number(value):
            return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
        case Text(value):
            return json.dumps(value, ensure_ascii=False)
        case Truth(value):
            return "true" if value else "false"
        case Column(name):
            return name if _PLAIN.match(name) and name not in KEYWORDS else f"`{name}`"
        case Negate(operand):
            return "-" + _wrap(operand, isinstance(operand, Arithmetic))
        case Absolute(operand):
            return f"abs({to_text(operand)})"
        case Arithmetic(operator, left, right):
            low = operator in "*/"
            loose = isinstance(left, Arithmetic) and low and left.operator in "+-"
            tight = isinstance(right, Arithmetic) and (low or right.operator in "+-")
            return f"{_wrap(left, loose)} {operator} {_wrap(right, tight)}"
        case Comparison(operator, left, right):
            return f"{to_text(left)} {operator} {to_text(right)}"
        case In(operand, items, negated):
            listed = ", ".join(map(to_text, items))
            return f"{to_text(operand)} {'not ' if negated else ''}in [{listed}]"
        case IsNull(operand, negated):
            return f"{to_text(operand)} is {'not ' if negated else ''}null"
        case Not(operand):
            return "not " + _wrap(operand, isinstance(operand, Both | Either))
        case Both(operands):
            return " and ".join(_wrap(o, isinstance(o, Either)) for o in operands)
        case Either(operands):
            return " or ".join(map(to_text, operands))


def _wrap(node: Expression, parentheses: bool) -> str:
    return f"({to_text(node)})" if parentheses else to_text(node)
