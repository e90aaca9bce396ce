"""The files of a dump: which belong to it, and reading them one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kernel_contracts.errors import InputError
from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.formats.base import ReadOptions, Source
from mismatch_audit.rollouts.formats.lines import decoder, read_lines
from mismatch_audit.rollouts.formats.table import Row, batches
from mismatch_audit.rollouts.formats.tidy import natural
from mismatch_audit.rollouts.schema import Header

T = TypeVar("T")

COMPRESSED = ("", ".gz", ".zst")


def matching(path: Path, *patterns: str) -> list[Path]:
    """Files of a folder that fit one of the globs, step 2 before step 10; the file itself, where
    ``path`` is one and its name fits the end of a glob. Compressed ones count."""
    globs = [pattern + end for pattern in patterns for end in COMPRESSED]
    if path.is_dir():
        found = {file for glob in globs for file in path.glob(glob) if file.is_file()}
        return sorted(found, key=natural)
    return [path] if any(path.match(glob.rsplit("/", 1)[-1]) for glob in globs) else []


class Files:
    """Batches of several files in turn. After an InputError the next ``next()`` goes on with the
    next file, so one damaged file does not hide the others."""

    def __init__(self, files: Sequence[Path], read: Callable[[Path], Iterator[TokenBatch]]) -> None:
        self._files, self._read = iter(files), read
        self._now: Iterator[TokenBatch] = iter(())

    def __iter__(self) -> Files:
        return self

    def __next__(self) -> TokenBatch:
        while True:
            try:
                return next(self._now)
            except StopIteration:
                self._now = self._read(next(self._files))


def size_of(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def rows_of(
    path: Path, objects: Iterator[tuple[int, T]], convert: Callable[[T, int], dict[str, Any]]
) -> Iterator[Row]:
    """Convert numbered objects to rows; a ValueError of ``convert`` names its file and row."""
    for number, item in objects:
        where = f"{path}:{number}"
        try:
            row = convert(item, number)
        except ValueError as error:
            raise InputError(str(error), where=where) from None
        yield where, row


def jsonl_source(
    path: Path,
    files: Sequence[Path],
    kind: type[T],
    convert: Callable[[Path], Callable[[T, int], dict[str, Any]]],
    header: Header,
    options: ReadOptions,
) -> Source:
    """A source of JSONL files. convert: given a file, a function of one decoded line and its number
    that returns the row's columns, or raises ValueError."""
    decode, seen = decoder(kind), set[str]()

    def read(file: Path) -> Iterator[TokenBatch]:
        lines = read_lines(file, decode, options.max_line)
        return batches(str(file), rows_of(file, lines, convert(file)), options, seen)

    return Source(path, header, Files(files, read), size_of(files))
