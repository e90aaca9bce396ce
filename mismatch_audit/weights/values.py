"""One canonical tensor of a side as values."""

from __future__ import annotations

import math

import torch

from mismatch_audit.weights.schemes import infer_scheme
from mismatch_audit.weights.sides import HEAD, SCALE_KINDS, Side


def numel_of(side: Side, name: str) -> int:
    """Elements of a canonical tensor, -1 when the side lacks it."""
    return math.prod(side.layout.shape(name)) if name in side.names else -1


def served_values(side: Side, name: str) -> torch.Tensor | None:
    """A canonical tensor of a side as fp32, dequantised; None when absent, sharded or unreadable.
    A tied head is read from the embedding."""
    if name not in side.names:
        if name != HEAD or side.geometry.family.embedding not in side.names:
            return None
        name = side.geometry.family.embedding
    pieces = side.layout.tensors[name]
    if len(pieces) != 1:
        return None
    value = pieces[0].view()
    if value.element_size() > 1:
        return value.float()
    for kind in SCALE_KINDS:
        scale_name = f"{name.removesuffix('weight')}{kind}"
        if name.endswith(".weight") and len(side.layout.tensors.get(scale_name, [])) == 1:
            scale = side.layout.tensors[scale_name][0].view()
            rows, columns = value.shape
            scheme = infer_scheme(value.dtype, (rows, columns), scale.dtype, tuple(scale.shape))
            return scheme.decode(value, scale) if scheme is not None else None
    return None
