"""A monitor set up by environment variables, for trainers that only take a function's name.

MISMATCH_AUDIT_CONTRACT   contract file; without it the hooks do nothing
MISMATCH_AUDIT_OUT        folder for report.json and report.html
MISMATCH_AUDIT_RECORD     folder for the observed sequences
MISMATCH_AUDIT_EVERY      steps between two reports (50)
MISMATCH_AUDIT_ACTIONS    comma-separated actions that may be taken (warn)
MISMATCH_AUDIT_STRICT     1: an error of the monitor's own is raised
"""

from __future__ import annotations

import os
from pathlib import Path

from kernel_contracts.errors import AuditError, InputError
from kernel_contracts.loading import load_contract
from mismatch_audit.rollouts.schema import Header
from mismatch_audit.trainers.monitor import Monitor

PREFIX = "MISMATCH_AUDIT_"


class StopTraining(AuditError):
    """The contract's escalation asks for the training to end (exit 1)."""

    exit_code = 1


def monitor_from_environment(
    framework: str, *, rank: int = 0, can: tuple[str, ...] = ("warn",)
) -> Monitor | None:
    """The monitor that the variables ask for; None without a contract.

    can: actions that this framework's hook is able to take. Raises InputError for a variable that
    cannot be used, naming it.
    """
    path = os.environ.get(PREFIX + "CONTRACT")
    if not path:
        return None
    every = os.environ.get(PREFIX + "EVERY", "50")
    if not every.isdecimal():
        raise InputError(f"{every!r} is no number of steps", where=PREFIX + "EVERY")
    asked = [a.strip() for a in os.environ.get(PREFIX + "ACTIONS", "warn").split(",") if a.strip()]
    unable = [a for a in asked if a not in can]
    if unable:
        raise InputError(
            f"a hook into {framework} cannot {', '.join(unable)}", where=PREFIX + "ACTIONS",
            fix=f"any of {', '.join(can)}",
        )  # fmt: skip
    out, record = os.environ.get(PREFIX + "OUT"), os.environ.get(PREFIX + "RECORD")
    return Monitor(
        load_contract(path),
        every=int(every),
        out=Path(out) if out else None,
        record=Path(record) if record else None,
        actions=tuple(asked),
        strict=os.environ.get(PREFIX + "STRICT", "") == "1",
        header=Header(framework=framework, format="live"),
        rank=rank,
    )
