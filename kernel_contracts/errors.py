"""One small family of errors. Each says what is wrong, where, and what fixes it.

The command line prints ``str(error)`` and exits with ``error.exit_code``; a traceback means a bug
of ours, never a user's mistake.
"""

from __future__ import annotations


class AuditError(Exception):
    """Base of every error that a user can cause and mend.

    what: one sentence, the mistake.  where: file, line, field or program.  fix: the command or
    change that mends it.  exit_code: the process's exit status (2 usage or bad input, 4 not
    comparable or unsound).
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__(what)

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n  fix: {self.fix}" if self.fix else head


class InputError(AuditError):
    """A file, option or setting that cannot be used as given (exit 2)."""


class ContractError(InputError):
    """A contract document that does not parse or contradicts itself (exit 2)."""


class NotComparableError(AuditError):
    """The two programs do not evaluate the same policy, so no drift may be reported (exit 4)."""

    exit_code = 4


class UnsoundError(AuditError):
    """A contract or a measurement route failed its own self-test (exit 4)."""

    exit_code = 4
