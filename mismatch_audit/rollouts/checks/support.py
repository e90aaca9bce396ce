"""Was q changed after the softmax? Truncation of the support, repetition penalty."""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np

from mismatch_audit.rollouts.checks.alignment import SampleCheck
from mismatch_audit.rollouts.checks.base import CheckResult
from mismatch_audit.rollouts.checks.contrasts import contrasts
from mismatch_audit.rollouts.checks.sample import Sample
from mismatch_audit.rollouts.checks.sampling import SLOPE_BAND, UNNORMALISED, logged_value
from mismatch_audit.rollouts.checks.strata import Mean, Strata, mean_of
from mismatch_audit.rollouts.checks.streaming import BOTH
from mismatch_audit.rollouts.checks.view import TokenView
from mismatch_audit.rollouts.schema import Header


class Truncation(SampleCheck):
    """q renormalised on a top-p/top-k support, p on all tokens: d = log(kept mass) <= 0.

    E_q[p/q] is then the kept mass rather than 1. Both hold for no other cause: kernels and stale
    weights keep E_q[p/q] = 1, and move siblings' tokens apart rather than together.
    """

    code = "TRUNCATED_SUPPORT"
    title = "the sampler's log-probs are renormalised on a truncated support"
    priority = 83
    remedy = (
        "Sample with top_p=1, top_k=0, min_p=0 (the engine may take others from the model's "
        "generation_config), or replay the kept support in the trainer."
    )
    BAND = 0.005

    def __init__(self, sample: Sample) -> None:
        super().__init__(sample)
        self.mean_ratio, self.mean_d = Strata(), Strata()

    def see(self, tokens: TokenView) -> None:
        super().see(tokens)
        zero = np.zeros(len(tokens.n), dtype=np.int64)
        self.mean_ratio.add(zero, tokens.clusters, tokens.n, tokens.n - tokens.sum_ratio)
        self.mean_d.add(zero, tokens.clusters, tokens.n, tokens.sum_d)

    def judge(self, header: Header) -> list[CheckResult]:
        deficit: Mean = self.mean_ratio.mean(0)
        if deficit.clusters < 10:
            return [self.too_little("needs comparable tokens of 10 prompts")]
        d = np.concatenate([r.d[r.used] for r in self.sampled_rows(*BOTH)] or [np.zeros(0)])
        low, high = np.quantile(d, [0.001, 0.999]) if len(d) else (0.0, 0.0)
        down, up = float((np.minimum(d, 0) ** 2).sum()), float((np.maximum(d, 0) ** 2).sum())
        pairs = contrasts(self.sample)
        common = pairs.common_offset() if pairs.count >= 20 else None
        limits = {n: logged_value(self.sample, n) for n in ("top_p", "top_k", "min_p")}
        row: dict[str, Any] = {
            "mean_p_over_q": 1 - deficit.value,
            "se": deficit.se,
            "mean_d": self.mean_d.mean(0).value,
            "d_quantile_0.001": low,
            "d_quantile_0.999": high,
            "down_over_up": down / up if up else None,
            "common_offset_of_siblings": common,
            **limits,
        }
        explained = self._kept_mass()
        if explained is not None:
            row["gap_left_after_kept_mass"] = explained
        together = common is not None and common > 0.5
        if self._unnormalised(down, up, together, limits):
            return [self._divided(row)]
        fits = down > 4 * up and row["mean_d"] > -1.0
        fits &= together if common is not None else _within(low, high, limits["top_p"])
        if deficit.beyond(self.BAND) and fits:
            on = {n: v for n, v in limits.items() if v is not None and v not in (0.0, 1.0)}
            text = (
                f"log p - log q is at most 0 and mean p/q is {1 - deficit.value:.4g}, the mass kept"
            )
            text += f" by {on}" if on else " by a truncation that the log does not name"
            return [self.found(text, [row])]
        return [self.clean(f"mean p/q is {1 - deficit.value:.4g}", [row])]

    def _unnormalised(
        self, down: float, up: float, together: bool, limits: dict[str, float | None]
    ) -> bool:
        """d is one offset a context, to one side, and the log rules truncation out: what is left
        is log p / T, off by log(sum of p^(1/T))."""
        whole = limits["top_p"] == 1.0 and limits["top_k"] in (0.0, None)
        whole &= limits["min_p"] in (0.0, None)
        t = logged_value(self.sample, "temperature")
        if not whole or not together or t is None or abs(log(t)) < SLOPE_BAND:
            return False
        return down > 4 * up if t < 1 else up > 4 * down

    def _divided(self, row: dict[str, Any]) -> CheckResult:
        text = "log p - log q is one offset a context, and temperature is the only setting not 1"
        return self.found(text, [row], **UNNORMALISED)

    def _kept_mass(self) -> float | None:
        """Share of |d| that is left once log(kept_mass) is taken off; None without the column."""
        gap = left = 0.0
        for row in self.sampled_rows(*BOTH, "kept_mass"):
            mass = row.columns["kept_mass"]
            use = row.used & (mass > 0)
            gap += float(np.abs(row.d[use]).sum())
            left += float(np.abs(row.d[use] - np.log(mass[use])).sum())
        return left / gap if gap > 0 else None


class RepetitionPenalty(SampleCheck):
    """q has a penalty on tokens seen before: p > q on those, p < q on new ones."""

    code = "REPETITION_PENALTY"
    title = "the sampler's log-probs carry a repetition penalty"
    priority = 82
    remedy = "Sample with repetition_penalty=1 (and presence and frequency penalties 0)."
    BAND = 0.01

    def judge(self, header: Header) -> list[CheckResult]:
        parts: dict[str, list[tuple[float, float]]] = {"seen": [], "new": []}
        for key in sorted(self.sample.groups):
            totals = {"seen": [0.0, 0.0], "new": [0.0, 0.0]}
            for r in self.sample.groups[key]:
                if any(c not in r.columns for c in (*BOTH, "token_ids")):
                    continue
                ids = r.columns["token_ids"]
                first = np.zeros(len(ids), dtype=bool)
                first[np.unique(ids, return_index=True)[1]] = True
                # a near-certain token cannot move: leave out where neither side doubts
                doubt = r.used & (np.minimum(*(r.columns[c] for c in BOTH)) < -0.05)
                for name, mask in (("seen", doubt & ~first), ("new", doubt & first)):
                    totals[name][0] += int(mask.sum())
                    totals[name][1] += float(np.clip(r.d[mask], -5, 5).sum())
            for name, (n, x) in totals.items():
                if n:
                    parts[name].append((n, x))
        means = {
            name: mean_of(*np.array(values).T) if values else None for name, values in parts.items()
        }
        seen, new = means["seen"], means["new"]
        if seen is None or new is None or min(seen.clusters, new.clusters) < 10:
            return [self.too_little("needs repeated and new tokens of 10 prompts")]
        logged = logged_value(self.sample, "repetition_penalty")
        row = {
            "mean_d_seen_before": seen.value,
            "mean_d_new": new.value,
            "logged_repetition_penalty": logged,
        }
        down = Mean(-new.value, new.se, new.clusters, new.tokens)
        if seen.beyond(self.BAND) and down.beyond(self.BAND):
            text = (
                f"mean log p - log q is {seen.value:+.3g} on tokens seen before and "
                f"{new.value:+.3g} on new ones"
            )
            return [self.found(text, [row])]
        return [self.clean("repeated and new tokens agree", [row])]


def _within(low: float, high: float, top_p: float | None) -> bool:
    """Whether d respects log(top_p), give or take the noise seen on the other side."""
    floor = log(top_p) if top_p is not None and 0 < top_p < 1 else -3.0
    # 0.1: bf16 kernels are off by this much on 1 token in 1000, and that side has no mirror here
    return bool(low >= floor - 0.1 - 2 * max(float(high), 0.0))
