"""Do both columns speak of the distribution that was sampled? Temperature, truncation, penalty."""

from __future__ import annotations

from math import exp, log
from typing import Any

import numpy as np
import numpy.typing as npt

from mismatch_audit.rollouts.checks.alignment import SampleCheck
from mismatch_audit.rollouts.checks.base import CheckResult
from mismatch_audit.rollouts.checks.contrasts import Slope, contrasts, fit, near
from mismatch_audit.rollouts.checks.sample import Sample
from mismatch_audit.rollouts.checks.strata import Mean, Strata, mean_of
from mismatch_audit.rollouts.checks.streaming import BOTH
from mismatch_audit.rollouts.checks.view import TokenView
from mismatch_audit.rollouts.schema import Header

Array = npt.NDArray[Any]

SLOPE_BAND = 0.03
"""|log slope| that counts as one temperature: T = 0.97 .. 1.03."""
POOLED_BAND = 0.1
"""The same where no siblings exist: there normalisers bend the line."""


UNNORMALISED: dict[str, Any] = {
    "code": "UNNORMALISED_TEMPERATURE",
    "title": "log-probs were divided by the temperature",
    "priority": 86,
    "remedy": "Divide logits by T and then take the log-softmax: log p / T is no log-prob.",
}


class Temperature(SampleCheck):
    """The two sides' temperatures against each other, and against the logged one."""

    code = "TEMPERATURE_MISMATCH"
    title = "the two sides use different temperatures"
    priority = 85
    remedy = "Divide the trainer's logits by the sampling temperature, and log processed log-probs."

    def __init__(self, sample: Sample) -> None:
        super().__init__(sample)
        self.forward, self.backward = Strata(), Strata()

    def see(self, tokens: TokenView) -> None:
        super().see(tokens)
        zero = np.zeros(len(tokens.n), dtype=np.int64)
        self.forward.add(zero, tokens.clusters, tokens.n, tokens.sum_ratio)
        inverse = tokens.sums(1.0 / tokens.ratio)
        self.backward.add(zero, tokens.clusters, tokens.n, inverse)

    def judge(self, header: Header) -> list[CheckResult]:
        s, t, group = pooled(self.sample)
        if len(s) < 100:
            return [self.too_little("needs 100 comparable tokens of probability below 0.99")]
        logged = logged_value(self.sample, "temperature")
        row: dict[str, Any] = {"logged_temperature": logged}
        straight = _proportional(s, t)
        slope, route = self._slope(s, t, group)
        row |= {
            "slope_trainer_on_sampler": slope.slope,
            "explained": slope.explained,
            "route": route,
            "pairs": slope.pairs,
            "mean_p_over_q": self.forward.mean(0).value,
            "mean_q_over_p": self.backward.mean(0).value,
        }
        if straight is not None:
            return [self._unnormalised(straight, row)]
        band = SLOPE_BAND if route == "siblings" else POOLED_BAND
        if slope.differs(band):
            return [self._named(slope.slope, logged, row)]
        if route == "siblings":
            return [self.clean(f"one temperature: slope {slope.slope:.4g}", [row])]
        if slope.groups < 10:
            return [self.too_little("needs 10 prompts")]
        return [self.clean(f"slope {slope.slope:.4g} over all tokens (no siblings: ±10%)", [row])]

    def _slope(self, s: Array, t: Array, group: Array) -> tuple[Slope, str]:
        pairs = contrasts(self.sample)
        if pairs.count:
            slope = fit(*pairs.differences(), pairs.group)
            if slope.groups >= 10 and slope.pairs >= 20:
                return slope, "siblings"
        return fit(s - s.mean(), t - t.mean(), group), "all tokens"

    def _unnormalised(self, c: float, row: dict[str, Any]) -> CheckResult:
        text = f"one column is {c:.4g} times the other, token by token (1/T = {c:.4g})"
        return self.found(
            text,
            [row | {"factor": c}],
            **UNNORMALISED,
        )

    def _named(self, b: float, logged: float | None, row: dict[str, Any]) -> CheckResult:
        sampled_by_trainer = self._drawn_from_trainer()
        text = f"differences of siblings' log-probs have slope {b:.4g} instead of 1"
        raw = logged is not None and abs(log(logged)) > SLOPE_BAND and near(b, 1 / logged)
        forgot = logged is not None and abs(log(logged)) > SLOPE_BAND and near(b, logged)
        if raw or (not forgot and sampled_by_trainer):
            return self.found(
                f"{text}: the sampler's ignore T = {1 / b:.4g}",
                [row],
                code="RAW_LOGPROBS",
                title="the sampler's log-probs are from before temperature",
                remedy="Set logprobs_mode='processed_logprobs' in the engine: the ratio needs the "
                "distribution that was sampled.",
            )
        if forgot:
            return self.found(
                f"{text}: the trainer's ignore T = {b:.4g}",
                [row],
                code="TRAINER_TEMPERATURE",
                title="the trainer scores at another temperature than the engine sampled at",
            )
        return self.found(f"{text}; the log says T = {logged}", [row])

    def _drawn_from_trainer(self) -> bool:
        """E_y[q/p] = 1 where y was drawn from p, and E_y[p/q] = 1 where it was drawn from q."""
        forward, backward = self.forward.mean(0), self.backward.mean(0)
        return abs(backward.value - 1) < 0.2 * abs(forward.value - 1)


class RescoreTemperature(SampleCheck):
    """The engine's own second scoring must be at the temperature that was sampled at."""

    code = "RESCORE_TEMPERATURE"
    title = "the engine's re-scoring uses another temperature"
    needs: tuple[str, ...] = ("sampler_logprob", "rescore_logprob")
    priority = 84
    remedy = "Send the sampling temperature with the re-scoring request (it was fixed, often to 0)."

    def judge(self, header: Header) -> list[CheckResult]:
        pairs = contrasts(self.sample, "sampler_logprob", "rescore_logprob")
        slope = fit(*pairs.differences(), pairs.group) if pairs.count else None
        if slope is None or slope.groups < 10 or slope.pairs < 20:
            return [self.too_little("needs siblings of 10 prompts that part at a sampled token")]
        row = {
            "slope_rescore_on_sampler": slope.slope,
            "explained": slope.explained,
            "logged_temperature": logged_value(self.sample, "temperature"),
        }
        if slope.differs(SLOPE_BAND):
            return [self.found(f"slope {slope.slope:.4g} instead of 1", [row])]
        return [self.clean(f"slope {slope.slope:.4g}", [row])]


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


def pooled(sample: Sample) -> tuple[Array, Array, Array]:
    """(log q, log p, prompt) of the sample's tokens that are not near-certain on both sides."""
    s, t, group = [], [], []
    for number, key in enumerate(sorted(sample.groups)):
        for row in sample.groups[key]:
            if any(c not in row.columns for c in BOTH):
                continue
            a, b = (row.columns[c].astype(np.float64) for c in BOTH)
            use = row.used & ((a < -0.01) | (b < -0.01)) & (a > -50) & (b > -50)
            s.append(a[use])
            t.append(b[use])
            group.append(np.full(int(use.sum()), number))
    if not s:
        return np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64)
    return np.concatenate(s), np.concatenate(t), np.concatenate(group)


def logged_value(sample: Sample, name: str) -> float | None:
    """The median of a logged setting over the sample; None where the log does not say."""
    values = np.array([float(r.scalars[name]) for r in sample.rows()])
    if name == "top_k":
        values = values[values >= 0]
    values = values[~np.isnan(values)]
    return float(np.median(values)) if len(values) else None


def _proportional(s: Array, t: Array) -> float | None:
    """c where t = c s token by token (and not by normalised temperature), else None."""
    c = float((s * t).sum() / (s * s).sum())
    gap, left = float(((t - s) ** 2).sum()), float(((t - c * s) ** 2).sum())
    return c if c > 0 and abs(log(c)) > SLOPE_BAND and left < 0.02 * gap else None


def _within(low: float, high: float, top_p: float | None) -> bool:
    """Whether d respects log(top_p), give or take the noise seen on the other side."""
    floor = log(top_p) if top_p is not None and 0 < top_p < 1 else log(exp(-3.0))
    return bool(low >= floor - 2 * max(float(high), 0.0) - 0.02)
