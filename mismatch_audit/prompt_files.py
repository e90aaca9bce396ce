"""Rows of a JSONL, CSV or Parquet prompt file with their places; all its mistakes at once.

A row is a plain dict without absent values. What a prompt is made of is checked in prompts.py.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from kernel_contracts.errors import InputError

MAX_SHOWN = 20
"""Mistakes of one file that are printed; the rest are counted."""

SUFFIXES = (".jsonl", ".ndjson", ".csv", ".parquet")
JSON_CELLS = ("messages", "token_ids")
"""Columns that a CSV file holds as JSON text."""
TEXT_CELLS = ("id", "prompt", "template")
"""Columns of a CSV file that stay text whatever they look like."""

_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?")


@dataclass(frozen=True)
class Row:
    """One record: its values, its line (or row, in Parquet; from 1), and how to name its place."""

    values: dict[str, Any]
    line: int
    where: str


@dataclass
class Mistakes:
    """Collects what is wrong, so that a user mends a file once and not once a line."""

    source: str
    found: list[tuple[str, str, str | None]] = field(default_factory=list)

    def add(self, where: str, what: str, fix: str | None = None) -> None:
        self.found.append((where, what, fix))

    def raise_any(self) -> None:
        """Raise InputError if there is a mistake: one as it is, several as a list."""
        if not self.found:
            return
        if len(self.found) == 1:
            where, what, fix = self.found[0]
            raise InputError(what, where=where, fix=fix)
        lines = [f"{len(self.found)} mistakes"]
        lines += [f"  {where}: {what}" for where, what, _ in self.found[:MAX_SHOWN]]
        if len(self.found) > MAX_SHOWN:
            lines.append(f"  ... and {len(self.found) - MAX_SHOWN} more")
        fixes = list(dict.fromkeys(fix for _, _, fix in self.found if fix))
        raise InputError("\n".join(lines), where=self.source, fix="; ".join(fixes[:3]) or None)


def read_rows(path: Path, mistakes: Mistakes) -> list[Row]:
    """Rows of the file in order; lines that do not parse are added to `mistakes`.

    Raises InputError when the file as a whole cannot be read: missing, unknown suffix, not UTF-8,
    not Parquet, a broken CSV header, or no row at all.
    """
    readers: dict[str, Callable[[Path, Mistakes], list[Row]]] = {
        ".jsonl": _read_jsonl,
        ".ndjson": _read_jsonl,
        ".csv": _read_csv,
        ".parquet": _read_parquet,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise InputError(
            f"unknown kind of prompt file {path.suffix or path.name!r}",
            where=str(path),
            fix=f"use one of {', '.join(SUFFIXES)} (one JSON object a line for .jsonl)",
        )
    if not path.is_file():
        raise InputError("no such prompt file", where=str(path), fix="check the path")
    rows = reader(path, mistakes)
    if not rows and not mistakes.found:
        raise InputError(
            "the prompt file is empty",
            where=str(path),
            fix='write one prompt a line, for example {"prompt": "Name three rivers."}',
        )
    return rows


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read: {error.strerror}", where=str(path)) from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InputError(
            f"not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}",
            where=f"{path}:{line}",
            fix="save the file as UTF-8, for example: iconv -f latin1 -t utf-8",
        ) from error


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"key {name!r} is given twice")
    return dict(pairs)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _json(text: str) -> Any:
    """Strict JSON: no repeated key, no NaN. Raises ValueError; RecursionError becomes one too."""
    try:
        return json.loads(text, object_pairs_hook=_pairs, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _json_mistake(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"malformed JSON at column {error.colno}: {error.msg}"
    return f"malformed JSON: {error}"


def _read_jsonl(path: Path, mistakes: Mistakes) -> list[Row]:
    rows = []
    # Not splitlines(): it also breaks at U+2028 and others that JSON text may hold as they are.
    for line, text in enumerate(_text(path).split("\n"), start=1):
        if not text.strip():
            continue
        where = f"{path}:{line}"
        try:
            values = _json(text)
        except ValueError as error:
            mistakes.add(where, _json_mistake(error), "write one JSON object a line")
            continue
        if not isinstance(values, dict):
            mistakes.add(
                where,
                f"expected a JSON object, found {kind_name(values)}",
                "write one JSON object a line",
            )
            continue
        rows.append(Row(_present(values), line, where))
    return rows


def _read_csv(path: Path, mistakes: Mistakes) -> list[Row]:
    limit = csv.field_size_limit(2**31 - 1)  # the default stops at 128 KB, a long prompt's size
    try:
        reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
        header, records, start = None, [], 1
        for cells in reader:
            if header is None:
                header = [name.strip() for name in cells]
            elif cells:
                records.append((start, cells))
            start = reader.line_num + 1
    except csv.Error as error:
        raise InputError(f"malformed CSV: {error}", where=f"{path}:{reader.line_num}") from error
    finally:
        csv.field_size_limit(limit)
    if header is None:
        return []
    wrong = sorted({name for name in header if header.count(name) > 1 or not name})
    if wrong:
        raise InputError(
            f"column names must be given and differ: {', '.join(map(repr, wrong))}",
            where=f"{path}:1",
        )
    rows = []
    for line, cells in records:
        where = f"{path}:{line}"
        if len(cells) != len(header):
            mistakes.add(where, f"{len(cells)} cells under {len(header)} column names")
            continue
        values: dict[str, Any] = {n: c for n, c in zip(header, cells, strict=True) if c != ""}
        try:
            for name in JSON_CELLS:
                if name in values:
                    values[name] = _json(values[name])
        except ValueError as error:
            mistakes.add(where, f"{name}: {_json_mistake(error)}", "quote the cell as CSV does")
            continue
        rows.append(Row(values, line, where))
    for name in header:
        if name not in JSON_CELLS and name not in TEXT_CELLS:
            _infer_column(name, rows)
    return rows


def _infer_column(name: str, rows: list[Row]) -> None:
    """Turn a metadata column into numbers or booleans when every cell is one; 007 stays text."""
    cells = [row.values[name] for row in rows if name in row.values]
    kind: Callable[[str], Any]
    if all(_INTEGER.fullmatch(cell) for cell in cells):
        kind = int
    elif all(_NUMBER.fullmatch(cell) for cell in cells):
        kind = float
    elif all(cell.lower() in ("true", "false") for cell in cells):
        kind = _boolean
    else:
        return
    for row in rows:
        if name in row.values:
            row.values[name] = kind(row.values[name])


def _boolean(cell: str) -> bool:
    return cell.lower() == "true"


def _read_parquet(path: Path, mistakes: Mistakes) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        records = pq.read_table(path, partitioning=None).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"not a readable Parquet file: {first}", where=str(path)) from error
    return [
        Row(_present(values), number, f"{path} row {number}")
        for number, values in enumerate(records, start=1)
    ]


def _present(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def kind_name(value: object) -> str:
    """How a message names a value's type: 'text', 'a list', ..."""
    names: dict[type, str] = {
        str: "text",
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        list: "a list",
        tuple: "a list",
        dict: "an object",
        bytes: "bytes",
        type(None): "null",
    }
    return names.get(type(value), f"a {type(value).__name__}")
