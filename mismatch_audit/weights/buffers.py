"""Buffers: no parameters, so pushes and optimizers forget them. RoPE's table is the usual one."""

from __future__ import annotations

import torch

from mismatch_audit.weights.families import Geometry
from mismatch_audit.weights.findings import Fault, TensorReport
from mismatch_audit.weights.formats import code_of, short
from mismatch_audit.weights.sides import Side

# A live table holds cos and sin of the frequencies in the engine's dtype. The angle of a rounded
# pair is within 0.0058 of its formula in bf16 (bases 1e4 to 1e7, heads of 32 to 256); fp16 loses
# its smallest frequencies, 1e-7 and below, to half a subnormal step.
_TOLERANCE = 2**-7
_STEP = 2**-24


def inverse_frequencies(geometry: Geometry) -> torch.Tensor | None:
    """theta^(-2 i / d) for i < d / 2, or None when the model scales its positions or is unknown.

    Source: RoFormer (arXiv 2104.09864), section 3.2.2. Shape ``[head_dim / 2]``, fp32.
    """
    theta, parameters = geometry.rope.get("theta"), geometry.rope.get("parameters") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if not isinstance(theta, int | float) or not geometry.head_dim or kind != "default":
        return None
    share = parameters.get("partial_rotary_factor", 1.0)
    if share != 1.0:
        return None
    steps = torch.arange(0, geometry.head_dim, 2, dtype=torch.float64) / geometry.head_dim
    return (float(theta) ** -steps).float()


def check_buffer(name: str, stored: torch.Tensor, geometry: Geometry) -> TensorReport:
    """A stored inverse-frequency table against the formula of its own config."""
    values = stored.float().reshape(-1)
    report = TensorReport(
        name,
        served_dtype=short(code_of(stored.dtype)),
        served_shape=tuple(stored.shape),
        elements=values.numel(),
    )
    if not bool(torch.isfinite(values).all()):
        report.fault = Fault.NONFINITE
    elif not bool(values.any()):
        report.fault = Fault.ZEROED
        report.evidence["equals"] = "zero: every position would look like the first"
    else:
        wanted = inverse_frequencies(geometry)
        if wanted is None:
            report.evidence["unchecked"] = "config.json gives no plain rotary frequencies"
        elif wanted.shape != values.shape:
            report.fault = Fault.SHAPE
            report.trainer_shape = tuple(wanted.shape)
        else:
            off = ((values - wanted).abs() - _STEP).clamp(min=0)
            error = float((off / wanted).max())
            report.relative_error = error
            if error > _TOLERANCE:
                report.fault = Fault.BUFFER
                report.evidence["worst_relative_error"] = error
    return report


def check_inverse_frequencies(name: str, served: Side) -> TensorReport | None:
    """The report of a served ``inv_freq`` that the trainer does not store; None for others."""
    if not name.endswith("inv_freq"):
        return None
    return check_buffer(name, served.layout.tensors[name][0].view(), served.geometry)
