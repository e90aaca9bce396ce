"""What changed between two contracts, and whether each change asks more or less of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kernel_contracts.contract import SECTIONS, Contract
from kernel_contracts.promotion import LIVE_STAGES

Direction = Literal["tighter", "looser", "added", "removed", "other"]

_LOWER_IS_TIGHTER = frozenset(
    {
        "limit",
        "share",
        "exceeds",
        "warn",
        "tail",
        "max_missing",
        "max_unusable",
        "alpha",
        "reward_drift",
        "flip_budget",
        "bias_budget",
    }
)
_HIGHER_IS_TIGHTER = frozenset({"at_least", "min_prompts", "min_tokens", "min_hours"})
_MORE_IS_TIGHTER = frozenset({"slices", "require", "same"})
_REMADE = ("metric", "probe", "path", "weight")
"""A clause with another one of these is another promise: its numbers cannot be compared."""
_OPPOSITE: dict[Direction, Direction] = {"tighter": "looser", "looser": "tighter"}


@dataclass(frozen=True)
class Change:
    """One difference. field: S1.limit, slices.domain, escalation[0], ...; before or after is None
    where there was or is nothing."""

    field: str
    direction: Direction
    before: Any
    after: Any
    note: str = ""


def diff_contracts(before: Contract, after: Contract) -> list[Change]:
    """Every difference between two resolved contracts, in the document's order.

    Clauses are the same when their ids are, whatever their order. A default spelt out is no change.
    """
    a, b = before.document(), after.document()
    return [
        *_fields("", _top(a), _top(b)),
        *_facts(a["pair"], b["pair"]),
        *_whole("slices", a["slices"], b["slices"]),
        *_clauses(a, b, _default_ceilings(before) & _default_ceilings(after)),
        *_fields("budget.", a["budget"], b["budget"]),
        *_promotion(a.get("promotion"), b.get("promotion")),
        *_rules(a["escalation"], b["escalation"]),
    ]


def _promotion(before: Any, after: Any) -> Iterator[Change]:
    if before is None or after is None:
        yield from _fields("", {"promotion": before}, {"promotion": after})
        return
    for stage in LIVE_STAGES:
        yield from _fields(f"promotion.{stage}.", before[stage], after[stage])
    old, new = ({k: v for k, v in side.items() if k not in LIVE_STAGES} for side in (before, after))
    yield from _fields("promotion.", old, new)


def _top(document: Mapping[str, Any]) -> dict[str, Any]:
    return {k: document[k] for k in ("schema", "name", "description", "alpha", "seed")}


def _direction(name: str, before: Any, after: Any) -> Direction:
    if name in _MORE_IS_TIGHTER:
        old, new = set(before), set(after)
        return "tighter" if old < new else "looser" if new < old else "other"
    if before is None:
        return "added"
    if after is None:
        return "removed"
    if name in _LOWER_IS_TIGHTER:
        return "tighter" if after < before else "looser"
    if name in _HIGHER_IS_TIGHTER:
        return "tighter" if after > before else "looser"
    return "other"


def _fields(
    prefix: str, a: Mapping[str, Any], b: Mapping[str, Any], note: str = ""
) -> Iterator[Change]:
    for name in dict.fromkeys((*a, *b)):
        old, new = a.get(name), b.get(name)
        if name in _MORE_IS_TIGHTER and sorted(old or ()) == sorted(new or ()):
            continue
        if old != new:
            direction: Direction = "other" if note else _direction(name, old, new)
            if name == "warn" and "at_least" in a and a["at_least"] is not None:
                direction = _OPPOSITE.get(direction, direction)
            yield Change(prefix + name, direction, old, new, note)


def _facts(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Change]:
    for side in ("reference", "engine"):
        for change in _whole(f"pair.{side}", a[side], b[side]):
            yield Change(
                change.field,
                change.direction,
                change.before,
                change.after,
                "binds another pair" if change.direction == "other" else "",
            )
    yield from _fields("pair.", {"same": a["same"]}, {"same": b["same"]})


def _whole(prefix: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Change]:
    for name in dict.fromkeys((*a, *b)):
        field = f"{prefix}.{name}"
        if name not in b:
            yield Change(field, "removed", a[name], None)
        elif name not in a:
            yield Change(field, "added", None, b[name])
        elif a[name] != b[name]:
            yield Change(field, "other", a[name], b[name])


def _default_ceilings(contract: Contract) -> set[str]:
    return {c.id for c in (*contract.statistical, *contract.runtime) if c.ceiling is None}


def _clauses(
    a: Mapping[str, Any], b: Mapping[str, Any], follows_limit: set[str]
) -> Iterator[Change]:
    """follows_limit: clauses with the default ceiling on both sides, told by their limit alone."""
    old = {c["id"]: (s, c) for s in SECTIONS for c in a[s]}
    new = {c["id"]: (s, c) for s in SECTIONS for c in b[s]}
    for name in dict.fromkeys((*old, *new)):
        if name not in new:
            yield Change(name, "removed", old[name][1], None)
        elif name not in old:
            yield Change(name, "added", None, new[name][1])
        else:
            (section_a, clause_a), (section_b, clause_b) = old[name], new[name]
            remade = section_a != section_b or any(
                clause_a.get(k) != clause_b.get(k) for k in _REMADE
            )
            note = "another promise" if remade else ""
            for change in _fields(f"{name}.", clause_a, clause_b, note):
                if not (change.field == f"{name}.ceiling" and name in follows_limit):
                    yield change


def _rules(a: list[Any], b: list[Any]) -> Iterator[Change]:
    for index in range(max(len(a), len(b))):
        old = a[index] if index < len(a) else None
        new = b[index] if index < len(b) else None
        if old != new:
            direction: Direction = "added" if old is None else "removed" if new is None else "other"
            yield Change(f"escalation[{index}]", direction, old, new)
