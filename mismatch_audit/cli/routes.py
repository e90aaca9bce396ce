"""``audit routes``: which slices may use which engine build, as a table that a router obeys."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mismatch_audit.routing.build import Audit

Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Finished runs (folder or report.json), one per engine build, preferred first.",
        show_default=False,
    ),
]
Names = Annotated[
    list[str] | None,
    typer.Option(
        "--name", help="Name of each run's engine, in order; needed for several. Default: engine."
    ),
]


def routes(
    runs: Runs = None,
    contract: Annotated[
        Path | None,
        typer.Option(help="Contract whose escalation policy is used. Default: the report's own."),
    ] = None,
    previous: Annotated[
        Path | None,
        typer.Option(help="The table in force: slices that failed in it come back slowly."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write, .json or .yaml. Default: only print.")
    ] = None,
    name: Names = None,
    passes: Annotated[
        int, typer.Option(min=1, help="Passes in a row after which a failed slice comes back.")
    ] = 3,
    return_at: Annotated[
        float,
        typer.Option(
            min=0.01, max=1.0, help="Or at once, with bounds within this share of limits."
        ),
    ] = 0.8,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema, then exit.")] = (
        False
    ),
) -> None:
    """Turn audits into a routing table. Slices that failed or were never seen go to the reference.

    Exits 0 when the engine may answer something, 1 when everything goes to the reference.
    """
    from mismatch_audit.routing.table import Policy, load_routes, routes_json_schema, save_routes

    if schema:
        typer.echo(json.dumps(routes_json_schema(), indent=1, ensure_ascii=False))
        return
    from rich.console import Console

    from kernel_contracts.errors import InputError
    from mismatch_audit.prepare import now
    from mismatch_audit.routing.build import build_table
    from mismatch_audit.routing.render import render_routes

    if not runs:
        raise InputError("no run given", fix="audit routes RUN --out routes.json")
    if out is not None and out.suffix not in (".json", ".yaml", ".yml"):
        raise InputError("not .json or .yaml", where=str(out), fix="give --out routes.json")
    names = name or (["engine"] if len(runs) == 1 else [])
    if len(names) != len(runs) or len(set(names)) != len(names):
        raise InputError(
            f"{len(runs)} runs and {len(set(names))} different names",
            fix="give --name once for each run",
        )
    before = load_routes(previous) if previous else None
    audits = [_audit(run, one, contract) for run, one in zip(runs, names, strict=True)]
    policy = Policy(passes_to_return=passes, return_at=return_at)
    table = build_table(audits, policy, before, now())
    if out is not None:
        save_routes(table, out)
    render_routes(table, Console())
    raise typer.Exit(int(all(e.rerouted.lower == 1.0 for e in table.engines)))


def _audit(run: Path, name: str, contract: Path | None) -> Audit:
    from kernel_contracts.loading import load_contract
    from mismatch_audit.reports.record import REPORT_NAME, load_record
    from mismatch_audit.routing.audited import load_audited
    from mismatch_audit.routing.build import Audit, judged_contract, same_promises

    record = load_record(run)
    file = run / REPORT_NAME if run.is_dir() else run
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    promised = (
        same_promises(record, load_contract(contract), file)
        if contract
        else judged_contract(record, file)
    )
    audited = load_audited(run, record) if run.is_dir() else None
    return Audit(name, record, digest, promised, audited)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(routes)
