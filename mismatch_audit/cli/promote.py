"""``audit promote``: from an audit to full traffic, stage by stage."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mismatch_audit.promotion.history import Decision, Subject
    from mismatch_audit.promotion.stages import Assessment
    from mismatch_audit.promotion.store import PromotionStore

promote_app = typer.Typer(
    no_args_is_help=True,
    help="Promote an engine build: offline, shadow, canary, full; each stage on evidence.",
)

Store = Annotated[
    str,
    typer.Option(
        help="sqlite:///FILE, a file name, or postgresql://USER@HOST/DB.", envvar="AUDIT_STORE"
    ),
]
Which = Annotated[
    str | None,
    typer.Option(
        "--subject", help="Build, or the beginning of a subject's key. Default: the only."
    ),
]
Actor = Annotated[
    str | None, typer.Option(help="Who decides. Default: the user.", envvar="AUDIT_ACTOR")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def register(app: typer.Typer) -> None:
    """Add the command group."""
    app.add_typer(promote_app, name="promote")


@promote_app.command()
def status(store: Store, subject: Which = None, as_json: AsJson = False) -> None:
    """Where each subject stands, and what its stage still lacks. Exits 0."""
    with _open(store) as opened:
        subjects = [opened.pick(subject)] if subject else opened.subjects()
        found = [(s, *opened.assessment(s)) for s in subjects]
    if as_json:
        typer.echo(json.dumps([_status(*row) for row in found], indent=1))
        return
    if not found:
        typer.echo(
            "no subject yet: audit promote advance --contract FILE --build BUILD --report RUN"
        )
    for row in found:
        _show_status(*row)


@promote_app.command()
def advance(
    store: Store,
    subject: Which = None,
    contract: Annotated[
        Path | None, typer.Option(help="Contract (YAML), to begin with a new build.")
    ] = None,
    build: Annotated[
        str | None, typer.Option(help="The new engine build, as its traffic log names it.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="The audit's folder or report.json: evidence of offline.")
    ] = None,
    actor: Actor = None,
    reason: Annotated[str, typer.Option(help="Why now, for the history.")] = "",
    as_json: AsJson = False,
) -> None:
    """Move to the next stage, if this one has shown enough.

    Exits 0 when it moved, 3 when evidence is missing, 1 when a promise is broken (and the build was
    taken back).
    """
    from kernel_contracts.errors import InputError
    from kernel_contracts.loading import load_contract
    from mismatch_audit.promotion.offline import OfflineEvidence
    from mismatch_audit.promotion.store import PromotionStore

    offline = None if report is None else OfflineEvidence.of(report)
    who = _actor(actor)
    starting = contract is not None or build is not None
    if starting and (contract is None or build is None or offline is None):
        raise InputError(
            "a new build needs --contract, --build and --report",
            fix="audit promote advance --contract FILE --build BUILD --report RUN --store URL",
        )
    with PromotionStore(store, create=starting) as opened:
        if starting:
            assert contract is not None
            assert build is not None
            assert offline is not None
            chosen = opened.start(load_contract(contract), build, offline.weights, actor=who)
        else:
            chosen = opened.pick(subject)
        outcome = opened.advance(chosen, actor=who, reason=reason, offline=offline)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "code": outcome.code,
                    "message": outcome.message,
                    "stage": outcome.stage,
                    "decision": None if outcome.decision is None else _plain(outcome.decision),
                },
                indent=1,
            )
        )
        raise typer.Exit(outcome.code)
    words = {0: "advanced", 1: "broken", 3: "refused"}
    typer.echo(f"{chosen.label}: {words[outcome.code]}: {outcome.message}")
    if outcome.decision is None or outcome.code:
        typer.echo(f"stage: {outcome.stage}")
    raise typer.Exit(outcome.code)


@promote_app.command()
def rollback(
    store: Store,
    reason: Annotated[str, typer.Option(help="Why, for the history.")],
    subject: Which = None,
    to: Annotated[str, typer.Option(help="offline, shadow or canary.")] = "offline",
    actor: Actor = None,
) -> None:
    """Take a build back to an earlier stage by hand."""
    with _open(store) as opened:
        chosen = opened.pick(subject)
        decision = opened.rollback(chosen, actor=_actor(actor), reason=reason, to=to)
    typer.echo(f"{chosen.label}: {decision.from_stage} -> {decision.to_stage}")


@promote_app.command()
def history(store: Store, subject: Which = None, as_json: AsJson = False) -> None:
    """Every decision with who, why and on what evidence."""
    with _open(store) as opened:
        chosen = opened.pick(subject)
        decisions = opened.decisions(chosen)
    if as_json:
        typer.echo(json.dumps([_plain(d) for d in decisions], indent=1))
        return
    typer.echo(f"{chosen.label}  {chosen.key[:12]}")
    for d in decisions:
        move = f"{d.from_stage or '-'} -> {d.to_stage}"
        typer.echo(f"{d.seq:>4}  {d.time}  {d.action:<8}  {move:<20}  {d.actor}: {d.reason}")
        exposure = d.evidence.get("exposure")
        if exposure:
            typer.echo(
                f"      on {exposure['prompts']} prompts, {exposure['tokens']} tokens, "
                f"{exposure['hours']:.2f} hours, {exposure['unusable']} unusable requests"
            )
        elif "sha256" in d.evidence:
            typer.echo(f"      on report {d.evidence['sha256'][:12]} ({d.evidence['verdict']})")


@promote_app.command()
def verify(store: Store, subject: Which = None) -> None:
    """Replay the evidence: no gap, no illegal move, no request twice. Exits 4 if it is unsound."""
    from kernel_contracts.errors import UnsoundError

    with _open(store) as opened:
        subjects = [opened.pick(subject)] if subject else opened.subjects()
        wrong = [f"{s.label}: {text}" for s in subjects for text in opened.verify(s)]
    if wrong:
        raise UnsoundError("; ".join(wrong), where="promotion store", fix="restore a backup")
    typer.echo(f"{len(subjects)} subjects: every decision and every test replays")


def _open(store: str) -> PromotionStore:
    from mismatch_audit.promotion.store import PromotionStore

    return PromotionStore(store, create=False)


def _actor(given: str | None) -> str:
    return given or os.environ.get("USER") or os.environ.get("LOGNAME") or f"uid {os.getuid()}"


def _plain(decision: Decision) -> dict[str, Any]:
    return dict(decision.__dict__)


def _status(subject: Subject, last: Decision, found: Assessment | None) -> dict[str, Any]:
    return {
        "key": subject.key,
        "engine_build": subject.engine_build,
        "contract": subject.contract.name,
        "contract_digest": subject.contract_digest,
        "weights": subject.weights,
        "stage": last.to_stage,
        "since": last.time,
        "decisions": last.seq,
        "evidence": None if found is None else found.to_dict(),
    }


def _show_status(subject: Subject, last: Decision, found: Assessment | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"[bold]{escape(subject.label)}[/]  {subject.key[:12]}")
    console.print(f"stage {last.to_stage} since {last.time}: {escape(last.reason)}")
    if found is None:
        console.print("next: audit promote advance --report RUN")
        return
    seen = found.exposure
    console.print(
        f"{found.verdict}: {seen.prompts} prompts, {seen.tokens} tokens, {seen.hours:.2f} hours, "
        f"{seen.unusable_share:.1%} of the requests unusable"
    )
    table = Table(
        "clause", "slice", "metric", "estimate", "limit", "prompts", "p", "verdict",
        box=box.SIMPLE_HEAD,
    )  # fmt: skip
    for s in found.standings:
        table.add_row(
            s.clause, escape(s.slice), s.metric,
            "" if s.estimate is None else f"{s.estimate:.4g}", f"{s.limit:.4g}", str(s.n),
            f"{s.p_fail:.2g}", s.verdict + (" (warn)" if s.warn else ""),
        )  # fmt: skip
    console.print(table)
    for text in found.lacks:
        console.print(f"lacks {escape(text)}")
