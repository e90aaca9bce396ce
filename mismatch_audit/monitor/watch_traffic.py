"""A mirrored-traffic log as a watch's source: each new request is re-scored by the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kernel_contracts.contract import Contract
from kernel_contracts.errors import InputError
from mismatch_audit.monitor.follow import Followed, Place, follow, waiting_bytes
from mismatch_audit.monitor.ingest import Scorer
from mismatch_audit.monitor.observe import BoundedClause
from mismatch_audit.monitor.traffic import TrafficRow, parse_row, rotated_files
from mismatch_audit.monitor.usable import UNIT_KEY, unit_of, why_unusable
from mismatch_audit.monitor.watch_source import Chunk, units_of

CHUNK = 32
"""Requests re-scored and counted together."""


class TrafficSource:
    """Follows ``log``. load: loads the reference, when the first request comes.

    weights_version: the one that the reference is of; None takes any.  Raises InputError at a bad
    line unless skip_bad.
    """

    def __init__(
        self,
        log: Path,
        contract: Contract,
        clauses: Sequence[BoundedClause],
        load: Callable[[], Scorer],
        *,
        weights_version: int | str | None = None,
        skip_bad: bool = False,
    ) -> None:
        self.log, self.contract, self.clauses = log, contract, clauses
        self.weights_version, self.skip_bad = weights_version, skip_bad
        self._load = load
        self._scorer: Scorer | None = None
        self.identity = {"source": "traffic", "weights_version": str(weights_version)}
        self.title = str(log)

    def poll(self, cursor: dict[str, Any], *, final: bool) -> Iterator[Chunk]:
        """New requests. A prompt with a ``prompt_id`` is complete when another one follows; at the
        log's end it waits, unless final."""
        if final and not rotated_files(self.log):
            raise InputError("no such log", where=str(self.log))
        place = Place(**cursor["place"]) if "place" in cursor else None
        rows: list[TrafficRow] = []
        group: list[TrafficRow] = []
        last, after_group = place, place  # after_group: the place after the last complete prompt
        notes: Counter[str] = Counter()
        pending: Counter[str] = Counter()  # notes that belong behind the open prompt
        for one in follow(self.log, place):
            notes["log replaced"] += int(one.gap)
            row = self._row(one, pending)
            if row is not None and group and unit_of(row) != unit_of(group[0]):
                rows, group, after_group = rows + group, [], last
                notes, pending = notes + pending, Counter()
            if row is not None:
                group.append(row)
            last = one.place
            if group and UNIT_KEY not in group[0].metadata:
                rows, group = rows + group, []
            if not group:
                after_group = last
                notes, pending = notes + pending, Counter()
            if len(rows) >= CHUNK:
                yield self._chunk(rows, after_group, notes)
                rows, notes = [], Counter()
        if final and group:
            rows, after_group, notes = rows + group, last, notes + pending
        if rows or notes or after_group != place:
            yield self._chunk(rows, after_group, notes)

    def _row(self, one: Followed, notes: Counter[str]) -> TrafficRow | None:
        if one.line.data is not None and not one.line.data.strip():
            return None
        try:
            return parse_row(one.line.data, f"{one.path}:byte {one.line.start}")
        except InputError:
            if not self.skip_bad:
                raise
            notes["bad lines"] += 1
            return None

    def _chunk(self, rows: Sequence[TrafficRow], place: Place | None, notes: Counter[str]) -> Chunk:
        cursor = {} if place is None else {"place": place.to_dict()}
        if not rows:
            return Chunk(cursor, notes=+notes)
        once = {r.request_id: r for r in reversed(rows)}  # the first of equal ids
        notes["repeated"] += len(rows) - len(once)
        rows = [r for r in rows if once[r.request_id] is r]
        fit = self.scorer.fit(self.weights_version)
        unusable = {r.request_id: why for r in rows if (why := why_unusable(r, fit)) is not None}
        scored, bad = self.scorer.score([r for r in rows if r.request_id not in unusable])
        times = {r.request_id: r.time for r in rows}
        units = units_of(self.contract, self.clauses, scored, times)
        return Chunk(cursor, units, unusable | bad, +notes)

    @property
    def scorer(self) -> Scorer:
        """The reference, loaded when it is first needed."""
        if self._scorer is None:
            self._scorer = self._load()
        return self._scorer

    def backlog(self, cursor: dict[str, Any]) -> int:
        """Bytes of the log that wait."""
        return waiting_bytes(self.log, Place(**cursor["place"]) if "place" in cursor else None)

    def close(self) -> None:
        """Free the reference."""
        if self._scorer is not None:
            self._scorer.close()
