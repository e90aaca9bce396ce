"""Golden files of the reports: what a reader sees, kept whole. ``python tests/report_golden.py``
writes them anew after a wanted change; read the difference before it is committed."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

from report_fixtures import many_slices, record
from rich.console import Console

from mismatch_audit.reports import render
from mismatch_audit.reports.record import Record
from mismatch_audit.reports.terminal import render_terminal

FOLDER = Path(__file__).with_name("golden")


def terminal(
    subject: Record, width: int = 100, *, color: bool = False, encoding: str = "utf-8"
) -> str:
    """The terminal report as text; with colours as the escape codes that a terminal would get."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    console = Console(
        file=stream, width=width, force_terminal=color, color_system="standard" if color else None,
        legacy_windows=False,
    )  # fmt: skip
    render_terminal(subject, console, folder="runs/x")
    stream.flush()
    return raw.getvalue().decode(encoding)


GOLDEN: dict[str, Callable[[], str]] = {
    "terminal-fail.txt": lambda: terminal(record("FAIL")),
    "terminal-pass.txt": lambda: terminal(record("PASS")),
    "terminal-not-comparable.txt": lambda: terminal(record("NOT_COMPARABLE")),
    "terminal-many-slices.txt": lambda: terminal(many_slices()),
    "fail.md": lambda: render(record("FAIL"), "markdown"),
    "fail.junit.xml": lambda: render(record("FAIL"), "junit"),
    "not-comparable.junit.xml": lambda: render(record("NOT_COMPARABLE"), "junit"),
    "fail.sarif": lambda: render(record("FAIL"), "sarif"),
    "fail.github.txt": lambda: render(record("FAIL"), "github"),
    "fail.prom": lambda: render(record("FAIL"), "prometheus"),
    "fail.csv": lambda: render(record("FAIL"), "csv"),
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, make in GOLDEN.items():
        (FOLDER / name).write_text(make(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
