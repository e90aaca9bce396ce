"""``audit plan``: how many prompts a contract needs, before anything runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kernel_contracts.planning import Need, Plan


def plan(
    contract: Annotated[Path, typer.Argument(help="Contract (YAML).")],
    effect: Annotated[
        float, typer.Option(help="Assumed true value, in units of each limit (0 to 1).")
    ] = 0.5,
    cv: Annotated[
        float, typer.Option(help="Assumed spread between prompts: deviation over mean.")
    ] = 1.0,
    power: Annotated[float, typer.Option(help="Wanted probability of a PASS.")] = 0.9,
    prompts_file: Annotated[
        Path | None, typer.Option(help="Prompt file: what each slice has is shown beside it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Say how many prompts each clause needs on each slice. Exit 3 if the file has too few."""
    from kernel_contracts.loading import load_contract
    from kernel_contracts.planning import plan_contract

    promised = load_contract(contract)
    frame = None if prompts_file is None else _prompts(prompts_file)
    planned = plan_contract(promised, frame, effect=effect, cv=cv, power=power)
    if as_json:
        typer.echo(json.dumps(_document(planned), indent=1, ensure_ascii=False))
    else:
        _show(planned)
    raise typer.Exit(planned.exit_code)


def _prompts(path: Path) -> Any:
    """One row a prompt: ``prompt_id`` and metadata."""
    import pandas as pd

    from mismatch_audit.prompts import load_prompts

    return pd.DataFrame([{"prompt_id": p.id, **p.metadata} for p in load_prompts(path)])


def _document(planned: Plan) -> dict[str, Any]:
    needs = [{**asdict(n), "enough": n.enough} for n in planned.needs]
    return {**asdict(planned), "needs": needs, "certifiable": planned.certifiable}


def _show(planned: Plan) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console.print(
        f"[bold]{planned.contract}[/]: prompts for a PASS with probability {planned.power:g}, if "
        f"the true value is {planned.effect:g} x each limit and prompts spread by "
        f"{planned.cv:g} of the mean"
    )
    known = planned.prompts is not None
    table = Table("clause", "slice", "needed", "at least", box=box.SIMPLE_HEAD)
    if known:
        table.add_column("in the file", justify="right")
    table.add_column("")
    for column in table.columns[2:4]:
        column.justify = "right"
    for row in _grouped(planned.needs):
        table.add_row(*map(escape, row if known else [*row[:4], row[5]]))
    console.print(table)
    for clause, note in dict.fromkeys(
        (n.clause, n.note) for n in planned.needs if len(n.note) > _SHORT
    ):
        console.print(escape(f"{clause}: {note}"))
    short = [n for n in planned.needs if n.enough is False or n.unreachable]
    if short:
        worst = max(short, key=lambda n: (n.needed is None, (n.needed or 0) - (n.available or 0)))
        what = f"{worst.clause} on {worst.slice}"
        console.print(
            f"[bold]cannot be certified as planned[/]: {len(short)} of {len(planned.needs)}; "
            + escape(f"worst is {what}: needs {_count(worst)}, has {worst.available}")
        )
    elif known:
        console.print(f"the file's {planned.prompts} prompts suffice, one clause at a time")


_SHORT = 16
"""Longest note that goes into the table; longer ones are printed below it."""


def _grouped(needs: tuple[Need, ...]) -> list[list[str]]:
    """Cells a line; the slices of one grouping on one line, with the fewest prompts of any."""
    lines = []
    for (clause, _), group in groupby(needs, key=lambda n: (n.clause, n.slice.partition("=")[0])):
        members = list(group)
        one = min(members, key=lambda n: n.available or 0)
        name = one.slice
        if len(members) > 1:
            name = f"{one.slice.partition('=')[0]}: {len(members)}, fewest in {one.slice}"
        available = ("" if one.exact else "<= ") + str(one.available)
        lines.append([clause, name, _count(one), str(one.least), available, _remark(one)])
    return lines


def _count(need: Need) -> str:
    if need.needed is not None:
        return str(need.needed)
    return "> 20000" if need.unreachable else "-"


def _remark(need: Need) -> str:
    parts = [need.note] if 0 < len(need.note) <= _SHORT else []
    if need.enough is False and need.needed is not None:
        parts.insert(0, f"{need.needed - (need.available or 0)} too few")
    if not need.exact and not need.slice.startswith("probe "):
        parts.append("rows decide")
    return "; ".join(parts)
