"""The command line without a process of its own: the imports are paid for once."""

from __future__ import annotations

from pathlib import Path

from conftest import ROOT, CommandResult
from typer.testing import CliRunner

from kernel_contracts.errors import AuditError
from mismatch_audit.cli.app import app


def audit(*arguments: str | Path) -> CommandResult:
    """As `conftest.audit`; an error of ours becomes its message and exit code, as in ``main``."""
    done = CliRunner().invoke(app, list(map(str, arguments)))
    code, err = done.exit_code, done.stderr
    if isinstance(done.exception, AuditError):
        code, err = done.exception.exit_code, f"error: {done.exception}"
    elif done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return CommandResult(code, done.stdout, err, ROOT)
