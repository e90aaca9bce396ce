"""The journal of pushes: one JSON line an event, each with the digest of the line before it.

A line is flushed to the disk before the step that it announces, so that after a crash the last
whole line tells what may have happened. A torn last line was never acted on, and is cut off.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kernel_contracts.errors import InputError
from mismatch_audit.gate.statement import write_time
from mismatch_audit.gate.strict import (
    Malformed,
    canonical,
    parse_canonical,
    read_limited,
    sha256,
    sync_folder,
)

JOURNAL = "journal.jsonl"
LOCK = "lock"
MAX_JOURNAL_BYTES = 64 << 20
_START = "0" * 64


@dataclass(frozen=True)
class Event:
    """push: number of the push in this journal. data: plain."""

    push: int
    event: str
    at: str
    data: dict[str, Any]


class Journal:
    """Use inside ``locked``. Raises InputError for a journal that was edited or is damaged."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL
        folder.mkdir(parents=True, exist_ok=True)
        self.events: list[Event] = []
        self._last = _START
        self._load()

    def _load(self) -> None:
        if not self.path.exists():
            return
        raw = read_limited(self.path, MAX_JOURNAL_BYTES, "a journal")
        whole = raw[: raw.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            self.events.append(self._event(line, number))
            self._last = sha256(line)
        if len(whole) < len(raw):
            with self.path.open("r+b") as stream:
                stream.truncate(len(whole))
                os.fsync(stream.fileno())

    def _event(self, line: bytes, number: int) -> Event:
        try:
            item = parse_canonical(line)
            if item["before"] != self._last:
                raise Malformed("chain", "a line before it was changed or removed")
            return Event(int(item["push"]), str(item["event"]), str(item["at"]), dict(item["data"]))
        except (Malformed, KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"damaged: {error}",
                where=f"{self.path}:{number}",
                fix="find out what the engine serves, then start with another --store",
            ) from None

    def append(self, push: int, event: str, **data: Any) -> Event:
        """Written and flushed when this returns."""
        found = Event(push, event, write_time(datetime.now(UTC)), data)
        line = canonical(
            {"before": self._last, "push": push, "event": event, "at": found.at, "data": data}
        )
        fresh = not self.path.exists()
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                _write_all(handle, line + b"\n")
                os.fsync(handle)
            finally:
                os.close(handle)
            if fresh:
                sync_folder(self.path.parent)
        except OSError as error:
            raise InputError(
                f"cannot write the journal: {error.strerror or error}",
                where=str(self.path),
                fix="mend it and repeat the command: it goes on, or rolls back",
            ) from error
        self.events.append(found)
        self._last = sha256(line)
        return found

    def of(self, push: int) -> list[Event]:
        """Events of one push, in order."""
        return [event for event in self.events if event.push == push]

    @property
    def last_push(self) -> int:
        """Number of the latest push, 0 before the first."""
        return self.events[-1].push if self.events else 0


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One push at a time. The lock ends with its process, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                "another push is under way here",
                where=str(folder),
                fix="wait for it; its lock ends with its process",
            ) from None
        yield
    finally:
        os.close(handle)
