"""Casts of a master weight to a served format, and the roundings an exporter may use by mistake.

Every function works on the integer pattern of the target format, whose magnitude grows with the
pattern (sign and magnitude), so "one step towards zero" is ``pattern - 1`` for either sign.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

E4M3_MAX = 448.0
_PATTERN = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pattern(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as signed integers of the same width (a view)."""
    return tensor.view(_PATTERN[tensor.element_size()])


def nearest(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to nearest, ties to even; e4m3 saturates at 448 (it has no infinity)."""
    if dtype == torch.float8_e4m3fn:
        return master.float().clamp(-E4M3_MAX, E4M3_MAX).to(dtype)
    return master.to(dtype)


def toward_zero(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Truncation of the magnitude."""
    rounded = nearest(master, dtype)
    bits = pattern(rounded)
    bits -= (rounded.float().abs() > master.float().abs()).to(bits.dtype)
    return rounded


def away_from_zero(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The next representable magnitude, unless the value is representable."""
    rounded = toward_zero(master, dtype)
    bits = pattern(rounded)
    bits += (rounded.float() != master.float()).to(bits.dtype)
    return rounded


def down(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Towards minus infinity."""
    return torch.where(
        pattern(master.float()) < 0, away_from_zero(master, dtype), toward_zero(master, dtype)
    )


def up(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Towards plus infinity."""
    return torch.where(
        pattern(master.float()) < 0, toward_zero(master, dtype), away_from_zero(master, dtype)
    )


def half_away(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To nearest with ties away from zero (a common hand-written ``+ 0x8000``)."""
    low, high = toward_zero(master, dtype), away_from_zero(master, dtype)
    middle = (low.float().double() + high.float().double()) / 2
    return torch.where(master.double().abs() >= middle.abs(), high, low)


def via_fp16(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Through fp16 on the way (rounded twice, small values flushed)."""
    return nearest(master.half(), dtype)


def via_bf16(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Through bf16 on the way (rounded twice)."""
    return nearest(master.bfloat16(), dtype)


Rounding = Callable[[torch.Tensor, torch.dtype], torch.Tensor]

# Tried in this order when a served tensor lies within one step of its master.
WRONG_ROUNDINGS: dict[str, Rounding] = {
    "toward_zero": toward_zero,
    "away_from_zero": away_from_zero,
    "down": down,
    "up": up,
    "half_away": half_away,
    "via_fp16": via_fp16,
    "via_bf16": via_bf16,
}


def ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Patterns as integers that order like the values, so that differences count ulps.

    +0 and -0 are one step apart: they are different bytes.
    """
    bits = pattern(tensor)
    width = bits.element_size() * 8 - 1
    return bits ^ ((bits >> width) & torch.iinfo(bits.dtype).max)
