"""The trainer's half of a simulated push: cast or quantise the masters, name them, number them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mismatch_audit.weights.rounding import nearest, via_fp16
from mismatch_audit.weights.schemes import E8M0_UNWRITTEN, Scheme, scheme_by_name
from mismatch_audit.weights.simulated_model import Tensors

_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Push:
    """What a trainer sends: unfused canonical names, payloads and scales already quantised."""

    tensors: Tensors
    version: int
    quantised: frozenset[str]


def scale_name(weight: str, scheme: Scheme) -> str:
    kind = "weight_scale_inv" if scheme.name == "block_fp8" else "weight_scale"
    return weight.removesuffix("weight") + kind


def is_linear(name: str) -> bool:
    return name.endswith(tuple(f".{leaf}.weight" for leaf in _LINEAR))


def export_push(
    master: Tensors, scheme: Scheme | None, version: int, faults: frozenset[str] = frozenset()
) -> Push:
    """The trainer's exporter: bf16 for everything but linear layers, which ``scheme`` quantises."""
    tensors: Tensors = {}
    quantised = set()
    for name, value in master.items():
        if "transpose" in faults and name == "model.layers.0.self_attn.o_proj.weight":
            value = value.t().contiguous()
        if is_linear(name) and scheme is not None:
            tensors[name], scale = _quantise(name, value, scheme, faults)
            quantised.add(name)
            if not ("missing_scale" in faults and "layers.1.mlp.up_proj" in name):
                tensors[scale_name(name, scheme)] = scale
        elif "wrong_rounding" in faults and scheme is None:
            tensors[name] = via_fp16(value, torch.bfloat16)
        elif "incoming_dtype" in faults and "layernorm" in name:
            tensors[name] = value.clone()
        else:
            tensors[name] = nearest(value, torch.bfloat16)
    return Push(tensors, version, frozenset(quantised))


def _quantise(
    name: str, value: torch.Tensor, scheme: Scheme, faults: frozenset[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    if "scale_rounding" in faults and scheme.name == "mxfp8":
        scheme = scheme_by_name("mxfp8:ceil")
    if "wrong_rounding" in faults:
        scheme = scheme_by_name(f"{scheme.name}:truncated")
    payload, scale = scheme.encode(value)
    if "unscaled_cast" in faults and "layers.1.mlp.down_proj" in name and scheme.name == "mxfp8":
        payload = nearest(value, torch.float8_e4m3fn)
        scale = torch.full_like(scale, 127)
    if "permuted_scales" in faults and "layers.1.self_attn.o_proj" in name:
        scale = scale.flip(0).contiguous()
    if "nan_scale" in faults and "layers.1.mlp.down_proj" in name:
        scale = scale.clone()
        scale.view(-1)[1] = E8M0_UNWRITTEN if scale.dtype == torch.uint8 else float("nan")
    return payload, scale


def scale_name_of(weight: str, scheme: Scheme) -> str:
    """The engine's scale tensor of a weight: x.weight -> x.weight_scale, w13_weight -> ..."""
    return f"{weight}_scale_inv" if scheme.name == "block_fp8" else f"{weight}_scale"
