"""Truth of a ``where`` expression on every row, with null as a third value.

A comparison with a null (None, NaN, or the result of a division by zero) is unknown. ``and`` is
false if one side is false, ``or`` is true if one side is true, whatever the unknown one would be;
``not`` of unknown is unknown. A row whose condition is unknown is not selected, and is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from kernel_contracts.errors import ContractError
from kernel_contracts.expressions import (
    Absolute,
    Arithmetic,
    Both,
    Column,
    Comparison,
    Condition,
    Either,
    Expression,
    In,
    IsNull,
    Negate,
    Not,
    Number,
    Text,
    Truth,
    Value,
    to_text,
)

Mask = npt.NDArray[np.bool_]

EXACT = 2**53
"""Whole numbers up to here are exact in float64, in which all numbers are compared."""


@dataclass(frozen=True)
class Outcome:
    """selected: ``[rows]`` true where the condition holds.  unknown: ``[rows]`` true where a null
    decides it. Never both."""

    selected: Mask
    unknown: Mask


@dataclass(frozen=True)
class Vector:
    """A value per row. kind: number (float64), text (object), boolean, or nothing (all null).

    values at null rows mean nothing.  values and null are ``[rows]`` or, for literals, ``[1]``.
    """

    kind: str
    values: npt.NDArray[Any]
    null: Mask


def vector(series: pd.Series, name: str) -> Vector:
    """A column's values. Raises ContractError for a column of mixed or unusable kinds."""
    null = series.isna().to_numpy(dtype=bool)
    kind = _kind(series, null)
    if kind == "nothing":
        return Vector(kind, np.zeros(len(null)), null)
    if kind == "number":
        values = series.to_numpy(dtype=np.float64, na_value=np.nan)
        big = pd.api.types.is_integer_dtype(series) and bool((np.abs(values) > EXACT).any())
        if big:
            raise ContractError(
                f"column {name} holds whole numbers beyond 2^53, which cannot be compared exactly",
                fix="store them as text",
            )
        return Vector(kind, values, null)
    if series.dtype == np.dtype(bool):
        return Vector(kind, series.to_numpy(), null)
    if kind == "boolean":
        filled = series.astype(object).where(~null, False)
        return Vector(kind, filled.to_numpy(dtype=bool), null)
    if kind == "text":
        filled = series.astype(object).where(~null, "")
        return Vector(kind, filled.to_numpy(dtype=object), null)
    raise ContractError(
        f"column {name} holds {kind}, which a slice cannot be made of",
        fix="give the column one kind of value: numbers, texts, or true and false",
    )


def evaluate(condition: Condition, column: Callable[[str], pd.Series], rows: int) -> Outcome:
    """The condition on every row.

    column: name -> its values, ``[rows]``.  Raises ContractError where a column's kind does not
    fit its use, and what ``column`` raises for a name that it does not know.
    """
    selected, unknown = _Evaluator(column, rows).condition(condition)
    return Outcome(selected & ~unknown, unknown)


def _kind(series: pd.Series, null: Mask) -> str:
    if null.all():
        return "nothing"
    dtype = series.dtype
    if pd.api.types.is_bool_dtype(dtype):
        return "boolean"
    if pd.api.types.is_complex_dtype(dtype):
        return "complex numbers"
    if pd.api.types.is_numeric_dtype(dtype):
        return "number"
    found = pd.api.types.infer_dtype(series.astype(object), skipna=True)
    if found in ("integer", "floating", "mixed-integer-float", "decimal"):
        return "number"
    return {"string": "text", "boolean": "boolean"}.get(found, f"values of kind {found}")


class _Evaluator:
    """Conditions give (true, unknown); at unknown rows ``true`` means nothing."""

    def __init__(self, column: Callable[[str], pd.Series], rows: int) -> None:
        self.column, self.rows = column, rows
        self.known: dict[str, Vector] = {}

    def full(self, mask: Mask) -> Mask:
        return np.broadcast_to(mask, (self.rows,))

    def read(self, name: str) -> Vector:
        if name not in self.known:
            self.known[name] = vector(self.column(name), name)
        return self.known[name]

    # Conditions ---------------------------------------------------------------------------------
    def condition(self, node: Condition) -> tuple[Mask, Mask]:
        match node:
            case Comparison():
                return self.comparison(node)
            case In():
                return self.membership(node)
            case IsNull(operand, negated):
                null = self.full(self.value(operand).null)
                return (~null if negated else null), np.zeros(self.rows, dtype=bool)
            case Not(operand):
                true, unknown = self.condition(operand)
                return ~true, unknown
            case Both(operands):
                return self.all_of(operands)
            case Either(operands):
                # a or b is not (not a and not b), in three values too
                true, unknown = self.all_of(tuple(Not(o) for o in operands))
                return ~true, unknown
            case Truth(value):
                return np.full(self.rows, value), np.zeros(self.rows, dtype=bool)
            case Column(name):
                flag = self.read(name)
                if flag.kind not in ("boolean", "nothing"):
                    raise _misuse(
                        node,
                        f"{name} holds {flag.kind}, not true or false",
                        "compare it with a value",
                    )
                return self.full(flag.values.astype(bool)), self.full(flag.null)

    def all_of(self, operands: tuple[Condition, ...]) -> tuple[Mask, Mask]:
        true = np.ones(self.rows, dtype=bool)
        unknown = np.zeros(self.rows, dtype=bool)
        false = np.zeros(self.rows, dtype=bool)
        for operand in operands:
            holds, open_ = self.condition(operand)
            true &= holds | open_
            unknown |= open_
            false |= ~holds & ~open_
        return true, unknown & ~false

    def comparison(self, node: Comparison) -> tuple[Mask, Mask]:
        left, right = self.value(node.left), self.value(node.right)
        null = self.full(left.null | right.null)
        if "nothing" in (left.kind, right.kind):
            return np.zeros(self.rows, dtype=bool), null
        if left.kind != right.kind:
            raise _misuse(
                node, f"compares {left.kind} with {right.kind}", f"compare with a {left.kind}"
            )
        if left.kind != "number" and node.operator not in ("==", "!="):
            raise _misuse(node, f"{left.kind} values have no order", "use ==, != or in")
        a, b = left.values, right.values
        with np.errstate(invalid="ignore"):
            match node.operator:
                case "==":
                    true = a == b
                case "!=":
                    true = a != b
                case "<":
                    true = a < b
                case "<=":
                    true = a <= b
                case ">":
                    true = a > b
                case _:
                    true = a >= b
        return self.full(np.asarray(true, dtype=bool)), null

    def membership(self, node: In) -> tuple[Mask, Mask]:
        operand = self.value(node.operand)
        null = self.full(operand.null)
        wanted = [item.value for item in node.items]
        kind = {Number: "number", Text: "text"}.get(type(node.items[0]), "boolean")
        if operand.kind == "nothing":
            return np.zeros(self.rows, dtype=bool), null
        if operand.kind != kind:
            raise _misuse(
                node,
                f"looks for {kind} among values that are {operand.kind}",
                f"list {operand.kind} values",
            )
        true = np.isin(operand.values, wanted) if kind != "text" else _text_in(operand, wanted)
        return self.full(~true if node.negated else true), null

    # Values -------------------------------------------------------------------------------------
    def value(self, node: Value) -> Vector:
        match node:
            case Column(name):
                return self.read(name)
            case Number(value):
                return Vector("number", np.array([value]), np.array([False]))
            case Text(value):
                return Vector("text", np.array([value], dtype=object), np.array([False]))
            case Truth(value):
                return Vector("boolean", np.array([value]), np.array([False]))
            case Negate(operand):
                inner = self.number(operand, node)
                return Vector("number", -inner.values, inner.null)
            case Absolute(operand):
                inner = self.number(operand, node)
                return Vector("number", np.abs(inner.values), inner.null)
            case Arithmetic(operator, left, right):
                return _arithmetic(operator, self.number(left, node), self.number(right, node))

    def number(self, node: Value, whole: Expression) -> Vector:
        found = self.value(node)
        if found.kind not in ("number", "nothing"):
            raise _misuse(
                whole, f"{to_text(node)} is {found.kind}, not a number", "compute with numbers only"
            )
        return found


def _arithmetic(operator: str, left: Vector, right: Vector) -> Vector:
    a, b, null = left.values, right.values, left.null | right.null
    with np.errstate(all="ignore"):
        match operator:
            case "+":
                values = a + b
            case "-":
                values = a - b
            case "*":
                values = a * b
            case _:
                values = a / b
                null = null | (b == 0)
    return Vector("number", values, null | np.isnan(values))


def _text_in(operand: Vector, wanted: list[Any]) -> Mask:
    return pd.Series(operand.values, dtype=object).isin(wanted).to_numpy(dtype=bool)


def _misuse(node: Expression, message: str, fix: str) -> ContractError:
    return ContractError(f"{message}, in `{to_text(node)}`", fix=fix)
