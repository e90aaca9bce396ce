"""``audit gate``: allow or deny; ``audit gate facts``: what an engine is."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mismatch_audit.gate.decide import Decision
    from mismatch_audit.gate.facts import EngineFacts

gate_app = typer.Typer(
    name="gate",
    help="May these weights be served on this engine under this contract? "
    "Exit codes: 0 allow, 1 deny, 2 an input that cannot be read.",
    invoke_without_command=True,
)


def register(app: typer.Typer) -> None:
    """Adds ``audit gate``."""
    app.add_typer(gate_app, name="gate")


@gate_app.callback()
def gate(
    ctx: typer.Context,
    weights: Annotated[
        Path | None, typer.Option(help="Checkpoint to be served, its manifest.json, or `sample`.")
    ] = None,
    engine_facts: Annotated[
        str | None,
        typer.Option(help="File of `audit gate facts`, or a live engine (http://host:port)."),
    ] = None,
    contract: Annotated[Path | None, typer.Option(help="Contract that must be kept.")] = None,
    blessing: Annotated[Path | None, typer.Option(help="File of `audit bless`.")] = None,
    trusted: Annotated[
        Path | None, typer.Option(help="Public key, or a folder of *.pub: who may bless.")
    ] = None,
    now: Annotated[
        str | None, typer.Option(help="Ask as of this time (ISO 8601, with its zone).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Answer allow or deny, with every reason."""
    if ctx.invoked_subcommand is not None:
        return
    from kernel_contracts.errors import InputError
    from mismatch_audit.gate.decide import Request, decide

    if (
        weights is None
        or engine_facts is None
        or contract is None
        or blessing is None
        or trusted is None
    ):
        raise InputError(
            "needs --weights, --engine-facts, --contract, --blessing and --trusted",
            fix="audit gate --help",
        )
    decision = decide(
        Request(_local(weights), _engine(engine_facts), contract, blessing, trusted, _time(now))
    )
    if as_json:
        typer.echo(json.dumps(decision.to_dict(), indent=1))
    else:
        _show(decision)
    raise typer.Exit(decision.exit_code)


def _show(decision: Decision) -> None:
    from mismatch_audit.reports.escape import visible

    typer.echo("ALLOW" if decision.allow else "DENY")
    for reason in decision.reasons:
        typer.echo(f"  {reason.code}: {visible(reason.detail)}")
    for note in decision.notes:
        typer.echo(f"  note: {note}")
    if decision.allow:
        typer.echo(f"  signed by {str(decision.signed_by)[:16]}, until {decision.expires}")


def _engine(text: str) -> Path | Callable[[], EngineFacts]:
    """A path, or what asks a live engine for its facts as they are now."""
    from mismatch_audit.gate.facts import facts_of
    from mismatch_audit.weights.live.base import is_engine_spec

    return (lambda: facts_of(text)) if is_engine_spec(text) else Path(text)


def _local(weights: Path) -> Path:
    """``sample`` is the sample model, as in ``audit run``."""
    from mismatch_audit.sample_model import SAMPLE_NAME, sample_model_path

    return sample_model_path() if str(weights) == SAMPLE_NAME else weights


def _time(text: str | None) -> datetime | None:
    from kernel_contracts.errors import InputError

    if text is None:
        return None
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        when = None
    if when is None or when.tzinfo is None:
        raise InputError(
            f"{text!r} is no time with a zone", where="--now", fix="2026-01-31T12:00:00+00:00"
        )
    return when.astimezone(UTC)


@gate_app.command()
def facts(
    source: Annotated[
        str, typer.Argument(help="A run's folder, or a live engine (http://..., vllm:FOLDER).")
    ],
    out: Annotated[Path, typer.Option(help="Facts file to write.")],
) -> None:
    """Write what an engine is: build, dtypes, caches, kernels, batching."""
    from mismatch_audit.gate.facts import facts_of, write_facts

    found = facts_of(source)
    write_facts(found, out)
    typer.echo(f"{len(found.facts)} facts of a {found.source} to {out}")
