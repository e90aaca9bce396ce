"""``audit doctor``: what is here, and whether the main job can run."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def doctor(
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Versions, devices, the engine and why it is usable or not, the sample model, disk, memory."""
    import json

    from mismatch_audit.health import examine

    checks = examine()
    if json_output:
        typer.echo(json.dumps([c.__dict__ for c in checks], indent=1))
    else:
        _print(checks)
    raise typer.Exit(0 if all(c.ok for c in checks if c.needed) else 2)


def _print(checks: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("", "what", "found", "fix"):
        table.add_column(name, overflow="fold")
    for check in checks:
        mark = Text("ok", "green") if check.ok else Text("missing" if check.needed else "-", "red")
        table.add_row(mark, check.name, check.found, "" if check.ok else check.fix)
    Console().print(table)
