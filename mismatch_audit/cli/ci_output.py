"""What commands that judge share: output for a CI system, and the run they compare with."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mismatch_audit.audit import Baseline
    from mismatch_audit.reports.record import Record

__all__ = [
    "BaselineOption",
    "FormatOption",
    "MarginOption",
    "OutputFormat",
    "announce_in_ci",
    "baseline_of",
]


class OutputFormat(StrEnum):
    """What a judging command prints beside its terminal report."""

    GITHUB = "github"


BaselineOption = Annotated[
    Path | None, typer.Option(help="An earlier run on these prompts: be no worse than it, too.")
]
MarginOption = Annotated[
    float,
    typer.Option(help="Share of a limit by which a mean may rise above the baseline.", min=0),
]
FormatOption = Annotated[
    OutputFormat | None,
    typer.Option("--format", help="github: annotations and step summary inside Actions, too."),
]


def announce_in_ci(record: Record, format: OutputFormat | None) -> None:
    """Annotations on the screen and a report in the step summary, inside GitHub Actions."""
    if format is not OutputFormat.GITHUB:
        return
    from kernel_contracts.errors import InputError
    from mismatch_audit.reports.github import announce

    try:
        text = announce(record, os.environ)
    except OSError as error:
        raise InputError(
            f"cannot append to the step summary: {error.strerror or error}",
            where="GITHUB_STEP_SUMMARY",
        ) from error
    if text:
        typer.echo(text, nl=False)


def baseline_of(folder: Path | None, margin: float) -> Baseline | None:
    """The run to compare with, or None. Raises InputError for a margin of zero."""
    if folder is None:
        return None
    from kernel_contracts.errors import InputError
    from mismatch_audit.audit import Baseline

    if not margin > 0:
        raise InputError(
            f"the margin must be positive, got {margin:g}",
            where="--baseline-margin",
            fix="0.25 lets a mean rise by a quarter of its limit",
        )
    return Baseline(folder, margin)
