"""A weight sync with a way back: push, check on the live engine, roll back when a check fails.

served = Served(checkpoint, 0, trainer.logprobs(canaries))      # what the engine serves now
outcome = guarded_sync(trainer, engine, version=1, previous=served, sequences=canaries,
                       folder=Path("pushes"), limits=SyncLimits.of(contract))
served = outcome.served                                         # the new one, or the old one
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kernel_contracts.errors import AuditError, InputError
from mismatch_audit.gate.checks import (
    LogProbs,
    SyncCheck,
    SyncLimits,
    check_agreement,
    check_movement,
    check_read_back,
    check_receipt,
    check_restored,
    check_steady,
    check_version,
    flat_pair,
)

if TYPE_CHECKING:
    from kernel_contracts.contract import Contract

__all__ = [
    "Served",
    "ServedEngine",
    "SyncCheck",
    "SyncLimits",
    "SyncOutcome",
    "TrainerSide",
    "guarded_sync",
]

Tokens = Sequence[Sequence[int]]


class ServedEngine(Protocol):
    """The part of a live engine that a sync needs (``weights.live.base.LiveEngine`` has it)."""

    def weight_version(self) -> Any:
        """The version of the weights that it serves, None when it does not tell."""

    def push(self, checkpoint: Path, version: int) -> Any:
        """Serve this checkpoint under this version; returns when it does."""

    def logprobs(self, sequences: Tokens) -> LogProbs:
        """Per sequence the log-prob (nats) of every token but the first, without a prefix cache."""


class TrainerSide(Protocol):
    """The part of a trainer that a sync needs."""

    def export(self, folder: Path) -> Path:
        """Write the weights to be served into this empty folder; returns the checkpoint's path."""

    def logprobs(self, sequences: Tokens) -> LogProbs:
        """As the engine's, by the trainer's own program and current weights."""


@dataclass(frozen=True)
class Served:
    """Weights that an engine serves. logprobs: the trainer's own, of the canaries, when known."""

    checkpoint: Path
    version: int
    logprobs: LogProbs | None = None


@dataclass(frozen=True)
class SyncOutcome:
    """ok: the new weights are served and checked. served: what the engine serves now.

    rolled_back: the previous weights were pushed again and answer as before.
    """

    ok: bool
    served: Served
    checks: tuple[SyncCheck, ...]
    rolled_back: bool = False
    error: str = ""

    @property
    def reasons(self) -> list[str]:
        """Why the new weights are not served; empty when they are."""
        found = [self.error] if self.error else []
        return found + [f"{c.check}: {c.detail}" for c in self.checks if not c.holds]


class RollbackError(AuditError):
    """The engine serves neither the new weights, checked, nor the previous ones (exit 4)."""

    exit_code = 4


def guarded_sync(
    trainer: TrainerSide,
    engine: ServedEngine,
    *,
    version: int,
    previous: Served,
    sequences: Tokens,
    folder: Path,
    limits: SyncLimits | None = None,
    contract: Contract | None = None,
    read_back: bool = False,
) -> SyncOutcome:
    """Export the trainer's weights, push them, check the live engine; roll back on a failure.

    sequences: canaries, token ids; best some of the last rollouts. limits: else those of
    ``contract``, else the defaults. read_back: compare every tensor that the engine applies too
    (``LiveEngine`` can). folder: where checkpoints are written, as ``version-N``; after a push
    that stands, the one that it replaced is removed from there. Raises InputError before anything
    is pushed, RollbackError when the way back fails too.
    """
    limits = limits or (SyncLimits.of(contract) if contract is not None else SyncLimits())
    target = _target(folder, version, previous, sequences)
    before = engine.logprobs(sequences)
    if isinstance(why := flat_pair(before, before), str):
        raise InputError(
            f"the engine cannot be checked before the push: {why}",
            fix="send canaries of at least two tokens, and make sure that the engine answers",
        )
    try:
        checkpoint = trainer.export(target)
        expected = trainer.logprobs(sequences)
    except BaseException:  # nothing was pushed: the engine serves what it served
        shutil.rmtree(target, ignore_errors=True)
        raise
    checks: tuple[SyncCheck, ...] = ()
    error = ""
    try:
        receipt = engine.push(checkpoint, version)
        after = engine.logprobs(sequences)
        known = previous.logprobs
        change = None if known is None else (known, expected)
        gap = None if known is None else (known, before)
        checks = (
            check_receipt(receipt),
            check_version(engine.weight_version(), version),
            check_agreement(expected, after, limits),
            check_movement(change, (before, after), limits),
            check_steady(gap, (expected, after), limits),
        )
        if read_back:
            checks += (_read_back(engine, checkpoint),)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    except BaseException:  # stopped by hand: unchecked weights must not stay
        roll_back(engine, previous, before, sequences, limits)
        raise
    if not error and all(check.holds for check in checks):
        _forget(previous.checkpoint, folder)
        return SyncOutcome(True, Served(checkpoint, version, expected), checks)
    checks += roll_back(engine, previous, before, sequences, limits)
    shutil.rmtree(target, ignore_errors=True)
    return SyncOutcome(False, previous, checks, rolled_back=True, error=error)


def roll_back(
    engine: ServedEngine,
    previous: Served,
    before: LogProbs,
    sequences: Tokens,
    limits: SyncLimits,
) -> tuple[SyncCheck, ...]:
    """Push the previous weights again and see that the engine answers as before.

    Raises RollbackError.
    """
    try:
        engine.push(previous.checkpoint, previous.version)
        version = check_version(engine.weight_version(), previous.version)
        checks = (
            replace(version, check="rollback_version"),
            check_restored(before, engine.logprobs(sequences), limits),
        )
    except Exception as failure:
        raise _lost(previous, f"{type(failure).__name__}: {failure}") from failure
    if wrong := [check.detail for check in checks if not check.holds]:
        raise _lost(previous, "; ".join(wrong))
    return checks


def _lost(previous: Served, why: str) -> RollbackError:
    return RollbackError(
        f"the push failed its checks, and so did the way back: {why}",
        where=f"version {previous.version}",
        fix=f"take the engine out of traffic and restart it from {previous.checkpoint}",
    )


def _read_back(engine: Any, checkpoint: Path) -> SyncCheck:
    with tempfile.TemporaryDirectory(prefix="read-back-") as name:
        return check_read_back(engine, checkpoint, Path(name))


def _target(folder: Path, version: int, previous: Served, sequences: Tokens) -> Path:
    """An empty ``folder/version-N``; leftovers of a sync that was stopped are removed."""
    if str(version) == str(previous.version):
        raise InputError(
            f"version {version} is served already: a push that does nothing would look like one",
            fix="number the pushes upwards",
        )
    if not any(len(tokens) > 1 for tokens in sequences):
        raise InputError(
            "no canary of two tokens or more, so nothing would be checked",
            where="sequences",
            fix="give some token sequences, for example of the last rollouts",
        )
    target = folder / f"version-{int(version)}"
    if target.resolve() == previous.checkpoint.resolve():
        raise InputError("would overwrite the weights that are served", where=str(target))
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    return target


def _forget(checkpoint: Path, folder: Path) -> None:
    """Remove a checkpoint that we wrote; one that lies elsewhere is the caller's."""
    inside = checkpoint.resolve()
    while inside.parent != inside and inside.parent != folder.resolve():
        inside = inside.parent
    if inside.parent == folder.resolve() and inside.name.startswith("version-"):
        shutil.rmtree(inside, ignore_errors=True)
