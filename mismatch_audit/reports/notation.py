"""Numbers as people read them: 1.4e-3, 2.9 %, 12,345. One notation in every projection."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from mismatch_audit.reports.rows import MeasurementRow

if TYPE_CHECKING:
    from mismatch_audit.reports.record import Record

NOTHING = "–"

METRIC_TITLES: dict[str, str] = {
    "kl_engine_reference": "KL(engine ‖ reference)",
    "kl_reference_engine": "KL(reference ‖ engine)",
    "tv": "total variation",
    "chi2": "chi-square",
    "drift": "logit drift",
    "abs_dlp": "|log-prob difference|",
    "flip_rate": "greedy flips",
    "k3": "KL, k3 estimate",
    "mult_prob_error": "probability ratio error",
    "abs_dp": "|probability difference|",
    "policy_gradient_bias": "policy-gradient bias",
    "policy_gradient_bias_to_noise": "policy-gradient bias / noise",
    "nonfinite": "non-finite logits",
    "ess_ratio": "effective sample share",
    "tail_mass": "mass outside the nucleus",
    "kl": "KL, engine against itself",
    "missing": "missing evidence",
}

_SHARES = frozenset({"flip_rate", "missing"})


def number(value: float | None) -> str:
    """Two significant digits as a power of ten below 0.01, three above, whole from 1000 on."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    size = abs(value)
    if size < 0.00995 or size >= 1e6:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if size >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percent(value: float | None) -> str:
    """A share as a percentage: 2.9 %, 0.034 %, 12 %."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return str(value)
    hundred = 100 * value
    if hundred == 0:
        return "0 %"
    if abs(hundred) < 0.00995:
        return f"{number(hundred)} %"
    if abs(hundred) < 9.95:
        return f"{hundred:#.2g} %"
    return f"{hundred:.0f} %" if abs(hundred) >= 99.5 else f"{hundred:#.3g} %"


def probability(value: float | None) -> str:
    """Three decimals; a power of ten below 0.01."""
    if value is None:
        return NOTHING
    return f"{value:.3f}" if value in {0.0, 1.0} or value >= 0.00995 else number(value)


def is_share(row: MeasurementRow) -> bool:
    """True where the row's numbers are shares, shown as percentages."""
    return row.metric in _SHARES or row.unit.startswith("share")


def quantity(row: MeasurementRow, value: float | None) -> str:
    """A value of this row in its own notation."""
    if is_share(row):
        return percent(value)
    if row.unit == "x" and value is not None and math.isfinite(value) and value < 100:
        return f"{value:.4f}".rstrip("0").rstrip(".") if value < 2 else f"{value:.3g}"
    return number(value)


def interval(row: MeasurementRow) -> str:
    """[lower, upper] of a row, or a dash. Exact counts have none to show."""
    if row.lower is None and row.upper is None:
        return NOTHING
    if row.lower == row.upper == row.value:
        return "exact"
    low, high = quantity(row, row.lower), quantity(row, row.upper)
    if is_share(row):
        low = low.removesuffix(" %")
    return f"[{low}, {high}]"


def metric_title(metric: str) -> str:
    """The metric in words; its own name where there are none."""
    return METRIC_TITLES.get(metric, metric)


def clause_title(row: MeasurementRow) -> str:
    """What a clause measures, in one line: metric, share of what, unit and path."""
    parts = [metric_title(row.metric)]
    if row.unit.startswith("share") or (row.unit and row.unit != "x"):
        parts.append(row.unit)
    if row.path:
        parts.append("decode and prefill" if row.path == "both" else row.path)
    return ", ".join(part for part in parts if part)


def limit(row: MeasurementRow, *, sign: bool = True) -> str:
    """``≤ 2e-3``: the limit as a person would have written it, and its side."""
    if row.limit is None:
        return NOTHING
    side = ("≥ " if row.metric == "ess_ratio" else "≤ ") if sign else ""
    if not math.isfinite(row.limit):
        return side + str(row.limit)
    value = 100 * row.limit if is_share(row) else row.limit
    text = f"{value:.4g}"
    if value != 0 and abs(value) < 0.00995:
        mantissa, exponent = f"{value:.3e}".split("e")
        text = f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{side}{text}{' %' if is_share(row) else ''}"


def times(value: float | None) -> str:
    """``3.7x``, ``1.2e4x``."""
    if value is None:
        return NOTHING
    if value < 999.5:
        return f"{value:.3g}x"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}x"


def count(value: int) -> str:
    """12,345."""
    return f"{value:,}"


def plural(value: int, word: str) -> str:
    """``1 prompt``, ``1,200 prompts``."""
    return f"{value:,} {word}" if value == 1 else f"{value:,} {word}s"


def duration(seconds: float) -> str:
    """0.4 s, 12 s, 3 min 5 s, 2 h 4 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def when(record: Record) -> str:
    """``2025-03-01 10:00:00 UTC, took 2 min 41 s``."""
    started, finished = (datetime.fromisoformat(t) for t in (record.started, record.finished))
    took = (finished - started).total_seconds()
    return f"{started.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC, took {duration(took)}"


def short_digest(text: str) -> str:
    """The first twelve characters of a digest; other text as it is."""
    body = text.removeprefix("sha256:")
    is_digest = len(body) >= 32 and all(c in "0123456789abcdef" for c in body)
    return body[:12] if is_digest else text


def fact(value: Any) -> str:
    """A fact of an identity or the environment, in one line."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, dict):
        return ", ".join(f"{key}={fact(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(fact(item) for item in value) or "none"
    return short_digest(str(value))
