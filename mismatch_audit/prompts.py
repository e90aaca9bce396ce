"""Prompt files -> prompts with slice metadata -> the token ids that both programs get.

A prompt is one of

* ``prompt``: text. With a tokenizer that has a chat template it becomes the one user message of a
  conversation; without one, or with ``"template": "none"``, it is tokenised as raw text.
* ``messages``: a conversation, ``[{"role": ..., "content": ...}, ...]``, rendered by the template.
* ``token_ids``: given to both programs as they are.

``id`` is optional (a hash of the content stands in). Every further column is metadata, a scalar, by
which slices may group. The chat template is applied here and nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kernel_contracts.errors import InputError
from kernel_contracts.vocabulary import COMPUTED_COLUMNS, TOKEN_COLUMNS
from mismatch_audit.prompt_files import Mistakes, Row, kind_name, read_rows

Scalar = str | int | float | bool
CONTENT_FIELDS = ("prompt", "messages", "token_ids")
ROLES = ("system", "developer", "user", "assistant", "tool")

_MAX_ID = 200
_INT64 = 2**63


@dataclass(frozen=True)
class Prompt:
    """One prompt as written: exactly one of prompt, messages and token_ids is not None.

    where: its place in its file, for messages.  line: line in the file (row, in Parquet), from 1.
    """

    id: str
    prompt: str | None = None
    messages: list[dict[str, str]] | None = None
    token_ids: list[int] | None = None
    template: Literal["chat", "none"] = "chat"
    metadata: dict[str, Scalar] = field(default_factory=dict)
    line: int = 0
    where: str = ""


@dataclass(frozen=True)
class EncodedPrompt:
    """The token ids that every program gets for a prompt."""

    id: str
    token_ids: list[int]
    metadata: dict[str, Scalar]
    n_prompt_tokens: int


def load_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Prompts of a .jsonl, .csv or .parquet file, in order.

    Absent, null and (in CSV) empty values are the same. A CSV file holds messages and token_ids as
    JSON text. Raises InputError with file and line for every mistake of the file, at most 20 shown.
    """
    mistakes = Mistakes(str(path))
    rows = read_rows(Path(path), mistakes)
    prompts: list[Prompt] = []
    first_with: dict[str, Row] = {}
    kinds: dict[str, tuple[str, Row]] = {}
    for row in rows:
        found = len(mistakes.found)
        content = _content(row, mistakes)
        metadata = _metadata(row, kinds, mistakes)
        given = _given_id(row, mistakes)
        if len(mistakes.found) > found:
            continue
        name = given or _content_id(content)
        if name in first_with:
            where = first_with[name].where
            mistakes.add(
                row.where,
                f"id {name!r} is already used at {where}"
                if given
                else f"the same prompt as at {where}",
                "give every prompt an id of its own",
            )
            continue
        first_with[name] = row
        prompts.append(
            Prompt(id=name, metadata=metadata, line=row.line, where=row.where, **content)
        )
    mistakes.raise_any()
    return prompts


def _content(row: Row, mistakes: Mistakes) -> dict[str, Any]:
    """The one content field of a row and its template, checked."""
    values = row.values
    given = [name for name in CONTENT_FIELDS if name in values]
    if not given:
        mistakes.add(
            row.where,
            "none of prompt, messages and token_ids is given",
            "each prompt needs exactly one of prompt, messages, token_ids",
        )
        return {}
    if len(given) > 1:
        mistakes.add(
            row.where,
            f"{' and '.join(given)} are both given" if len(given) == 2 else "all three are given",
            "each prompt needs exactly one of prompt, messages, token_ids",
        )
        return {}
    name = given[0]
    template = values.get("template", "chat")
    if template not in ("chat", "none"):
        mistakes.add(row.where, f"template must be chat or none, found {template!r}")
    elif template == "none" and name == "messages":
        mistakes.add(row.where, "messages need a chat template, but template is none")
    value = values[name]
    if name == "prompt":
        mistake = _text_mistake(value)
    elif name == "messages":
        value, mistake = _messages(value)
    else:
        mistake = _token_ids_mistake(value)
    if mistake:
        mistakes.add(row.where, f"{name} {mistake}")
    return {name: value, "template": template}


def _text_mistake(value: object, *, may_be_empty: bool = False) -> str | None:
    if not isinstance(value, str):
        return f"must be text, found {kind_name(value)}"
    if not value.strip() and not may_be_empty:
        return "is empty"
    if any("\ud800" <= character <= "\udfff" for character in value):
        return "holds half of a surrogate pair, which no tokenizer can encode"
    return None


def _messages(value: object) -> tuple[Any, str | None]:
    """Messages without null keys, and what is wrong with them."""
    if not isinstance(value, list):
        return value, f"must be a list, found {kind_name(value)}"
    if not value:
        return value, "is empty"
    kept = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            return value, f"must hold objects, but number {number} is {kind_name(message)}"
        present = {k: v for k, v in message.items() if v is not None}
        if unknown := sorted(set(present) - {"role", "content", "name"}):
            return value, f"number {number} has the unknown key {unknown[0]!r}"
        if (role := present.get("role")) not in ROLES:
            return value, f"number {number} needs a role of {', '.join(ROLES)}; found {role!r}"
        if mistake := _text_mistake(present.get("content"), may_be_empty=role == "system"):
            return value, f"number {number}: content {mistake}"
        kept.append(present)
    if kept[-1]["role"] == "assistant":
        return value, "ends with the assistant's answer, so nothing is left to generate"
    return kept, None


def _token_ids_mistake(value: object) -> str | None:
    if not isinstance(value, list):
        return f"must be a list, found {kind_name(value)}"
    if not value:
        return "is empty"
    for index, token in enumerate(value):
        if type(token) is not int:
            return f"must be integers, but item {index} is {kind_name(token)}: {token!r}"
        if token < 0:
            return f"must not be negative, but item {index} is {token}"
    return None


def _metadata(row: Row, kinds: dict[str, tuple[str, Row]], mistakes: Mistakes) -> dict[str, Scalar]:
    """Columns that are not content, checked to be scalars of one kind over the file."""
    metadata: dict[str, Scalar] = {}
    for name, value in row.values.items():
        if name in CONTENT_FIELDS or name in ("id", "template"):
            continue
        if not name.strip():
            mistakes.add(row.where, "a column has no name")
        elif name in TOKEN_COLUMNS or name in COMPUTED_COLUMNS:
            mistakes.add(
                row.where,
                f"column {name!r} is one of the audit's own",
                "rename the metadata column",
            )
        elif isinstance(value, bool | str):
            kind = "a boolean" if isinstance(value, bool) else "text"
            _check_kind(name, kind, row, kinds, mistakes)
            metadata[name] = value
        elif isinstance(value, int | float):
            if not math.isfinite(value) or abs(value) >= _INT64:
                mistakes.add(row.where, f"column {name!r}: {value} is out of range")
            _check_kind(name, "a number", row, kinds, mistakes)
            metadata[name] = value
        else:
            mistakes.add(
                row.where,
                f"column {name!r} holds {kind_name(value)}",
                "metadata is text, a number or a boolean: flatten nested values into columns",
            )
    return metadata


def _check_kind(
    name: str, kind: str, row: Row, kinds: dict[str, tuple[str, Row]], mistakes: Mistakes
) -> None:
    expected, first = kinds.setdefault(name, (kind, row))
    if kind != expected:
        mistakes.add(
            row.where,
            f"column {name!r} holds {kind} here and {expected} at {first.where}",
            "give a metadata column one type",
        )


def _given_id(row: Row, mistakes: Mistakes) -> str | None:
    value = row.values.get("id")
    if value is None:
        return None
    if type(value) is int:
        return str(value)
    mistake = _text_mistake(value)
    if mistake is None and (len(value) > _MAX_ID or not value.isprintable()):
        mistake = f"must be at most {_MAX_ID} printable characters"
    if mistake is not None:
        mistakes.add(row.where, f"id {mistake}")
        return None
    return str(value)


def _content_id(content: dict[str, Any]) -> str:
    return f"p-{_digest(content)[:16]}"


def _digest(document: Any) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def spread(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """The first `limit` prompts (all, for None), one from each ``domain`` in turn.

    Domains come in the order in which the file first names them, prompts within one in file order;
    prompts without a domain form one of their own. A larger limit only adds prompts at the end.
    """
    groups: dict[Any, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.metadata.get("domain"), []).append(prompt)
    longest = max((len(group) for group in groups.values()), default=0)
    turns = [group[i] for i in range(longest) for group in groups.values() if i < len(group)]
    return turns[:limit]


def prompts_digest(encoded: Iterable[EncodedPrompt]) -> str:
    """SHA-256 (hex) over ids, token ids and metadata in order: what two runs must share."""
    return _digest([[p.id, p.token_ids, p.metadata] for p in encoded])


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: Any,
    max_context: int,
    max_new_tokens: int,
    *,
    vocab_size: int | None = None,
) -> list[EncodedPrompt]:
    """Token ids of every prompt, in order, chat template applied.

    max_context: tokens that the model can hold, prompt and response together.  vocab_size: of the
    model (default: of the tokenizer); an id at or above it is a mistake. Raises InputError naming
    every prompt that cannot be encoded, has two leading BOS tokens, or does not fit.
    """
    from mismatch_audit.prompt_encoding import token_ids

    size = len(tokenizer) if vocab_size is None else vocab_size
    mistakes = Mistakes("prompts")
    encoded = []
    for prompt in prompts:
        where = prompt.where or f"prompt {prompt.id!r}"
        try:
            ids = token_ids(prompt, tokenizer)
        except InputError as error:
            mistakes.add(where, error.what, error.fix)
            continue
        if (largest := max(ids)) >= size:
            mistakes.add(
                where,
                f"token id {largest} of prompt {prompt.id!r} is outside the vocabulary of {size}",
                "use the tokenizer that belongs to the model",
            )
        elif len(ids) + max_new_tokens > max_context:
            mistakes.add(
                where,
                f"prompt {prompt.id!r} has {len(ids)} tokens and may grow by {max_new_tokens}, "
                f"but the context holds {max_context}",
                "shorten the prompt, lower max_tokens, or use a model with a longer context",
            )
        encoded.append(EncodedPrompt(prompt.id, ids, dict(prompt.metadata), len(ids)))
    mistakes.raise_any()
    return encoded
