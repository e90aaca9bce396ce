"""What looks at the engine during a push: the live engine itself, or a command of the user's."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from kernel_contracts.errors import InputError
from mismatch_audit.gate.canaries import Canary, responses
from mismatch_audit.gate.checks import (
    LogProbs,
    SyncCheck,
    SyncLimits,
    check_agreement,
    check_movement,
    check_read_back,
    check_restored,
    check_version,
)
from mismatch_audit.gate.facts import EngineFacts, pinned, read_facts
from mismatch_audit.gate.statement import write_time
from mismatch_audit.gate.targets import Command, OpenEngine, TargetError, Weights


class Prober(Protocol):
    """Each may raise AuditError; during the checks that is a failed check."""

    def facts(self) -> EngineFacts:
        """Of the engine, as it runs now."""

    def snapshot(self, canaries: Sequence[Canary]) -> LogProbs | None:
        """What it answers before the push (responses' log-probs); None when it cannot be asked."""

    def check(
        self, weights: Weights, canaries: Sequence[Canary], before: LogProbs | None
    ) -> list[SyncCheck]:
        """Does it serve these weights?"""

    def check_restored(
        self, weights: Weights, canaries: Sequence[Canary], before: LogProbs | None
    ) -> list[SyncCheck]:
        """After a rollback to these weights: does it answer as before?"""


@dataclass(frozen=True)
class EngineProber:
    """A LiveEngine: version, log-probs of the canaries, and every tensor that it applies."""

    open_engine: OpenEngine
    limits: SyncLimits
    read_back: bool = True

    def facts(self) -> EngineFacts:
        with self.open_engine() as engine:
            return EngineFacts(pinned(engine.facts()), "engine", write_time(datetime.now(UTC)))

    def snapshot(self, canaries: Sequence[Canary]) -> LogProbs | None:
        with self.open_engine() as engine:
            return responses(canaries, engine.logprobs([c.token_ids for c in canaries]))

    def check(
        self, weights: Weights, canaries: Sequence[Canary], before: LogProbs | None
    ) -> list[SyncCheck]:
        expected = [list(c.expected) for c in canaries]
        with self.open_engine() as engine:
            found = [check_version(engine.weight_version(), weights.version)]
            after = responses(canaries, engine.logprobs([c.token_ids for c in canaries]))
            found.append(check_agreement(expected, after, self.limits))
            if before is not None:
                found.append(check_movement((before, expected), (before, after), self.limits))
            if self.read_back:
                with tempfile.TemporaryDirectory(prefix="read-back-") as name:
                    found.append(check_read_back(engine, weights.checkpoint, Path(name)))
        return found

    def check_restored(
        self, weights: Weights, canaries: Sequence[Canary], before: LogProbs | None
    ) -> list[SyncCheck]:
        with self.open_engine() as engine:
            found = [check_version(engine.weight_version(), weights.version)]
            if before is not None:
                after = responses(canaries, engine.logprobs([c.token_ids for c in canaries]))
                found.append(check_restored(before, after, self.limits))
            if self.read_back:
                with tempfile.TemporaryDirectory(prefix="read-back-") as name:
                    found.append(check_read_back(engine, weights.checkpoint, Path(name)))
        return found


@dataclass(frozen=True)
class CommandProber:
    """A command with ``{checkpoint}`` and ``{version}``; exits 0 when the engine serves them."""

    command: Command
    facts_file: Path | None

    def facts(self) -> EngineFacts:
        if self.facts_file is None:
            raise InputError("no facts of the engine", fix="give --engine-facts FILE or --engine")
        return read_facts(self.facts_file)

    def snapshot(self, canaries: Sequence[Canary]) -> LogProbs | None:
        return None

    def check(
        self, weights: Weights, canaries: Sequence[Canary], before: LogProbs | None
    ) -> list[SyncCheck]:
        try:
            self.command.run(weights)
        except TargetError as error:
            return [SyncCheck("command", False, str(error))]
        return [SyncCheck("command", True, "the check command ended with 0")]

    def check_restored(
        self, weights: Weights, canaries: Sequence[Canary], before: LogProbs | None
    ) -> list[SyncCheck]:
        return self.check(weights, canaries, before)
