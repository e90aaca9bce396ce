"""JSON lines, plain or compressed, read with bounds: one decoded object a line, or a clear error.

msgspec decodes into a typed struct: fields that no reader uses are skipped, and a wrong type is
named with its path in the line. It takes a third of json's time and is level with pyarrow.json,
which cannot name a line and refuses NaN (benchmarks/rollout_formats.py).
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import msgspec

from kernel_contracts.errors import InputError

T = TypeVar("T")

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
# A truncated or damaged compressed stream ends in one of these.
_STREAM_ERRORS = (OSError, EOFError, zlib.error)


def open_binary(path: Path) -> BinaryIO:
    """The file's bytes, unpacked when they start as gzip or zstd. Raises InputError."""
    try:
        file = path.open("rb")
        magic = file.read(4)
        file.seek(0)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"cannot read: {reason}", where=str(path)) from error
    if magic.startswith(_GZIP):
        return cast(BinaryIO, io.BufferedReader(gzip.GzipFile(fileobj=file)))
    if magic == _ZSTD:
        import pyarrow as pa

        return cast(BinaryIO, io.BufferedReader(pa.CompressedInputStream(file, "zstd")))
    return cast(BinaryIO, file)


def decoder(kind: type[T]) -> Callable[[bytes], T]:
    """Decode one line into ``kind`` (a msgspec struct). NaN and Infinity, which Python writes but
    JSON has not, become null. The function raises ValueError with the reason."""
    typed = msgspec.json.Decoder(kind)

    def decode(line: bytes) -> T:
        try:
            return typed.decode(line)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None
        except RecursionError:
            raise ValueError("nested too deeply") from None
        except msgspec.DecodeError as error:
            if b"NaN" not in line and b"Infinity" not in line:
                raise ValueError(f"not JSON: {error}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 at byte {error.start}") from None
        try:
            loose = json.loads(line, parse_constant=lambda _: None)
            return msgspec.convert(loose, kind, strict=True)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        except ValueError as error:  # JSON, UTF-8 and validation errors are all ValueErrors
            raise ValueError(str(error)) from None

    return decode


def read_lines(path: Path, decode: Callable[[bytes], T], max_line: int) -> Iterator[tuple[int, T]]:
    """``(line number from 1, decoded)`` of each line that is not blank. Raises InputError, file and
    line named, for a line that is too long, cut off or no object of the format."""
    with open_binary(path) as file:
        number = 0
        while True:
            number += 1
            where = f"{path}:{number}"
            try:
                line = file.readline(max_line + 1)
            except _STREAM_ERRORS as error:
                raise InputError(
                    f"the compressed data is damaged or cut off: {error}",
                    where=where,
                    fix="unpack the file with its own tool to see how much of it is left",
                ) from error
            if not line:
                return
            if len(line) > max_line:
                raise InputError(
                    f"the line is longer than {max_line >> 10} KiB",
                    where=where,
                    fix="one line is one sequence; raise the limit on a line's length if it is",
                )
            if line.isspace():
                continue
            try:
                decoded = decode(line)
            except ValueError as error:
                if not line.endswith(b"\n") and not _closed(line):
                    raise InputError(
                        "the last line is cut off (was the file still being written?)",
                        where=where,
                        fix="remove the last line, or wait until the writer has finished",
                    ) from None
                raise InputError(str(error), where=where) from None
            yield number, decoded


def _closed(line: bytes) -> bool:
    return line.rstrip().endswith(b"}")


def first_object(path: Path, limit: int = 64 << 20) -> dict[str, Any] | None:
    """Top-level keys of the first line (of its first object, where it is a list) with undecoded
    values; None where it is no JSON object."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return _first_object(str(path), stat.st_mtime_ns, stat.st_size, limit)


@lru_cache(maxsize=256)
def _first_object(path: str, _mtime: int, _size: int, limit: int) -> dict[str, Any] | None:
    raw = msgspec.json.Decoder(dict[str, msgspec.Raw] | list[dict[str, msgspec.Raw]])
    try:
        with open_binary(Path(path)) as file:
            if file.peek(64)[:64].lstrip()[:1] not in (b"{", b"[", b""):  # type: ignore[attr-defined]
                return None
            line = b"\n"
            while line.isspace():
                line = file.readline(limit)
        found = raw.decode(line)
        first = (found[0] if found else {}) if isinstance(found, list) else found
        return {key: bytes(value) for key, value in first.items()}
    except msgspec.DecodeError:
        return _loose_keys(line)
    except (InputError, UnicodeDecodeError, RecursionError, *_STREAM_ERRORS):
        return None


def _loose_keys(line: bytes) -> dict[str, Any] | None:
    if b"NaN" not in line and b"Infinity" not in line:
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return dict.fromkeys(found, b"") if isinstance(found, dict) else None
