"""``audit rollouts``: rollouts that a trainer has recorded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from mismatch_audit.rollouts.formats import Problem, Source

PATHS = typer.Argument(help="Dumps: files, or folders of them.", show_default=False)


def rollouts(
    paths: Annotated[list[Path], PATHS],
    format: Annotated[
        str, typer.Option("--format", "-f", help="Format of the dump; auto detects it.")
    ] = "auto",
    contract: Annotated[
        Path | None, typer.Option(help="Contract (YAML). Default: the one for recorded rollouts.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the report.", envvar="AUDIT_OUT")
    ] = Path("runs/rollouts"),
    field: Annotated[
        list[str] | None,
        typer.Option(help="OURS=THEIRS: a column's name in a plain file; repeatable."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer's folder, for dumps that hold text only.")
    ] = None,
    rescore: Annotated[
        str | None,
        typer.Option(help="Checkpoint that scores the tokens where a log has no trainer's side."),
    ] = None,
    rescore_engine: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint that vLLM scores the tokens with: the sampler's side where a log has "
            "none, else a second opinion that parts policy lag from implementation error."
        ),
    ] = None,
    engine_dtype: Annotated[
        str, typer.Option(help="Of the --rescore-engine: bfloat16, float16, float32.")
    ] = "bfloat16",
    prompt_tokens: Annotated[
        int, typer.Option(help="Most tokens a prompt's rollouts can have; token-weighted clauses.")
    ] = 0,
    no_checks: Annotated[bool, typer.Option(help="Statistics and verdicts alone.")] = False,
    exit_zero: Annotated[bool, typer.Option(help="Exit 0 whatever the verdict.")] = False,
) -> None:
    """Audit recorded rollouts of any trainer: statistics, slices, causes, verdicts."""
    from rich.console import Console

    from kernel_contracts.errors import InputError
    from mismatch_audit.cli.progress import progress_display
    from mismatch_audit.reports.terminal import render_terminal
    from mismatch_audit.rollouts.allocator import keep_freed_memory
    from mismatch_audit.rollouts.formats import ReadOptions
    from mismatch_audit.rollouts.whole import audit_rollouts

    keep_freed_memory()
    renamed = {}
    for item in field or []:
        ours, sign, theirs = item.partition("=")
        if not (sign and ours and theirs):
            raise InputError(f"--field takes OURS=THEIRS, got {item!r}")
        renamed[ours] = theirs
    console, errors = Console(), Console(stderr=True)
    with progress_display(errors) as progress:
        record, damaged = audit_rollouts(
            paths,
            out,
            format=format,
            contract=contract,
            options=ReadOptions(tokenizer=tokenizer, fields=renamed),
            rescore=rescore,
            rescore_engine=rescore_engine,
            engine_dtype=engine_dtype,
            max_rows=prompt_tokens,
            checks=not no_checks,
            progress=progress,
            on_sources=lambda sources, problems: _say(errors, sources, problems),
        )
    render_terminal(record, console, folder=str(out))
    for text in damaged:
        errors.print(f"error: {text}", markup=False, highlight=False)
    if exit_zero:
        raise typer.Exit(0)
    if damaged:
        errors.print("exit code 2: not everything could be read", highlight=False)
    raise typer.Exit(2 if damaged else int(record.exit_code))


def _say(console: Console, sources: list[Source], problems: list[Problem]) -> None:
    """What was detected, before it is read."""
    for one in sources[:20]:
        size = one.bytes_total / 1e6
        text = f"{one.path}: {one.header.format}, {size:,.1f} MB"
        console.print(text, markup=False, highlight=False)
    if len(sources) > 20:
        console.print(f"and {len(sources) - 20} more", highlight=False)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(rollouts)
