"""What a measurement of the policy gradient found: per slice, estimator and target."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from kernel_contracts.estimators import WeightSummary
from kernel_contracts.verdict import BiasEstimate
from mismatch_audit.gradient.relative import RelativeBias

__all__ = ["GradientReport", "SliceBias"]


@dataclass(frozen=True)
class SliceBias:
    """One estimator against one target on one slice.

    bias: relative to the target's gradient.  noise: relative to the root mean square of one
    prompt's gradient without weights, which is never lost in noise.  variance: trace of the
    covariance of the prompts' vectors, over that of the estimator without weights.  cosine:
    between the mean gradients of estimator and target, noise removed.
    """

    slice: str
    estimator: str
    target: str
    bias: RelativeBias
    noise: RelativeBias
    cosine: float
    variance: float
    n_tokens: int
    weights: WeightSummary
    detail: str = ""

    def bounds(self) -> tuple[float, float]:
        """(lower, upper); nothing is claimed where a few responses carry the target."""
        return (0.0, math.inf) if self.detail else (self.bias.lower, self.bias.upper)

    @property
    def harmless_batch(self) -> float:
        """Prompts of a batch whose sampling noise is as large as the bias may be (upper end).

        The mean of B prompts is off by about rms / sqrt(B) at random; below this B the bias hides
        in that. Infinite where there is no bias, 0 where nothing is claimed.
        """
        if self.detail or self.noise.upper == math.inf:
            return 0.0
        return 1 / self.noise.upper**2 if self.noise.upper > 0 else math.inf

    def row(self) -> dict[str, Any]:
        """JSON-ready facts; what is not known is None."""
        lower, upper = self.bounds()
        facts: dict[str, Any] = {
            "slice": self.slice,
            "estimator": self.estimator,
            "target": self.target,
            "relative_bias": self.bias.value,
            "lower": lower,
            "upper": upper,
            "bias_to_noise": self.noise.value,
            "bias_to_noise_lower": self.noise.lower if not self.detail else 0.0,
            "bias_to_noise_upper": self.noise.upper if not self.detail else math.inf,
            "harmless_batch": self.harmless_batch,
            "cosine": self.cosine,
            "noise_floor": self.bias.noise_floor,
            "split_half_cosine": self.bias.split_half,
            "variance_ratio": self.variance,
            "n_prompts": self.bias.n,
            "n_tokens": self.n_tokens,
            "ess_share": self.weights.ess_share,
            "max_weight_share": self.weights.max_share,
            "detail": self.detail,
        }
        return {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in facts.items()
        }


@dataclass
class GradientReport:
    """estimates: slice -> bias of the estimator without weights, for contracts; noise_estimates:
    the same against the noise.  biases: every slice, estimator and target.  left_out: slice or
    sequence kind -> why.  facts: of the run."""

    estimates: dict[str, BiasEstimate]
    biases: list[SliceBias]
    noise_estimates: dict[str, BiasEstimate] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        return [one.row() for one in self.biases]
