"""Following a log that grows, is rotated, truncated or replaced: never a line twice or none."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch_audit.monitor.traffic import Line, lines_of, rotated_files

HEAD = 1024
"""Bytes that a file is recognised by, beside its inode: inodes are used again."""


@dataclass(frozen=True)
class Place:
    """Just after a line. head: SHA-256 of the file's first ``size`` bytes."""

    inode: int
    head: str
    size: int
    offset: int

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    @classmethod
    def of(cls, path: Path, offset: int) -> Place:
        size = min(offset, HEAD)
        return cls(path.stat().st_ino, _head(path, size), size, offset)


@dataclass(frozen=True)
class Followed:
    """A line, the file it is in, and the place after it. gap: the last place was not found again,
    and reading began anew at the oldest file."""

    path: Path
    line: Line
    gap: bool = False

    @property
    def place(self) -> Place:
        return Place.of(self.path, self.line.end)


def follow(log: Path, place: Place | None) -> Iterator[Followed]:
    """The finished lines after a place, over rotated files; ends where the log ends for now.

    Where the place is gone (its file deleted, truncated, or another with the same inode), every
    file that is there is read from its start: the caller lets no request in twice.
    """
    files = rotated_files(log)
    at, offset = _find(files, place)
    gap = place is not None and at is None
    for path in files[at or 0 :]:
        for line in lines_of(path, offset=offset):
            yield Followed(path, line, gap)
            gap = False
        offset = 0


def waiting_bytes(log: Path, place: Place | None) -> int:
    """Bytes after the place, an unfinished line included."""
    files = rotated_files(log)
    at, offset = _find(files, place)
    return sum(_size(path) for path in files[at or 0 :]) - offset


def _find(files: list[Path], place: Place | None) -> tuple[int | None, int]:
    if place is None:
        return None, 0
    for index, path in enumerate(files):
        try:
            status = path.stat()
        except FileNotFoundError:  # rotated between the listing and now; its new name comes later
            continue
        same = status.st_ino == place.inode and status.st_size >= place.offset
        if same and _head(path, place.size) == place.head:
            return index, place.offset
    return None, 0


def _head(path: Path, size: int) -> str:
    with path.open("rb") as stream:
        return hashlib.sha256(stream.read(size)).hexdigest()


def _size(path: Path) -> int:
    try:
        return os.path.getsize(path)
    except FileNotFoundError:
        return 0
