"""Where weights are handed to: commands, or a live engine; and what checks them there.

In place: one hand-over, after which the engine serves the new weights. In two phases: a hand-over
to a standby that takes no traffic, and an activation once the standby's checks passed.
"""

from __future__ import annotations

import os
import shlex
import string
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kernel_contracts.errors import AuditError, InputError
from mismatch_audit.gate.checks import check_receipt

OpenEngine = Callable[[], AbstractContextManager[Any]]
"""Opens the live engine (its standby, in two phases) that the checks look at."""

_FIELDS = {"checkpoint", "version"}


class TargetError(AuditError):
    """A hand-over failed (exit 1): the engine said so."""

    exit_code = 1


@dataclass(frozen=True)
class Weights:
    """A checkpoint and the version it is served under. tensors: its digest."""

    checkpoint: Path
    version: int
    tensors: str


class Target(Protocol):
    """Every call may be repeated: a crash can hit between the act and its record."""

    @property
    def two_phase(self) -> bool:
        """Does ``hand_over`` leave the served weights alone until ``activate``?"""

    def hand_over(self, weights: Weights) -> None:
        """Raises TargetError."""

    def activate(self, weights: Weights) -> None:
        """Raises TargetError. Nothing to do in place."""


@dataclass(frozen=True)
class Command:
    """A command line with ``{checkpoint}`` and ``{version}``; exit 0 means done. No shell."""

    words: tuple[str, ...]
    timeout: float = 1800.0

    @classmethod
    def parse(cls, text: str, option: str) -> Command:
        """Raises InputError for quotes that do not close and for other fields."""
        try:
            words = shlex.split(text)
            fields = {
                f for w in words for _, f, _, _ in string.Formatter().parse(w) if f is not None
            }
        except ValueError as error:
            raise InputError(f"cannot be split into words: {error}", where=option) from None
        if not words or (unknown := fields - _FIELDS):
            raise InputError(
                f"unknown fields {sorted(unknown)}" if words else "an empty command",
                where=option,
                fix="{checkpoint} and {version} are filled in; write {{ for a brace",
            )
        return cls(tuple(words))

    def run(self, weights: Weights) -> None:
        """Raises TargetError when it fails. Its output goes to ours; it may hold no secrets."""
        values = {"checkpoint": str(weights.checkpoint.resolve()), "version": str(weights.version)}
        words = [word.format_map(values) for word in self.words]
        environment = {
            **os.environ,
            "AUDIT_CHECKPOINT": values["checkpoint"],
            "AUDIT_VERSION": values["version"],
        }
        environment.pop("AUDIT_KEY_PASSPHRASE", None)
        try:
            done = subprocess.run(
                words, check=False, timeout=self.timeout, env=environment, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            raise TargetError(f"no end after {self.timeout:g} s", where=words[0]) from None
        except OSError as error:
            raise TargetError(f"cannot start: {error.strerror}", where=words[0]) from error
        if done.returncode != 0:
            raise TargetError(f"ended with {done.returncode}", where=words[0])


@dataclass(frozen=True)
class CommandTarget:
    """Hand-over and, for two phases, activation by commands."""

    give: Command
    switch: Command | None = None

    @property
    def two_phase(self) -> bool:
        return self.switch is not None

    def hand_over(self, weights: Weights) -> None:
        self.give.run(weights)

    def activate(self, weights: Weights) -> None:
        if self.switch is not None:
            self.switch.run(weights)


@dataclass(frozen=True)
class EngineTarget:
    """In place, through the live engine itself."""

    open_engine: OpenEngine
    two_phase: bool = False

    def hand_over(self, weights: Weights) -> None:
        try:
            with self.open_engine() as engine:
                receipt = check_receipt(engine.push(weights.checkpoint, weights.version))
        except AuditError as error:
            raise TargetError(error.what, where=error.where, fix=error.fix) from error
        if not receipt.holds:
            raise TargetError(receipt.detail)

    def activate(self, weights: Weights) -> None:
        """Nothing: it serves what it was given."""
