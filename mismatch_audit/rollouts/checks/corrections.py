"""What the trainer did about the mismatch, and what that does to the gradient and the metrics."""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatch_audit.rollouts.checks.alignment import SampleCheck
from mismatch_audit.rollouts.checks.base import CheckResult
from mismatch_audit.rollouts.checks.sample import Row, Sample
from mismatch_audit.rollouts.checks.strata import Strata
from mismatch_audit.rollouts.checks.streaming import BOTH, Streaming
from mismatch_audit.rollouts.checks.view import LOG_RATIO_CAP, TokenView
from mismatch_audit.rollouts.schema import Header


class AppliedWeights(SampleCheck):
    """Applied importance weights against the raw ones. Raw weights have mean 1 under the sampled
    distribution, so the mean applied weight is the scale of the gradient."""

    code = "GRADIENT_SCALED"
    title = "importance weights shrink or blow up the gradient"
    needs: tuple[str, ...] = (*BOTH, "applied_weight")
    priority = 40
    remedy = "Mend the mismatch: clipping hides it and changes the learning rate."

    def __init__(self, sample: Sample) -> None:
        super().__init__(sample)
        self.applied, self.raw = Strata(), Strata()
        self.zeros = self.ones = self.tokens = 0

    def see(self, tokens: TokenView) -> None:
        super().see(tokens)
        w = tokens.pack("applied_weight")
        known = np.isfinite(w)
        n, raw = tokens.n, tokens.sum_ratio
        self.zeros += int(np.count_nonzero(w == 0))
        self.ones += int(np.count_nonzero(w == 1))
        if not known.all():
            w[~known] = 0.0
            n, raw = tokens.sums(known), tokens.sums(tokens.ratio * known)
        zero = np.zeros(len(n), dtype=np.int64)
        self.applied.add(zero, tokens.clusters, n, tokens.sums(w))
        self.raw.add(zero, tokens.clusters, n, raw)
        self.tokens += int(n.sum())

    def judge(self, header: Header) -> list[CheckResult]:
        applied, raw = self.applied.mean(0), self.raw.mean(0)
        if not self.tokens:
            return [self.unobserved(*BOTH, header=header)]
        if self.ones == self.tokens:
            return [self.clean("all weights are 1: the loss corrects nothing")]
        kind, altered, rows = self._compare()
        row: dict[str, Any] = {
            "mean_applied_weight": applied.value,
            "mean_raw_ratio": raw.value,
            "share_zero": self.zeros / self.tokens,
            "weights_are": kind,
            "share_altered": altered,
        }
        answers = []
        if self.zeros == self.tokens or applied.value < 1e-3:
            answers.append(
                self.found(
                    f"all {self.tokens} tokens have weight 0: nothing is learned",
                    [row],
                    code="ZERO_GRADIENT",
                    title="every token is masked: the gradient is zero",
                    priority=41,
                )
            )
        elif applied.clusters >= 2 and not 0.5 <= applied.value <= 2.0:
            text = f"the gradient is scaled by {applied.value:.3g}"
            answers.append(self.found(text, [row]))
        if rows >= 20 and altered > 0.05:
            answers.append(
                self.found(
                    f"{altered:.1%} of the {kind} weights were clipped or masked: metrics of the "
                    "applied weights do not show the mismatch",
                    [row],
                    code="METRIC_AFTER_CLIP",
                    title="logged ratios are from after clipping",
                    severity="warning",
                    priority=39,
                    remedy="Log the raw ratio as well (this audit works it out from both columns).",
                )
            )
        text = f"mean applied weight {applied.value:.3g}, {altered:.1%} of {kind} weights altered"
        return answers or [self.clean(text, [row])]

    def _compare(self) -> tuple[str, float, int]:
        """-> (token | sequence | geometric, share of weights that are not the raw ratio, rows)."""
        off = {"token": 0.0, "sequence": 0.0, "geometric": 0.0}
        rows = 0
        for row in self.sampled_rows(*BOTH, "applied_weight"):
            use = row.used & np.isfinite(row.columns["applied_weight"])
            if not use.any():
                continue
            rows += 1
            for kind, gap in _altered(row, use).items():
                off[kind] += gap
        if not rows:
            return "token", 0.0, 0
        kind = min(off, key=lambda k: off[k])
        return kind, off[kind] / rows, rows


def _altered(row: Row, use: Any) -> dict[str, float]:
    d = np.clip(row.d[use], -LOG_RATIO_CAP, LOG_RATIO_CAP)
    n = len(d)
    w = row.columns["applied_weight"][use].astype(np.float64)
    total = float(np.clip(d.sum(), -LOG_RATIO_CAP, LOG_RATIO_CAP))
    raw = {"token": np.exp(d), "sequence": np.exp(total), "geometric": np.exp(d.sum() / n)}
    # 1%: float32 sums of many terms on the trainer's side
    return {
        k: float(np.count_nonzero(np.abs(w - r) > 0.01 * np.abs(r))) / n for k, r in raw.items()
    }


class RatioForm(Streaming):
    """The ratio of a sequence as a product and as a geometric mean are different numbers."""

    code = "LENGTH_DEPENDENT_RATIO"
    title = "sequence ratios leave every band because sequences are long"
    severity = "note"
    priority = 29
    remedy = (
        "A product of token ratios spreads as sqrt(T): choose token weights or the geometric mean, "
        "or state the horizon; and name which one a metric reports."
    )

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.product = self.geometric = 0
        self.sum_product = self.sum_product2 = self.sum_geometric = 0.0

    def see(self, tokens: TokenView) -> None:
        full = tokens.n > 0
        total, n = tokens.sum_d[full], tokens.n[full]
        mean = total / n
        product = np.exp(np.clip(total, -LOG_RATIO_CAP, LOG_RATIO_CAP))
        self.rows += len(total)
        self.product += int((np.abs(total) > np.log(2)).sum())
        self.geometric += int((np.abs(mean) > 0.1).sum())
        self.sum_product += float(product.sum())
        self.sum_product2 += float((product**2).sum())
        self.sum_geometric += float(np.exp(mean).sum())

    def judge(self, header: Header) -> list[CheckResult]:
        if self.rows < 20:
            return [self.too_little("needs 20 sequences")]
        ess = self.sum_product**2 / self.sum_product2 / self.rows
        row = {
            "mean_product_ratio": self.sum_product / self.rows,
            "mean_geometric_ratio": self.sum_geometric / self.rows,
            "ess_of_products": ess,
            "share_products_outside_half_to_2": self.product / self.rows,
            "share_geometric_outside_0.9_to_1.1": self.geometric / self.rows,
        }
        if self.product > 0.5 * self.rows and self.geometric < 0.2 * self.rows:
            return [self.found(f"ESS of sequence weights {ess:.2g} of the rows", [row])]
        return [self.clean(f"ESS of sequence weights {ess:.2g} of the rows", [row])]


class PolicyVersions(Streaming):
    """The policy in the denominator must be the one that sampled, or staleness is uncorrected."""

    code = "OLD_POLICY_NOT_BEHAVIOUR"
    title = "the old policy is not the one that sampled, and nothing corrects for it"
    needs: tuple[str, ...] = ("weights_version_max", "trainer_version")
    priority = 81
    remedy = (
        "Use the sampler's log-probs in the denominator, or multiply by (truncated) importance "
        "weights of old policy over behaviour policy."
    )

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.stale = self.mixed = 0
        self.lags: dict[int, int] = {}
        self.corrected = self.weights_seen = False
        self.lag_by_step = Strata()

    def see(self, tokens: TokenView) -> None:
        lag = tokens.lag
        self.rows += len(lag)
        self.stale += int((lag != 0).sum())
        step = tokens.scalar("step").astype(np.int64)
        self.lag_by_step.add(step, tokens.clusters, np.ones(len(lag)), np.maximum(lag, 0) + 0.0)
        oldest, newest = tokens.scalar("weights_version_min"), tokens.scalar("weights_version_max")
        self.mixed += int(((oldest >= 0) & (oldest < newest)).sum())
        for value, count in zip(*np.unique(np.clip(lag, -64, 64), return_counts=True), strict=True):
            self.lags[int(value)] = self.lags.get(int(value), 0) + int(count)
        if (lag != 0).any() and tokens.has("applied_weight"):
            self.weights_seen = True
            w = tokens.pack("applied_weight")
            far = tokens.abs_d > 0.01
            self.corrected |= bool((np.abs(w[far] - 1.0) > 1e-3).any())

    def judge(self, header: Header) -> list[CheckResult]:
        rows = [
            {"lag": lag, "sequences": count}
            for lag, count in sorted(self.lags.items(), key=lambda item: -item[1])
        ]
        text = f"{self.stale} of {self.rows} sequences were sampled by other weights"
        if self.mixed:
            text += f", {self.mixed} by several in one sequence"
        if self._falls_behind():
            return [
                self.found(
                    f"{text}; the lag rises to {max(self.lags)} and does not level off",
                    rows,
                    code="ENGINE_FALLS_BEHIND",
                    title="the engine's weights version stands still",
                    remedy="Pushes fail or are not counted: look at the engine's log, and push "
                    "once by hand.",
                )
            ]
        if not self.stale:
            return [self.clean(f"all {self.rows} sequences at lag 0", rows)]
        if self.corrected:
            return [self.clean(f"{text}: staleness, and weights correct for it", rows)]
        reason = "weights are all 1" if self.weights_seen else "no applied weights are logged"
        return [self.found(f"{text}; {reason}", rows)]

    def _falls_behind(self) -> bool:
        """The mean lag rises by at least 1 from each third of the steps to the next."""
        keys = self.lag_by_step.order()
        third = len(keys) // 3
        if third < 1 or min(keys) < 0:
            return False
        parts = (keys[:third], keys[third : len(keys) - third], keys[-third:])
        first, middle, last = (self.lag_by_step.mean(*part).value for part in parts)
        return middle >= first + 1 and last >= middle + 1
