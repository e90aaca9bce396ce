"""``audit run``: the live dual audit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mismatch_audit.cli.ci_output import (
    BaselineOption,
    FormatOption,
    MarginOption,
    OutputFormat,
    announce_in_ci,
    baseline_of,
)

if TYPE_CHECKING:
    from mismatch_audit.reports.record import Record

SETTINGS = typer.Argument(help="A run file (YAML). Options below override it.", show_default=False)


def run(
    settings: Annotated[Path | None, SETTINGS] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report and tables.", envvar="AUDIT_OUT")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Checkpoint folder, hub id, or `sample`.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Prompt file: .jsonl, .csv or .parquet.")
    ] = None,
    contract: Annotated[Path | None, typer.Option(help="Contract (YAML).")] = None,
    limit: Annotated[
        int | None, typer.Option(help="First N prompts, spread over domains.", min=1)
    ] = None,
    engine_dtype: Annotated[str | None, typer.Option(help="The engine's dtype.")] = None,
    engine_model: Annotated[
        str | None, typer.Option(help="Serve another checkpoint than --model.")
    ] = None,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE passed to the engine as it is; repeatable."),
    ] = None,
    top_logprobs: Annotated[
        int | None,
        typer.Option(
            help="Use only the engine's public top K log-probs a row: divergences become "
            "intervals that can fail a clause, not pass it.",
            min=2,
        ),
    ] = None,
    reference_dtype: Annotated[str | None, typer.Option(help="The reference's dtype.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Response tokens a prompt.", min=1)] = None,
    inject: Annotated[
        list[str] | None,
        typer.Option(help="Fault to put into the engine, to test a contract: stale_weights=0.02."),
    ] = None,
    gradient: Annotated[
        bool, typer.Option(help="Measure the policy-gradient bias of the rollouts too.")
    ] = False,
    baseline: BaselineOption = None,
    baseline_margin: MarginOption = 0.25,
    format: FormatOption = None,
    resume: Annotated[bool, typer.Option(help="Finish a run that was stopped.")] = False,
    overwrite: Annotated[
        bool, typer.Option(help="Remove an earlier run of ours in the folder first.")
    ] = False,
    exit_zero: Annotated[bool, typer.Option(help="Exit 0 whatever the verdict.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option(help="Let the model's repository run its own code.")
    ] = False,
) -> None:
    """Run identical prompts through the reference and the engine; judge each slice."""
    from kernel_contracts.errors import InputError
    from mismatch_audit.rundir import remove_run
    from mismatch_audit.settings import load_settings, parse_settings

    overrides: dict[str, Any] = {
        "model": model,
        "prompts": None if prompts is None else str(prompts),
        "contract": None if contract is None else str(contract),
        "limit": limit,
        "engine.dtype": engine_dtype,
        "engine.model": engine_model,
        "engine.rows": None if top_logprobs is None else "topk",
        "engine.top_logprobs": top_logprobs,
        "engine.args": _pairs("--engine-arg", engine_arg),
        "engine.inject": _pairs("--inject", inject),
        "reference.dtype": reference_dtype,
        "sampling.max_tokens": max_tokens,
        "trust_remote_code": trust_remote_code or None,
    }
    document = {} if settings is None else load_settings(settings).model_dump()
    where = "options" if settings is None else str(settings)
    if settings is None and (prompts is None or contract is None):
        raise InputError(
            "needs a run file, or --prompts and --contract",
            fix="audit run samples/quickstart.yaml --out runs/quickstart",
        )
    for name, value in overrides.items():
        if value is not None:
            *parents, key = name.split(".")
            holder = document
            for parent in parents:
                holder = holder.setdefault(parent, {})
            holder[key] = {**holder.get(key, {}), **value} if isinstance(value, dict) else value
    resolved = parse_settings(document, where)
    if overwrite and resume:
        raise InputError("--overwrite and --resume exclude each other")
    target = out or Path("runs") / (settings.stem if settings else "audit")
    if overwrite:
        remove_run(target)
    before = baseline_of(baseline, baseline_margin)
    record = _execute(resolved, target, resume, gradient, before, format)
    raise typer.Exit(0 if exit_zero else int(record.exit_code))


def _pairs(option: str, items: list[str] | None) -> dict[str, Any] | None:
    """``["a=1"]`` -> ``{"a": 1}``; values are YAML scalars."""
    import yaml

    from kernel_contracts.errors import InputError

    if not items:
        return None
    pairs = {}
    for item in items:
        key, sign, value = item.partition("=")
        if not sign or not key:
            raise InputError(f"{option} takes KEY=VALUE, got {item!r}")
        pairs[key] = yaml.safe_load(value)
    return pairs


def _execute(
    settings: Any,
    out: Path,
    resume: bool,
    gradient: bool,
    baseline: Any,
    format: OutputFormat | None,
) -> Record:
    from rich.console import Console

    from mismatch_audit.audit import run_audit
    from mismatch_audit.cli.progress import progress_display
    from mismatch_audit.reports.terminal import render_terminal

    console = Console()
    with progress_display(Console(stderr=True)) as progress:
        record = run_audit(
            settings, out, resume=resume, progress=progress, gradient=gradient, baseline=baseline
        )
    render_terminal(record, console, folder=str(out))
    announce_in_ci(record, format)
    return record
