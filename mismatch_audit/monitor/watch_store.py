"""A promotion store as a watch's source: prompts that `audit ingest` has judged already."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from kernel_contracts.contract import Contract
from kernel_contracts.errors import InputError
from kernel_contracts.loading import contract_digest
from mismatch_audit.monitor.watch_source import Chunk, Unit
from mismatch_audit.promotion import schema
from mismatch_audit.promotion.evidence import COUNTED, LATE
from mismatch_audit.promotion.store import PromotionStore

CHUNK = 500


class StoreSource:
    """Follows the judged prompts of one subject over all its stages.

    subject: build or the beginning of its key; None takes the only one.  Raises InputError where
    the store's contract is another.
    """

    def __init__(self, url: str, contract: Contract, subject: str | None) -> None:
        self.store = PromotionStore(url, create=False)
        self.subject = self.store.pick(subject)
        if self.subject.contract_digest != contract_digest(contract):
            self.store.close()
            raise InputError(
                f"{self.subject.engine_build} is promoted under another contract "
                f"({self.subject.contract_digest[:12]})",
                fix="give the contract that it was started with",
            )
        self.identity = {"source": "store", "subject": self.subject.key}
        self.title = self.subject.label

    def poll(self, cursor: dict[str, Any], *, final: bool) -> Iterator[Chunk]:
        """Prompts after the cursor, in the order in which they were counted."""
        u, r = schema.units, schema.requests
        visit, seq = int(cursor.get("visit", 0)), int(cursor.get("seq", 0))
        told = dict(cursor.get("unusable", {}))
        while True:
            with self.store.database.reading() as connection:
                rows = (
                    connection.execute(
                        sa.select(u)
                        .where(u.c.subject_id == self.subject.id)
                        .where((u.c.visit > visit) | ((u.c.visit == visit) & (u.c.seq > seq)))
                        .order_by(u.c.visit, u.c.seq)
                        .limit(CHUNK)
                    )
                    .mappings()
                    .all()
                )
                bad = connection.execute(
                    sa.select(r.c.outcome, sa.func.count())
                    .where(r.c.subject_id == self.subject.id)
                    .where(r.c.outcome.not_in((COUNTED, LATE)))
                    .group_by(r.c.outcome)
                ).all()  # fmt: skip
            totals = {str(why): int(n) for why, n in bad}
            if not rows and totals == told:
                return
            if rows:
                visit, seq = rows[-1]["visit"], rows[-1]["seq"]
            chunk = Chunk({"visit": visit, "seq": seq, "unusable": totals})
            for why, total in totals.items():
                chunk.unusable |= {
                    f"{why} {number}": why for number in range(told.get(why, 0), total)
                }
            told = totals
            for row in rows:
                name = f"{row['visit']}/{row['unit']}"
                chunk.units.append(
                    Unit(
                        name,
                        tuple(f"{name}/{k}" for k in range(row["n_requests"])),
                        row["n_tokens"],
                        {
                            clause: {s: (float(v), int(n)) for s, (v, n) in slices.items()}
                            for clause, slices in json.loads(row["observations"]).items()
                        },
                        row["last_time"],
                    )
                )
            yield chunk

    def backlog(self, cursor: dict[str, Any]) -> int:
        """Prompts that wait."""
        u = schema.units
        visit, seq = int(cursor.get("visit", 0)), int(cursor.get("seq", 0))
        with self.store.database.reading() as connection:
            found = connection.scalar(
                sa.select(sa.func.count())
                .where(u.c.subject_id == self.subject.id)
                .where((u.c.visit > visit) | ((u.c.visit == visit) & (u.c.seq > seq)))
            )
        return int(found or 0)

    def close(self) -> None:
        """Give the connection back."""
        self.store.close()
