"""A slice's name in a report -> its definition and its condition.

The inverse of how ``kernel_contracts.slices`` names slices: ``domain=code``,
``hard:domain=code,reference_prob[0.1,0.5)``. Names that no definition gives have none.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from kernel_contracts.contract import Contract
from kernel_contracts.definitions import SliceDefinition
from kernel_contracts.errors import InputError
from kernel_contracts.expressions import (
    Both,
    Column,
    Comparison,
    Condition,
    In,
    Not,
    Number,
    Text,
    Truth,
    to_text,
)
from kernel_contracts.predicates import PredicateError, parse
from mismatch_audit.routing.approximate import simplify
from mismatch_audit.routing.features import known_when

Literal_ = Number | Text | Truth

_VALUE = r'("(?:[^"\\]|\\.)*"|[^,"]*)'
_EDGE = r"(-?[0-9.]+(?:[eE][-+]?[0-9]+)?)"
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?\Z")


CHUNK = 40
"""Values of one ``not in``. A condition that is longer than the language admits is written as
several that must all hold."""


@dataclass(frozen=True)
class Named:
    """A slice by name. definition: its name in the contract, "" for what is about the whole run.
    condition: over columns of the token table and metadata. values: of ``by``, in its order."""

    name: str
    definition: str
    condition: Condition
    values: tuple[Literal_, ...] = ()


def whole_run(name: str) -> Named:
    """A row that is about all of the engine's traffic, such as a probe's."""
    return Named(name, "", Truth(True))


def named(contract: Contract, name: str) -> Named | None:
    """The slice that a report calls ``name``; None when the contract has no such slice. The name of
    a definition that groups stands for all its rows."""
    if name.startswith("probe "):
        return whole_run(name)
    for key, definition in contract.slices.items():
        if name == key:
            return Named(name, key, _where(definition))
        found = _grouped(name, key, definition)
        if found is not None:
            return found
    return None


def _where(definition: SliceDefinition) -> Condition:
    return Truth(True) if definition.where is None else parse(definition.where)


def _grouped(name: str, key: str, definition: SliceDefinition) -> Named | None:
    if not definition.grouping:
        return None
    prefix = f"{key}:" if definition.where is not None else ""
    parts = [re.escape(c) + "=" + _VALUE for c in definition.by or ()]
    parts += [re.escape(c) + rf"\[{_EDGE},{_EDGE}([)\]])" for c in definition.bins or {}]
    match = re.fullmatch(re.escape(prefix) + ",".join(parts), name)
    if match is None:
        return None
    groups = list(match.groups())
    conditions: list[Condition] = [_where(definition)]
    values: list[Literal_] = []
    for column in definition.by or ():
        value = _literal(groups.pop(0))
        values.append(value)
        conditions.append(Comparison("==", Column(column), value))
    for column in definition.bins or {}:
        low, high, end = groups.pop(0), groups.pop(0), groups.pop(0)
        conditions.append(Comparison(">=", Column(column), Number(float(low))))
        operator = "<=" if end == "]" else "<"
        conditions.append(Comparison(operator, Column(column), Number(float(high))))
    return Named(name, key, simplify(Both(tuple(conditions))), tuple(values))


def _literal(text: str) -> Literal_:
    if text.startswith('"'):
        return Text(json.loads(text))
    if text in ("true", "false"):
        return Truth(text == "true")
    return Number(float(text)) if _NUMBER.match(text) else Text(text)


def unseen(contract: Contract, key: str, seen: list[Named]) -> Condition | None:
    """True where a request has values of ``by`` that no slice of the definition was measured on.

    None when the definition does not group by what a request shows before it is sent: no request
    then says that it belongs to an unseen slice.
    """
    definition = contract.slices[key]
    by = definition.by or ()
    if not by or any(known_when(c) != "request" for c in by):
        return None
    combinations = list(dict.fromkeys(s.values for s in seen if s.values))
    if not combinations:
        return _where(definition)
    if len(by) == 1:
        items = [c[0] for c in combinations]
        chunks = [tuple(items[at : at + CHUNK]) for at in range(0, len(items), CHUNK)]
        unknown = tuple(In(Column(by[0]), chunk, True) for chunk in chunks)
        return simplify(Both((_where(definition), *unknown)))
    none = tuple(
        Not(Both(tuple(Comparison("==", Column(c), v) for c, v in zip(by, one, strict=True))))
        for one in combinations
    )
    return simplify(Both((_where(definition), *none)))


def texts(condition: Condition) -> list[str]:
    """The condition in the language of ``where``, as texts that must all hold, so that each keeps
    the language's bounds. Raises InputError when that cannot be done."""
    whole = to_text(condition)
    if _fits(whole):
        return [whole]
    if not isinstance(condition, Both):
        raise InputError(
            f"a slice's condition is too long for a rule: {whole[:80]}...",
            fix="group by a coarser column in the contract",
        )
    return [text for operand in condition.operands for text in texts(operand)]


def _fits(text: str) -> bool:
    try:
        parse(text)
    except PredicateError:
        return False
    return True
