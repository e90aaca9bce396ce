"""The watch itself: chunks in, tests updated, alarms recorded, in one transaction each."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kernel_contracts.contract import Contract
from kernel_contracts.definitions import EscalationRule
from kernel_contracts.loading import contract_digest
from mismatch_audit.monitor.observe import BoundedClause
from mismatch_audit.monitor.trackers import Book, Plan, Standing
from mismatch_audit.monitor.traffic import utc_now
from mismatch_audit.monitor.watch_source import Chunk, Source, Unit
from mismatch_audit.monitor.watch_state import Alarm, Snapshot, WatchState, key_of

JUDGED, REPEATED, LATE = "judged", "repeated", "late"

DEFAULT_HORIZON = 300


@dataclass
class View:
    """What a watch shows of itself: to the screen, to Prometheus, to scripts."""

    contract: str
    contract_digest: str
    source: str
    standings: list[Standing] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    alarms: list[Alarm] = field(default_factory=list)
    last_row: str = ""
    backlog: int = 0

    @property
    def exit_code(self) -> int:
        """1 after an alarm, 0 where every promise was shown to be kept, else 3."""
        if self.alarms:
            return 1
        verdicts = {s.verdict for s in self.standings}
        return 0 if verdicts == {"PASS"} else 3

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "contract": self.contract,
            "contract_digest": self.contract_digest,
            "source": self.source,
            "exit_code": self.exit_code,
            "clauses": [s.to_dict() for s in self.standings],
            "counters": dict(self.counters),
            "alarms": [a.payload for a in self.alarms],
            "last_row": self.last_row,
            "backlog": self.backlog,
        }


def watch_identity(contract: Contract, source: Source) -> dict[str, str]:
    """What a state is about: evidence of another contract or source is not carried over."""
    return {"contract": contract_digest(contract), **source.identity}


class Watch:
    """A contract's tests over a source, with their state. actions: names that alarms go to."""

    def __init__(
        self,
        contract: Contract,
        clauses: Sequence[BoundedClause],
        source: Source,
        state: WatchState,
        actions: Sequence[str] = (),
    ) -> None:
        self.contract, self.source, self.state, self.actions = contract, source, state, actions
        rules = contract.promotion
        plan = Plan(
            contract.alpha,
            rules.full.min_prompts if rules else DEFAULT_HORIZON,
            rules.max_response_tokens if rules else 4096,
        )
        self.book = Book(contract, clauses, plan)
        self.snapshot: Snapshot = state.load()
        self.book.restore(self.snapshot.book)

    def step(self, *, final: bool = False) -> int:
        """Everything that is new; gives the number of chunks. final: nothing more is to come."""
        done = 0
        for chunk in self.source.poll(self.snapshot.cursor, final=final):
            self.apply(chunk)
            done += 1
        return done

    def apply(self, chunk: Chunk) -> None:
        """Count a chunk in. A process killed in here has done nothing."""
        snapshot = Snapshot(
            chunk.cursor, self.snapshot.counters + chunk.notes, {}, self.snapshot.last_row
        )
        try:
            with self.state.transaction():
                for unit in chunk.units:
                    self._count(unit, snapshot)
                    self._alarm(snapshot)
                self._count_unusable(chunk.unusable, snapshot)
                snapshot.book = self.book.to_dict()
                self.state.save(snapshot)
        except BaseException:
            self.book.restore(self.snapshot.book)
            raise
        self.snapshot = snapshot

    def _count(self, unit: Unit, snapshot: Snapshot) -> None:
        keys = {key_of("request", r): r for r in unit.requests}
        new = self.state.unseen(keys)
        snapshot.counters[REPEATED] += len(keys) - len(new)
        own = key_of("unit", unit.unit)
        if len(new) < len(keys) or not self.state.unseen([own]):
            # Counted before, whole or in part: a second value would not be independent evidence.
            snapshot.counters[LATE] += len(new)
            self.state.add_seen(new)
            return
        self.book.update(unit.observations)
        self.state.add_seen([own, *keys])
        snapshot.counters[JUDGED] += len(keys)
        snapshot.counters["prompts"] += 1
        snapshot.counters["tokens"] += unit.tokens
        snapshot.last_row = max(snapshot.last_row, unit.time)

    def _count_unusable(self, unusable: dict[str, str], snapshot: Snapshot) -> None:
        keys = {key_of("request", r): why for r, why in unusable.items()}
        new = self.state.unseen(keys)
        snapshot.counters[REPEATED] += len(keys) - len(new)
        for key in new:
            snapshot.counters[f"unusable: {keys[key]}"] += 1
        self.state.add_seen(new)

    def _alarm(self, snapshot: Snapshot) -> None:
        for one in self.book.failing():
            self.state.add_alarm(self._alarm_of(one, snapshot), self.actions)

    def _alarm_of(self, one: Standing, snapshot: Snapshot) -> Alarm:
        digest = contract_digest(self.contract)
        place = json.dumps([digest, self.source.identity, one.clause, one.slice], sort_keys=True)
        rule = _rule(self.contract, one)
        alarm_id = hashlib.sha256(place.encode()).hexdigest()[:16]
        now = utc_now()
        payload = {
            "id": alarm_id,
            "time": now,
            "contract": self.contract.name,
            "contract_digest": digest,
            "source": self.source.title,
            "action": rule.action if rule else "",
            "to": (rule.to or "") if rule else "",
            "at_prompt": snapshot.counters["prompts"],
            **one.to_dict(),
        }
        return Alarm(alarm_id, now, one.clause, one.slice, payload)

    def view(self) -> View:
        """As it stands."""
        return View(
            self.contract.name,
            contract_digest(self.contract),
            self.source.title,
            self.book.standings(),
            self.snapshot.counters,
            self.state.alarms(),
            self.snapshot.last_row,
            self.source.backlog(self.snapshot.cursor),
        )


def _rule(contract: Contract, one: Standing) -> EscalationRule | None:
    """The contract's answer to a FAIL of this clause on this slice."""
    for rule in contract.escalation:
        when = rule.when
        if when.verdict != "FAIL" or when.clause not in (None, one.clause):
            continue
        if when.slice is None or when.slice == one.slice or _is_of(contract, one, when.slice):
            return rule
    return None


def _is_of(contract: Contract, one: Standing, definition: str) -> bool:
    clause = contract.clause(one.clause)
    if definition not in getattr(clause, "slices", ()):
        return False
    grouping = contract.slices[definition].grouping
    head = one.slice.removeprefix(f"{definition}:")
    return bool(grouping) and head.startswith((f"{grouping[0]}=", f"{grouping[0]}["))
