"""Where in a sequence, and on how few tokens, the mismatch sits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from mismatch_audit.rollouts.checks.alignment import SampleCheck
from mismatch_audit.rollouts.checks.base import CheckResult
from mismatch_audit.rollouts.checks.sample import Row, Sample
from mismatch_audit.rollouts.checks.strata import Mean, Strata, mean_of
from mismatch_audit.rollouts.checks.strata_checks import ENOUGH, FACTOR, FLOOR
from mismatch_audit.rollouts.checks.streaming import BOTH
from mismatch_audit.rollouts.checks.view import TokenView
from mismatch_audit.rollouts.schema import Header

CAP = 5.0
"""|d| counts as this much at most: growth must not come from one wild token."""


def doubt(row: Row) -> npt.NDArray[np.float64]:
    """``[L]`` 1 - sqrt(p q), as ``TokenView.sum_doubt``."""
    mean = 0.5 * (row.columns["sampler_logprob"] + row.columns["trainer_logprob"])
    return np.asarray(-np.expm1(np.minimum(mean.astype(np.float64), -1e-6)))


class PositionGrowth(SampleCheck):
    """Scaled mismatch by octaves of the position in the sequence."""

    code = "GROWS_WITH_POSITION"
    title = "the mismatch grows with the position"
    priority = 63
    remedy = (
        "Compare the rotary settings of both sides (theta, scaling, per-layer types) and whether "
        "cos and sin are computed in float32; switch off fused RoPE."
    )

    def judge(self, header: Header) -> list[CheckResult]:
        parts: dict[int, list[tuple[float, float]]] = {}
        for key in sorted(self.sample.groups):
            totals: dict[int, list[float]] = {}
            for row in self.sample.groups[key]:
                if any(c not in row.columns for c in BOTH):
                    continue
                at = np.flatnonzero(row.used)
                octave = np.log2(at + 1).astype(np.int64)
                size = np.minimum(np.abs(row.d[at]), CAP)
                n, x = np.bincount(octave, doubt(row)[at]), np.bincount(octave, size)
                for k in np.flatnonzero(n).tolist():
                    held = totals.setdefault(k, [0.0, 0.0])
                    held[0] += n[k]
                    held[1] += x[k]
            for k, (n_k, x_k) in totals.items():
                parts.setdefault(k, []).append((n_k, x_k))
        means: dict[int, Mean] = {
            k: mean_of(*np.array(v).T) for k, v in sorted(parts.items()) if len(v) >= ENOUGH
        }
        if len(means) < 3:
            return [self.too_little("needs three octaves of positions with 5 prompts each")]
        rows = [
            {"positions": f"{2**k - 1}-{2 ** (k + 1) - 2}", "scaled_mismatch": m.value, "se": m.se}
            for k, m in means.items()
        ]
        order = list(means)
        values = [means[k].value for k in order]
        ranks = pd.Series(values).rank()
        rank = float(np.corrcoef(np.arange(len(order)), ranks)[0, 1]) if ranks.nunique() > 1 else 0
        first, last = means[order[0]], means[order[-1]]
        if last.value > FLOOR and rank >= 0.8 and last.above(first, FACTOR):
            text = f"{last.value / max(first.value, 1e-12):.3g} times from the first to the last"
            return [self.found(text, rows[::-1])]
        return [self.clean("no growth by a factor of 2", rows)]


class LastToken(SampleCheck):
    """The last token of a sequence against all others."""

    code = "LAST_TOKEN_MISMATCH"
    title = "the mismatch sits on the last token of the sequences"
    priority = 74
    remedy = (
        "Look at how the end is handled: an appended EOS, a stop string cut off, a log-prob row "
        "that is one short."
    )
    TIMES = 5.0

    def judge(self, header: Header) -> list[CheckResult]:
        last, rest = [], []
        for key in sorted(self.sample.groups):
            sums = np.zeros(4)
            for row in self.sample.groups[key]:
                if any(c not in row.columns for c in BOTH) or not row.whole or not row.used[-1]:
                    continue
                size, weight = np.minimum(np.abs(row.d), CAP), doubt(row)
                inner = row.used.copy()
                inner[-1] = False
                sums += (weight[-1], size[-1], weight[inner].sum(), size[inner].sum())
            if sums[0] > 0 and sums[2] > 0:
                last.append(sums[:2])
                rest.append(sums[2:])
        if len(last) < 2 * ENOUGH:
            return [self.too_little("needs 10 prompts whose sequences end in a comparable token")]
        end, others = mean_of(*np.array(last).T), mean_of(*np.array(rest).T)
        row_out = {"last_token": end.value, "other_tokens": others.value}
        if end.value > FLOOR and end.above(others, self.TIMES):
            return [self.found(f"{end.value / max(others.value, 1e-12):.3g} times", [row_out])]
        return [self.clean("the last token is like the others", [row_out])]


class HeavyTail(SampleCheck):
    """Most tokens agree and a few are off by a factor of e or more."""

    code = "HEAVY_TAIL"
    title = "few tokens carry the mismatch"
    severity = "warning"
    priority = 15
    remedy = (
        "Look at the tokens below. A mean of exp|d| or a maximum is ruled by them; fused kernels "
        "that keep bf16 intermediates, routers and caches give such tails."
    )
    SHARE = 1e-3
    TYPICAL = 0.05

    def __init__(self, sample: Sample) -> None:
        super().__init__(sample)
        self.strata = Strata()

    def see(self, tokens: TokenView) -> None:
        super().see(tokens)
        big = tokens.abs_d > 1.0
        count = tokens.sums(big) if big.any() else np.zeros(len(tokens.n))
        zero = np.zeros(len(tokens.n), dtype=np.int64)
        self.strata.add(zero, tokens.clusters, tokens.n, count)

    def judge(self, header: Header) -> list[CheckResult]:
        share = self.strata.mean(0)
        if share.clusters < 10:
            return [self.too_little("needs comparable tokens of 10 prompts")]
        rows = self.sampled_rows(*BOTH)
        size = np.concatenate([np.abs(r.d[r.used]) for r in rows])
        typical = float(np.median(size))
        worst = sorted(
            (
                {"sample_id": r.scalars["sample_id"], "index": int(i), "log_ratio": float(r.d[i])}
                for r in rows
                for i in np.flatnonzero(r.used & (np.abs(r.d) > 1.0))[:4]
            ),
            key=lambda row: -abs(float(row["log_ratio"])),
        )[:5]
        text = f"{share.value:.3%} of tokens have |d| > 1 while the median is {typical:.2g}"
        if share.beyond(self.SHARE) and typical < self.TYPICAL:
            return [self.found(text, worst)]
        return [self.clean(text, worst)]
