"""Policy-gradient bias, measured: in parameter space by autograd, in logit space without it."""

from mismatch_audit.gradient.advantages import RolloutAdvantages, rollout_advantages
from mismatch_audit.gradient.corrections import (
    NONE,
    SEQUENCE_WEIGHTS,
    TOKEN_WEIGHTS,
    Correction,
    standard_corrections,
)
from mismatch_audit.gradient.estimate import measure_gradient
from mismatch_audit.gradient.relative import RelativeBias, relative_bias
from mismatch_audit.gradient.report import GradientReport, SliceBias

__all__ = [
    "NONE",
    "SEQUENCE_WEIGHTS",
    "TOKEN_WEIGHTS",
    "Correction",
    "GradientReport",
    "RelativeBias",
    "RolloutAdvantages",
    "SliceBias",
    "measure_gradient",
    "relative_bias",
    "rollout_advantages",
    "standard_corrections",
]
