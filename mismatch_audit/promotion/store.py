"""The promotion store: subjects, their history, and decisions that only evidence can make."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from kernel_contracts.contract import Contract
from kernel_contracts.errors import InputError
from kernel_contracts.loading import contract_digest
from kernel_contracts.promotion import Stage
from mismatch_audit.monitor.traffic import utc_now
from mismatch_audit.promotion import evidence, schema
from mismatch_audit.promotion.database import Database
from mismatch_audit.promotion.evidence import Batch, Counted
from mismatch_audit.promotion.history import (
    Decision,
    Subject,
    decide,
    decisions_of,
    find_subject,
    rules_of,
    subject_key,
    subject_of,
    wrong_history,
)
from mismatch_audit.promotion.offline import OfflineEvidence
from mismatch_audit.promotion.stages import (
    Assessment,
    after,
    check_stage,
    illegal,
    violation_target,
)


@dataclass(frozen=True)
class Outcome:
    """What an attempt to advance came to. decision: None where nothing changed.  code: the exit
    status (0 advanced, 1 a promise is broken, 3 evidence is missing)."""

    code: int
    message: str
    stage: Stage
    decision: Decision | None
    assessment: Assessment | None


class PromotionStore:
    """All reads and writes of one store. url as in `Database`; close it, or use it in ``with``."""

    def __init__(self, url: str, *, create: bool = True) -> None:
        self.database = Database(url, create=create)

    def close(self) -> None:
        self.database.close()

    def __enter__(self) -> PromotionStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Subjects

    def subject(self, contract: Contract, build: str, weights: str) -> Subject | None:
        """The subject, or None where it was never started."""
        weights = "any" if rules_of(contract).weights == "any" else weights
        with self.database.reading() as connection:
            return find_subject(connection, subject_key(contract_digest(contract), build, weights))

    def start(self, contract: Contract, build: str, weights: str, *, actor: str) -> Subject:
        """The subject, made at the stage offline if it is new. Raises InputError for a build that
        cannot be printed as it is."""
        if not build.isprintable() or not 0 < len(build) <= 512:
            raise InputError("a build's name is a printable text", where="--build")
        weights = "any" if rules_of(contract).weights == "any" else weights
        key = subject_key(contract_digest(contract), build, weights)
        with self.database.writing() as connection:
            if not self.database.sqlite:  # two first starts at once
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(int(key[:15], 16))))
            found = find_subject(connection, key)
            if found is not None:
                return found
            made = connection.execute(
                sa.insert(schema.subjects).values(
                    key=key,
                    contract_name=contract.name,
                    contract_digest=contract_digest(contract),
                    contract=json.dumps(contract.model_dump(mode="json", by_alias=True)),
                    engine_build=build,
                    weights=weights,
                    created=utc_now(),
                )
            ).inserted_primary_key
            assert made is not None
            decide(connection, made[0], "start", None, "offline", actor, "first seen", {})
            subject = find_subject(connection, key)
        assert subject is not None
        return subject

    def subjects(self) -> list[Subject]:
        """Every subject, oldest first."""
        with self.database.reading() as connection:
            rows = connection.execute(sa.select(schema.subjects).order_by(schema.subjects.c.id))
            return [subject_of(row) for row in rows.mappings()]

    def pick(self, text: str | None) -> Subject:
        """The subject whose key starts with a text or whose build it is; None takes the only one.
        Raises InputError where that is none or several."""
        found = self.subjects()
        if text is not None:
            found = [s for s in found if s.key.startswith(text) or s.engine_build == text]
        if len(found) != 1:
            what = "no subject" if not found else f"{len(found)} subjects"
            raise InputError(
                f"{what}{' called ' + repr(text) if text else ''} in this store",
                where=self.database.shown,
                fix="`audit promote status` lists them; name one with --subject",
            )
        return found[0]

    # Where it stands

    def decisions(self, subject: Subject) -> list[Decision]:
        """The whole history, oldest first."""
        with self.database.reading() as connection:
            return decisions_of(connection, subject.id)

    def assessment(self, subject: Subject) -> tuple[Decision, Assessment | None]:
        """(the decision that made the present stage, what the stage has shown; None offline)."""
        with self.database.reading() as connection:
            return self._standing(connection, subject)

    def _standing(
        self, connection: sa.Connection, subject: Subject
    ) -> tuple[Decision, Assessment | None]:
        last = decisions_of(connection, subject.id)[-1]
        if last.to_stage == "offline":
            return last, None
        return last, evidence.assessment(
            connection, subject.id, last.seq, subject.contract, last.to_stage
        )

    # Changes

    def record(self, subject: Subject, batch: Batch, *, actor: str) -> Counted:
        """Count a batch of judged prompts for the subject's present stage, in one transaction.

        Requests that were counted before, at any stage, are left out. A promise that breaks ends
        the batch there and takes the subject back, in the same transaction.
        """
        with self.database.writing() as connection:
            self._lock(connection, subject)
            last = decisions_of(connection, subject.id)[-1]
            if last.to_stage != batch.stage:
                return Counted(stage=last.to_stage, other_stage=batch.n_requests)
            counted = evidence.count(connection, subject.id, last.seq, subject.contract, batch)
            if counted.broken:
                found = evidence.assessment(
                    connection, subject.id, last.seq, subject.contract, last.to_stage
                )
                counted.rolled_back_to = self._violated(
                    connection, subject, last, found, actor
                ).to_stage
            return counted

    def advance(
        self,
        subject: Subject,
        *,
        actor: str,
        reason: str = "",
        offline: OfflineEvidence | None = None,
    ) -> Outcome:
        """Move to the next stage if the evidence for it is there; a broken promise rolls back.

        offline: the audit's report, needed to leave the stage offline. Raises InputError at the
        last stage, or for a report of another contract or other weights.
        """
        with self.database.writing() as connection:
            self._lock(connection, subject)
            last, found = self._standing(connection, subject)
            stage, target = last.to_stage, after(last.to_stage)
            if found is None:
                since = last.time if last.action == "rollback" else None
                code, message, shown = _offline(subject, offline, since)
            else:
                if found.verdict == "FAIL":
                    decision = self._violated(connection, subject, last, found, actor)
                    return Outcome(1, decision.reason, decision.to_stage, decision, found)
                shown = found.to_dict()
                code = 0 if found.verdict == "PASS" else 3
                message = "; ".join(found.lacks)
            if target is None:
                raise InputError(
                    f"{subject.engine_build} is at full traffic already", fix="nothing is to do"
                )
            if code:
                return Outcome(code, message, stage, None, found)
            decision = decide(
                connection, subject.id, "advance", stage, target, actor,
                reason or f"evidence of {stage} suffices", shown,
            )  # fmt: skip
            return Outcome(0, f"{stage} -> {target}", target, decision, found)

    def rollback(
        self, subject: Subject, *, actor: str, reason: str, to: str | None = None
    ) -> Decision:
        """Take the subject back by hand. to: default offline. Raises InputError for no reason, or
        a stage that is not earlier."""
        target = check_stage(to or "offline")
        if not reason.strip():
            raise InputError("a rollback needs its reason", fix="--reason 'why'")
        with self.database.writing() as connection:
            self._lock(connection, subject)
            last, found = self._standing(connection, subject)
            if wrong := illegal("rollback", last.to_stage, target):
                raise InputError(wrong, fix="roll back to an earlier stage")
            shown = {} if found is None else found.to_dict()
            return decide(
                connection, subject.id, "rollback", last.to_stage, target, actor, reason, shown
            )

    def _violated(
        self,
        connection: sa.Connection,
        subject: Subject,
        last: Decision,
        found: Assessment,
        actor: str,
    ) -> Decision:
        rule = subject.rules.rule(last.to_stage)
        what = ", ".join(f"{s.clause} on {s.slice}" for s in found.failing)
        return decide(
            connection, subject.id, "rollback", last.to_stage,
            violation_target(last.to_stage, rule), actor, f"broken: {what}", found.to_dict(),
        )  # fmt: skip

    def _lock(self, connection: sa.Connection, subject: Subject) -> None:
        """On PostgreSQL the subject's row; on SQLite the transaction holds the file already."""
        table = schema.subjects
        connection.execute(sa.select(table.c.id).where(table.c.id == subject.id).with_for_update())

    def verify(self, subject: Subject) -> list[str]:
        """What is wrong with the history and its evidence: gaps, illegal moves, a wealth that is
        not that of its observations, a request counted twice. Empty: nothing."""
        with self.database.reading() as connection:
            wrong = wrong_history(decisions_of(connection, subject.id))
            for decision in decisions_of(connection, subject.id):
                if decision.to_stage != "offline":
                    wrong += evidence.replay_errors(
                        connection, subject.id, decision.seq, subject.contract, decision.to_stage
                    )
        return wrong


def _offline(
    subject: Subject, offline: OfflineEvidence | None, since: str | None
) -> tuple[int, str, dict[str, Any]]:
    if offline is None:
        return 3, "no report of an audit: give --report RUN", {}
    offline.check(subject.contract_digest, subject.weights)
    if since is not None and not offline.finished_after(since):
        return 3, f"the report is from before the rollback at {since}: audit again", {}
    codes = {"PASS": 0, "FAIL": 1}
    message = "" if offline.verdict == "PASS" else f"the audit's verdict is {offline.verdict}"
    return codes.get(offline.verdict, 3), message, offline.to_dict()
