"""``audit bless``: sign what an audit found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Adds ``audit bless``."""
    app.command()(bless)


def bless(
    run: Annotated[Path, typer.Argument(help="Folder of an audit that passed.")],
    key: Annotated[Path, typer.Option(help="Private key, from `audit key new`.")],
    expires: Annotated[str, typer.Option(help="Lifetime: 30m, 12h, 7d.")] = "7d",
    weights: Annotated[
        Path | None,
        typer.Option(help="The audited checkpoint where it lies now, or its manifest.json."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Blessing file (default: RUN/blessing.dsse.json).")
    ] = None,
) -> None:
    """Sign the verdict for exactly these weights, contract and programs. Only a PASS is signed."""
    from mismatch_audit.cli.key import passphrase
    from mismatch_audit.gate.bless import bless_run, duration
    from mismatch_audit.gate.keys import load_private

    lifetime = duration(expires)
    signer = load_private(key, passphrase())
    blessing = bless_run(run, signer, lifetime=lifetime, weights=weights, out=out)
    statement = blessing.statement
    predicate = statement.predicate
    typer.echo(f"blessed   {statement.subject[0].name}  {statement.tensors[:16]}")
    typer.echo(f"contract  {predicate.contract.name}  {predicate.contract.digest[:16]}")
    typer.echo(f"until     {predicate.expires}")
    typer.echo(f"keyid     {blessing.keyid[:16]}")
    typer.echo(f"file      {blessing.path}")
