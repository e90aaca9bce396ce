"""SVG by hand: escaped tags, axes with round numbers.

Charts have no viewBox. Positions across are percentages and positions down are pixels, so that a
chart fills any width while its text, dots and lines keep their size: the same on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from mismatch_audit.reports.escape import visible
from mismatch_audit.reports.notation import number


def tag(name: str, body: Markup | str = "", **attributes: str | float) -> Markup:
    """One element. Plain text is made visible and escaped; only Markup passes as it is.
    Attribute names: ``class_`` for class, ``_`` for ``-``."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_short(value))}"'
        for key, value in attributes.items()
    )
    inner = body if isinstance(body, Markup) else escape(visible(body))
    return Markup(f"<{name}{given}>{inner}</{name}>")


def _short(value: str | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def join(parts: Iterable[Markup]) -> Markup:
    """Elements after one another."""
    return Markup("").join(parts)


def across(share: float) -> str:
    """A horizontal position: a share of the width as a percentage."""
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


def chart(title: str, description: str, height: int, parts: Iterable[Markup]) -> Markup:
    """The SVG of a chart, named and described for those who do not see it."""
    named = tag("title", title) + tag("desc", description)
    return tag("svg", named + join(parts), class_="chart", role="img", height=height)


@dataclass(frozen=True)
class Scale:
    """Values -> [0, 1], linear or by powers of ten; beyond the ends they stay at the end."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        if self.log:
            if value <= self.low:
                return 0.0
            low, high, value = math.log10(self.low), math.log10(self.high), math.log10(value)
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def ticks(self) -> list[float]:
        """Four to seven round numbers, or every power of ten."""
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            return [10.0**e for e in range(first, last + 1, max(1, (last - first) // 5))]
        step = _round_step((self.high - self.low) / 5)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(i * step, 12) for i in range(first, last + 1)]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)


def scale_of(values: Sequence[float], *, may_log: bool = True) -> Scale:
    """From zero to the largest; by powers of ten where values spread over a factor of 50."""
    positive = [v for v in values if v > 0 and math.isfinite(v)]
    if not positive:
        return Scale(0.0, 1.0)
    low, high = min(positive), max(positive)
    if may_log and high > 50 * low:
        return Scale(10.0 ** math.floor(math.log10(low)), high * 2, log=True)
    return Scale(0.0, high * 1.15)


def tick_text(value: float) -> str:
    """1e-3, 0.02, 5: no digits that say nothing."""
    if value == 0:
        return "0"
    power = math.log10(abs(value))
    if abs(value) < 0.01 and abs(power - round(power)) < 1e-9:
        return f"1e{round(power)}"
    return number(value).replace(".0e", "e")
