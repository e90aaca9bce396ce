"""``audit ingest``: mirrored traffic, re-scored by the reference and judged."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mismatch_audit.monitor.ingest import IngestResult


class LiveStage(StrEnum):
    """What ``--stage`` takes."""

    SHADOW = "shadow"
    CANARY = "canary"
    FULL = "full"


LOGS = typer.Argument(
    help="Traffic logs (JSON lines); rotated files are found.", show_default=False
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(ingest)


def ingest(
    logs: Annotated[list[Path], LOGS],
    contract: Annotated[Path, typer.Option(help="Contract (YAML).")],
    reference: Annotated[str, typer.Option(help="Checkpoint folder, hub id, or `sample`.")],
    out: Annotated[Path, typer.Option(help="Folder for tables and the report; may be extended.")],
    stage: Annotated[
        LiveStage | None, typer.Option(help="Only requests of this stage. Default: the only one.")
    ] = None,
    build: Annotated[
        str | None, typer.Option(help="Only this engine build. Default: the only one.")
    ] = None,
    weights_version: Annotated[
        str | None,
        typer.Option(
            help="The version that the reference is of; `any` takes rows of every version and "
            "rows that do not tell."
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="Promotion store that gets the evidence.", envvar="AUDIT_STORE"),
    ] = None,
    reference_dtype: Annotated[str, typer.Option(help="The reference's dtype.")] = "float32",
    skip_bad: Annotated[bool, typer.Option(help="Skip lines that are no requests.")] = False,
    actor: Annotated[str, typer.Option(help="Who acts, in the store's history.")] = "audit ingest",
    exit_zero: Annotated[bool, typer.Option(help="Exit 0 whatever the verdict.")] = False,
) -> None:
    """Re-score mirrored traffic with the reference; judge each slice; keep evidence."""
    from rich.console import Console

    from mismatch_audit.assemble import write_report
    from mismatch_audit.cli.progress import progress_display
    from mismatch_audit.monitor.ingest import IngestSettings
    from mismatch_audit.monitor.ingest import ingest as run_ingest
    from mismatch_audit.monitor.rescore import Rescorer
    from mismatch_audit.reports.terminal import render_terminal
    from mismatch_audit.settings import ReferenceSettings

    settings = IngestSettings(
        logs=logs, contract=contract, out=out, stage=None if stage is None else stage.value,
        build=build, weights_version=weights_version, store=store, skip_bad=skip_bad, actor=actor,
    )  # fmt: skip
    reference_settings = ReferenceSettings(dtype=reference_dtype)
    with progress_display(Console(stderr=True)) as progress:
        result = run_ingest(settings, lambda: Rescorer(reference, reference_settings), progress)
    write_report(result.record, out)
    render_terminal(result.record, Console(), folder=str(out))
    for line in summary(result):
        typer.echo(line)
    raise typer.Exit(0 if exit_zero else result.exit_code)


def summary(result: IngestResult) -> list[str]:
    """What the run did, and where the promotion stands."""
    new = sum(result.outcomes.values())
    lines = [f"{new} new requests, {result.repeated} known before"]
    lines += [f"  {count} {why}" for why, count in sorted(result.outcomes.items())]
    if result.counted is not None and result.subject is not None:
        counted = result.counted
        lines.append(
            f"store: {counted.prompts} prompts counted, {counted.repeated} requests known before, "
            f"{counted.late} late, {counted.other_stage} of a stage that is over or not begun"
        )
        if counted.rolled_back_to is not None:
            broken = ", ".join(counted.broken)
            lines.append(f"ROLLED BACK to {counted.rolled_back_to}: broken: {broken}")
        elif result.assessment is not None:
            lines.append(f"stage {result.assessment.stage}: {result.assessment.verdict}")
            lines += [f"  lacks {text}" for text in result.assessment.lacks]
    return lines
