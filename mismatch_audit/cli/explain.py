"""``audit explain``: the page of a finding's code."""

from __future__ import annotations

from typing import Annotated

import typer


def explain(
    code: Annotated[
        str | None, typer.Argument(help="A code from a report. Left out: all of them.")
    ] = None,
) -> None:
    """Say what a finding's code means, why it matters, and how to fix it."""
    from mismatch_audit.explain import page_of, pages

    if code is not None:
        typer.echo(str(page_of(code)), nl=False)
        return
    width = max(len(name) for name in pages())
    for page in pages().values():
        typer.echo(f"{page.code:<{width}}  {page.title}")
