"""The state of a watch: one SQLite file, one transaction a chunk, so that a kill at any moment
neither loses a row nor counts one twice."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_contracts.errors import InputError

VERSION = 1

_TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS seen (id BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS alarms (
  id TEXT PRIMARY KEY, time TEXT NOT NULL, clause TEXT NOT NULL, slice TEXT NOT NULL,
  payload TEXT NOT NULL, UNIQUE (clause, slice));
CREATE TABLE IF NOT EXISTS deliveries (
  alarm TEXT NOT NULL REFERENCES alarms (id), action TEXT NOT NULL, status TEXT NOT NULL,
  attempts INTEGER NOT NULL, due REAL NOT NULL, note TEXT NOT NULL,
  PRIMARY KEY (alarm, action));
"""


@dataclass
class Snapshot:
    """What the state holds. cursor: where the source goes on.  counters: rows by outcome and sums.
    book: state of the sequential tests."""

    cursor: dict[str, Any] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    book: dict[str, Any] = field(default_factory=dict)
    last_row: str = ""


@dataclass(frozen=True)
class Alarm:
    """A promise that broke. id: the same for the same alarm, also after a restart."""

    id: str
    time: str
    clause: str
    slice: str
    payload: dict[str, Any]


@dataclass(frozen=True)
class Delivery:
    """An action about an alarm. status: pending, done or failed.  due: Unix time to try at."""

    alarm: Alarm
    action: str
    status: str
    attempts: int
    due: float
    note: str


def key_of(kind: str, text: str) -> bytes:
    """16 bytes of a hash: two of a billion ids share one with probability 1e-21."""
    return hashlib.sha256(f"{kind}\0{text}".encode()).digest()[:16]


class WatchState:
    """Opened for one process; a second one is refused while the first lives.

    identity: what the state is about (contract, source); another one raises InputError.
    """

    def __init__(self, path: Path, identity: Mapping[str, str]) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, isolation_level=None, timeout=0.5)
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("BEGIN EXCLUSIVE")
            self._db.execute("COMMIT")
            self._db.executescript(_TABLES)
        except sqlite3.OperationalError as error:
            busy = "locked" in str(error)
            raise InputError(
                "another watch has this state open" if busy else f"cannot open it: {error}",
                where=str(path),
                fix="give another --state" if busy else "check the folder's permissions",
            ) from None
        except sqlite3.DatabaseError as error:
            raise InputError(
                f"damaged: {error}", where=str(path), fix="restore it, or begin anew with --state"
            ) from None
        self._check_identity({"version": str(VERSION), **identity})

    def _check_identity(self, identity: dict[str, str]) -> None:
        known = self._meta("identity")
        if known is None:
            with self.transaction():
                self._set_meta("identity", identity)
        elif known != identity:
            changed = sorted(k for k in {*known, *identity} if known.get(k) != identity.get(k))
            raise InputError(
                f"this state is of another watch; different: {', '.join(changed)}",
                where=str(self.path),
                fix="give another --state: evidence is not carried over",
            )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of it, or nothing."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def load(self) -> Snapshot:
        """As the last chunk left it."""
        saved = self._meta("snapshot")
        if saved is None:
            return Snapshot()
        return Snapshot(saved["cursor"], Counter(saved["counters"]), saved["book"], saved["last"])

    def save(self, snapshot: Snapshot) -> None:
        """Inside a transaction."""
        self._set_meta(
            "snapshot",
            {
                "cursor": snapshot.cursor,
                "counters": dict(snapshot.counters),
                "book": snapshot.book,
                "last": snapshot.last_row,
            },
        )

    def unseen(self, keys: Iterable[bytes]) -> set[bytes]:
        """Those of the keys that were never added."""
        wanted = set(keys)
        found: set[bytes] = set()
        for key in wanted:
            if self._db.execute("SELECT 1 FROM seen WHERE id = ?", (key,)).fetchone():
                found.add(key)
        return wanted - found

    def add_seen(self, keys: Iterable[bytes]) -> None:
        """Inside a transaction."""
        self._db.executemany("INSERT OR IGNORE INTO seen VALUES (?)", [(k,) for k in keys])

    def add_alarm(self, alarm: Alarm, actions: Iterable[str]) -> bool:
        """Inside a transaction; False where this clause and slice alarmed before."""
        fresh = self._db.execute(
            "INSERT OR IGNORE INTO alarms VALUES (?, ?, ?, ?, ?)",
            (alarm.id, alarm.time, alarm.clause, alarm.slice, json.dumps(alarm.payload)),
        ).rowcount
        if fresh:
            self._db.executemany(
                "INSERT INTO deliveries VALUES (?, ?, 'pending', 0, 0, '')",
                [(alarm.id, action) for action in actions],
            )
        return bool(fresh)

    def alarms(self) -> list[Alarm]:
        """Oldest first."""
        rows = self._db.execute(
            "SELECT id, time, clause, slice, payload FROM alarms ORDER BY time, id"
        )
        return [Alarm(i, t, c, s, json.loads(payload)) for i, t, c, s, payload in rows]

    def deliveries(self) -> list[Delivery]:
        """Every action about every alarm."""
        alarms = {a.id: a for a in self.alarms()}
        rows = self._db.execute(
            "SELECT alarm, action, status, attempts, due, note FROM deliveries ORDER BY rowid"
        )
        return [Delivery(alarms[row[0]], *row[1:]) for row in rows]

    def set_delivery(self, one: Delivery) -> None:
        """A transaction of its own."""
        with self.transaction():
            self._db.execute(
                "UPDATE deliveries SET status = ?, attempts = ?, due = ?, note = ? "
                "WHERE alarm = ? AND action = ?",
                (one.status, one.attempts, one.due, one.note, one.alarm.id, one.action),
            )

    def _meta(self, key: str) -> Any:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def _set_meta(self, key: str, value: Any) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value, allow_nan=False))
        )

    def close(self) -> None:
        self._db.close()
