"""Run folders as controls: the token table of a run that had no fault put into it."""

from __future__ import annotations

import json
from pathlib import Path

from kernel_contracts.errors import InputError
from kernel_contracts.infer import ControlRun
from mismatch_audit.rundir import STATE
from mismatch_audit.tokens import read_parts


def read_control_run(folder: Path) -> ControlRun:
    """The token table of a run folder.

    Raises InputError when it holds no run, or one with an injected fault: limits made from that
    would allow the fault.
    """
    parts = sorted((folder / "tokens").glob("part-*.parquet"))
    if not parts:
        raise InputError(
            "holds no finished part of a run",
            where=str(folder),
            fix="give the folder that `audit run --out` wrote",
        )
    injected = _injected(folder / STATE)
    if injected:
        raise InputError(
            f"a fault was put into this run ({', '.join(injected)}): it is no control",
            where=str(folder),
            fix="give a run without --inject",
        )
    return ControlRun(folder.name, read_parts(parts))


def _injected(state: Path) -> list[str]:
    try:
        spec = json.loads(state.read_text(encoding="utf-8"))["spec"]
        return sorted(spec["settings"]["engine"]["inject"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"cannot tell whether a fault was put into this run: {error!r}", where=str(state)
        ) from error
