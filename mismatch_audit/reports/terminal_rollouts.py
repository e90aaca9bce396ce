"""Sections of the terminal report that recorded rollouts have."""

from __future__ import annotations

from rich.text import Text

from mismatch_audit.reports.escape import visible
from mismatch_audit.reports.grouping import not_observed
from mismatch_audit.reports.notation import count, number, plural
from mismatch_audit.reports.record import Record
from mismatch_audit.reports.rollout_rows import Rollouts
from mismatch_audit.reports.staleness_table import (
    LAG_HEAD,
    PART_HEAD,
    lag_rows,
    part_rows,
    staleness_notes,
)
from mismatch_audit.reports.terminal_lines import Column, Page, cut

_SOURCES = 8
STATISTICS: tuple[tuple[str, str], ...] = (
    ("abs_dlp", "mean |log p − log q|"),
    ("k3", "KL(q‖p), k3"),
    ("k1", "KL(q‖p), k1"),
    ("mult_prob_error", "mean exp|log p − log q|"),
    ("abs_dp", "mean |p − q|"),
    ("log_ppl_diff", "log-ppl, trainer − sampler"),
    ("chi2_token", "chi², tokens"),
    ("chi2_seq_geometric", "chi², seq., geometric"),
    ("chi2_seq_product", "chi², seq., product"),
    ("ess_token", "ESS / n, tokens"),
    ("ess_seq", "ESS / n, sequences"),
    ("ratio_p0.1", "ratio, 0.1 % quantile"),
    ("ratio_p99.9", "ratio, 99.9 % quantile"),
    ("ratio_max", "largest ratio"),
    ("outside_0.5_2", "ratios outside [0.5, 2]"),
)
"""Names in ``rollouts.statistics`` and what they are called."""


def source_list(page: Page, rollouts: Rollouts) -> None:
    """What was read, and what could not be."""
    page.heading("sources")
    columns = [Column("source", max(20, page.width - 52), False), Column("format", 12),
               Column("sequences", 12, True), Column("tokens", 16, True)]  # fmt: skip
    page.row(
        columns, [Text(f"  {c.title}" if c is columns[0] else c.title, "dim") for c in columns]
    )
    for one in rollouts.sources[:_SOURCES]:
        path = cut(visible(one.path), columns[0].width - 2, tail=True)
        page.row(columns, [f"  {path}", one.format or "?", count(one.sequences), count(one.tokens)])
        if one.error:
            page.note(one.error, indent=6, style="red", first="    ✘")
        for note in one.notes[:4]:
            page.note(note, indent=6, style="dim", first="    ·")
    rest = len(rollouts.sources) - _SOURCES
    if rest > 0:
        page.line(Text(f"  {plural(rest, 'more source')} in report.json", style="dim"))


def unseen_list(page: Page, record: Record) -> None:
    """Optional slices without evidence, by reason."""
    reasons = not_observed(record)
    if not reasons:
        return
    page.heading("not observed")
    for reason, names in reasons.items():
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        page.note(f"{shown}: {reason}", indent=4, style="dim", first="  ○")


def statistics_list(page: Page, rollouts: Rollouts) -> None:
    """The usual numbers of the whole log, in two columns."""
    known = [
        (title, number(v) if isinstance(v := rollouts.statistics.get(name), float) else str(v))
        for name, title in STATISTICS
        if name in rollouts.statistics
    ]
    if not known:
        return
    page.heading("statistics of all tokens")
    half = (len(known) + 1) // 2
    title = max(20, page.width // 2 - 14)
    columns = [Column("", title), Column("", 8, True)] * 2
    for i in range(half):
        left, right = known[i], known[i + half] if i + half < len(known) else ("", "")
        page.row(columns, [f"  {left[0]}", left[1], f"  {right[0]}", right[1]])


def staleness_list(page: Page, rollouts: Rollouts) -> None:
    """Mismatch by lag, and its split where the log allows one."""
    if not rollouts.staleness:
        return
    page.heading("staleness")
    for head, rows in (
        (LAG_HEAD, lag_rows(rollouts.staleness)),
        (PART_HEAD, part_rows(rollouts.staleness)),
    ):
        if not rows:
            continue
        kept = list(head)
        while sum(max(len(r[i]) for r in [kept, *rows]) + 2 for i in range(len(kept))) > page.width:
            kept.pop()  # the last columns give way on a narrow terminal
        columns = [
            Column(title, max(len(r[i]) for r in [kept, *rows]), True)
            for i, title in enumerate(kept)
        ]
        page.row(columns, [Text(title, "dim") for title in kept])
        for row in rows:
            page.row(columns, row[: len(kept)])
    for note in staleness_notes(rollouts.staleness):
        page.note(note, indent=4, style="dim", first="  ○")


def check_list(page: Page, rollouts: Rollouts) -> None:
    """How many checks were clean, and which could not look."""
    if not rollouts.checks:
        page.heading("checks")
        page.line(Text("  none was run", style="dim"))
        return
    clean = sum(c.status == "clean" for c in rollouts.checks)
    found = sum(c.status == "found" for c in rollouts.checks)
    blind = [c for c in rollouts.checks if c.status == "unobserved"]
    page.heading("checks")
    page.line(f"  {clean} clean, {found} found something, {len(blind)} unobserved")
    reasons: dict[str, list[str]] = {}
    for check in blind:
        reasons.setdefault(check.detail, []).append(check.code)
    for reason, codes in reasons.items():
        page.note(f"{', '.join(codes)}: {reason}", indent=4, style="dim", first="  ○")
