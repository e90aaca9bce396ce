"""The pictures of docs/theory.md, computed from the functions that the page explains.

    python benchmarks/figures.py

Writes docs/img/*.svg; seeded, about five seconds.  Each picture is white paper with dark ink, so
that it reads the same on a light and on a dark page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike

from kernel_contracts import bounds as b
from kernel_contracts import budgets, divergence
from kernel_contracts.confidence import clopper_pearson, holm, mean_bounds, normal_bounds
from kernel_contracts.topk import topk_intervals
from mismatch_audit.reports.svg import Scale, join, tag, tick_text

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "img"
WIDTH = 720
INK, SOFT, GRID, BAND = "#1f2937", "#5b6472", "#e5e7eb", "#f1f5f9"
BLUE, RED, GREEN, GOLD = "#1d4ed8", "#b91c1c", "#15803d", "#a16207"
# Mean KL per token of published runs (AknA13/train-infer-mismatch: Qwen3-8B, transformers trainer
# against vLLM sampler).
BF16, FP16, FP32 = 7.84e-4, 1.26e-5, 1.8e-6


def text(x: float, y: float, words: str, colour: str = INK, **more: str | float) -> Markup:
    return tag("text", words, x=float(x), y=float(y), fill=colour, **{"font_size": 13, **more})


def paper(title: str, told: str, height: int, parts: Sequence[Markup]) -> str:
    """A whole file. told: what the picture shows, for those who do not see it."""
    body = [
        tag("title", title),
        tag("desc", told),
        tag("rect", x=0.5, y=0.5, width=WIDTH - 1, height=height - 1, rx=8, fill="#fff",
            stroke="#d1d5db"),
        text(20, 27, title, font_size=15, font_weight="bold"),
        *parts,
    ]  # fmt: skip
    svg = tag("svg", join(body), xmlns="http://www.w3.org/2000/svg", role="img",
              viewBox=f"0 0 {WIDTH} {height}", width=WIDTH, height=height,
              font_family="system-ui, Roboto, Helvetica, Arial, sans-serif")  # fmt: skip
    return str(svg).replace("><", ">\n<") + "\n"


class Panel:
    """One pair of axes; everything drawn in it is in the unit of the data."""

    def __init__(
        self,
        box: tuple[float, float, float, float],
        x: Scale,
        y: Scale,
        labels: tuple[str, str],
        ticks: tuple[Iterable[float] | None, Iterable[float] | None] = (None, None),
    ) -> None:
        """box: left, top, width, height of the axes.  labels: across, upwards."""
        self.left, self.top, self.width, self.height = box
        self.x, self.y = x, y
        bottom, right = self.top + self.height, self.left + self.width
        self.parts: list[Markup] = []
        for tick in y.ticks() if ticks[1] is None else ticks[1]:
            at = self.down(tick)
            self._rule(self.left, at, right, at)
            self.parts.append(text(self.left - 6, at + 4, _tick(tick), SOFT, text_anchor="end",
                                   font_size=12))  # fmt: skip
        for tick in x.ticks() if ticks[0] is None else ticks[0]:
            at = self.over(tick)
            self._rule(at, bottom, at, bottom + 4, SOFT)
            self.parts.append(text(at, bottom + 18, _tick(tick), SOFT, text_anchor="middle",
                                   font_size=12))  # fmt: skip
        self._rule(self.left, bottom, right, bottom, SOFT)
        self.parts.append(text(right, bottom + 37, labels[0], text_anchor="end"))
        self.parts.append(text(self.left - 30, self.top - 12, labels[1]))

    def _rule(self, x1: float, y1: float, x2: float, y2: float, colour: str = GRID) -> None:
        ends = {"x1": float(x1), "y1": float(y1), "x2": float(x2), "y2": float(y2)}
        self.parts.append(tag("line", stroke=colour, **ends))

    def over(self, value: float) -> float:
        return self.left + self.width * self.x.at(float(value))

    def down(self, value: float) -> float:
        return self.top + self.height * (1 - self.y.at(float(value)))

    def line(self, x: ArrayLike, y: ArrayLike, colour: str, dash: str = "") -> None:
        """Points outside the axes are left out."""
        pairs = zip(np.ravel(x), np.ravel(y), strict=True)
        low, high = self.y.low * (1 - 1e-9), self.y.high * (1 + 1e-9)
        kept = [(a, v) for a, v in pairs if low <= v <= high and self.x.low <= a <= self.x.high]
        way = " ".join(f"{self.over(a):.1f},{self.down(v):.1f}" for a, v in kept)
        self.parts.append(tag("polyline", points=way, fill="none", stroke=colour, stroke_width=2.2,
                              stroke_dasharray=dash or "none"))  # fmt: skip

    def dots(self, x: ArrayLike, y: ArrayLike, colour: str, r: float = 1.8) -> None:
        for a, v in zip(np.ravel(x), np.ravel(y), strict=True):
            self.parts.append(tag("circle", cx=self.over(a), cy=self.down(v), r=r, fill=colour,
                                  fill_opacity=0.7 if r < 3 else 1))  # fmt: skip

    def area(self, x: ArrayLike, low: ArrayLike, high: ArrayLike, colour: str) -> None:
        ends = [*zip(np.ravel(x), np.ravel(high), strict=True)]
        ends += [*zip(np.ravel(x), np.ravel(low), strict=True)][::-1]
        way = " ".join(f"{self.over(a):.1f},{self.down(v):.1f}" for a, v in ends)
        self.parts.append(tag("polygon", points=way, fill=colour, fill_opacity=0.16))

    def say(self, x: float, y: float, words: str, colour: str = INK, anchor: str = "start") -> None:
        self.parts.append(text(self.over(x), self.down(y), words, colour, text_anchor=anchor))


def _tick(value: float) -> str:
    """Powers of ten as 0.001 or 1e-4; thousands with a thin gap."""
    return f"{value:,.0f}".replace(",", " ") if value >= 1000 else tick_text(value)


def _drawn(*panels: Panel) -> list[Markup]:
    return [part for panel in panels for part in panel.parts]


# --- the pictures -------------------------------------------------------------------------------


def chain() -> str:
    """Two routes from one token to the reward, and the flips' side road, with numbers."""
    drift, kl, steps = 0.05, 1e-5, 256
    tv, tv_rms = float(b.sequence_tv_from_drift(drift, steps)), float(
        b.sequence_tv_from_mean_kl(kl, steps))  # fmt: skip
    rows = [
        ("sup route", BLUE, [
            ["in every context", f"drift D ≤ {drift} nats"],
            [f"TV ≤ {float(b.tv_from_drift(drift)):.4f}",
             f"KL ≤ {float(b.kl_from_drift(drift)):.2g} nats",
             f"ESS ≥ {float(b.ess_from_drift(drift)):.4f}"],
            [f"TV ≤ {tv:.2f}"],
            [f"reward ≤ {float(b.reward_drift(tv)):.2f} range", f"gradient ≤ {2 * tv:.2f} T F"]]),
        ("rms route", GREEN, [
            ["on rollouts", f"mean KL ≤ {kl:.0e} nats"],
            [f"mean TV ≤ {float(b.tv_from_kl(kl)):.4f}"],
            [f"KL ≤ {steps * kl:.2g} nats", f"TV ≤ {tv_rms:.3f}"],
            [f"reward ≤ {float(b.reward_drift(tv_rms)):.3f} range",
             f"gradient ≤ {2 * tv_rms:.3f} T F"]]),
        ("greedy", GOLD, [
            ["in every context", f"drift D ≤ {drift} nats"],
            [f"margin > {drift}, or top-1",
             f"probability > {float(b.flip_needs_top1_below(drift)):.4f}:", "no flip"],
            ["texts that differ ≤", f"{steps} × the flip rate"]]),
    ]  # fmt: skip
    parts = [text(20 + 176 * i, 56, head, SOFT) for i, head in enumerate(
        ("measured", "one token", f"{steps} tokens", "what the job feels"))]  # fmt: skip
    for r, (name, colour, boxes) in enumerate(rows):
        y = 72 + 98 * r
        for i, lines in enumerate(boxes):
            x = 17 + 176 * i
            parts.append(tag("rect", x=x, y=y, width=158, height=76, rx=6, fill=BAND,
                             stroke=colour))  # fmt: skip
            if i == 0:
                parts.append(text(x + 10, y + 20, name, colour, font_weight="bold"))
            first = y + (41 if i == 0 else 24 if len(lines) == 3 else 44 - 9 * (len(lines) - 1))
            parts += [text(x + 10, first + 19 * k, line, font_size=12) for k, line
                      in enumerate(lines)]  # fmt: skip
            if i:
                parts.append(tag("path", d=f"M{x - 17} {y + 38}h14m-5 -4l6 4l-6 4", fill="none",
                                 stroke=colour, stroke_width=1.6))  # fmt: skip
    return paper("The chain: from one token to what the job feels",
                 "Boxes from drift or mean KL through one token and 256 tokens to reward drift "
                 "and gradient bias.", 72 + 98 * 3, parts)  # fmt: skip


def drift() -> str:
    """The same two programs with and without a constant in the logits."""
    z = np.array([4.0, 3.1, 2.7, 2.0, 1.2, 0.4, -0.5, -1.3])
    d = np.array([0.11, -0.06, 0.19, 0.02, -0.14, 0.08, -0.21, 0.05])
    top, panels = float(divergence.drift(z + d, z, eta=0)), []
    same = float(divergence.kl_divergence(z, z + d))
    for i, offset in enumerate((0.0, 0.45)):
        panel = Panel((60 + 345 * i, 90, 270, 170), Scale(0.0, 9.0), Scale(-0.3, 0.9),
                      ("token", "logit difference d, nats"), (range(1, 9), None))  # fmt: skip
        panel.area([0, 9], [(d + offset).min()] * 2, [(d + offset).max()] * 2, BLUE)
        for k, v in enumerate(d + offset):
            panel.line([k + 1, k + 1], [0.0, v], SOFT)
            panel.dots([k + 1], [v], BLUE, 4)
        panel.line([0, 9], [0, 0], SOFT, "3 3")
        largest = float(np.abs(d + offset).max())
        panel.say(0.2, 0.8, f"max |d| = {largest:.2f}, D = {top:.2f}")
        panels.append(panel)
    notes = [
        text(30, 58, "engine and reference"),
        text(375, 58, "one side's logits shifted by 0.45"),
        text(20, 322, f"Both have KL = {same:.4f} nats and D = {top:.2f}, the height of the band.",
             SOFT),
    ]  # fmt: skip
    return paper("Drift is the height of the band, not its distance from 0",
                 "Logit differences of eight tokens as they are and with a constant added.", 340,
                 [*_drawn(*panels), *notes])  # fmt: skip


def token() -> str:
    """Random and extreme pairs under the three curves that no pair crosses."""
    rng = np.random.default_rng(1)
    grid, rows = np.linspace(0, 3, 91), []
    for i in range(240):
        size, wide = int(rng.integers(2, 40)), rng.uniform(0.05, 3)
        if i % 3:
            q = np.log(rng.dirichlet(np.full(size, rng.uniform(0.05, 2))) + 1e-30)
            d = rng.uniform(-1, 1, size)
        else:  # two blocks, the kind of pair that attains the bounds
            q, d = np.log([s := rng.uniform(0.02, 0.98), 1 - s]), np.array([1.0, 0.0])
        p = q + d / (d.max() - d.min()) * wide
        rows.append((wide, divergence.total_variation(p, q), divergence.kl_divergence(q, p),
                     b.ess_from_chi2(divergence.chi_squared(p, q))))  # fmt: skip
    seen = np.array(rows, np.float64)
    curves: list[tuple[str, Callable[..., np.ndarray], float]] = [
        ("TV ≤ tanh(D/4)", b.tv_from_drift, 0.8),
        ("KL ≤ K(D), nats", b.kl_from_drift, 1.1),
        ("ESS share ≥ sech²(D/2)", b.ess_from_drift, 1.05),
    ]
    panels = []
    for i, (name, function, high) in enumerate(curves):
        panel = Panel((52 + 229 * i, 72, 175, 185), Scale(0.0, 3.0), Scale(0.0, high),
                      ("drift D, nats", name), (range(4), None))  # fmt: skip
        panel.dots(seen[:, 0], seen[:, i + 1], SOFT)
        panel.line(grid, function(grid), BLUE)
        panels.append(panel)
    return paper("One token: no pair of distributions crosses the line, some touch it",
                 "TV, KL and effective sample share of 240 pairs against their drift.", 310,
                 _drawn(*panels))  # fmt: skip


def movement() -> str:
    """How far one probability can rise and fall, and the formula that missed the fall."""
    d, q = 1.5, np.linspace(0, 1, 201)
    low, high = b.probability_range_from_drift(q, d)
    panel = Panel((60, 72, 630, 190), Scale(0.0, 1.0), Scale(0.0, 0.5),
                  ("engine's probability q of the token", f"|p − q| at D = {d}"))  # fmt: skip
    panel.area(q, 0 * q, b.movement_from_drift(q, d), BLUE)
    panel.line(q, b.movement_from_drift(q, d), BLUE)
    panel.line(q, high - q, GREEN, "7 4")
    panel.line(q, q - low, RED, "2 4")
    panel.say(0.06, 0.4, "largest rise", GREEN)
    panel.say(0.94, 0.4, "largest fall", RED, "end")
    panel.say(0.5, 0.42, "bound, with min(q, 1 − q): tanh(D/4) at most", BLUE, "middle")
    panel.say(0.67, 0.05, "a formula for the rise alone (green) misses the fall", SOFT, "end")
    return paper("A token near 0 or 1 barely moves; in the middle it may",
                 "Largest change of one probability against that probability.", 315,
                 _drawn(panel))  # fmt: skip


def flips() -> str:
    """Where flips are, where they cannot be, and the estimate in between, by margin."""
    rng, spread, n = np.random.default_rng(4), 0.05, 60_000
    z = rng.normal(0, 2.2, (n, 12))
    e = rng.normal(0, spread, (n, 12))
    margin, flip = divergence.margin(z), divergence.top1(z) != divergence.top1(z + e)
    safe = b.flip_certified(margin, divergence.drift(z, z + e, eta=0))
    edges = np.linspace(0, 0.4, 21)
    middle, where = (edges[1:] + edges[:-1]) / 2, np.digitize(margin, edges) - 1
    share = np.array([[flip[where == i].mean(), safe[where == i].mean()] for i in range(20)])
    panel = Panel((60, 72, 630, 200), Scale(0.0, 0.4), Scale(0.0, 1.0),
                  ("margin of the reference's top two, nats", "share of contexts"))  # fmt: skip
    for x, v in zip(middle, share[:, 0], strict=True):
        panel.area([x - 0.008, x + 0.008], [0, 0], [v, v], RED)
    fine = np.linspace(0, 0.4, 81)
    panel.line(fine, [b.flip_rate_predicted([m], spread * 2**0.5) for m in fine], RED)
    panel.line(middle, share[:, 1], GREEN)
    panel.say(0.02, 0.85, "flipped (bars) and predicted (line)", RED)
    panel.say(0.26, 0.86, "certified: no flip possible", GREEN)
    panel.say(0.26, 0.6, f"all contexts: {flip.mean():.2%} flip,")
    panel.say(0.26, 0.52, f"{b.flip_rate_predicted(margin, spread * 2**0.5):.2%} predicted,")
    panel.say(0.26, 0.44, f"{1 - safe.mean():.2%} not certified,")
    panel.say(0.26, 0.36, f"{int((flip & safe).sum())} certified ones flip")
    return paper("Flips sit at small margins; the certificate errs on the safe side",
                 "Share of contexts that flip and share certified against the margin.", 325,
                 _drawn(panel))  # fmt: skip


def topk() -> str:
    """KL interval from the k largest log-probs of one row, against the exact value."""
    rng, size = np.random.default_rng(7), 2000
    q = divergence.log_softmax(-1.2 * np.log(np.arange(1, size + 1)))
    p = divergence.log_softmax(q + rng.uniform(-0.1, 0.1, size))
    exact = float(divergence.kl_divergence(q, p))
    ks = np.unique(np.geomspace(1, 1500, 70).astype(int))
    whole = divergence.drift(p, q, eta=0)
    found = [topk_intervals(p[:k], q[:k], drift=whole, resolution=0.0) for k in ks]
    part = [float((np.exp(q[:k]) * (q[:k] - p[:k])).sum()) / exact for k in ks]
    panel = Panel((60, 72, 630, 200), Scale(1.0, 1500.0, True), Scale(-1.0, 4.0),
                  ("log-probs logged per token, k", "multiples of the exact KL"),
                  ((1, 10, 100, 1000), (-1, 0, 1, 2, 3, 4)))  # fmt: skip
    low = np.array([f.kl_lower for f in found]) / exact
    high = np.array([f.kl_upper for f in found]) / exact
    panel.area(ks, low, np.minimum(high, 4), BLUE)
    panel.line(ks, low, BLUE)
    panel.line(ks, high, BLUE)
    panel.line([1, 1500], [1, 1], INK, "2 3")
    panel.line(ks, part, RED, "7 4")
    panel.say(1450, 2.1, "upper: needs a drift bound for the rest", BLUE, "end")
    panel.say(1.4, -0.35, "lower: proves a FAIL, never a PASS", BLUE)
    panel.say(95, -0.85, "sum over the k tokens alone: neither", RED, "end")
    return paper("Top-k log-probs give an interval, not a number",
                 "Bounds of the KL from the k largest log-probs against k.", 325,
                 _drawn(panel))  # fmt: skip


def sequence() -> str:
    """Sequence TV by both routes, and the horizon at which 0.1 of the reward range is spent."""
    t, largest, budget = np.unique(np.geomspace(1, 16384, 120).astype(int)), 1.0, 0.1
    panel = Panel((60, 72, 630, 220), Scale(1.0, 16384.0, True), Scale(1e-3, 1.0, True),
                  ("response length T, tokens", "TV of responses = reward drift / range"),
                  ((1, 10, 100, 1000, 10000), None))  # fmt: skip
    panel.area([1, 16384], [budget] * 2, [1, 1], SOFT)
    panel.say(1.2, 0.115, "over the budget of 0.1", SOFT)
    panel.line(t, b.sequence_tv_from_drift(largest, t), RED)
    panel.say(3, 0.25, f"sup route, largest drift {largest:g} (bf16)", RED)
    for kl, name, colour, at in (
        (BF16, "rms route, bf16", BLUE, (30, 0.06, "start")),
        (FP16, "rms route, fp16", GREEN, (1500, 0.13, "end")),
        (FP32, "rms route, fp32", GOLD, (15500, 0.016, "end")),
    ):
        panel.line(t, b.sequence_tv_from_mean_kl(kl, t), colour)
        ends = float(b.horizon_from_mean_kl(kl, budget))
        panel.dots([ends], [budget], colour, 4)
        panel.say(at[0], at[1], f"{name}: T* = {ends:.0f}", colour, at[2])
    return paper("Whole responses: the mean KL carries far, the largest drift does not",
                 "Bounds of sequence TV against response length.", 345, _drawn(panel))  # fmt: skip


def gradient() -> str:
    """Left: bias by response length and kind of weight. Right: what truncation leaves."""
    eps, t, d = 1e-3, np.unique(np.geomspace(2, 1024, 40).astype(int)), 0.5
    left = Panel((60, 90, 300, 210), Scale(2.0, 1024.0, True), Scale(1e-3, 2.0, True),
                 ("response length T", f"bias bound / (T F), TV ≤ {eps:g}"),
                 ((10, 100, 1000), None))  # fmt: skip
    left.line(t, b.bias_none_trajectory_from_sup_tv(eps, t) / t, RED)
    left.line(t, b.bias_token_weights(eps, t) / t, GOLD, "7 4")
    left.line(t, [b.bias_cumulative_weights(eps, int(k)) / k for k in t], GREEN)
    left.say(5, 0.03, "no weights", RED, "middle")
    left.say(7, 0.0036, "token weights", GOLD)
    left.say(60, 0.019, "prefix weights", GREEN)
    left.say(40, 0.0014, "response weights: 0", SOFT)
    c = np.linspace(1, 1.9, 91)
    right = Panel((430, 90, 260, 210), Scale(1.0, 1.9), Scale(0.0, 0.3),
                  ("threshold C, clip 1 ± (C − 1)", f"one token: bias / F, D = {d}"))  # fmt: skip
    right.line(c, b.bias_truncated_from_drift(d, c), BLUE)
    right.line(c, b.bias_clipped_from_drift(d, c - 1), RED, "7 4")
    right.line([1, 1.9], [float(b.bias_none_token(b.tv_from_drift(d)))] * 2, SOFT, "2 3")
    right.say(1.88, 0.262, "no weights: 2 tanh(D/4)", SOFT, "end")
    right.say(1.22, 0.12, "clip on both sides", RED)
    right.say(1.02, 0.02, "min(w, C)", BLUE)
    right.say(1.88, 0.03, f"0 from C = e^D = {np.exp(d):.2f}", BLUE, "end")
    return paper("Policy-gradient bias: which weights remove what",
                 "Bias bounds against response length and truncation threshold.", 355,
                 _drawn(left, right))  # fmt: skip


def limits() -> str:
    """The mean KL that a reward budget allows, against what precisions show."""
    t = np.geomspace(16, 16384, 40)
    panel = Panel((60, 72, 540, 230), Scale(16.0, 16384.0, True), Scale(1e-7, 1e-1, True),
                  ("response length T, tokens", "largest mean KL per token, nats"),
                  ((16, 100, 1000, 10000), [10.0**k for k in range(-7, 0)]))  # fmt: skip
    for kl, name in ((BF16, "bf16"), (FP16, "fp16"), (FP32, "fp32")):
        panel.line([16, 16384], [kl, kl], SOFT, "2 3")
        panel.parts.append(text(608, panel.down(kl) + 4, f"{name}: {kl:.2g}", SOFT))
    for share, colour in ((0.3, GREEN), (0.1, BLUE), (0.02, RED)):
        panel.line(t, [budgets.reward_budget_kl(share, 1.0, int(k)).limit for k in t], colour)
        panel.say(18, float(budgets.reward_budget_kl(share, 1.0, 16).limit) * 1.5,
                  f"{share:g} of the range", colour)  # fmt: skip
    return paper("A reward budget becomes a limit on KL: twice its square, over T",
                 "Limit on mean KL against response length for three reward budgets.", 355,
                 _drawn(panel))  # fmt: skip


def prompts() -> str:
    """Coverage of an upper bound: tokens taken as independent, and the normal interval."""
    rng, n, size, audits, alpha = np.random.default_rng(11), 60, 64, 150, 0.05
    iccs, covered = np.array([0.0, 0.05, 0.1, 0.2, 0.3]), []
    for icc in iccs:
        held = np.zeros(2)
        for _ in range(audits):
            rate = np.full(n, 0.05)
            if icc:
                rate = rng.beta(0.05 * (1 / icc - 1), 0.95 * (1 / icc - 1), n)
            k = rng.binomial(size, rate)
            held += [clopper_pearson(int(k.sum()), n * size, alpha)[1] >= 0.05,
                     mean_bounds(k / size, ceiling=1.0, alpha=alpha).upper >= 0.05]  # fmt: skip
        covered.append(held / audits)
    sizes, kept = np.array([10, 20, 40, 80, 160, 320]), []
    for m in sizes:
        held = np.zeros(2)
        for _ in range(audits):
            x = np.minimum(np.exp(1.2 * rng.standard_normal(m) - 0.72), 100.0)
            held += [normal_bounds(x, alpha)[1] >= 1,
                     mean_bounds(x, ceiling=100.0, alpha=alpha).upper >= 1]  # fmt: skip
        kept.append(held / audits)
    left = Panel((60, 90, 290, 200), Scale(0.0, 0.3), Scale(0.5, 1.0),
                 ("correlation of a prompt's tokens, ICC", "how often a 95 % bound holds"),
                 (None, (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)))  # fmt: skip
    right = Panel((430, 90, 260, 200), Scale(10.0, 320.0, True), Scale(0.5, 1.0),
                  ("prompts", "skewed KL, by prompts"),
                  (sizes, (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)))  # fmt: skip
    for panel, x, seen in ((left, iccs, covered), (right, sizes, kept)):
        panel.line([x[0], x[-1]], [0.95, 0.95], INK, "2 3")
        panel.line(x, np.array(seen)[:, 0], RED)
        panel.line(x, np.array(seen)[:, 1], GREEN)
    left.say(0.09, 0.58, "exact binomial on tokens", RED)
    left.say(0.17, 0.9, "betting on prompts", GREEN)
    right.say(40, 0.75, "normal interval", RED)
    right.say(40, 0.9, "betting", GREEN)
    return paper("Prompts are the unit, and betting keeps its word",
                 "Coverage of upper bounds against correlation and number of prompts.", 345,
                 _drawn(left, right))  # fmt: skip


def verdicts() -> str:
    """Bounds of three truths narrow with prompts until they clear the limit, or do not."""
    rng = np.random.default_rng(3)
    n = np.unique(np.geomspace(10, 1500, 36).astype(int))
    panel = Panel((60, 72, 530, 230), Scale(10.0, 1500.0, True), Scale(0.2, 8.0, True),
                  ("prompts", "mean KL in multiples of the limit"),
                  ((10, 30, 100, 300, 1000), (0.2, 0.5, 1, 2, 5)))  # fmt: skip
    panel.line([10, 1500], [1, 1], INK)
    for truth, word, colour in ((0.4, "PASS", GREEN), (1.0, "INCONCLUSIVE", SOFT),
                                (2.5, "FAIL", RED)):  # fmt: skip
        x = truth * np.minimum(np.exp(rng.standard_normal(1500) - 0.5), 30 / truth)
        found = [mean_bounds(x[:k], ceiling=30.0, alpha=0.05) for k in n]
        low, high = np.array([f.lower for f in found]), np.array([f.upper for f in found])
        panel.area(n, low, high, colour)
        panel.line(n, low, colour)
        panel.line(n, high, colour)
        sure = n[(high <= 1) | (low > 1)]
        panel.parts.append(text(597, panel.down(truth) + 4, word, colour))
        if len(sure):
            panel.dots([sure[0]], [1.0], colour, 5)
            panel.say(float(sure[0]) * 1.05, 1.06 if truth < 1 else 0.78, f"at {sure[0]}", colour)
    return paper("Three verdicts: the whole interval must clear the limit",
                 "Confidence intervals of three truths against the number of prompts.", 355,
                 _drawn(panel))  # fmt: skip


def slices() -> str:
    """Chance of a false alarm and of a false release against the number of slices."""
    rng, alpha, ks = np.random.default_rng(5), 0.05, np.array([1, 2, 4, 8, 16, 32])
    p = rng.uniform(size=(4000, 32))  # every slice exactly at its limit
    plain = [float((p[:, :k] <= alpha).any(1).mean()) for k in ks]
    corrected = [float(np.mean([holm(row[:k], alpha).rejected.any() for row in p])) for k in ks]
    panel = Panel((60, 72, 630, 200), Scale(1.0, 32.0, True), Scale(0.0, 0.85),
                  ("slices, independent, each exactly at its limit", "chance of the mistake"),
                  (ks, None))  # fmt: skip
    panel.line(ks, plain, RED)
    panel.line(ks, corrected, GREEN)
    panel.line(ks, [float((p[:, 0] <= alpha).mean())] * len(ks), BLUE, "7 4")
    panel.say(7, 0.46, "some alarm is false, uncorrected", RED, "end")
    panel.say(31, 0.15, "some alarm is false, Holm", GREEN, "end")
    panel.say(31, 0.1, "release with one slice at its limit, no correction", BLUE, "end")
    return paper("Alarms need a correction for many slices, a release does not",
                 "Chance of a mistake against slices.", 325, _drawn(panel))  # fmt: skip


FIGURES: dict[str, Callable[[], str]] = {
    f.__name__: f
    for f in (chain, drift, token, movement, flips, topk, sequence, gradient, limits, prompts,
              verdicts, slices)
}  # fmt: skip
"""File name without its ending -> what draws it."""


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
        print(FOLDER / f"{name}.svg")


if __name__ == "__main__":
    main()
