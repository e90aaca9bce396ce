"""The verdict table as CSV: one row per clause and slice, numbers in full precision."""

from __future__ import annotations

import csv
import io

from mismatch_audit.reports.escape import csv_cell, harmless_line
from mismatch_audit.reports.record import Record

COLUMNS = (
    "verdict", "clause", "slice", "metric", "section", "value", "lower", "upper", "limit", "unit",
    "noise_floor", "p_fail", "n_prompts", "n_tokens", "path", "warn", "method", "detail",
)  # fmt: skip


def render_csv(record: Record) -> str:
    """A header and one line a measurement. An unknown number is an empty cell, never 0; text that
    a spreadsheet would read as a formula gets an apostrophe before it."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in record.measurements:
        writer.writerow([_cell(getattr(row, name)) for name in COLUMNS])
    return stream.getvalue()


def _cell(value: str | float | bool | None) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return harmless_line(csv_cell(value)) if isinstance(value, str) else repr(value)
