"""The payload of an int8 layer with dynamically quantised activations, read through its kernel.

Identity rows give it exactly where the kernel sums exactly. On an x86 CPU without VNNI it does not:
its multiply-add saturates pairs of products at 16 bits (activations are moved up by 128 to be
unsigned, so that 255 * 127 + 128 * 127 overflows), and large weights beside large weights come back
too small. A second reading then keeps every activation but one within 2 steps of zero, where no
pair can saturate, and takes differences; sums are whole numbers, so it is exact in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_CHUNK = 256
_TOP = 127
# (128 + 2) * 127 + 128 * 127 = 32766 is the largest sum of a pair, and fits into 16 bits.
_SMALL = 2
_NEAR = 64  # inputs that may share a pair, or a block, with the large one
# A quotient this close to a whole number of steps is one (fp32 is good to 1e-5, bf16 to 0.25).
_EXACT, _COARSE = 1e-2, 0.3
# Relative error above which the kernel is said to hold another scale than its parameter.
_OFF = 2**-4


@dataclass(frozen=True)
class Int8Reading:
    """payload [out, in], scale [out, 1]. whole: every value was a whole number of steps.
    off_scale: the kernel applies another scale than its parameter holds (``scale`` is then the
    kernel's, or NaN where neither can be told). saturates: identity rows lost products to it."""

    payload: torch.Tensor
    scale: torch.Tensor
    whole: bool
    off_scale: bool = False
    saturates: bool = False


def read_int8(
    apply: Callable[[torch.Tensor], torch.Tensor],
    columns: int,
    scale: torch.Tensor,
    exact: bool,
) -> Int8Reading:
    """apply: rows [n, columns] -> [n, out] as fp32. scale: the parameter [out, 1]. exact: the
    kernel's outputs are fp32, so that whole sums can be told apart."""
    eye = torch.eye(columns)
    plain = torch.cat([apply(eye[a : a + _CHUNK]) for a in range(0, columns, _CHUNK)]).t()
    answers = torch.isfinite(plain).all(1)
    # Rows that cannot be read keep their scale if that says why, else none at all.
    kept = torch.where(answers[:, None] | ~torch.isfinite(scale), scale, torch.nan)
    good = answers & torch.isfinite(scale[:, 0]) & (scale[:, 0] > 0)
    broken = bool((answers != torch.isfinite(scale[:, 0])).any())
    steps = torch.where(good[:, None], plain / scale, 0.0)
    if not bool(good.any()):
        return Int8Reading(_payload(steps), kept, True, off_scale=broken)
    if _is_whole(steps, exact):
        return Int8Reading(_payload(steps), kept, True, off_scale=broken)
    if exact:
        careful = torch.where(good[:, None], _by_differences(apply, columns, scale), 0.0)
        if _is_whole(careful, exact):
            return Int8Reading(_payload(careful), kept, True, off_scale=broken, saturates=True)
    error = (plain - steps.round() * scale)[good].norm() / plain[good].norm()
    if error > _OFF or float(steps.abs().max()) > _TOP + 1.5:
        largest = plain.abs().amax(1, keepdim=True) / _TOP
        own = torch.where(good[:, None], largest.clamp_min(torch.finfo(torch.float32).tiny), kept)
        steps = torch.where(good[:, None], plain / own, 0.0)
        return Int8Reading(_payload(steps), own, False, off_scale=True)
    return Int8Reading(_payload(steps), kept, False, off_scale=broken)


def _is_whole(steps: torch.Tensor, exact: bool) -> bool:
    far = (steps - steps.round()).abs().max()
    return bool(far <= (_EXACT if exact else _COARSE)) and bool(steps.abs().max() <= _TOP + 1.5)


def _payload(steps: torch.Tensor) -> torch.Tensor:
    whole = torch.nan_to_num(steps.round(), nan=0.0, posinf=_TOP, neginf=-_TOP - 1)
    return whole.clamp(-_TOP - 1, _TOP).to(torch.int8)


def _by_differences(
    apply: Callable[[torch.Tensor], torch.Tensor], columns: int, scale: torch.Tensor
) -> torch.Tensor:
    """Steps [out, in]: one large activation fixes the quantiser's scale at 1 / 127, another of two
    steps moves over the inputs; the large one's own (perhaps saturated) sum cancels."""
    out = torch.empty(scale.shape[0], columns)
    apart = min(_NEAR, columns // 2)
    for large, inputs in ((0, range(apart, columns)), (columns - 1, range(apart))):
        base = torch.zeros(1, columns)
        base[0, large] = 1.0
        sums = apply(base) * _TOP / scale.t()
        for at in range(0, len(inputs), _CHUNK):
            moving = list(inputs[at : at + _CHUNK])
            rows = base.repeat(len(moving), 1)
            rows[torch.arange(len(moving)), moving] = _SMALL / _TOP
            out[:, moving] = ((apply(rows) * _TOP / scale.t() - sums) / _SMALL).t()
    return out
