"""Reading what others wrote: bounded, and one spelling only.

A signature covers bytes, a reader sees a document. Between the two lie duplicate keys, trailing
bytes, other spellings of one number and base64 with spare bits. Here a document must be spelt
exactly as ``canonical`` spells it, so that one document has one file.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from kernel_contracts.errors import InputError

MAX_DEPTH = 32


class Malformed(Exception):
    """Bytes that are no document of ours. code: for a gate's reasons."""

    def __init__(self, code: str, what: str) -> None:
        self.code, self.what = code, what
        super().__init__(what)


def read_limited(path: Path, limit: int, what: str) -> bytes:
    """At most ``limit`` bytes of a regular file. Raises InputError for anything else."""
    where = str(path)
    try:
        # Opened before it is looked at, without waiting: a FIFO or a device must not hang a gate.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise InputError(f"not a file, so not {what}", where=where)
            raw = stream.read(limit + 1)
    except OSError as error:
        raise InputError(f"cannot read {what}: {error.strerror or error}", where=where) from error
    if len(raw) > limit:
        raise InputError(f"larger than {limit >> 10} KB: not {what}", where=where)
    return raw


def canonical(document: Any) -> bytes:
    """UTF-8 JSON, keys sorted, no spaces, ASCII only, no NaN."""
    return json.dumps(
        document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode("ascii")


def parse(raw: bytes) -> Any:
    """JSON without duplicate keys, NaN, trailing bytes or runaway nesting. Raises Malformed."""
    try:
        text = raw.decode("utf-8")
        value, end = json.JSONDecoder(
            object_pairs_hook=_unique, parse_constant=_no_constant
        ).raw_decode(text, len(text) - len(text.lstrip(" \t\r\n")))
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:
        raise Malformed("not_json", f"not JSON: {str(error)[:120]}") from None
    if text[end:].strip(" \t\r\n"):
        raise Malformed("trailing_bytes", f"{len(text) - end} characters after the document")
    _check_depth(value)
    return value


def parse_canonical(raw: bytes) -> Any:
    """As ``parse``, and spelt as ``canonical`` spells it. Raises Malformed."""
    value = parse(raw)
    try:
        same = canonical(value) == raw
    except ValueError:
        same = False
    if not same:
        raise Malformed("not_canonical", "spelt in another way than it was signed")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise Malformed("duplicate_key", f"the key {twice[:60]!r} stands twice")
    return found


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _check_depth(value: Any, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise Malformed("not_json", f"nested deeper than {MAX_DEPTH}")
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        _check_depth(item, depth + 1)


def sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """The whole file or the old one, also after a power cut. Raises InputError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.chmod(mode)
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"cannot write it: {error.strerror or error}", where=str(path)) from error


def sync_folder(folder: Path) -> None:
    """Make a rename or a new file in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
