"""Progress of a long job: bars with an ETA on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

EVERY = 10.0
"""Seconds between a stage's lines where there is no terminal: a CI log is read, not watched."""

LABELS = {
    "load": "load both programs",
    "prompts": "prompts through both",
    "probes": "probes",
    "gradient": "gradient bias",
    "gradient bias": "gradient bias",
    "gradient statistics": "gradient statistics",
    "verdicts": "verdicts",
}


@contextmanager
def progress_display(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A callback (stage, done, total) that draws."""
    if console.is_terminal:
        yield from _bars(console)
    else:
        yield _lines(console)


def _lines(console: Console) -> Callable[[str, int, int], None]:
    """A line when a stage begins and ends, and every ``EVERY`` seconds between."""
    started = time.monotonic()
    told: dict[str, tuple[float, int]] = {}

    def report(stage: str, done: int, total: int) -> None:
        elapsed = time.monotonic() - started
        last, before = told.get(stage, (-EVERY, -1))
        ended = done >= total and before < total
        if not ended and elapsed - last < EVERY:
            return
        told[stage] = elapsed, done
        console.print(
            f"[{elapsed:6.1f} s] {LABELS.get(stage, stage)}: {done}/{total}",
            markup=False,
            highlight=False,
        )

    return report


def _bars(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bars = Progress(
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console,
    )
    tasks: dict[str, Any] = {}

    def report(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(LABELS.get(stage, stage), total=total)
        bars.update(tasks[stage], completed=done, total=total)

    with bars:
        yield report
