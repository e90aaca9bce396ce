"""Reports: one record, and projections of it that add no facts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mismatch_audit.reports.record import Record

_RENDERERS = {
    "json": ("record", "record_text"),
    "html": ("html", "render_html"),
    "markdown": ("markdown", "render_markdown"),
    "junit": ("junit", "render_junit"),
    "sarif": ("sarif", "render_sarif"),
    "github": ("github", "render_github_annotations"),
    "prometheus": ("prometheus", "render_prometheus"),
    "csv": ("csv", "render_csv"),
}
FORMATS = tuple(_RENDERERS)


def render(record: Record, format: str) -> str:
    """The record as text in one of ``FORMATS``. Imports only that format's module."""
    module, function = _RENDERERS[format]
    text: str = getattr(import_module(f"mismatch_audit.reports.{module}"), function)(record)
    return text
