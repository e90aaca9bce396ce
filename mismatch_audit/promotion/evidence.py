"""Judged prompts in the store: counted once, and the sequential tests that they feed."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from kernel_contracts.contract import Contract
from kernel_contracts.errors import InputError
from kernel_contracts.promotion import Stage
from mismatch_audit.monitor.observe import Observations, observable_clauses
from mismatch_audit.monitor.trackers import Book, Plan
from mismatch_audit.promotion import schema
from mismatch_audit.promotion.stages import Assessment, Exposure, assess

COUNTED, LATE = "counted", "late"


@dataclass(frozen=True)
class JudgedUnit:
    """One prompt with what its responses show. requests: id -> (time, response tokens)."""

    unit: str
    requests: dict[str, tuple[str, int]]
    observations: Observations


@dataclass(frozen=True)
class Batch:
    """Of one stage. unusable: request id -> why it cannot be judged."""

    stage: Stage
    units: list[JudgedUnit] = field(default_factory=list)
    unusable: dict[str, str] = field(default_factory=dict)

    @property
    def n_requests(self) -> int:
        return sum(len(u.requests) for u in self.units) + len(self.unusable)


@dataclass
class Counted:
    """What became of a batch. repeated: requests counted before.  late: requests of a prompt that
    was counted without them.  other_stage: requests of a stage where the subject is not (any
    more).  broken: clauses and slices whose promise broke."""

    stage: Stage
    prompts: int = 0
    requests: int = 0
    repeated: int = 0
    late: int = 0
    unusable: int = 0
    other_stage: int = 0
    broken: list[str] = field(default_factory=list)
    rolled_back_to: Stage | None = None

    def add(self, other: Counted) -> None:
        """Sum up over batches."""
        for name in ("prompts", "requests", "repeated", "late", "unusable", "other_stage"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.stage, self.broken = other.stage, self.broken + other.broken
        self.rolled_back_to = other.rolled_back_to or self.rolled_back_to


def hashed(text: str) -> str:
    """Ids are kept as hashes: they may hold what a client wrote."""
    return hashlib.sha256(text.encode()).hexdigest()


def make_book(contract: Contract, stage: Stage) -> Book:
    """The tests of a stage, without evidence."""
    promotion = contract.promotion
    if promotion is None:
        raise InputError("the contract says nothing about promotion")
    rule = promotion.rule(stage)
    plan = Plan(contract.alpha, rule.min_prompts, promotion.max_response_tokens)
    return Book(contract, observable_clauses(contract, rule.clauses), plan)


def count(
    connection: sa.Connection, subject: int, visit: int, contract: Contract, batch: Batch
) -> Counted:
    """Count a batch; the caller holds the subject's lock and knows that it is at batch.stage."""
    result = Counted(stage=batch.stage)
    ids = [r for u in batch.units for r in u.requests] + list(batch.unusable)
    known = _known_requests(connection, subject, ids)
    book = load_book(connection, subject, visit, contract, batch.stage)
    seq = _last_seq(connection, subject, visit)
    seen = _known_units(connection, subject, visit, [u.unit for u in batch.units])
    new_units: list[dict[str, Any]] = []
    new_requests: list[dict[str, Any]] = []

    def note(request: str, outcome: str, unit_seq: int | None) -> None:
        known.add(request)
        new_requests.append(
            {"subject_id": subject, "request_id": hashed(request), "visit": visit,
             "unit_seq": unit_seq, "outcome": outcome[:80]}
        )  # fmt: skip

    for one in batch.units:
        fresh = {r: v for r, v in one.requests.items() if r not in known}
        result.repeated += len(one.requests) - len(fresh)
        if len(fresh) < len(one.requests) or one.unit in seen:
            # Its prompt is counted already, or this part of it is: a second value would not be
            # independent of the first.
            for request in fresh:
                note(request, LATE, None)
            result.late += len(fresh)
            continue
        seq += 1
        seen.add(one.unit)
        book.update(one.observations)
        times = sorted(time for time, _ in fresh.values())
        tokens = sum(n for _, n in fresh.values())
        new_units.append(
            {"subject_id": subject, "visit": visit, "seq": seq, "unit": hashed(one.unit),
             "n_requests": len(fresh), "n_tokens": tokens, "first_time": times[0],
             "last_time": times[-1], "observations": json.dumps(one.observations)}
        )  # fmt: skip
        for request in fresh:
            note(request, COUNTED, seq)
        result.prompts, result.requests = result.prompts + 1, result.requests + len(fresh)
        if failing := book.failing():
            result.broken = [f"{s.clause} on {s.slice}" for s in failing]
            break
    if not result.broken:
        for request, why in batch.unusable.items():
            if request in known:
                result.repeated += 1
                continue
            note(request, why, None)
            result.unusable += 1
    if new_units:
        connection.execute(sa.insert(schema.units), new_units)
        _save_book(connection, subject, visit, book)
    if new_requests:
        connection.execute(sa.insert(schema.requests), new_requests)
    return result


def load_book(
    connection: sa.Connection, subject: int, visit: int, contract: Contract, stage: Stage
) -> Book:
    """The tests of a stage as they were left."""
    table = schema.tests
    rows = connection.execute(
        sa.select(table.c.clause, table.c.slice, table.c.state)
        .where(table.c.subject_id == subject, table.c.visit == visit)
        .order_by(table.c.clause, table.c.place)
    )
    state: dict[str, dict[str, Any]] = {}
    for clause, name, text in rows:
        state.setdefault(clause, {})[name] = json.loads(text)
    book = make_book(contract, stage)
    book.restore(state)
    return book


def _save_book(connection: sa.Connection, subject: int, visit: int, book: Book) -> None:
    table = schema.tests
    connection.execute(
        sa.delete(table).where(table.c.subject_id == subject, table.c.visit == visit)
    )
    rows = [
        {"subject_id": subject, "visit": visit, "clause": clause, "slice": name, "place": place,
         "n": family.trackers[name].n, "state": json.dumps(state)}
        for clause, family in book.families.items()
        for place, (name, state) in enumerate(book.to_dict()[clause].items())
    ]  # fmt: skip
    if rows:
        connection.execute(sa.insert(table), rows)


def assessment(
    connection: sa.Connection, subject: int, visit: int, contract: Contract, stage: Stage
) -> Assessment:
    """What a stage has shown, against its rule."""
    if contract.promotion is None:
        raise InputError("the contract says nothing about promotion")
    book = load_book(connection, subject, visit, contract, stage)
    exposure = _exposure(connection, subject, visit)
    return assess(stage, contract.promotion.rule(stage), exposure, book.standings())


def _exposure(connection: sa.Connection, subject: int, visit: int) -> Exposure:
    u, r = schema.units, schema.requests
    here = (u.c.subject_id == subject, u.c.visit == visit)
    prompts, requests, tokens, first, last = connection.execute(
        sa.select(
            sa.func.count(), sa.func.sum(u.c.n_requests), sa.func.sum(u.c.n_tokens),
            sa.func.min(u.c.first_time), sa.func.max(u.c.last_time),
        ).where(*here)
    ).one()  # fmt: skip
    unusable = connection.scalar(
        sa.select(sa.func.count()).where(
            r.c.subject_id == subject,
            r.c.visit == visit,
            r.c.outcome.not_in((COUNTED, LATE)),
        )
    )
    return Exposure(prompts, int(tokens or 0), int(requests or 0), int(unusable or 0), first, last)


def replay_errors(
    connection: sa.Connection, subject: int, visit: int, contract: Contract, stage: Stage
) -> list[str]:
    """Feed the kept observations to new tests: the wealth must come out bit for bit."""
    u, r = schema.units, schema.requests
    rows = connection.execute(
        sa.select(u.c.seq, u.c.n_requests, u.c.observations)
        .where(u.c.subject_id == subject, u.c.visit == visit)
        .order_by(u.c.seq)
    ).all()
    counted = Counter(
        connection.scalars(
            sa.select(r.c.unit_seq).where(
                r.c.subject_id == subject, r.c.visit == visit, r.c.outcome == COUNTED
            )
        )
    )
    where, wrong = f"decision {visit} ({stage})", []
    book = make_book(contract, stage)
    for expected, (seq, n_requests, text) in enumerate(rows, start=1):
        if seq != expected:
            wrong.append(f"{where}: prompt {expected} is missing")
            break
        if counted.pop(seq, 0) != n_requests:
            wrong.append(f"{where}: prompt {seq} has not the {n_requests} requests that it counts")
        book.update(json.loads(text))
    if counted:
        wrong.append(f"{where}: requests are counted for prompts that are not there")
    kept = load_book(connection, subject, visit, contract, stage).to_dict()
    if kept != book.to_dict():
        wrong.append(f"{where}: the tests' wealth is not that of their observations")
    return wrong


def _last_seq(connection: sa.Connection, subject: int, visit: int) -> int:
    u = schema.units
    found = connection.scalar(
        sa.select(sa.func.max(u.c.seq)).where(u.c.subject_id == subject, u.c.visit == visit)
    )
    return int(found or 0)


def _known_requests(connection: sa.Connection, subject: int, ids: list[str]) -> set[str]:
    r = schema.requests
    by_hash = {hashed(i): i for i in ids}
    found: set[str] = set()
    for part in _parts(list(by_hash)):
        query = sa.select(r.c.request_id).where(r.c.subject_id == subject, r.c.request_id.in_(part))
        found |= {by_hash[h] for h in connection.scalars(query)}
    return found


def _known_units(connection: sa.Connection, subject: int, visit: int, names: list[str]) -> set[str]:
    u = schema.units
    by_hash = {hashed(n): n for n in names}
    found: set[str] = set()
    for part in _parts(list(by_hash)):
        query = sa.select(u.c.unit).where(
            u.c.subject_id == subject, u.c.visit == visit, u.c.unit.in_(part)
        )
        found |= {by_hash[h] for h in connection.scalars(query)}
    return found


def _parts(items: list[str], size: int = 500) -> Iterator[list[str]]:
    """SQLite takes a bounded number of parameters."""
    for at in range(0, len(items), size):
        yield items[at : at + size]


__all__ = [
    "Batch",
    "Counted",
    "JudgedUnit",
    "assessment",
    "count",
    "hashed",
    "load_book",
    "make_book",
    "replay_errors",
]
