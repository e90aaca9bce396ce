"""``audit show``: the report of a finished run, again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RUN = typer.Argument(help="The run's folder, or a report.json.", show_default=False)


def show(
    run: Annotated[Path, RUN],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print report.json, for scripts.")
    ] = False,
) -> None:
    """Print the terminal report of a run again. Exits 0 whatever its verdict was."""
    from mismatch_audit.reports.record import load_record, record_text

    record = load_record(run)
    if as_json:
        typer.echo(record_text(record), nl=False)
        return
    from rich.console import Console

    from mismatch_audit.reports.terminal import render_terminal

    render_terminal(record, Console(), folder=str(run if run.is_dir() else run.parent))
