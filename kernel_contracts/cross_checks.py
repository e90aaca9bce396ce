"""Rules between the parts of a contract: names that must exist, ids that must differ.

They work on plain data, so that a document with other mistakes is still checked for these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kernel_contracts.predicates import closest
from kernel_contracts.promotion import LIVE_STAGES, SAMPLED_METRICS
from kernel_contracts.vocabulary import TOKEN_COLUMNS

Place = tuple[str | int, ...]
_SECTIONS = ("numerical", "statistical", "runtime", "observability")


@dataclass(frozen=True)
class Mistake:
    """A wrong place of a document. place: keys and indices from the top."""

    place: Place
    message: str
    fix: str = ""

    @property
    def field(self) -> str:
        """The place as text: statistical[0].slices[1]."""
        return field_text(self.place)


def field_text(place: Place) -> str:
    """Keys joined by dots, indices in brackets."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def cross_check(document: Mapping[str, Any]) -> list[Mistake]:
    """Everything that the parts of a document say wrongly about one another."""
    slices = document.get("slices")
    slices = slices if isinstance(slices, Mapping) else {}
    return [
        *_all_is_all(slices),
        *_has_promises(document),
        *_ids_differ(document),
        *_slices_exist(document, {"all", *map(str, slices)}),
        *_required_columns(document),
        *_escalation_names(document, slices),
        *_acknowledged_names(document, slices),
        *_promotion_names(document),
    ]


def _clauses(document: Mapping[str, Any]) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    for section in _SECTIONS:
        for index, clause in enumerate(_list(document.get(section))):
            if isinstance(clause, Mapping):
                yield (section, index), clause


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _all_is_all(slices: Mapping[str, Any]) -> Iterator[Mistake]:
    definition = slices.get("all")
    if isinstance(definition, Mapping) and any(v is not None for v in definition.values()):
        yield Mistake(("slices", "all"), "`all` always means every row", "choose another name")


def _has_promises(document: Mapping[str, Any]) -> Iterator[Mistake]:
    if not any(_list(document.get(s)) for s in ("numerical", "statistical", "runtime")):
        given = [
            s for s in _SECTIONS if s in document and not isinstance(document[s], list | tuple)
        ]
        if not given:
            yield Mistake(
                (),
                "the contract promises nothing",
                "add a numerical, statistical or runtime clause",
            )


def _ids_differ(document: Mapping[str, Any]) -> Iterator[Mistake]:
    seen: dict[str, Place] = {}
    for place, clause in _clauses(document):
        name = clause.get("id")
        if isinstance(name, str):
            if name in seen:
                yield Mistake(
                    (*place, "id"),
                    f"{name} is already the id of {field_text(seen[name])}",
                    "ids are unique in a contract",
                )
            seen.setdefault(name, place)


def _slices_exist(document: Mapping[str, Any], known: set[str]) -> Iterator[Mistake]:
    for place, clause in _clauses(document):
        names = _list(clause.get("slices"))
        for index, name in enumerate(names):
            where = (*place, "slices", index)
            if isinstance(name, str) and name not in known:
                yield Mistake(where, f"no slice {name!r}", closest(name, known))
            elif name in names[:index]:
                yield Mistake(where, f"{name} is already in this list")


def _required_columns(document: Mapping[str, Any]) -> Iterator[Mistake]:
    for place, clause in _clauses(document):
        if place[0] != "observability":
            continue
        for index, name in enumerate(_list(clause.get("require"))):
            if isinstance(name, str) and name not in TOKEN_COLUMNS:
                yield Mistake(
                    (*place, "require", index),
                    f"no column {name!r} in the token table",
                    closest(name, TOKEN_COLUMNS),
                )


def _escalation_names(document: Mapping[str, Any], slices: Mapping[str, Any]) -> Iterator[Mistake]:
    ids = {c["id"] for _, c in _clauses(document) if isinstance(c.get("id"), str)}
    for index, rule in enumerate(_list(document.get("escalation"))):
        if not isinstance(rule, Mapping):
            continue
        when = rule.get("when")
        when = when if isinstance(when, Mapping) else {}
        clause = when.get("clause")
        if isinstance(clause, str) and clause not in ids:
            yield Mistake(
                ("escalation", index, "when", "clause"),
                f"no clause {clause!r}",
                closest(clause, ids),
            )
        for place, name in (
            (("escalation", index, "when", "slice"), when.get("slice")),
            (("escalation", index, "slice"), rule.get("slice")),
        ):
            if isinstance(name, str) and not _names_slice(name, slices):
                yield Mistake(place, f"no slice {name!r}", closest(name, {"all", *slices}))


def _acknowledged_names(
    document: Mapping[str, Any], slices: Mapping[str, Any]
) -> Iterator[Mistake]:
    ids = {c["id"] for _, c in _clauses(document) if isinstance(c.get("id"), str)}
    for index, entry in enumerate(_list(document.get("acknowledge"))):
        if not isinstance(entry, Mapping):
            continue
        clause, name = entry.get("clause"), entry.get("slice")
        if isinstance(clause, str) and clause not in ids:
            place = ("acknowledge", index, "clause")
            yield Mistake(place, f"no clause {clause!r}", closest(clause, ids))
        if isinstance(name, str) and not _names_slice(name, slices):
            place = ("acknowledge", index, "slice")
            yield Mistake(place, f"no slice {name!r}", closest(name, {"all", *slices}))


def _promotion_names(document: Mapping[str, Any]) -> Iterator[Mistake]:
    """Stages name clauses that traffic can show, and have at least one."""
    promotion = document.get("promotion")
    if not isinstance(promotion, Mapping):
        return
    metric = {str(c.get("id")): c.get("metric") for _, c in _clauses(document)}
    shown = {i for i, m in metric.items() if m in SAMPLED_METRICS}
    if not shown:
        yield Mistake(
            ("promotion",),
            "no clause is on a metric that sampled tokens can show",
            f"add one on {', '.join(sorted(SAMPLED_METRICS))}",
        )
    for stage in LIVE_STAGES:
        rule = promotion.get(stage)
        names = _list(rule.get("clauses")) if isinstance(rule, Mapping) else []
        for index, name in enumerate(names):
            place = ("promotion", stage, "clauses", index)
            if isinstance(name, str) and name not in metric:
                yield Mistake(place, f"no clause {name!r}", closest(name, metric.keys()))
            elif isinstance(name, str) and name not in shown:
                yield Mistake(
                    place,
                    f"{name} is on {metric[name]}, which sampled tokens do not show",
                    f"metrics that they show: {', '.join(sorted(SAMPLED_METRICS))}",
                )


def _names_slice(name: str, slices: Mapping[str, Any]) -> bool:
    """A definition's name, or the name of one slice that a ``by`` or ``bins`` can give."""
    if name == "all" or name in slices:
        return True
    prefix, _, rest = name.partition(":")
    names = {prefix: slices[prefix]} if rest and prefix in slices else slices
    rest = rest if rest and prefix in slices else name
    for definition in names.values():
        if isinstance(definition, Mapping):
            by = definition.get("by")
            grouping = [
                *([by] if isinstance(by, str) else _list(by)),
                *(definition.get("bins") or ()),
            ]
            if grouping and rest.startswith((f"{grouping[0]}=", f"{grouping[0]}[")):
                return True
    return False
