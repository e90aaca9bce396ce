"""The table on screen: who answers what and why, what moves, what is left."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatch_audit.reports.escape import visible
from mismatch_audit.routing.table import REFERENCE, EngineRoutes, MixtureBound, RoutingTable

_STYLES = {"PASS": "green", "FAIL": "red", "UNSOUND": "red"}


def render_routes(table: RoutingTable, console: Console) -> None:
    """Every engine: its slices, rules and bounds. All text of reports is made harmless."""
    for engine in table.engines:
        report = f"report {engine.report.digest[:12]}, {engine.report.verdict}"
        audit = f"{engine.contract.name}, {report}, {engine.report.prompts} prompts"
        console.print(_line(f"{engine.name}  ({audit})", "bold"))
        console.print(_slices(engine))
        if engine.rules:
            console.print(_rules(engine))
        console.print(_line(_moved(engine)))
        for bound in engine.mixture:
            console.print(_line("  " + _bound(bound)))
        for note in engine.notes:
            console.print(_line(f"note: {note}", "yellow"))
    everything = all(e.rerouted.lower == 1.0 for e in table.engines)
    if everything:
        console.print(_line("every request goes to the reference", "bold red"))


def _line(text: str, style: str = "") -> Text:
    return Text(visible(text), style=style)


def _slices(engine: EngineRoutes) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    for heading in ("slice", "verdict", "goes to", "share", "why"):
        table.add_column(heading, overflow="fold")
    for state in engine.slices:
        table.add_row(
            Text(visible(state.slice)),
            Text(state.verdict, style=_STYLES.get(state.verdict, "yellow")),
            Text(state.to, style="red" if state.to == REFERENCE else ""),
            "" if state.share is None else f"{state.share:.1%}",
            Text(visible(state.reason)),
        )
    return table


def _rules(engine: EngineRoutes) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    for heading in ("not the engine's", "when", "known", "mapping"):
        table.add_column(heading, overflow="fold")
    for rule in engine.rules:
        known = "in decode" if rule.level == "decode" else "before"
        table.add_row(
            Text(visible(rule.slice)),
            Text(visible(" and ".join([rule.when, *rule.also]))),
            known,
            rule.mapping,
        )
    return table


def _moved(engine: EngineRoutes) -> str:
    moved = engine.rerouted
    if moved.lower == moved.upper:
        return f"re-routed: {moved.upper:.1%} of the audit's prompts"
    return (
        f"re-routed: between {moved.lower:.1%} and {moved.upper:.1%} of the audit's prompts "
        "(slices may overlap; the run's folder would tell)"
    )


def _bound(one: MixtureBound) -> str:
    before = "" if one.before is None else f" (all on the engine: {one.before:.3g})"
    if one.bound is None:
        return f"{one.metric} over all traffic{before}: no bound, {one.detail or one.method}"
    detail = f"; {one.detail}" if one.detail else ""
    unit = f" {one.unit}" if one.unit else ""
    return (
        f"{one.metric} over all traffic{before}: at most {one.bound:.3g}{unit} "
        f"(confidence {one.confidence:.2f}; {one.method}{detail})"
    )
