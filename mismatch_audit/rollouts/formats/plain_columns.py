"""Columns of a plain file in our own types, checked; and its header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kernel_contracts.errors import InputError
from mismatch_audit.rollouts.schema import LISTS, REQUIRED, SCALARS, Header

if TYPE_CHECKING:
    import pyarrow as pa


def conform(records: pa.RecordBatch, names: Mapping[str, str], path: Path, done: int) -> Any:
    """A record batch with our names and types. names: theirs -> ours.  done: rows before it.

    Raises InputError naming file, row and column: a null or negative id, a list of another length
    than the tokens, a value that does not fit its type.
    """
    import pyarrow as pa

    arrays, schema = [], []
    for theirs, ours in names.items():
        array = _typed(records.column(theirs), ours, path, done)
        arrays.append(array)
        schema.append(pa.field(ours, array.type))
    batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(schema))
    _check(batch, path, done)
    return batch


def _typed(column: Any, name: str, path: Path, done: int) -> Any:
    import pyarrow as pa

    wanted = pa.type_for_alias(SCALARS.get(name) or LISTS[name])
    if name in LISTS:
        wanted = pa.list_(wanted)
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            raise InputError(
                f"{name} should be a list a row, but is {column.type}", where=f"{path}:{done + 1}"
            )
    if column.type.equals(wanted) or (
        name in LISTS and column.type.value_type.equals(wanted.value_type)
        and pa.types.is_list(column.type)
    ):  # fmt: skip
        return column
    try:
        if name in LISTS and pa.types.is_floating(wanted.value_type):
            return column.cast(wanted, safe=False)
        return column.cast(wanted)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        row = done + 1 + _first_misfit(column, wanted)
        reason = str(error).splitlines()[0]
        raise InputError(
            f"{name} should be {wanted}, but is {column.type}: {reason}", where=f"{path}:{row}"
        ) from None


def _first_misfit(column: Any, wanted: Any) -> int:
    import pyarrow as pa

    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            column[low:middle].cast(wanted)
            low = middle
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            high = middle
    return low


def _check(batch: Any, path: Path, done: int) -> None:
    for name in REQUIRED:
        column = batch.column(name)
        if column.null_count:
            at = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            raise InputError(f"{name} is null", where=f"{path}:{done + at + 1}")
    tokens = batch.column("token_ids")
    if tokens.flatten().null_count:
        raise InputError("token_ids holds a null", where=f"{path}:{done + 1}")
    lengths = np.diff(tokens.offsets.to_numpy())
    prompt = batch.column("prompt_len").to_numpy(zero_copy_only=False)
    wrong = (prompt < 0) | (prompt > lengths)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InputError(
            f"prompt_len {prompt[at]} is not between 0 and the {lengths[at]} tokens",
            where=f"{path}:{done + at + 1}",
        )
    for name in batch.schema.names:
        if name not in LISTS or name == "token_ids":
            continue
        column = batch.column(name)
        own = np.diff(column.offsets.to_numpy())
        wrong = own != lengths
        if column.null_count:
            wrong &= column.is_valid().to_numpy(zero_copy_only=False)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise InputError(
                f"{name} has {own[at]} values for {lengths[at]} tokens",
                where=f"{path}:{done + at + 1}",
            )


_WHY = {
    "sampler_logprob": "record the engine's log-prob of each sampled token",
    "trainer_logprob": "record the trainer's log-prob of each token before the update",
    "group_id": "each sequence counts as a prompt of its own: name the prompt",
}


def lacking(have: set[str]) -> dict[str, str]:
    """Columns that a file does not have, and what to do about it."""
    return {
        name: f"the file has no column {name}" + (f": {_WHY[name]}" if name in _WHY else "")
        for name in (*SCALARS, *LISTS)
        if name not in have
    }


def header_of(path: Path, stored: bytes) -> Header:
    """The header in the file's metadata, or in ``NAME.header.json`` beside it; else an empty one.
    Raises InputError where it is none of ours."""
    beside = path.with_name(path.name.split(".")[0] + ".header.json")
    where = str(path)
    if not stored and beside.is_file():
        where, stored = str(beside), beside.read_bytes()[: 1 << 20]
    if not stored:
        return Header(framework="unknown")
    known = {field.name for field in fields(Header)}
    try:
        document = json.loads(stored)
        unknown = sorted(set(document) - known)
        if unknown:
            raise ValueError(f"unknown keys {', '.join(unknown)}")
        if document.get("eos_ids") is not None:
            document["eos_ids"] = tuple(int(i) for i in document["eos_ids"])
        return Header(**document)
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"its header is not ours: {error}",
            where=where,
            fix=f"write a JSON object with keys of {', '.join(sorted(known))}",
        ) from None
