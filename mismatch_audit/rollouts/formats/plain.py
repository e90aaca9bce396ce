"""Our own schema, as Parquet or JSON lines: docs/rollouts.md lists the columns.

Columns may be in any order, and any but the required ones may be absent. Types are converted where
that loses nothing but digits (list<double> to float32). Unknown columns are ignored and noted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kernel_contracts.errors import InputError
from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.formats.base import Detection, ReadOptions, Source
from mismatch_audit.rollouts.formats.lines import first_object, open_binary
from mismatch_audit.rollouts.formats.plain_columns import conform, header_of, lacking
from mismatch_audit.rollouts.formats.table import batches as slow_batches
from mismatch_audit.rollouts.schema import LISTS, REQUIRED, SCALARS, Header

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

FORMAT = "plain"

_BLOCK = 16 << 20
_FIX = "docs/rollouts.md lists the columns; rename yours with --field OURS=THEIRS"


@dataclass
class _Read:
    """How far a reader is: rows of a Parquet file, bytes of JSON lines (unpacked)."""

    amount: int = 0


def detect(path: Path) -> Detection | None:
    """A Parquet or JSONL file with our required columns."""
    if path.is_dir():
        return None
    names: Iterable[str] = ()
    if _is_parquet(path):
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            names = pq.read_schema(path).names
        except (OSError, pa.ArrowException):
            return None
    elif ".jsonl" in path.suffixes:
        names = first_object(path) or ()
    if not set(REQUIRED) <= set(names):
        return None
    return Detection(FORMAT, 0.9, f"columns {', '.join(REQUIRED)}")


def read(path: Path, options: ReadOptions) -> Source:
    """Raises InputError where a required column is missing."""
    if _is_parquet(path):
        return _parquet(path, options)
    return _jsonl(path, options)


def _is_parquet(path: Path) -> bool:
    if path.suffix in (".parquet", ".pq"):
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PAR1"
    except OSError:
        return False


def _names(found: Iterable[str], options: ReadOptions, path: Path) -> dict[str, str]:
    """Their column -> ours. Raises InputError for a required column that is not there."""
    found = set(found)
    mapping = {theirs: ours for ours, theirs in options.fields.items()}
    for theirs, ours in mapping.items():
        if ours not in SCALARS and ours not in LISTS:
            raise InputError(f"no column {ours!r} in our schema", where="--field", fix=_FIX)
        if theirs not in found:
            raise InputError(f"no column {theirs!r} (for {ours})", where=str(path), fix=_FIX)
    taken = set(mapping.values())
    mapping |= {
        name: name for name in found if name not in taken and (name in SCALARS or name in LISTS)
    }
    absent = [name for name in REQUIRED if name not in mapping.values()]
    if absent:
        raise InputError(f"no column {', '.join(absent)}", where=str(path), fix=_FIX)
    return mapping


def _header(path: Path, found: Iterable[str], names: Mapping[str, str], stored: bytes) -> Header:
    header = header_of(path, stored)
    header.format = FORMAT
    header.lacks |= {
        name: why for name, why in lacking(set(names.values())).items() if name not in header.lacks
    }
    ignored = sorted(set(found) - set(names))
    if ignored:
        shown = ", ".join(ignored[:8]) + (" and others" if len(ignored) > 8 else "")
        header.notes.append(f"columns ignored: {shown}")
    return header


# Parquet ------------------------------------------------------------------------------------------
def _parquet(path: Path, options: ReadOptions) -> Source:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # pre_buffer keeps every group that was read: 1.6 GB after 100 million tokens, no faster
        file = pq.ParquetFile(path, pre_buffer=False)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"not readable as Parquet: {_short(error)}", where=str(path)) from None
    found = file.schema_arrow.names
    names = _names(found, options, path)
    stored = (file.schema_arrow.metadata or {}).get(b"mismatch_audit", b"")
    header = _header(path, found, names, stored)
    size, read = path.stat().st_size, _Read()
    batches = _parquet_batches(path, file, names, options, read)
    rows = max(1, file.metadata.num_rows)
    return Source(path, header, batches, size, lambda: size * read.amount // rows)


def _parquet_batches(
    path: Path, file: pq.ParquetFile, names: dict[str, str], options: ReadOptions, read: _Read
) -> Iterator[TokenBatch]:
    import pyarrow as pa

    rows = _rows_a_batch(file, next(t for t, o in names.items() if o == "token_ids"), options)
    done = 0
    try:
        for records in file.iter_batches(batch_size=rows, columns=list(names)):
            read.amount += records.num_rows
            yield TokenBatch(conform(records, names, path, done), str(path), done)
            done = read.amount
    except (OSError, pa.ArrowException) as error:
        raise InputError(
            f"damaged from row {done + 1} on: {_short(error)}", where=f"{path}:{done + 1}"
        ) from None


def _rows_a_batch(file: pq.ParquetFile, tokens: str, options: ReadOptions) -> int:
    """Rows that hold about ``batch_tokens`` tokens in the group whose rows are the longest."""
    longest = 1.0
    meta = file.metadata
    for group in range(meta.num_row_groups):
        chunk = meta.row_group(group)
        for i in range(chunk.num_columns):
            leaf = chunk.column(i)
            if leaf.path_in_schema.split(".")[0] == tokens:
                longest = max(longest, leaf.num_values / max(1, chunk.num_rows))
    return max(1, int(options.batch_tokens / longest))


# JSON lines ---------------------------------------------------------------------------------------
def _jsonl(path: Path, options: ReadOptions) -> Source:
    first = first_object(path)
    if first is None:
        raise InputError("its first line is no JSON object", where=f"{path}:1")
    names = _names(first, options, path)
    header = _header(path, first, names, b"")
    size, read = path.stat().st_size, _Read()
    batches = _jsonl_batches(path, names, first, options, read)
    return Source(path, header, batches, size, lambda: min(size, read.amount))


def _jsonl_batches(
    path: Path, names: dict[str, str], first: Mapping[str, Any], options: ReadOptions, read: _Read
) -> Iterator[TokenBatch]:
    schema = _json_schema(names, first)
    done, seen = 0, set[str]()
    for block, line in _blocks(path, options.max_line):
        read.amount += len(block)
        try:
            records = _parse(block, schema)
            batch = TokenBatch(conform(records, names, path, done), str(path), done)
        except (ValueError, InputError):  # pyarrow's errors are ValueErrors; they name no line
            for batch in slow_batches(
                str(path), _slow_rows(path, block, line, names), options, seen
            ):
                done += batch.n_sequences
                yield batch
            continue
        done += batch.n_sequences
        yield batch


def _json_schema(names: Mapping[str, str], first: Mapping[str, Any]) -> pa.Schema:
    """Types to parse: ours, or what the first line writes where that can be converted (0 and 1 for
    truths, whole numbers for ids)."""
    import pyarrow as pa

    fields = []
    for theirs, ours in names.items():
        raw = (first.get(theirs) or b"").lstrip(b" \t")
        if ours in SCALARS:
            kind = pa.type_for_alias(SCALARS[ours])
            if SCALARS[ours] == "string" and raw[:1].isdigit():
                kind = pa.int64()
        else:
            kind = pa.type_for_alias(LISTS[ours])
            if LISTS[ours] == "bool" and raw[1:].lstrip()[:1].isdigit():
                kind = pa.int8()
            kind = pa.list_(kind)
        fields.append(pa.field(theirs, kind))
    return pa.schema(fields)


def _parse(block: bytes, schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa
    from pyarrow import json as pa_json

    table = pa_json.read_json(
        pa.BufferReader(block),
        read_options=pa_json.ReadOptions(use_threads=True, block_size=min(len(block), 4 << 20)),
        parse_options=pa_json.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="ignore"
        ),
    )
    return table.combine_chunks().to_batches()[0]


def _blocks(path: Path, max_line: int) -> Iterator[tuple[bytes, int]]:
    """(whole lines, number of the first) of about 16 MB. Raises InputError for a line that is too
    long, or a compressed file that is damaged."""
    line, rest = 1, b""
    with open_binary(path) as file:
        while True:
            try:
                data = file.read(_BLOCK)
            except (OSError, EOFError, ValueError) as error:
                raise InputError(
                    f"the compressed data is damaged or cut off: {_short(error)}",
                    where=f"{path}:{line}",
                ) from None
            cut = data.rfind(b"\n") + 1
            if data and not cut:
                rest += data
                if len(rest) > max_line:
                    raise InputError(
                        f"the line is longer than {max_line >> 20} MiB", where=f"{path}:{line}"
                    )
                continue
            block, rest = rest + data[:cut], data[cut:]
            if not data:
                block, rest = block + rest, b""
            if block.strip():
                yield block, line
            line += block.count(b"\n")
            if not data:
                return


def _slow_rows(
    path: Path, block: bytes, line: int, names: Mapping[str, str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Line by line: what pyarrow does not read (NaN, Infinity), and the place of a mistake."""
    for number, text in enumerate(block.splitlines(), line):
        if not text.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(text, parse_constant=_constant)
        except (ValueError, RecursionError) as error:
            raise InputError(f"not JSON: {error}", where=where) from None
        if not isinstance(row, dict):
            raise InputError("not a JSON object", where=where)
        missing = [t for t, ours in names.items() if ours in REQUIRED and row.get(t) is None]
        if missing:
            raise InputError(f"no value for {', '.join(missing)}", where=where)
        clean = {ours: row[theirs] for theirs, ours in names.items() if theirs in row}
        yield where, {k: _plain(k, v) for k, v in clean.items()}


def _constant(word: str) -> float | None:
    return None if word == "NaN" else float(word.replace("Infinity", "inf"))


def _plain(name: str, value: Any) -> Any:
    if SCALARS.get(name) == "string" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, list) and LISTS.get(name, "").startswith("float"):
        return np.array([np.nan if v is None else v for v in value], dtype=np.float64)
    return value


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__
