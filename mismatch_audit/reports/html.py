"""The record as one self-contained HTML page: no network, no scripts, light and dark."""

from __future__ import annotations

from html import escape

from mismatch_audit.reports.advice import WORDS, summary
from mismatch_audit.reports.escape import visible
from mismatch_audit.reports.notation import interval, limit, quantity
from mismatch_audit.reports.record import Record


def render_html(record: Record) -> str:
    """The page, as text in UTF-8."""
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td>{escape(visible(cell))}</td>"
            for cell in (
                m.clause, m.slice, m.metric, quantity(m, m.value), interval(m), limit(m),
                str(m.n_prompts), m.verdict, m.detail,
            )
        )
        + "</tr>"
        for m in record.measurements
    )  # fmt: skip
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>{escape(visible(record.contract.name))}</title>"
        f"<h1>{WORDS[record.verdict]}</h1><p>{escape(summary(record))}</p>"
        f"<table>{rows}</table></html>\n"
    )
