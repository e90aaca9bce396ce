"""Subjects and their decisions: read, checked, and written in one place."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from kernel_contracts.contract import Contract
from kernel_contracts.errors import InputError, UnsoundError
from kernel_contracts.loading import contract_digest
from kernel_contracts.promotion import Promotion, Stage
from mismatch_audit.monitor.traffic import utc_now
from mismatch_audit.promotion import schema
from mismatch_audit.promotion.stages import illegal


def rules_of(contract: Contract) -> Promotion:
    """The contract's promotion section. Raises InputError when there is none: rules are written
    before the evidence is seen."""
    if contract.promotion is None:
        raise InputError(
            "the contract says nothing about promotion",
            where=f"contract {contract.name}",
            fix="add a `promotion:` section (docs/contract.md), then audit with that contract",
        )
    return contract.promotion


@dataclass(frozen=True)
class Subject:
    """An engine build with its weights under a contract. weights: a digest, or ``any``."""

    id: int
    key: str
    contract: Contract
    contract_digest: str
    engine_build: str
    weights: str
    created: str

    @property
    def rules(self) -> Promotion:
        """Raises InputError for a contract without the section."""
        return rules_of(self.contract)

    @property
    def label(self) -> str:
        """For people: build, contract, weights."""
        return f"{self.engine_build} under {self.contract.name} (weights {self.weights[:12]})"


@dataclass(frozen=True)
class Decision:
    """One line of the history."""

    seq: int
    time: str
    action: str
    from_stage: Stage | None
    to_stage: Stage
    actor: str
    reason: str
    evidence: dict[str, Any]


def subject_key(digest: str, build: str, weights: str) -> str:
    return hashlib.sha256(json.dumps([digest, build, weights]).encode()).hexdigest()


def find_subject(connection: sa.Connection, key: str) -> Subject | None:
    row = (
        connection.execute(sa.select(schema.subjects).where(schema.subjects.c.key == key))
        .mappings()
        .first()
    )
    return None if row is None else subject_of(row)


def subject_of(row: Any) -> Subject:
    contract = Contract.model_validate(json.loads(row["contract"]))
    if contract_digest(contract) != row["contract_digest"]:
        raise UnsoundError(
            f"the contract kept for {row['engine_build']} is not the one of its digest",
            fix="the store was edited by hand, or by another version of the contract language",
        )
    return Subject(
        row["id"], row["key"], contract, row["contract_digest"], row["engine_build"],
        row["weights"], row["created"],
    )  # fmt: skip


def decisions_of(connection: sa.Connection, subject_id: int) -> list[Decision]:
    table = schema.decisions
    rows = connection.execute(
        sa.select(table).where(table.c.subject_id == subject_id).order_by(table.c.seq)
    ).mappings()
    return [
        Decision(
            r["seq"], r["time"], r["action"], r["from_stage"], r["to_stage"], r["actor"],
            r["reason"], json.loads(r["evidence"]),
        )
        for r in rows
    ]  # fmt: skip


def decide(
    connection: sa.Connection,
    subject_id: int,
    action: str,
    from_stage: Stage | None,
    to_stage: Stage,
    actor: str,
    reason: str,
    shown: dict[str, Any],
) -> Decision:
    """The only place that writes history."""
    if wrong := illegal(action, from_stage, to_stage):
        raise InputError(wrong)
    table = schema.decisions
    last = connection.scalar(
        sa.select(sa.func.max(table.c.seq)).where(table.c.subject_id == subject_id)
    )
    decision = Decision(
        int(last or 0) + 1, utc_now(), action, from_stage, to_stage, actor[:200], reason, shown
    )
    connection.execute(
        sa.insert(table).values(
            subject_id=subject_id,
            **{**decision.__dict__, "evidence": json.dumps(shown, allow_nan=False)},
        )
    )
    return decision


def wrong_history(history: list[Decision]) -> list[str]:
    wrong, stage = [], None
    for expected, decision in enumerate(history, start=1):
        if decision.seq != expected:
            wrong.append(f"decision {expected} is missing: the next one is {decision.seq}")
            break
        if decision.from_stage != stage:
            wrong.append(f"decision {expected} starts at {decision.from_stage}, not at {stage}")
        if reason := illegal(decision.action, decision.from_stage, decision.to_stage):
            wrong.append(f"decision {expected}: {reason}")
        stage = decision.to_stage
    return wrong if history else ["no decision at all"]
