"""Do both columns speak of the distribution that was sampled? Temperatures."""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np
import numpy.typing as npt

from mismatch_audit.rollouts.checks.alignment import SampleCheck
from mismatch_audit.rollouts.checks.base import CheckResult
from mismatch_audit.rollouts.checks.contrasts import Slope, contrasts, fit, near
from mismatch_audit.rollouts.checks.sample import Sample
from mismatch_audit.rollouts.checks.strata import Strata
from mismatch_audit.rollouts.checks.streaming import BOTH
from mismatch_audit.rollouts.checks.view import TokenView
from mismatch_audit.rollouts.schema import Header

Array = npt.NDArray[Any]

SLOPE_BAND = 0.03
"""|log slope| that counts as one temperature: T = 0.97 .. 1.03."""
POOLED_BAND = 0.1
"""The same where no siblings exist: there normalisers bend the line."""


RAW: dict[str, Any] = {
    "code": "RAW_LOGPROBS",
    "title": "the sampler's log-probs are from before temperature",
    "remedy": "Set logprobs_mode='processed_logprobs' in the engine: the ratio needs the "
    "distribution that was sampled.",
}
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
        if route != "siblings" and self._drawn_from_trainer() and self.forward.mean(0).beyond(1.02):
            text = (
                f"mean p/q is {row['mean_p_over_q']:.4g} and mean q/p is "
                f"{row['mean_q_over_p']:.4g}: the tokens were drawn from the trainer's "
                "distribution, and the sampler's column is another one"
            )
            return [self.found(text, [row], **RAW)]
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
                **RAW,
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
