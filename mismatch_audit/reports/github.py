"""The record for GitHub Actions: annotations on stdout, and the step summary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mismatch_audit.reports.advice import WORDS, against_limit, by_verdict, place, summary
from mismatch_audit.reports.escape import harmless_line, workflow_data, workflow_property
from mismatch_audit.reports.markdown import render_markdown
from mismatch_audit.reports.record import Record

PER_LEVEL = 9
"""GitHub shows ten annotations of a level a step: nine, and how many more there are."""

_LEVELS = {
    "FAIL": "error",
    "UNSOUND": "error",
    "NOT_COMPARABLE": "error",
    "UNOBSERVED": "warning",
    "ACKNOWLEDGED": "warning",
    "INCONCLUSIVE": "warning",
    "PASS": "notice",
}


def render_github_annotations(record: Record) -> str:
    """Workflow commands, one a line: the audit's verdict first, then each row that did not pass,
    furthest beyond its limit first, then findings that are errors."""
    lines = [
        _command(
            _LEVELS[record.verdict],
            f"mismatch-audit: {WORDS[record.verdict]} ({record.contract.name})",
            summary(record),
        )
    ]
    for level, rows in _by_level(record).items():
        shown = rows[: PER_LEVEL - (level == _LEVELS[record.verdict])]
        lines += [_command(level, title, text) for title, text in shown]
        if len(rows) > len(shown):
            lines.append(f"{len(rows) - len(shown)} more of level {level} in the report")
    return "\n".join(lines) + "\n"


def _by_level(record: Record) -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {"error": [], "warning": []}
    for verdict in ("UNSOUND", "FAIL", "UNOBSERVED", "INCONCLUSIVE", "ACKNOWLEDGED"):
        for row in by_verdict(record, verdict):
            text = against_limit(row) + (f"; {row.detail}" if row.detail else "")
            found[_LEVELS[verdict]].append((f"{WORDS[verdict]}: {place(row)}", text))
    for finding in record.findings:
        if finding.severity == "error":
            found["error"].append((finding.code, f"{finding.title}. {finding.remedy}"))
    return found


def _command(level: str, title: str, text: str) -> str:
    """One workflow command. The mark that an older command syntax starts with is broken too."""
    shown, message = harmless_line(workflow_property(title)), harmless_line(workflow_data(text))
    return f"::{level} title={shown}::{message}"


def announce(record: Record, environ: Mapping[str, str]) -> str:
    """What to print inside GitHub Actions, and nothing elsewhere. Appends the Markdown report to
    the step summary where the runner names its file.

    Raises OSError when that file cannot be written.
    """
    if environ.get("GITHUB_ACTIONS") != "true":
        return ""
    target = environ.get("GITHUB_STEP_SUMMARY")
    if target:
        with Path(target).open("a", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(render_markdown(record))
    return render_github_annotations(record)
