"""The record on a terminal: fits 100 columns, reads without colour, on dark and on light."""

from __future__ import annotations

from rich.console import Console

from mismatch_audit.reports.record import Record
from mismatch_audit.reports.terminal_lines import Page
from mismatch_audit.reports.terminal_parts import (
    banner,
    chain_table,
    closing,
    finding_list,
    gradient_list,
    identity_list,
    next_list,
    verdict_table,
    worst_list,
)
from mismatch_audit.reports.terminal_rollouts import (
    check_list,
    source_list,
    staleness_list,
    statistics_list,
    unseen_list,
)

WIDTH = 100


def render_terminal(record: Record, console: Console, *, folder: str | None = None) -> None:
    """Print the report. folder: the run's, for the paths in the last line."""
    page = Page(console, min(console.width, WIDTH))
    banner(page, record)
    if record.rollouts is not None:
        source_list(page, record.rollouts)
        finding_list(page, record)
    identity_list(page, record)
    verdict_table(page, record)
    unseen_list(page, record)
    if record.rollouts is not None:
        statistics_list(page, record.rollouts)
        staleness_list(page, record.rollouts)
        check_list(page, record.rollouts)
    worst_list(page, record)
    chain_table(page, record)
    gradient_list(page, record)
    if record.rollouts is None:
        finding_list(page, record)
    next_list(page, record)
    closing(page, record, folder)
