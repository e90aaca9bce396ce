"""From an error of the models to words: which keys could stand there, what was meant."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from kernel_contracts.contract import Contract
from kernel_contracts.cross_checks import Mistake, Place
from kernel_contracts.predicates import closest

_FIXED = {
    "missing": "required, and not there",
    "model_type": "a mapping of keys to values is needed",
    "dict_type": "a mapping of keys to values is needed",
    "string_type": "a text is needed",
    "int_type": "a whole number is needed",
    "int_from_float": "a whole number is needed",
    "float_type": "a number is needed",
    "finite_number": "a finite number is needed",
    "tuple_type": "a list is needed",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
}


def keys_at(place: Place) -> dict[str, str]:
    """Key in the file -> field name, of the model that lies at a place of the document."""
    model = _model_at(place)
    if model is None:
        return {}
    return {f.alias or name: name for name, f in model.model_fields.items()}


def closest_key(key: object, place: Place) -> str | None:
    """The valid key at a place that a misspelt one is nearest to."""
    keys = list(keys_at(place))
    near = difflib.get_close_matches(str(key), keys, n=1, cutoff=0.6)
    return near[0] if near else None


def explain(error: ErrorDetails) -> Mistake:
    """An error of pydantic as a mistake at a place of the document."""
    place: Place = tuple(p for p in error["loc"] if p != "[key]")
    kind, value = error["type"], error["input"]
    context: Mapping[str, Any] = error.get("ctx") or {}
    match kind:
        case "extra_forbidden":
            near = closest_key(place[-1], place[:-1])
            fix = (
                f"did you mean {near}?" if near else f"keys here: {', '.join(keys_at(place[:-1]))}"
            )
            return Mistake(place, f"unknown key {str(place[-1])!r}", fix)
        case "clause":
            return Mistake((*place, str(context["field"])), str(context["text"]))
        case "literal_error":
            known = re.findall(r"'([^']*)'", str(context.get("expected", "")))
            return Mistake(
                place, f"{_shown(value)} is not one of the words here", closest(str(value), known)
            )
        case "string_pattern_mismatch":
            return Mistake(
                place,
                f"{_shown(value)} is not a name",
                "letters, digits, _ . - and a letter or _ first",
            )
        case "tuple_type":
            fix = f"[{value}]" if isinstance(value, str) else ""
            return Mistake(place, _with_input(_FIXED[kind], value), fix)
        case "missing":
            return Mistake(place, _FIXED[kind])
    return Mistake(place, _with_input(_FIXED.get(kind, error["msg"].removeprefix("Input ")), value))


def _with_input(message: str, value: object) -> str:
    if isinstance(value, Mapping | list | tuple):
        return message if message.startswith("must") else f"{message}, this is {_kind(value)}"
    if message.startswith("should"):
        return f"{_shown(value)} {message}"
    return f"{message}, this is {_shown(value)}" if message in _FIXED.values() else message


def _kind(value: object) -> str:
    return "a mapping" if isinstance(value, Mapping) else "a list"


def _shown(value: object) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _model_at(place: Place) -> type[BaseModel] | None:
    current: Any = Contract
    for part in place:
        current = _bare(current)
        if isinstance(current, type) and issubclass(current, BaseModel):
            names = {f.alias or name: name for name, f in current.model_fields.items()}
            if part not in names:
                return None
            current = current.model_fields[names[str(part)]].annotation
        elif get_origin(current) is tuple:
            current = get_args(current)[0]
        elif get_origin(current) is dict:
            current = get_args(current)[1]
        else:
            return None
    current = _bare(current)
    return current if isinstance(current, type) and issubclass(current, BaseModel) else None


def _bare(annotation: Any) -> Any:
    """Without Annotated and ``| None``."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        kept = [a for a in get_args(annotation) if a is not type(None)]
        return _bare(kept[0]) if len(kept) == 1 else annotation
    return annotation
