"""Probes: what matrix does a layer apply? Answered through the layer, never from its storage.

Reading parameters back cannot see a repacked, swizzled or captured copy that the kernel really
multiplies with; probing can. Everything takes ``apply(x [rows, in]) -> y [rows, out]``, so the
same maths serves a simulated layer and a live engine's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

Apply = Callable[[torch.Tensor], torch.Tensor]

# A healthy MXFP8 layer measures 0.03 to 0.05 here, any layout fault 0.4 and more.
PROBE_LIMIT = 0.25
PROBE_ROWS = 8
# Not 0: rows that equal a weight's own initialisation would probe it along one direction.
PROBE_SEED = 1729


@dataclass(frozen=True)
class Probe:
    """relative_error: ||y - x W^T|| / ||x W^T|| (inf when y is not finite)."""

    relative_error: float
    limit: float = PROBE_LIMIT

    @property
    def ok(self) -> bool:
        return self.relative_error <= self.limit  # false for NaN


def probe_rows(columns: int, rows: int = PROBE_ROWS, seed: int = PROBE_SEED) -> torch.Tensor:
    """Standard normal inputs ``[rows, columns]``, the same for the same seed."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def relative_error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """||actual - wanted|| / ||wanted|| in float64; inf when actual is not finite."""
    a, w = actual.double(), wanted.double()
    if not bool(torch.isfinite(a).all()):
        return math.inf
    norm = float(w.norm())
    error = float((a - w).norm())
    return error / norm if norm else (0.0 if error == 0 else math.inf)


def probe_linear(
    apply: Apply,
    weight: torch.Tensor,
    *,
    rows: int = PROBE_ROWS,
    seed: int = PROBE_SEED,
    limit: float = PROBE_LIMIT,
    dtype: torch.dtype = torch.float32,
) -> Probe:
    """A linear layer against a matrix ``[out, in]``.

    With the layer's own dequantised weight this is the self-consistency probe; with the master's
    it is the trainer-anchored one. dtype: what the layer takes.
    """
    x = probe_rows(weight.shape[1], rows, seed).to(dtype)
    return Probe(relative_error(apply(x).float(), x.float() @ weight.float().t()), limit)


def gated_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """silu(x G^T) * (x U^T) through D^T, for gate_up ``[2 I, H]`` and down ``[H, I]``."""
    gate, up = (x @ gate_up.t()).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ down.t()


def probe_expert(
    apply: Apply,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    rows: int = PROBE_ROWS,
    seed: int = PROBE_SEED,
    limit: float = PROBE_LIMIT,
) -> Probe:
    """One expert, two matrices and the gate between them, with all rows routed to it."""
    x = probe_rows(gate_up.shape[1], rows, seed)
    wanted = gated_mlp(x, gate_up.float(), down.float())
    return Probe(relative_error(apply(x).float(), wanted), limit)


def effective_weight(
    apply: Apply, columns: int, block: int = 256, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The matrix ``[out, in]`` that a layer applies, by probing it with identity rows.

    Exact when the kernel multiplies by 1 and adds 0 exactly; activation quantisation keeps both.
    """
    eye = torch.eye(columns, dtype=dtype)
    parts = [apply(eye[a : a + block].contiguous()).float() for a in range(0, columns, block)]
    return torch.cat(parts).t().contiguous()


def movement_coefficient(
    apply: Apply, before: torch.Tensor, after: torch.Tensor, *, rows: int = 64, seed: int = 1
) -> tuple[float, float]:
    """How far the layer moved from ``before`` to ``after``: (coefficient, its standard error).

    c = <y - x B^T, x (A - B)^T> / ||x (A - B)^T||^2: 1 when the update is served, 0 when it is
    not. Sees updates far below the probe's limit (a LoRA, one push) when the error is small.
    """
    x = probe_rows(after.shape[1], rows, seed)
    y = apply(x).double()
    base, change = x.double() @ before.double().t(), x.double() @ (after - before).double().t()
    size = float((change * change).sum())
    if size == 0 or not bool(torch.isfinite(y).all()):
        return math.nan, math.inf
    coefficient = float(((y - base) * change).sum()) / size
    rest = y - base - coefficient * change
    spread = float(rest.square().mean().sqrt()) / math.sqrt(size)
    return coefficient, spread
