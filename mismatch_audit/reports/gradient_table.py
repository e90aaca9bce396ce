"""The measured policy-gradient bias, as the rows that the terminal and Markdown show."""

from __future__ import annotations

from typing import Any

from mismatch_audit.reports.notation import NOTHING, number
from mismatch_audit.reports.rows import Facts

__all__ = ["HEAD", "gradient_rows"]

HEAD = ("slice", "weights", "bias / |g|", "bounds", "bias / noise", "variance", "harmless up to")
"""bias / |g|: relative to the target's gradient, with its bounds. bias / noise: upper end, against
the rms of one prompt's gradient. variance: against the estimator without weights. harmless up to:
prompts of a batch whose own noise is as large as the bias may be."""

_WHOLE = "all"
_NONE = "none"


def gradient_rows(rows: list[Facts]) -> list[list[str]]:
    """Cells under ``HEAD``: every estimator on the whole traffic, the plain one on each slice, each
    against the first target that its slice is measured against."""
    target: dict[str, object] = {}
    for row in rows:
        target.setdefault(str(row.get("slice")), row.get("target"))
    chosen = [
        row
        for row in rows
        if row.get("target") == target[str(row.get("slice"))]
        and (row.get("slice") == _WHOLE or row.get("estimator") == _NONE)
    ]
    return [
        [
            _word(row.get("slice")),
            _word(row.get("estimator")),
            number(_real(row.get("relative_bias"))),
            _bounds(row),
            _most(row.get("bias_to_noise_upper")),
            number(_real(row.get("variance_ratio"))),
            _batch(row.get("harmless_batch"), row.get("bias_to_noise_upper")),
        ]
        for row in chosen
    ]


def _word(value: Any) -> str:
    return str(value) if value is not None else NOTHING


def _real(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _bounds(row: Facts) -> str:
    low, high = _real(row.get("lower")), _real(row.get("upper"))
    if low is None and high is None:
        return NOTHING
    return f"{number(low)} – {'no end' if high is None else number(high)}"


def _most(value: Any) -> str:
    real = _real(value)
    return NOTHING if real is None else f"≤ {number(real)}"


def _batch(value: Any, noise: Any) -> str:
    real = _real(value)
    if real is None:  # infinite: no bias that the measurement could see
        return NOTHING if _real(noise) is None else "any batch"
    return f"{real:,.0f} prompts" if real >= 1 else NOTHING
