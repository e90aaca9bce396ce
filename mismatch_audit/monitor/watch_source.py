"""What a watch follows: chunks of judged prompts, each with the place to go on from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kernel_contracts.contract import Contract
from mismatch_audit.monitor.frames import ScoredRow
from mismatch_audit.monitor.observe import BoundedClause, Observations, observe


@dataclass(frozen=True)
class Unit:
    """One prompt. requests: ids of its responses.  time: of the last, "" where unknown."""

    unit: str
    requests: tuple[str, ...]
    tokens: int
    observations: Observations
    time: str = ""


@dataclass
class Chunk:
    """Applied as a whole or not at all. cursor: where the source goes on after it.  unusable:
    request id -> reason.  notes: things that happened to the source (a log replaced, a bad line),
    counted."""

    cursor: dict[str, Any]
    units: list[Unit] = field(default_factory=list)
    unusable: dict[str, str] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)


class Source(Protocol):
    """A log, a folder of dumps, or a store.

    poll: what is new after a cursor, in order; ends when nothing is there for now.  backlog: bytes
    or prompts that are known to be waiting; 0 when none.
    """

    identity: dict[str, str]
    title: str

    def poll(self, cursor: dict[str, Any], *, final: bool) -> Iterator[Chunk]: ...

    def backlog(self, cursor: dict[str, Any]) -> int: ...

    def close(self) -> None: ...


def units_of(
    contract: Contract,
    clauses: Sequence[BoundedClause],
    rows: Sequence[ScoredRow],
    times: dict[str, str] | None = None,
) -> list[Unit]:
    """Judged prompts in order of appearance. times: request id -> time."""
    by_unit: dict[str, list[ScoredRow]] = {}
    for row in rows:
        by_unit.setdefault(row.unit, []).append(row)
    known = times or {}
    return [
        Unit(
            unit,
            tuple(r.request_id for r in by_unit[unit]),
            sum(r.n_tokens for r in by_unit[unit]),
            seen,
            max((known.get(r.request_id, "") for r in by_unit[unit]), default=""),
        )
        for unit, seen in observe(contract, clauses, rows).items()
    ]
