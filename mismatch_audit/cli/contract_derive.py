"""``audit contract derive`` and ``infer``: limits from budgets, or from clean runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kernel_contracts.budgets import Limit

Name = Annotated[str, typer.Option(help="Name of the new contract.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Write the contract to this file.")]


def derive(
    reward_drift: Annotated[
        float | None,
        typer.Option(help="Change of the expected reward, between the programs, to bear."),
    ] = None,
    reward_range: Annotated[
        float | None, typer.Option(help="Largest minus smallest reward of a rollout.")
    ] = None,
    horizon: Annotated[
        int | None, typer.Option(min=1, help="Response tokens over which it must hold.")
    ] = None,
    flip_budget: Annotated[
        float | None, typer.Option(help="Share of greedy tokens that may change.")
    ] = None,
    bias_budget: Annotated[
        float | None, typer.Option(help="Policy-gradient bias to bear, relative to the gradient.")
    ] = None,
    advantage_bound: Annotated[
        float | None, typer.Option(help="Largest absolute advantage (default 1).")
    ] = None,
    tis_threshold: Annotated[
        float | None, typer.Option(help="Threshold of the trainer's truncated weights.")
    ] = None,
    alpha: Annotated[float, typer.Option(help="Error probability of a verdict.")] = 0.05,
    name: Name = "derived",
    out: Out = None,
) -> None:
    """Derive the limits that a budget implies, with the arithmetic, and fill a contract."""
    from pydantic import ValidationError

    from kernel_contracts.definitions import Budget
    from kernel_contracts.derive import derive_contract
    from kernel_contracts.errors import InputError

    try:
        budget = Budget(
            reward_drift=reward_drift,
            reward_range=1.0 if reward_drift is not None and reward_range is None else reward_range,
            horizon=horizon,
            flip_budget=flip_budget,
            bias_budget=bias_budget,
            advantage_bound=advantage_bound,
            tis_threshold=tis_threshold,
        )
        derived = derive_contract(budget, name=name, alpha=alpha)
    except ValidationError as error:
        first = error.errors()[0]
        field = str((first.get("ctx") or {}).get("field") or (first["loc"] or ("budget",))[-1])
        raise InputError(
            first["msg"],
            where="--" + field.replace("_", "-"),
            fix="audit contract derive --reward-drift 0.1 --reward-range 1 --horizon 512",
        ) from None
    for limit in derived.limits:
        ids = [i for i, known in derived.promised.items() if known is limit]
        typer.echo("\n".join(_lines(limit, ids)) + "\n")
    _write(derived.text, out)


def _lines(limit: Limit, ids: list[str]) -> list[str]:
    mark = f"clause {ids[0]}" if ids else "shown, not promised"
    head = f"{limit.metric} <= {limit.limit:.4g} {limit.unit}  ({limit.applies}; {mark})"
    return [head, *(f"    {line}" for line in limit.arithmetic)]


def infer(
    runs: Annotated[list[Path], typer.Argument(help="Folders of clean control runs.")],
    coverage: Annotated[
        float, typer.Option(help="Share of prompts that a bound must cover.")
    ] = 0.9,
    confidence: Annotated[float, typer.Option(help="How certain that is.")] = 0.95,
    margin: Annotated[
        float, typer.Option(help="Factor on what was measured, so that a clean run passes again.")
    ] = 2.0,
    name: Name = "inferred",
    out: Out = None,
) -> None:
    """Propose limits from clean control runs: what a clean run does, not what can be borne."""
    from kernel_contracts.infer import infer_contract
    from mismatch_audit.control_runs import read_control_run

    inferred = infer_contract(
        [read_control_run(folder) for folder in runs],
        coverage=coverage,
        confidence=confidence,
        margin=margin,
        name=name,
    )
    for proposal in inferred.proposals:
        typer.echo(str(proposal))
    typer.echo("measured on clean runs: no budget stands behind these limits\n")
    _write(inferred.text, out)


def _write(text: str, out: Path | None) -> None:
    from kernel_contracts.errors import InputError

    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write it: {error.strerror or error}", where=str(out)) from error
    typer.echo(f"wrote {out}")
