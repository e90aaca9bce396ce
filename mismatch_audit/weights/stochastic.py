"""Rounding up or down with the right probability: unbiased, reproducible, independent of chunking.

Random bits come from Philox, a counter-based generator (Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3"): the key is the seed, the tensor's name and, for fresh noise, the
push; the counter is the element's index. Any slice of a tensor can be rounded alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from mismatch_audit.weights.rounding import away_from_zero, nearest, toward_zero

_PHILOX_BITS = 256  # per counter step


@dataclass(frozen=True)
class Noise:
    """Uniform random integers per weight. push None: the same at every push (a dither)."""

    seed: int
    push: int | None = None

    def draw(self, name: str, start: int, count: int, bits: int) -> torch.Tensor:
        """Integers in [0, 2^bits) for elements [start, start + count); bits is 16 or 32."""
        text = f"{self.seed}/{'dither' if self.push is None else self.push}/{name}"
        key = np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], np.uint64)
        each = _PHILOX_BITS // bits
        first, skip = divmod(start, each)
        steps = -(-(skip + count) // each)
        raw = np.random.Philox(key=key, counter=first).random_raw(steps * 4)
        values = raw.view(np.uint16 if bits == 16 else np.uint32)[skip : skip + count]
        return torch.from_numpy(values.astype(np.int32 if bits == 16 else np.int64))


Rounding = Callable[[torch.Tensor, torch.dtype], torch.Tensor]


def stochastic(name: str, start: int, noise: Noise) -> Rounding:
    """A rounding of elements [start, ...) of a tensor: up with probability = the place between
    the two neighbours, so that E[q] = w exactly (bf16) or to 2^-32 of a step (other formats)."""

    def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        flat = values.reshape(-1)
        if dtype == torch.bfloat16:
            bits = noise.draw(name, start, flat.numel(), 16)
            return add_and_truncate(flat, bits).view(values.shape)
        uniform = noise.draw(name, start, flat.numel(), 32).double() / 2**32
        return between(flat, uniform, dtype).view(values.shape)

    return rounded


def add_and_truncate(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """fp32 to bf16: add 16 random bits below the cut, then cut. Exact in expectation.

    The 16 discarded bits are the distance to the lower neighbour in 2^-16 of a step, and the
    carry into the kept part happens for exactly that many of the 2^16 values of ``bits``.
    """
    pattern = values.contiguous().float().view(torch.int32)
    summed = ((pattern + bits) & -0x10000).view(torch.float32)
    finite = torch.isfinite(values)
    return torch.where(finite, summed, values.float()).to(torch.bfloat16)


def between(values: torch.Tensor, uniform: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To the neighbour away from zero where uniform < place, for any float format."""
    if dtype == torch.float8_e4m3fn:
        values = values.clamp(-448.0, 448.0)
    low, high = toward_zero(values, dtype), away_from_zero(values, dtype)
    small, large = low.float().double(), high.float().double()
    span = large - small
    place = torch.where(span == 0, torch.zeros_like(span), (values.double() - small) / span)
    return torch.where(uniform < place, high, low)


def rounded_after_cast(name: str, start: int, noise: Noise) -> Rounding:
    """The silent bug: the cast comes first, and what is left to round is already on the grid.

    Kept as the injected fault of the self-test: it ignores the seed and equals round to nearest.
    """
    inner = stochastic(name, start, noise)

    def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return inner(nearest(values, dtype).float(), dtype)

    return rounded


@dataclass(frozen=True)
class SelfTest:
    """bias: largest |mean(q) - w| in its standard errors. share: weights that the seed changes."""

    bias: float
    seed_share: float
    expected_share: float

    @property
    def problem(self) -> str | None:
        """What is wrong with a stochastic rounding, or None."""
        if not self.seed_share:
            return "does not depend on the seed: it rounds a value that was already cast"
        if self.bias > 6.0:
            return f"is biased: a mean is {self.bias:.1f} standard errors from its weight"
        if abs(self.seed_share / self.expected_share - 1) > 0.2:
            return (
                f"two seeds differ in {self.seed_share:.3f} of the weights, "
                f"not in {self.expected_share:.3f}"
            )
        return None


def self_test(
    make: Callable[[str, int, Noise], Rounding], dtype: torch.dtype, draws: int = 64
) -> SelfTest:
    """Draws a rounding many times on a few thousand weights and compares means with weights.

    Groups of weights by their place between two neighbours keep the test sensitive: within a
    group the bias of every wrong rounding has one sign. Costs 0.1 s.
    """
    weights = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 0.05
    low, high = toward_zero(weights, dtype).double(), away_from_zero(weights, dtype).double()
    place = (weights.double() - low) / (high - low)
    first = make("self-test", 0, Noise(0, 0))(weights, dtype)
    second = make("self-test", 0, Noise(1, 0))(weights, dtype)
    total = torch.zeros(4096, dtype=torch.float64)
    for draw in range(draws):
        total += make("self-test", 0, Noise(2, draw))(weights, dtype).double()
    up = (total / draws - low) / (high - low)
    worst = 0.0
    for group in range(8):
        members = (place >= group / 8) & (place < (group + 1) / 8)
        error = float((up - place)[members].mean())
        variance = float((place * (1 - place))[members].sum()) / int(members.sum()) ** 2
        worst = max(worst, abs(error) / (variance / draws) ** 0.5)
    share = float((first.float() != second.float()).float().mean())
    return SelfTest(worst, share, float((2 * place * (1 - place)).mean()))
