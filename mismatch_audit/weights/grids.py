"""Served formats as grids: what a master becomes, how wide a step is, which bytes it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kernel_contracts.errors import InputError
from mismatch_audit.weights.rounding import E4M3_MAX, Rounding, nearest
from mismatch_audit.weights.schemes import (
    MX_BLOCK,
    SCHEMES,
    Scheme,
    e4m3_to_float,
    e8m0_to_float,
    spread,
)


@dataclass(frozen=True)
class Served:
    """values: fp32, what the engine computes with. parts: the stored tensors, as bytes.

    signs_only: a change of scale alone does not count as a visible update.
    """

    values: torch.Tensor
    parts: tuple[torch.Tensor, ...]
    signs_only: bool = False

    def changed(self, other: Served) -> torch.Tensor:
        """Which weights an engine would see change."""
        if self.signs_only:
            return (self.values > 0) != (other.values > 0)
        return self.values != other.values


class Grid(Protocol):
    """A format of a matrix ``[rows, columns]``; amax is the largest magnitude of the tensor."""

    @property
    def name(self) -> str: ...

    def served(self, w: torch.Tensor, amax: torch.Tensor, rounding: Rounding) -> Served: ...

    def step(self, w: torch.Tensor, amax: torch.Tensor) -> torch.Tensor | None: ...


def float_step(w: torch.Tensor, mantissa: int, smallest: float) -> torch.Tensor:
    """2^(floor(log2 |w|) - mantissa), at least the subnormal step: the gap to the next number."""
    exponent = torch.frexp(w.float().abs())[1] - 1
    step = torch.ldexp(torch.ones_like(w, dtype=torch.float32), exponent - mantissa)
    return torch.where(w == 0, smallest, step.clamp_min(smallest))


@dataclass(frozen=True)
class FloatGrid:
    """bf16 and fp16."""

    name: str
    dtype: torch.dtype
    mantissa: int
    smallest: float

    def served(self, w: torch.Tensor, amax: torch.Tensor, rounding: Rounding) -> Served:
        q = rounding(w, self.dtype)
        return Served(q.float(), (q,))

    def step(self, w: torch.Tensor, amax: torch.Tensor) -> torch.Tensor | None:
        return float_step(w, self.mantissa, self.smallest)


@dataclass(frozen=True)
class ScaledGrid:
    """e4m3 with one fp32 scale a tensor, or one power of two per 32 inputs (mxfp8)."""

    name: str
    scheme: Scheme

    def _scale(self, w: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.scheme.name == "mxfp8":
            stored = self.scheme.encode(w)[1]
            return stored, spread(e8m0_to_float(stored), 1, MX_BLOCK, w.shape)
        stored = (amax.float() / E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny)
        return stored.reshape(1), stored

    def served(self, w: torch.Tensor, amax: torch.Tensor, rounding: Rounding) -> Served:
        stored, scale = self._scale(w, amax)
        payload = rounding((w / scale).clamp(-E4M3_MAX, E4M3_MAX), torch.float8_e4m3fn)
        return Served(e4m3_to_float(payload) * scale, (payload, stored))

    def step(self, w: torch.Tensor, amax: torch.Tensor) -> torch.Tensor | None:
        _, scale = self._scale(w, amax)
        return float_step(w / scale, 3, 2.0**-9) * scale


@dataclass(frozen=True)
class BinaryGrid:
    """sign(w) times the mean magnitude of its row (XNOR-Net, arXiv 1603.05279, section 3.1).

    Stochastic rounding takes + with probability (1 + w / scale) / 2, clipped; unbiased inside
    the scale only, as one bit cannot represent more.
    """

    name: str = "binary"

    def served(self, w: torch.Tensor, amax: torch.Tensor, rounding: Rounding) -> Served:
        scale = w.abs().mean(1, keepdim=True)
        if rounding is nearest:
            positive = w >= 0
        else:
            # place between 1 and 2 in bf16's coarsest binade: exact odds from any unbiased rounding
            odds = ((1 + w / scale.clamp_min(1e-30)) / 2).clamp(0, 1)
            positive = rounding(1 + odds * 2**-7, torch.bfloat16).float() > 1
        values = torch.where(positive, scale, -scale)
        return Served(values, (pack_bits(positive), scale), signs_only=True)

    def step(self, w: torch.Tensor, amax: torch.Tensor) -> torch.Tensor | None:
        return None


def pack_bits(flags: torch.Tensor) -> torch.Tensor:
    """Booleans as bytes, eight to a byte, little end first; the last byte is padded with 0."""
    flat = flags.reshape(-1).to(torch.uint8)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
    return (padded * weights).sum(1, dtype=torch.uint8)


BF16 = FloatGrid("bf16", torch.bfloat16, 7, 2.0**-133)
GRIDS: dict[str, Grid] = {
    "bf16": BF16,
    "fp16": FloatGrid("fp16", torch.float16, 10, 2.0**-24),
    "fp8": ScaledGrid("fp8", SCHEMES["tensor_fp8"]),
    "mxfp8": ScaledGrid("mxfp8", SCHEMES["mxfp8"]),
    "binary": BinaryGrid(),
}


def grid_by_name(name: str) -> Grid:
    """Raises InputError for an unknown cast."""
    if name not in GRIDS:
        raise InputError(f"unknown cast {name!r}", fix=f"one of {', '.join(GRIDS)}")
    return GRIDS[name]


def changed_bytes(before: Served, after: Served) -> int:
    """Stored bytes that differ between two served copies."""
    return sum(
        int(torch.count_nonzero(_bytes(a) != _bytes(b)))
        for a, b in zip(before.parts, after.parts, strict=True)
    )


def _bytes(stored: torch.Tensor) -> torch.Tensor:
    return stored.contiguous().view(torch.uint8)
