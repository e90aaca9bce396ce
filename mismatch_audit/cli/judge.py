"""``audit judge``: a finished run under another contract, without running anything again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mismatch_audit.cli.ci_output import (
    BaselineOption,
    FormatOption,
    MarginOption,
    announce_in_ci,
    baseline_of,
)


def judge(
    run: Annotated[Path, typer.Argument(help="A finished run's folder.", show_default=False)],
    contract: Annotated[Path, typer.Option(help="The contract to judge it by (YAML).")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report. Default: RUN/judged-NAME.")
    ] = None,
    baseline: BaselineOption = None,
    baseline_margin: MarginOption = 0.25,
    format: FormatOption = None,
    exit_zero: Annotated[bool, typer.Option(help="Exit 0 whatever the verdict.")] = False,
) -> None:
    """Judge a finished run's tables by another contract. Nothing is run again."""
    from rich.console import Console

    from mismatch_audit.audit import judge_again
    from mismatch_audit.cli.progress import progress_display
    from mismatch_audit.reports.terminal import render_terminal

    target = out or run / f"judged-{contract.stem}"
    with progress_display(Console(stderr=True)) as progress:
        record = judge_again(
            run, contract, target, progress=progress,
            baseline=baseline_of(baseline, baseline_margin),
        )  # fmt: skip
    render_terminal(record, Console(), folder=str(target))
    announce_in_ci(record, format)
    raise typer.Exit(0 if exit_zero else int(record.exit_code))
