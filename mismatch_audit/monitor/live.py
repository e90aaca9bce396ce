"""The live view of a watch on a terminal: where each promise stands, and how near an alarm is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mismatch_audit.monitor.trackers import Standing
from mismatch_audit.monitor.watch import JUDGED, View
from mismatch_audit.monitor.watch_state import Delivery
from mismatch_audit.reports.escape import harmless_line, visible

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_STYLE = {"PASS": "green", "FAIL": "bold red", "INCONCLUSIVE": "yellow", "UNOBSERVED": "dim"}
_MARK = {"PASS": "✓", "FAIL": "✗", "INCONCLUSIVE": "…", "UNOBSERVED": "·"}
_WIDTH = 8
_MOST_ROWS = 40
_WIDE = 100


def plain(text: str) -> str:
    """Text of the outside, harmless on a terminal."""
    return harmless_line(visible(text))


def gauge(one: Standing, alpha: float) -> str:
    """How near the alarm is: log(1/p) over log(1/alpha), as a bar."""
    share = min(1.0, math.log(1 / max(one.p_fail, 1e-300)) / math.log(1 / alpha))
    full = round(share * _WIDTH)
    return "█" * full + "░" * (_WIDTH - full)


def render(
    view: View, deliveries: Sequence[Delivery], alpha: float, rate: float, width: int = 120
) -> RenderableType:
    """One frame. rate: requests a second since the last frames.  width: of the terminal; a narrow
    one does without the metrics' names."""
    from rich.console import Group
    from rich.text import Text

    counters = view.counters
    unusable = sum(n for name, n in counters.items() if name.startswith("unusable: "))
    head = Text()
    head.append(f"{plain(view.contract)} ", style="bold")
    head.append(f"{view.contract_digest[:12]}  watching {plain(view.source)}\n")
    head.append(
        f"{counters[JUDGED]} requests judged ({counters['prompts']} prompts, "
        f"{counters['tokens']} tokens), {rate:.1f}/s; {unusable} unusable; "
        f"{view.backlog} waiting" + (f"; newest {view.last_row}" if view.last_row else "")
    )
    if view.alarms:
        head.append(f"\n{len(view.alarms)} alarms", style="bold red")
    order = {"FAIL": 0, "INCONCLUSIVE": 1, "PASS": 2, "UNOBSERVED": 3}
    rows = sorted(view.standings, key=lambda s: order[s.verdict])
    table = _table(rows[:_MOST_ROWS], alpha, metrics=width >= _WIDE)
    parts: list[RenderableType] = [head, table]
    if len(rows) > _MOST_ROWS:
        parts.append(Text(f"... and {len(rows) - _MOST_ROWS} more slices", "dim"))
    for note, count in sorted(counters.items()):
        if note.startswith("unusable: ") or note in ("bad lines", "log replaced"):
            parts.append(Text(f"{count} {plain(note)}", "dim"))
    for alarm in view.alarms[-5:]:
        parts.append(Text(alarm_line(alarm.payload), "bold red"))
    for one in deliveries[-5:]:
        tries = f"{one.attempts} tries" if one.attempts != 1 else "1 try"
        note = f": {plain(one.note)}" if one.note else ""
        text = f"  {one.alarm.clause} on {plain(one.alarm.slice)} -> {plain(one.action)}: "
        parts.append(Text(f"{text}{one.status} after {tries}{note}"))
    return Group(*parts)


def _table(rows: Sequence[Standing], alpha: float, *, metrics: bool) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("", "clause", "slice", *(["metric"] if metrics else [])):
        table.add_column(name, overflow="fold")
    for name in ("estimate", "limit", "prompts"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("to alarm", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for s in rows:
        style, warned = _STYLE[s.verdict], s.warn and s.verdict != "FAIL"
        table.add_row(
            Text("!" if warned else _MARK[s.verdict], "yellow" if warned else style),
            Text(s.clause),
            Text(plain(s.slice)),
            *([Text(s.metric)] if metrics else []),
            Text("" if s.estimate is None else f"{s.estimate:.4g}", "yellow" if s.warn else ""),
            Text(f"{s.limit:.4g}"),
            Text(str(s.n)),
            Text(gauge(s, alpha), style if s.verdict == "FAIL" else "cyan"),
            Text(s.verdict, style),
        )
    return table


def alarm_line(payload: dict[str, object]) -> str:
    """An alarm in one line."""
    return (
        f"ALARM {payload['time']} {payload['clause']} on {plain(str(payload['slice']))}: "
        f"{payload['metric']} {payload['estimate']:.4g}, limit {payload['limit']:.4g}, "
        f"after {payload['n']} prompts" + (f" -> {payload['action']}" if payload["action"] else "")
    )
