"""``audit contract selftest``: would this contract notice a fault?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kernel_contracts.selftest import Calibration, Trial
    from mismatch_audit.selftest.run import DetectableDrift, SelfTest

SAMPLE_PROMPTS = Path(__file__).parents[2] / "samples" / "prompts.jsonl"


def selftest(
    contracts: Annotated[list[Path], typer.Argument(help="Contract files (YAML).")],
    model: Annotated[str, typer.Option(help="Checkpoint folder, hub id, or `sample`.")] = "sample",
    prompts: Annotated[
        Path, typer.Option(help="Prompt file. Default: the samples of the repository.")
    ] = SAMPLE_PROMPTS,
    limit: Annotated[int, typer.Option(min=1, help="Prompts, spread over domains.")] = 72,
    max_tokens: Annotated[int, typer.Option(min=1, help="Response tokens a prompt.")] = 16,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Leave longer prompts out: a forward costs their length.")
    ] = 100,
    fault: Annotated[
        list[str] | None, typer.Option(help="Only this fault of the menu; repeatable.")
    ] = None,
    tolerate: Annotated[
        list[str] | None,
        typer.Option(
            help="A fault that the contract bears by design: judged and reported, but a miss does "
            "not make the contract unsound. Repeatable."
        ),
    ] = None,
    no_drift: Annotated[
        bool, typer.Option("--no-drift", help="Skip the smallest detected drift.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of texts and draws.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
    write_docs: Annotated[
        Path | None,
        typer.Option(help="Put the tables into this Markdown file, between its markers."),
    ] = None,
) -> None:
    """Put faults that ordinary checks miss into the reference; a sound contract fails each.

    Exit 0 sound, 3 too few prompts to tell, 4 unsound: a fault is missed or a clean program fails.
    """
    from rich.console import Console

    from kernel_contracts.loading import load_contract
    from mismatch_audit.cli.progress import progress_display
    from mismatch_audit.selftest.faults import chosen
    from mismatch_audit.selftest.prepare import prepare_bench
    from mismatch_audit.selftest.run import check_tolerated, run_selftest

    loaded = [load_contract(path) for path in contracts]
    faults = chosen(fault)
    check_tolerated(tolerate or (), faults)
    with progress_display(Console(stderr=True)) as progress:
        bench, too_long = prepare_bench(
            model, prompts, limit=limit, max_tokens=max_tokens, most=max_prompt_tokens, seed=seed,
            progress=progress,
        )  # fmt: skip
        result = run_selftest(
            loaded, bench, faults, tolerate=tolerate or (), drift=not no_drift, progress=progress
        )
    if as_json:
        typer.echo(json.dumps(_document(result), indent=1, ensure_ascii=False))
    else:
        _show(result, too_long, max_prompt_tokens)
    if write_docs is not None:
        from mismatch_audit.selftest.tables import write_tables

        write_tables(result, write_docs)
    raise typer.Exit(result.exit_code)


def _show(result: SelfTest, too_long: int, most: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from kernel_contracts.selftest import summary

    console = Console(highlight=False)
    measured = {m.name: m for m in result.measured}
    table = Table("fault", "KL", "|dlp|", "flips", "ordinary checks", box=box.SIMPLE_HEAD)
    trials = [result.calibrations[0].control, *result.calibrations[0].faults]
    for trial in trials:
        m = measured[trial.name]
        cells = [trial.name, f"{m.kl:.2e}", f"{m.abs_dlp:.2e}", f"{m.flip_rate:.2%}"]
        table.add_row(*cells, _ordinary(trial))
    console.print(table)
    for trial in trials[1:]:
        console.print(f"  {escape(trial.name)}: {escape(trial.meaning)}")
    for calibration, drift in zip(result.calibrations, result.drifts, strict=True):
        console.print()
        _show_contract(console, calibration, drift)
        style = {"SOUND": "green", "UNSOUND": "red"}.get(calibration.state, "yellow")
        console.print(f"[bold {style}]{escape(summary(calibration))}[/]")
    if too_long:
        console.print(f"{too_long} prompts of more than {most} tokens were left out")


def _show_contract(console: Any, calibration: Calibration, drift: DetectableDrift | None) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(calibration.contract, "verdict", "", box=box.SIMPLE_HEAD)
    for trial in (calibration.control, *calibration.faults):
        table.add_row(trial.name, _word(trial), escape(_because(trial)))
    console.print(table)
    for line in calibration.left_out:
        console.print(f"  not tested: {escape(line)}")
    if drift is not None:
        console.print("  " + escape(drift_text(drift)))


def _word(trial: Trial) -> str:
    if trial.name == "control":
        return trial.verdict
    if trial.detected:
        return "FAIL (detected)"
    return f"{trial.verdict} ({'borne' if trial.tolerated else 'MISSED'})"


def _because(trial: Trial) -> str:
    if trial.caught_by:
        shown = [clause if place == "all" else f"{clause} on {place}" for clause, place in
                 trial.caught_by]  # fmt: skip
        return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
    return trial.reason


def _ordinary(trial: Trial) -> str:
    failed = [f"{c.name} {c.value:.3g} (wanted {c.wanted})" for c in trial.ordinary if not c.passed]
    if failed:
        return "seen: " + ", ".join(failed)
    agree = [c for c in trial.ordinary if c.name == "same greedy token"]
    return f"pass, {agree[0].value:.0%} same greedy token" if agree else ""


def drift_text(drift: DetectableDrift) -> str:
    """The smallest detected drift in words."""
    if drift.caught is None:
        return f"no noise up to {drift.missed:g} nats a logit (KL {drift.kl:.2g}) is detected"
    below = "" if drift.missed is None else f", missed at {drift.missed:.2g}"
    return (
        f"smallest detected drift: noise of {drift.caught:.2g} nats a logit "
        f"(KL {drift.kl:.2g}, TV {drift.tv:.2g}){below}"
    )


def _document(result: SelfTest) -> dict[str, Any]:
    from dataclasses import asdict

    contracts = []
    for calibration, drift in zip(result.calibrations, result.drifts, strict=True):
        trials = (calibration.control, *calibration.faults)
        contracts.append(
            {
                "contract": calibration.contract,
                "state": calibration.state,
                "exit_code": calibration.exit_code,
                "n_prompts": calibration.n_prompts,
                "n_tokens": calibration.n_tokens,
                "left_out": calibration.left_out,
                "smallest_detected": None if drift is None else asdict(drift),
                "trials": [
                    {**asdict(t), "detected": t.detected, "ordinary_passed": t.ordinary_passed}
                    for t in trials
                ],
            }
        )
    return {
        "exit_code": result.exit_code,
        "measured": [asdict(m) for m in result.measured],
        "contracts": contracts,
    }
