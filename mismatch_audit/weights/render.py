"""Weight reports for people: the terminal's view of what ``--json`` holds."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatch_audit.weights.findings import WeightReport
from mismatch_audit.weights.live.report import SyncReport

_ROWS = 200
_PIPE_WIDTH = 160


def _console() -> Console:
    """Logs and pipes have no width of their own: wide enough for names to stay whole."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_WIDTH)


def show_report(report: WeightReport, every: bool) -> None:
    """Tensors that differ (all of them when asked), findings with remedies, notes, a sum."""
    console = _console()
    rows = [r for r in report.reports if every or not r.healthy]
    if rows:
        table = Table("tensor", "fault", "trainer", "served", "differ", "max ulp", "rel. error")
        for r in rows[:_ROWS]:
            share = f"{r.differing / r.elements:.3%}" if r.elements else "-"
            table.add_row(
                Text(r.name),
                r.fault.value,
                Text(f"{r.trainer_dtype or '-'} {list(r.trainer_shape or ())}"),
                Text(f"{r.served_dtype or '-'} {list(r.served_shape or ())}"),
                share,
                "-" if r.max_ulp is None else str(r.max_ulp),
                "-" if r.relative_error is None else f"{r.relative_error:.3g}",
            )
        console.print(table)
        if len(rows) > _ROWS:
            console.print(f"... and {len(rows) - _ROWS} more tensors (--json has them all)")
    for finding in report.findings:
        console.print(f"{finding.code} {finding.title}", markup=False)
        console.print(f"     fix: {finding.remedy}", markup=False)
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    healthy = sum(r.healthy for r in report.reports)
    if not report.compared:
        console.print("nothing to compare: the two sides have no tensor in common", markup=False)
    else:
        console.print(
            f"{healthy} of {len(report.reports)} tensors equal the cast of their master",
            markup=False,
        )


def show_sync(report: SyncReport) -> None:
    """A row per check, findings with remedies, notes, the cause."""
    console = _console()
    engine = report.engine
    console.print(
        f"{engine.get('program')} {engine.get('version')}, {engine.get('dtype')}, quantisation "
        f"{engine.get('quantization') or 'none'}; pushed {report.receipt.tensors} tensors, "
        f"{report.receipt.bytes / 2**20:.1f} MiB in {report.receipt.seconds:.2f} s; version "
        f"{report.receipt.version}",
        markup=False,
    )
    table = Table("check", "result", "detail")
    words = {True: "pass", False: "FAIL", None: "unobserved"}
    for name, result in report.results.items():
        table.add_row(Text(name), words[result.ok], Text(result.detail))
    console.print(table)
    for finding in report.findings():
        warns = "warning: " if finding["severity"] == "warning" else ""
        console.print(f"{finding['code']} {warns}{finding['title']}", markup=False)
        console.print(f"     fix: {finding['remedy']}", markup=False)
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    if report.cause:
        console.print(f"cause: {report.cause}", markup=False)
    elif report.unobserved:
        console.print(f"nothing failed; not observed: {', '.join(report.unobserved)}", markup=False)
    else:
        console.print("every check passed: the engine serves the pushed weights", markup=False)


def show_visibility(document: dict[str, Any], tensors: bool) -> None:
    """The overall numbers, one row per export, and one per tensor when asked."""
    console = _console()
    overall = document["overall"]
    console.print(
        f"{overall['weights']} weights, {overall['moved_share']:.2%} moved, "
        f"{overall['visible_share']:.3%} visible in {document['cast']} "
        f"({overall['predicted_visible_share']:.3%} predicted); the rest is "
        f"{document['invisible_updates_are']} ({document['master']} master)",
        markup=False,
    )
    lags = ", ".join(f"{q} {v:.3g}" for q, v in overall["lag_pushes"].items())
    console.print(
        f"gain {overall['gain']:.4g}, cosine {overall['cosine']:.3g}, noise "
        f"{overall['noise']:.3g}; half-step lag in pushes: {lags or 'none'}",
        markup=False,
    )
    table = Table(f"export, {document['pushes']} pushes", "visible/push", "bytes/push", "gain")
    table.add_column("cosine")
    table.add_column("noise")
    for name, effect in overall["exports"].items():
        table.add_row(
            name,
            f"{effect['visible_share_per_push']:.3%}",
            f"{effect['bytes_changed_share_per_push']:.3%}",
            f"{effect['gain']:.4g}",
            f"{effect['cosine']:.3g}",
            f"{effect['noise']:.3g}",
        )
    console.print(table)
    if gap := document.get("served_loss_gap"):
        parts = ", ".join(f"{k} {v:+.3g}" for k, v in gap.items() if k != "master_loss")
        console.print(f"served-loss gap (nats a token): {parts}", markup=False)
    if tensors:
        listing = Table("tensor", "moved", "visible", "predicted", "gain", "median lag")
        for name, item in document["tensors"].items():
            listing.add_row(
                Text(name),
                f"{item['moved_share']:.2%}",
                f"{item['visible_share']:.3%}",
                f"{item['predicted_visible_share']:.3%}",
                f"{item['gain']:.4g}",
                f"{item['lag_pushes'].get('p50', float('nan')):.3g}",
            )
        console.print(listing)
