"""The folder of pushes: journal, what is served, blessings, and what a way back needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernel_contracts.errors import InputError
from mismatch_audit.gate.canaries import Canary
from mismatch_audit.gate.checks import LogProbs, SyncCheck
from mismatch_audit.gate.journal import Event, Journal
from mismatch_audit.gate.strict import (
    Malformed,
    canonical,
    parse_canonical,
    read_limited,
    sha256,
    write_atomic,
)
from mismatch_audit.gate.targets import Weights

SERVING = "serving.json"
ENDED = frozenset({"committed", "aborted", "rolled_back"})
MAX_SNAPSHOT_BYTES = 64 << 20


@dataclass(frozen=True)
class PushResult:
    """status: committed, aborted (nothing was handed over) or rolled_back. served: the version
    that is served and was checked. exit_code: 0 only when the new weights are served."""

    status: str
    served: int
    reasons: tuple[str, ...]
    checks: tuple[SyncCheck, ...]
    exit_code: int

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "checks": [asdict(check) for check in self.checks]}


@dataclass(frozen=True)
class Snapshot:
    """Canaries, and what the engine said of them before the push (None: it was not asked)."""

    canaries: list[Canary]
    before: LogProbs | None


def describe(weights: Weights) -> dict[str, Any]:
    """For the journal."""
    return {
        "checkpoint": str(weights.checkpoint),
        "version": weights.version,
        "tensors": weights.tensors,
    }


def _weights(data: dict[str, Any]) -> Weights:
    return Weights(Path(data["checkpoint"]), int(data["version"]), str(data["tensors"]))


class Store:
    """State of a folder of pushes, all of it from the journal. Use under its lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = Journal(folder)
        self.number = self.journal.last_push
        if self.served is not None:
            self._point(self.served)  # the crash may have come between the commit and the pointer

    @property
    def events(self) -> list[Event]:
        return self.journal.of(self.number)

    @property
    def unfinished(self) -> dict[str, Any] | None:
        """What was begun and has no end, or an end that lost the engine."""
        events = self.events
        return events[0].data if events and events[-1].event not in ENDED else None

    @property
    def handed(self) -> bool:
        """May the engine hold the new weights?"""
        return self._had("handing_over")

    @property
    def activating(self) -> bool:
        return self._had("activating")

    @property
    def going_back(self) -> bool:
        return self._had("rolling_back")

    def _had(self, event: str) -> bool:
        return any(item.event == event for item in self.events)

    @property
    def served(self) -> Weights | None:
        """The last weights that were checked and kept; else what the first push found."""
        for item in reversed(self.journal.events):
            if item.event == "committed":
                return _weights(item.data["served"])
        return _weights(self.journal.events[0].data["previous"]) if self.journal.events else None

    @property
    def previous(self) -> Weights:
        """What was served when the current push began."""
        return _weights(self.events[0].data["previous"])

    def begin(self, source: Weights, contract: str, previous: Weights, two_phase: bool) -> None:
        self.number = self.journal.last_push + 1
        self.append(
            "begun",
            source=describe(source),
            contract=contract,
            previous=describe(previous),
            two_phase=two_phase,
        )
        self._point(previous)

    def append(self, event: str, **data: Any) -> None:
        self.journal.append(self.number, event, **data)

    def commit(self, weights: Weights, checks: Sequence[SyncCheck]) -> PushResult:
        """The journal decides; the pointer follows, at the latest when the store is next read."""
        self.append("committed", served=describe(weights))
        self._point(weights)
        return PushResult("committed", weights.version, (), tuple(checks), 0)

    def committed_as(self, source: Weights, contract: str) -> PushResult | None:
        """The latest push again: a result only when it was committed from these very weights."""
        events = {event.event: event.data for event in self.events}
        begun = events.get("begun", {})
        if "committed" not in events or begun.get("contract") != contract:
            return None
        if begun["source"] != describe(source):
            return None
        checks = tuple(SyncCheck(**item) for item in events["checked"]["checks"])
        return PushResult("committed", source.version, ("it was served already",), checks, 0)

    def abort(self, reasons: Sequence[str], exit_code: int) -> PushResult:
        self.append("aborted", reasons=list(reasons))
        return PushResult("aborted", self.previous.version, tuple(reasons), (), exit_code)

    def _point(self, weights: Weights) -> None:
        data = canonical(describe(weights)) + b"\n"
        path = self.folder / SERVING
        if not path.is_file() or path.read_bytes() != data:
            write_atomic(path, data)

    def keep_snapshot(self, snapshot: Snapshot) -> str:
        """Before the hand-over; gives the file's digest for the journal."""
        canaries = [
            [list(c.token_ids), c.prompt_length, list(c.expected)] for c in snapshot.canaries
        ]
        before = None if snapshot.before is None else [list(row) for row in snapshot.before]
        data = canonical({"canaries": canaries, "before": before})
        write_atomic(self._snapshot_path(), data)
        return sha256(data)

    def snapshot(self) -> Snapshot:
        """Of the current push. Raises InputError when it is not the one that was kept."""
        path = self._snapshot_path()
        raw = read_limited(path, MAX_SNAPSHOT_BYTES, "a push's snapshot")
        digest = next(e.data["snapshot"] for e in self.events if e.event == "handing_over")
        try:
            if sha256(raw) != digest:
                raise Malformed("changed", "changed since it was written")
            data = parse_canonical(raw)
        except Malformed as error:
            raise InputError(error.what, where=str(path)) from None
        canaries = [Canary(tuple(t), int(n), tuple(e)) for t, n, e in data["canaries"]]
        return Snapshot(canaries, data["before"])

    def _snapshot_path(self) -> Path:
        return self.folder / "snapshots" / f"push-{self.number:06d}.json"
