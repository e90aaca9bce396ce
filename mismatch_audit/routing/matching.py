"""Does a request meet a condition? True, false, or not known before its tokens are.

Three-valued as the slices are, over intervals: a column that varies over the request's tokens
(position, context_length) is an interval, and a comparison that holds for some of them only is
unknown. What a request does not show is unknown too, and so is a value of the wrong kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kernel_contracts.expressions import (
    Absolute,
    Arithmetic,
    Both,
    Column,
    Comparison,
    Condition,
    Either,
    In,
    IsNull,
    Negate,
    Not,
    Number,
    Text,
    Truth,
    Value,
)
from mismatch_audit.routing.features import DECODE_COLUMNS, SPAN_COLUMNS

Interval = tuple[float, float]
Known = Interval | str | bool | None
"""An interval, a text, a truth value, or None for what is not known."""
Scalar = str | bool | int | float

UNKNOWN_SPAN: Final[Interval] = (0.0, math.inf)


@dataclass(frozen=True)
class Facts:
    """What a request shows. metadata: flat.  spans: position and context_length as intervals over
    the tokens it may generate.  decode: the engine's account of one token, while it is drawn."""

    metadata: Mapping[str, Scalar] = field(default_factory=dict)
    spans: Mapping[str, Interval] = field(default_factory=dict)
    decode: Mapping[str, float] = field(default_factory=dict)

    def value(self, name: str) -> Known:
        if name in SPAN_COLUMNS:
            return self.spans.get(name, UNKNOWN_SPAN)
        found: Scalar | None
        if name in DECODE_COLUMNS:
            found = self.decode.get(name)
        else:
            found = self.metadata.get(name)
        if isinstance(found, bool) or found is None or isinstance(found, str):
            return found
        try:
            number = float(found)
        except OverflowError:  # a whole number of 400 digits
            return None
        return None if math.isnan(number) else (number, number)


def spans(prompt_tokens: tuple[float, float], max_tokens: float) -> dict[str, tuple[float, float]]:
    """position and context_length over the tokens that a request may generate.

    prompt_tokens: least and most tokens of the prompt, equal where they were counted.
    """
    last = max(max_tokens - 1, 0.0)
    return {
        "position": (0.0, last),
        "context_length": (prompt_tokens[0], prompt_tokens[1] + last),
    }


Test = Callable[[Facts], "bool | None"]
Read = Callable[[Facts], Known]


def compiled(node: Condition) -> Test:
    """The condition as a function: some 0.3 us a comparison, against 3 us for walking the tree."""
    match node:
        case Truth(value):
            return lambda _: value
        case Column(name):
            return lambda facts: v if isinstance(v := facts.value(name), bool) else None
        case Not(operand):
            inner = compiled(operand)
            return lambda facts: None if (v := inner(facts)) is None else not v
        case Both(operands):
            return _all(tuple(map(compiled, operands)), on=False)
        case Either(operands):
            return _all(tuple(map(compiled, operands)), on=True)
        case IsNull(operand, negated):
            return _is_null(operand, negated)
        case In(operand, items, negated):
            tests = tuple(compiled(Comparison("==", operand, item)) for item in items)
            found = _all(tests, on=True)
            return (lambda f: None if (v := found(f)) is None else not v) if negated else found
        case Comparison(operator, left, right):
            return _comparison(operator, _read(left), _read(right))
    raise TypeError(f"not a condition: {node!r}")


def _all(tests: tuple[Test, ...], *, on: bool) -> Test:
    """``and`` (on=False: a false one decides) or ``or`` (on=True: a true one decides)."""

    def test(facts: Facts) -> bool | None:
        unknown = False
        for one in tests:
            found = one(facts)
            if found is on:
                return on
            unknown = unknown or found is None
        return None if unknown else not on

    return test


def _is_null(operand: Value, negated: bool) -> Test:
    read = _read(operand)
    later = isinstance(operand, Column) and operand.name in DECODE_COLUMNS

    def test(facts: Facts) -> bool | None:
        missing = read(facts) is None
        return None if missing and later else missing is not negated

    return test


def _comparison(operator: str, left: Read, right: Read) -> Test:
    def test(facts: Facts) -> bool | None:
        a, b = left(facts), right(facts)
        if isinstance(a, tuple) and isinstance(b, tuple):
            return _ordered(operator, a, b)
        if a is None or b is None or type(a) is not type(b) or operator not in ("==", "!="):
            return None
        return (a == b) is (operator == "==")

    return test


def _ordered(operator: str, a: Interval, b: Interval) -> bool | None:
    match operator:
        case "<":
            return True if a[1] < b[0] else False if a[0] >= b[1] else None
        case "<=":
            return True if a[1] <= b[0] else False if a[0] > b[1] else None
        case ">":
            return _ordered("<", b, a)
        case ">=":
            return _ordered("<=", b, a)
    apart = a[1] < b[0] or b[1] < a[0]
    equal = a[0] == a[1] == b[0] == b[1]
    if not apart and not equal:
        return None
    return equal is (operator == "==")


def _read(node: Value) -> Read:
    match node:
        case Number(value):
            point = (value, value)
            return lambda _: point
        case Text(value) | Truth(value):
            return lambda _: value
        case Column(name):
            return lambda facts: facts.value(name)
        case Negate(operand):
            return _number(lambda a: (-a[1], -a[0]), operand)
        case Absolute(operand):
            return _number(_absolute, operand)
        case Arithmetic(operator, left, right):
            return _arithmetic(operator, _read(left), _read(right))
    raise TypeError(f"not a value: {node!r}")


def _number(change: Callable[[Interval], Interval], operand: Value) -> Read:
    read = _read(operand)
    return lambda facts: change(a) if isinstance(a := read(facts), tuple) else None


def _absolute(a: Interval) -> Interval:
    low = 0.0 if a[0] <= 0 <= a[1] else min(abs(a[0]), abs(a[1]))
    return low, max(abs(a[0]), abs(a[1]))


def _arithmetic(operator: str, left: Read, right: Read) -> Read:
    def read(facts: Facts) -> Known:
        a, b = left(facts), right(facts)
        if not isinstance(a, tuple) or not isinstance(b, tuple):
            return None
        match operator:
            case "+":
                ends = [a[0] + b[0], a[1] + b[1]]
            case "-":
                ends = [a[0] - b[1], a[1] - b[0]]
            case "*":
                ends = [x * y for x in a for y in b]
            case _:
                if b[0] <= 0 <= b[1]:
                    return None
                ends = [x / y for x in a for y in b]
        return None if any(map(math.isnan, ends)) else (min(ends), max(ends))

    return read
