"""What a request shows: read from its body and one header, without changing a byte of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mismatch_audit.routing.matching import Facts, Interval, Scalar, spans
from mismatch_audit.routing.proxy.refusal import Refusal

METADATA_HEADER = b"x-audit-metadata"
MAX_HEADER = 8192

Kind = Literal["completion", "chat"]
Source = Literal["both", "header", "body"]

_EXTRA_TOKENS = 8
"""BOS and the like that a tokenizer may add to a text: more than any does."""


@dataclass(frozen=True)
class Asked:
    """A request, parsed. body: as received.  document: its JSON."""

    kind: Kind
    path: str
    body: bytes
    document: Mapping[str, Any]
    facts: Facts
    stream: bool


def parse(
    path: str, kind: Kind, body: bytes, header: bytes | None, source: Source = "both"
) -> Asked:
    """header: value of ``x-audit-metadata``.  source: whose metadata count; where both do, the
    header's win. Raises Refusal (400) for what is not a JSON object."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "malformed", f"the body is not JSON: {_short(error)}") from None
    if not isinstance(document, dict):
        raise Refusal(400, "malformed", "the body is not a JSON object")
    metadata = scalars(document.get("metadata")) if source != "header" else {}
    if header is not None and source != "body":
        metadata |= _header(header)
    length = _chat_length() if kind == "chat" else _length(document.get("prompt"))
    facts = Facts(metadata, spans(length, _budget(kind, document)))
    return Asked(kind, path, body, document, facts, document.get("stream") is True)


def scalars(value: Any) -> dict[str, Scalar]:
    """The texts, numbers and truth values of an object; others are as if they were not there."""
    if not isinstance(value, dict):
        return {}
    return {k: v for k, v in value.items() if isinstance(v, str | bool | int | float)}


def _header(raw: bytes) -> dict[str, Scalar]:
    if len(raw) > MAX_HEADER:
        raise Refusal(400, "malformed", f"x-audit-metadata is longer than {MAX_HEADER} bytes")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Refusal(400, "malformed", "x-audit-metadata is not a JSON object")
    return scalars(value)


def _budget(kind: Kind, document: Mapping[str, Any]) -> float:
    """Most tokens that the request may generate; infinite where it sets no bound."""
    names = ("max_completion_tokens", "max_tokens") if kind == "chat" else ("max_tokens",)
    given = [document.get(name) for name in names]
    found = [v for v in given if isinstance(v, int) and not isinstance(v, bool) and v >= 0]
    if found:
        return float(max(found))
    return math.inf if kind == "chat" else 16.0  # the default of /v1/completions


def _chat_length() -> Interval:
    """A chat template may add any text, a default system prompt for one."""
    return 1.0, math.inf


def _length(prompt: Any) -> Interval:
    """Tokens of a prompt: counted where ids are given; of a text at most one a byte."""
    if isinstance(prompt, str):
        return 1.0, float(len(prompt.encode("utf-8", "surrogatepass")) + _EXTRA_TOKENS)
    if not isinstance(prompt, list) or not prompt:
        return 1.0, math.inf
    if all(isinstance(token, int) for token in prompt):
        return float(len(prompt)), float(len(prompt))
    parts = [_length(one) for one in prompt]
    return min(p[0] for p in parts), max(p[1] for p in parts)


def _short(error: Exception) -> str:
    return str(error)[:120] or type(error).__name__
