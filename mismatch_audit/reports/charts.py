"""The charts of the HTML report, as inline SVG. Colour is for verdicts; all else is ink."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from markupsafe import Markup

from mismatch_audit.reports.notation import count, interval, limit, number, percent, quantity
from mismatch_audit.reports.rows import (
    FlipBin,
    MeasurementRow,
    PositionBin,
    ProbabilityBin,
    Scatter,
)
from mismatch_audit.reports.svg import Scale, across, chart, join, scale_of, tag, tick_text

HEIGHT = 210
_STRIP = 22
_WIDEST = (1e-3, 1e3)


def limit_scale(rows: Sequence[MeasurementRow]) -> Scale:
    """One axis for every clause: how many times its limit a number is, by powers of ten. At least
    0.1 to 10, at most three powers on either side."""
    ratios = [r for m in rows for v in (m.value, m.lower, m.upper) if (r := _ratio(m, v))]
    low = min([0.1, *ratios])
    high = max([10.0, *(r for r in ratios if math.isfinite(r))])
    low, high = max(_WIDEST[0], low), min(_WIDEST[1], high)
    return Scale(10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high)), True)


def _ratio(row: MeasurementRow, value: float | None) -> float | None:
    """A value as a multiple of its limit; None where that means nothing. Ratios are best at 1:
    there it is the distance from 1, on the limit's side, that counts."""
    if value is None or row.limit is None:
        return None
    best = 1.0 if row.unit == "x" or row.metric == "ess_ratio" else 0.0
    room = row.limit - best
    return max(0.0, (value - best) / room) if room != 0 else None


def limit_axis(scale: Scale) -> Markup:
    """The axis over the strips: powers of ten, the limit at 1."""
    parts = []
    for tick in scale.ticks():
        text = "limit" if tick == 1 else f"{tick:g}×"
        kind = "axis strong" if tick == 1 else "axis"
        end = {0.0: "start", 1.0: "end"}.get(scale.at(tick), "middle")
        at = across(scale.at(tick))
        parts.append(tag("text", text, x=at, y=12, class_=kind, text_anchor=end))
    return chart("Axis: multiples of the limit", "Left of the limit keeps it.", 16, parts)


def strip(row: MeasurementRow, scale: Scale) -> Markup:
    """A row on the shared axis: dot, interval, the limit, and a tick at the noise floor."""
    middle = _STRIP / 2
    value = _ratio(row, row.value)
    if value is None:
        return Markup("")
    ends = [r for v in (row.lower, row.upper) if (r := _ratio(row, v)) is not None]
    line = across(scale.at(1.0))
    parts = [
        tag("line", x1="0", x2="100%", y1=middle, y2=middle, class_="rail"),
        tag("line", x1=line, x2=line, y1=0, y2=_STRIP, class_="limit"),
    ]
    kind = f"m-{row.verdict}"
    if len(ends) == 2:
        left, right = across(scale.at(min(ends))), across(scale.at(max(ends)))
        parts.append(
            tag("line", x1=left, x2=right, y1=middle, y2=middle, class_=f"interval {kind}")
        )
    floor = _ratio(row, row.noise_floor)
    if floor is not None and floor > scale.low:
        at = across(scale.at(floor))
        parts.append(tag("line", x1=at, x2=at, y1=middle - 5, y2=middle + 5, class_="floor"))
    beyond = value < scale.low or value > scale.high
    parts.append(
        tag("circle", cx=across(scale.at(value)), cy=middle, r=4.5,
            class_=f"dot {kind}{' open' if beyond else ''}")
    )  # fmt: skip
    told = f"{row.slice}: {quantity(row, row.value)}, bounds {interval(row)}, limit {limit(row)}"
    return chart(f"{told}: {row.verdict}", f"{value:.3g} times the limit", _STRIP, parts)


@dataclass(frozen=True)
class Point:
    """A bin's dot: label over it, whiskers when it has bounds."""

    value: float
    label: str
    told: str
    lower: float | None = None
    upper: float | None = None


class _Bin(Protocol):
    @property
    def lo(self) -> float | None: ...
    @property
    def hi(self) -> float | None: ...


def flip_rate(bins: Sequence[FlipBin]) -> Markup:
    """Greedy flips by the reference's margin, with bounds that count tokens as independent."""
    points = [
        Point(b.rate, percent(b.rate) if b.rate else "0",
              f"{percent(b.rate)} of {count(b.n)} tokens", b.lower, b.upper)
        for b in bins if b.rate is not None
    ]  # fmt: skip
    kept = [b for b in bins if b.rate is not None]
    return _binned("Flip rate by reference margin", kept, points, "margin of the reference, nats",
                   shares=True)  # fmt: skip


def kl_by_probability(bins: Sequence[ProbabilityBin], whose: str) -> Markup:
    """Mean KL by the probability that one side, the reference or the sampler, gives the token."""
    kept = [b for b in bins if b.mean is not None]
    points = [
        Point(b.mean or 0.0, number(b.mean), f"{number(b.mean)} nats over {count(b.n)} tokens")
        for b in kept
    ]
    return _binned(f"Mean KL by {whose} probability", kept, points, f"{whose} probability")


def gap_by_probability(bins: Sequence[ProbabilityBin], whose: str) -> Markup:
    """Mean |log-prob difference| by the probability that one side gives the token."""
    kept = [b for b in bins if b.mean_abs_dlp is not None]
    points = [
        Point(b.mean_abs_dlp or 0.0, number(b.mean_abs_dlp),
              f"{number(b.mean_abs_dlp)} nats over {count(b.n)} tokens")
        for b in kept
    ]  # fmt: skip
    title = f"Mean log-prob difference by {whose} probability"
    return _binned(title, kept, points, f"{whose} probability")


def _binned(
    title: str, bins: Sequence[_Bin], points: Sequence[Point], below: str, *, shares: bool = False
) -> Markup:
    """Dots over bins of equal width, whatever their range; the edges are written below."""
    if not points:
        return Markup("")
    tops = [p.upper if p.upper is not None else p.value for p in points]
    scale = scale_of([*tops, *(p.value for p in points)], may_log=not shares)
    parts = _grid(scale, shares=shares)
    n = len(points)
    base = HEIGHT
    for i, point in enumerate(points):
        x, y = across((i + 0.5) / n), _down(scale, point.value)
        mark = [tag("title", point.told)]
        if point.lower is not None and point.upper is not None:
            low, high = _down(scale, point.lower), _down(scale, point.upper)
            mark.append(tag("line", x1=x, x2=x, y1=low, y2=high, class_="whisker"))
        elif not scale.log:
            mark.append(tag("line", x1=x, x2=x, y1=float(base), y2=y, class_="stem"))
        mark.append(tag("circle", cx=x, cy=y, r=4, class_="ink"))
        over = _down(scale, point.upper) if point.upper is not None else y
        mark.append(tag("text", point.label, x=x, y=over - 8, class_="label"))
        parts.append(tag("g", join(mark)))
    edges = [bins[0].lo, *(b.hi for b in bins)]
    for i, edge in enumerate(edges):
        text = "∞" if edge is None else f"{edge:g}"
        parts.append(tag("text", text, x=across(i / n), y=base + 16, class_="axis mid"))
    parts.append(_caption(below))
    told = "; ".join(
        f"{'up' if b.lo is None else f'{b.lo:g}'} to {'any' if b.hi is None else f'{b.hi:g}'}: "
        f"{p.told}"
        for b, p in zip(bins, points, strict=True)
    )
    return chart(title, told, base + 38, parts)


def kl_by_position(bins: Sequence[PositionBin]) -> Markup:
    """Mean and 95th percentile of the per-token KL along the response."""
    kept = [b for b in bins if b.mean is not None and b.lo is not None and b.hi is not None]
    if not kept:
        return Markup("")
    end = max(b.hi or 0.0 for b in kept)
    values = [v for b in kept for v in (b.mean, b.p95) if v is not None]
    scale, along = scale_of(values), Scale(0.0, end)
    parts = _grid(scale)
    for name, kind in (("p95", "soft"), ("mean", "ink")):
        track = [
            (along.at(((b.lo or 0.0) + (b.hi or 0.0)) / 2), _down(scale, v), b)
            for b in kept
            if (v := getattr(b, name)) is not None
        ]
        for (x1, y1, _), (x2, y2, _) in pairwise(track):
            parts.append(
                tag("line", x1=across(x1), y1=y1, x2=across(x2), y2=y2, class_=f"track {kind}")
            )
        for x, y, b in track:
            named = tag("title", f"positions {b.lo:g} to {b.hi:g}: {number(getattr(b, name))}")
            parts.append(tag("circle", named, cx=across(x), cy=y, r=2.5, class_=kind))
        if track:
            x, y = track[-1][0], min(at for _, at, _ in track[-6:])
            label = "mean" if name == "mean" else "95th percentile"
            parts.append(tag("text", label, x=across(x), y=y - 9, class_=f"label end {kind}"))
    for tick in along.ticks():
        place = across(along.at(tick))
        parts.append(tag("text", f"{tick:g}", x=place, y=HEIGHT + 16, class_="axis mid"))
    parts.append(_caption("position in the response, tokens"))
    told = "; ".join(f"{b.lo:g} to {b.hi:g}: {number(b.mean)}" for b in kept)
    return chart("KL by position", f"Mean, nats. {told}", HEIGHT + 38, parts)


def logprob_scatter(points: Scatter) -> Markup:
    """The same tokens' log-probs on both sides; agreement is the diagonal."""
    if not points.reference:
        return Markup("")
    low = min(*points.reference, *points.engine, -1.0)
    both = Scale(math.floor(low), 0.0)
    parts = []
    for tick in both.ticks():
        share = both.at(tick)
        y = HEIGHT * (1 - share)
        parts.append(tag("line", x1="0", x2="100%", y1=y, y2=y, class_="grid"))
        text = f"{tick:g}".replace("-", "−")
        parts.append(tag("text", text, x=-7, y=y + 4, class_="axis end"))
        parts.append(tag("text", text, x=across(share), y=HEIGHT + 16, class_="axis mid"))
    parts.append(tag("line", x1="0", y1=HEIGHT, x2="100%", y2=0, class_="diagonal"))
    for x, y in zip(points.reference, points.engine, strict=True):
        at = across(both.at(x))
        parts.append(tag("circle", cx=at, cy=HEIGHT * (1 - both.at(y)), r=1.7, class_="cloud"))
    parts.append(_caption("log-prob of the reference; upwards: of the engine, nats"))
    told = f"{count(len(points.reference))} tokens; on the diagonal both sides agree."
    return chart("Log-probs of the same tokens on both sides", told, HEIGHT + 38, parts)


def _down(scale: Scale, value: float) -> float:
    return HEIGHT * (1 - scale.at(value))


def _grid(scale: Scale, *, shares: bool = False) -> list[Markup]:
    parts = []
    for tick in scale.ticks():
        y = _down(scale, tick)
        text = percent(tick).replace(".0 %", " %") if shares else tick_text(tick)
        parts.append(tag("line", x1="0", x2="100%", y1=y, y2=y, class_="grid"))
        parts.append(tag("text", text, x=-7, y=y + 4, class_="axis end"))
    return parts


def _caption(text: str) -> Markup:
    return tag("text", text, x="50%", y=HEIGHT + 33, class_="axis mid")
