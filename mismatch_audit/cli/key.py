"""``audit key``: keys that sign blessings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

key_app = typer.Typer(
    name="key",
    no_args_is_help=True,
    help="Ed25519 keys that sign blessings. AUDIT_KEY_PASSPHRASE holds the passphrase, if any.",
)


def register(app: typer.Typer) -> None:
    """Adds ``audit key``."""
    app.add_typer(key_app, name="key")


def passphrase() -> bytes | None:
    """From the environment, never from an option: options are seen by every user of the machine."""
    text = os.environ.get("AUDIT_KEY_PASSPHRASE", "")
    return text.encode("utf-8") or None


@key_app.command()
def new(
    out: Annotated[Path, typer.Option(help="Folder for NAME.key (private, 0600) and NAME.pub.")],
    name: Annotated[str, typer.Option(help="Name of the files.")] = "audit",
) -> None:
    """Make a key pair. Trust NAME.pub where the gate runs; NAME.key stays with the signer."""
    from mismatch_audit.gate.keys import new_key

    key = new_key(out, name, passphrase())
    typer.echo(f"private  {key.private}  {'encrypted' if key.encrypted else 'not encrypted'}, 0600")
    typer.echo(f"public   {key.public}")
    typer.echo(f"keyid    {key.keyid}")


@key_app.command()
def show(
    trusted: Annotated[Path, typer.Argument(help="A .pub file, or a folder of them.")],
) -> None:
    """Print the keyids of public keys, as blessings and the gate name them."""
    from mismatch_audit.gate.keys import load_trusted

    for keyid in load_trusted(trusted):
        typer.echo(keyid)
