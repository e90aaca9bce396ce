"""``audit report``: a run's record in the format that another tool reads."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mismatch_audit.reports.record import Record

RUN = typer.Argument(help="The run's folder, or a report.json.", show_default=False)


class ReportFormat(StrEnum):
    """What ``--format`` takes."""

    JSON = "json"
    HTML = "html"
    MARKDOWN = "markdown"
    JUNIT = "junit"
    SARIF = "sarif"
    GITHUB = "github"
    PROMETHEUS = "prometheus"
    CSV = "csv"


def report(
    run: Annotated[Path, RUN],
    format: Annotated[ReportFormat, typer.Option("--format", "-f", help="What to write.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write to this file, not to the screen.")
    ] = None,
) -> None:
    """Write the report of a run in another format. Exits 0 whatever its verdict was."""
    from mismatch_audit.reports.record import load_record

    text = render(load_record(run), format)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_text(out, text)


def render(record: Record, format: ReportFormat) -> str:
    """The record in one format, ending in a newline."""
    from mismatch_audit import reports

    return reports.render(record, format.value)


def write_text(path: Path, text: str) -> None:
    """Write a report file. Raises InputError when it cannot be written."""
    from kernel_contracts.errors import InputError

    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
    except OSError as error:
        raise InputError(
            f"cannot write it: {error.strerror or error}",
            where=str(path),
            fix="give --out a file in a folder that exists and can be written",
        ) from error
