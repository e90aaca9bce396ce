"""``audit push``: audit, bless, hand over, check on the live engine, or go back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mismatch_audit.gate.live_checks import Prober
    from mismatch_audit.gate.store import PushResult
    from mismatch_audit.gate.targets import Target


def register(app: typer.Typer) -> None:
    """Adds ``audit push``."""
    app.command()(push)


def push(
    target: Annotated[
        str,
        typer.Option(
            help="Command with {checkpoint} and {version} that hands the weights over (exit 0: "
            "done), or a live engine (http://host:port)."
        ),
    ],
    contract: Annotated[Path, typer.Option(help="Contract that the weights must keep.")],
    store: Annotated[Path, typer.Option(help="Folder of the journal, blessings, serving.json.")],
    source: Annotated[Path | None, typer.Option(help="Checkpoint to serve.")] = None,
    version: Annotated[int | None, typer.Option(help="Its version.", min=0)] = None,
    key: Annotated[Path | None, typer.Option(help="Private key that signs the blessing.")] = None,
    trusted: Annotated[
        Path | None, typer.Option(help="Public keys of the gate (default: the key's own .pub).")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="Folder of a finished audit of the source.")
    ] = None,
    settings: Annotated[
        Path | None, typer.Option(help="Run file: audit the source now, into the store.")
    ] = None,
    activate: Annotated[
        str | None,
        typer.Option(help="Command that switches traffic to the standby that was handed to."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Live engine that the checks look at (default: --target if it is one)."),
    ] = None,
    check: Annotated[
        str | None, typer.Option(help="Instead: a command that exits 0 when it serves them.")
    ] = None,
    engine_facts: Annotated[
        Path | None, typer.Option(help="With --check: file of `audit gate facts`.")
    ] = None,
    previous: Annotated[
        Path | None, typer.Option(help="First push of a store: the checkpoint served now.")
    ] = None,
    previous_version: Annotated[int | None, typer.Option(help="Its version.", min=0)] = None,
    expires: Annotated[str, typer.Option(help="Lifetime of the blessing.")] = "7d",
    read_back: Annotated[
        bool, typer.Option(help="Read every tensor back from the live engine.")
    ] = True,
    recover: Annotated[
        bool, typer.Option("--recover", help="Only go back from a push that was cut short.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Serve a checkpoint that passes, or keep serving the one before it.

    Run again after a crash, the same command goes on. Exit codes: 0 served, 1 refused or rolled
    back, 2 bad input, 3 and 4 as the audit's verdict; 4 also when the way back failed.
    """
    from kernel_contracts.errors import InputError
    from mismatch_audit.cli.key import passphrase
    from mismatch_audit.gate import push as gate_push
    from mismatch_audit.gate.bless import duration
    from mismatch_audit.gate.keys import load_private

    there, prober = _sides(
        target, activate, engine, check, engine_facts, contract, read_back=read_back
    )
    if recover:
        result = gate_push.recover(store, there, prober)
        if result is None:
            typer.echo("no push was cut short here")
            return
        raise typer.Exit(_show(result, as_json))
    if source is None or version is None or key is None:
        raise InputError("needs --source, --version and --key", fix="audit push --help")
    if (previous is None) != (previous_version is None):
        raise InputError("--previous and --previous-version go together")
    plan = gate_push.PushPlan(
        source=source,
        version=version,
        contract=contract,
        audit=_audit(run, settings, source, contract, store / "runs" / f"version-{version}"),
        key=load_private(key, passphrase()),
        trusted=trusted or key.with_suffix(".pub"),
        target=there,
        prober=prober,
        previous=None if previous is None or previous_version is None else (
            previous, previous_version
        ),
        lifetime=duration(expires),
    )  # fmt: skip
    raise typer.Exit(_show(gate_push.run_push(plan, store), as_json))


def _sides(
    target: str,
    activate: str | None,
    engine: str | None,
    check: str | None,
    engine_facts: Path | None,
    contract: Path,
    *,
    read_back: bool,
) -> tuple[Target, Prober]:
    from kernel_contracts.errors import InputError
    from kernel_contracts.loading import load_contract
    from mismatch_audit.gate.checks import SyncLimits
    from mismatch_audit.gate.live_checks import CommandProber, EngineProber
    from mismatch_audit.gate.targets import Command, CommandTarget, EngineTarget

    live = target if _is_server(target, "--target") else None
    looked_at = engine or live
    if looked_at is not None and not _is_server(looked_at, "--engine"):
        raise InputError("not the address of a server", where=looked_at, fix="http://host:port")
    there: Target
    if live is not None:
        if activate is not None:
            raise InputError("a live engine is pushed to in place", where="--activate")
        there = EngineTarget(_opener(live))
    else:
        switch = None if activate is None else Command.parse(activate, "--activate")
        there = CommandTarget(Command.parse(target, "--target"), switch)
    if looked_at is not None:
        limits = SyncLimits.of(load_contract(contract))
        return there, EngineProber(_opener(looked_at), limits, read_back)
    if check is None:
        raise InputError(
            "nothing would check what the engine serves after the push",
            fix="give --engine http://host:port, or --check COMMAND with --engine-facts FILE",
        )
    return there, CommandProber(Command.parse(check, "--check"), engine_facts)


def _is_server(text: str, option: str) -> bool:
    from kernel_contracts.errors import InputError
    from mismatch_audit.weights.live.base import IN_PROCESS, URL_SCHEMES

    if text.startswith(IN_PROCESS):
        raise InputError(
            "an engine of this process ends with it, so nothing would be served",
            where=option,
            fix="give a running server, http://host:port, or a command",
        )
    return text.startswith(URL_SCHEMES)


def _opener(spec: str) -> Callable[[], Any]:
    from mismatch_audit.weights.live.base import open_engine

    return lambda: open_engine(spec)


def _audit(
    run: Path | None, settings: Path | None, source: Path, contract: Path, out: Path
) -> Callable[[], Path]:
    """Gives the folder of an audit of the source: a finished one, or one that it runs."""
    from kernel_contracts.errors import InputError

    if (run is None) == (settings is None):
        raise InputError("needs --run FOLDER or --settings FILE, and not both")
    if settings is None:
        return lambda: run  # type: ignore[return-value]
    from mismatch_audit.settings import load_settings

    told = load_settings(settings)
    # Where the run file serves another checkpoint than the reference's, that one is replaced.
    if told.engine.model is None:
        told = told.model_copy(update={"model": str(source), "contract": str(contract)})
    else:
        served = told.engine.model_copy(update={"model": str(source)})
        told = told.model_copy(update={"engine": served, "contract": str(contract)})

    def job() -> Path:
        from rich.console import Console

        from mismatch_audit.audit import run_audit
        from mismatch_audit.cli.progress import progress_display

        with progress_display(Console(stderr=True)) as progress:
            run_audit(told, out, resume=(out / "run.json").exists(), progress=progress)
        return out

    return job


def _show(result: PushResult, as_json: bool) -> int:
    from mismatch_audit.reports.escape import visible

    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=1))
        return result.exit_code
    words = {"committed": "SERVED", "aborted": "REFUSED", "rolled_back": "ROLLED BACK"}
    typer.echo(f"{words[result.status]}  version {result.served} is served")
    for reason in result.reasons:
        typer.echo(f"  {visible(reason)}")
    for one in result.checks:
        state = {True: "ok", False: "FAILED", None: "not seen"}[one.ok]
        typer.echo(f"  {one.check:17} {state:9} {visible(one.detail)}")
    return result.exit_code
