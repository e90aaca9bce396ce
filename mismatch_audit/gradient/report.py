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

    variance: trace of the covariance of the prompts' vectors, over that of the estimator without
    weights.  cosine: between the mean gradients of estimator and target, noise removed.
    """

    slice: str
    estimator: str
    target: str
    bias: RelativeBias
    cosine: float
    variance: float
    n_tokens: int
    weights: WeightSummary
    detail: str = ""

    def bounds(self) -> tuple[float, float]:
        """(lower, upper); nothing is claimed where a few responses carry the target."""
        return (0.0, math.inf) if self.detail else (self.bias.lower, self.bias.upper)

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
    """estimates: slice -> bias of the estimator without weights, for contracts.  biases: every
    slice, estimator and target.  left_out: slice or sequence kind -> why.  facts: of the run."""

    estimates: dict[str, BiasEstimate]
    biases: list[SliceBias]
    left_out: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        return [one.row() for one in self.biases]
