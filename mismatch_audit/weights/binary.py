"""Binary weights trained with a few-bit residual: the sign is served, the residual is the rest.

There is no fp32 master: a weight is a sign and an integer residual of ``bits`` bits, in units of
1 / 2^(bits - 1) of the distance between -1 and +1. An update moves the residual; when that runs
over, the sign flips and the overshoot stays in the residual (error diffusion), so nothing is lost
until the residual saturates. Every flip is logged: old signs plus the log must give the new signs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from kernel_contracts.errors import InputError
from mismatch_audit.weights.grids import pack_bits


@dataclass
class BinaryState:
    """positive: served signs, bool. residual: int16 in [-2^(bits-1), 2^(bits-1) - 1]."""

    positive: torch.Tensor
    residual: torch.Tensor
    bits: int

    @classmethod
    def start(cls, weights: torch.Tensor, bits: int) -> BinaryState:
        """Signs of a float weight, residual zero. Raises InputError for bits outside 2..8."""
        if not 2 <= bits <= 8:
            raise InputError(f"a residual of {bits} bits is not supported", fix="2 to 8 bits")
        return cls(weights >= 0, torch.zeros(weights.shape, dtype=torch.int16), bits)

    @property
    def half(self) -> int:
        return 1 << (self.bits - 1)

    def clone(self) -> BinaryState:
        return BinaryState(self.positive.clone(), self.residual.clone(), self.bits)

    def step(self, update: torch.Tensor, uniform: torch.Tensor | None = None) -> torch.Tensor:
        """Adds an update (in units of the distance between the signs); returns flipped indices.

        uniform: random numbers in [0, 1) that round the update stochastically; without them it is
        rounded to nearest, and updates below half a unit do nothing at all.
        """
        units = update.double() * 2 * self.half
        whole = (units + uniform).floor() if uniform is not None else units.round()
        moved = self.residual.long() + whole.long().view(self.residual.shape)
        over, under = moved > self.half - 1, moved < -self.half
        flip = (over & ~self.positive) | (under & self.positive)
        moved = torch.where(flip & over, moved - 2 * self.half, moved)
        moved = torch.where(flip & under, moved + 2 * self.half, moved)
        self.residual = moved.clamp(-self.half, self.half - 1).to(torch.int16)
        self.positive = self.positive ^ flip
        return torch.nonzero(flip.reshape(-1)).flatten()


@dataclass
class FlipLog:
    """Flipped indices of every step, in order."""

    steps: list[torch.Tensor] = field(default_factory=list)

    def append(self, flipped: torch.Tensor) -> None:
        self.steps.append(flipped)

    @property
    def flips(self) -> int:
        return sum(len(step) for step in self.steps)


def replay(positive: torch.Tensor, steps: Iterable[torch.Tensor]) -> torch.Tensor:
    """Signs after a log of flips.

    Raises InputError for an index outside the tensor, or one that flips twice in a step.
    """
    flat = positive.reshape(-1).clone()
    for number, step in enumerate(steps):
        if len(step) and (int(step.min()) < 0 or int(step.max()) >= len(flat)):
            raise InputError(f"step {number} of the flip log leaves the tensor")
        if len(torch.unique(step)) != len(step):
            raise InputError(f"step {number} of the flip log flips a weight twice")
        flat[step] = ~flat[step]
    return flat.view(positive.shape)


@dataclass(frozen=True)
class BinaryReport:
    """unequal_signs: served bits unlike the trainer's. dead: residuals that never moved although
    their weight had updates. saturated: residuals at a bound, whose further updates are lost.
    replay_mismatches: signs that old signs plus the log do not give."""

    weights: int
    unequal_signs: int
    dead_share: float
    saturated_share: float
    flips_per_weight: float
    replay_mismatches: int

    @property
    def problems(self) -> list[str]:
        """What an engine or a log gets wrong; residual shares are for judgement, not errors."""
        found = []
        if self.unequal_signs:
            found.append(f"{self.unequal_signs} served signs differ from the trainer's")
        if self.replay_mismatches:
            found.append(f"{self.replay_mismatches} signs are not explained by the flip log")
        return found

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "problems": self.problems}


def audit_binary(
    before: BinaryState,
    after: BinaryState,
    log: FlipLog,
    served_bits: torch.Tensor,
    updated: torch.Tensor,
) -> BinaryReport:
    """Checks a run from ``before`` to ``after``.

    served_bits: the engine's packed signs (uint8, eight to a byte). updated: bool, weights that
    had any update. Raises InputError for shapes that do not fit.
    """
    wanted = pack_bits(after.positive)
    if served_bits.shape != wanted.shape:
        raise InputError(f"{len(served_bits)} served bytes, {len(wanted)} expected")
    n = after.positive.numel()
    differing = _unpack(served_bits, n) != after.positive.reshape(-1)
    still = (before.residual == after.residual) & (before.positive == after.positive)
    bound = (after.residual == -after.half) | (after.residual == after.half - 1)
    replayed = replay(before.positive, log.steps)
    return BinaryReport(
        weights=n,
        unequal_signs=int(differing.sum()),
        dead_share=float((still & updated).sum()) / max(1, int(updated.sum())),
        saturated_share=float(bound.float().mean()),
        flips_per_weight=log.flips / n,
        replay_mismatches=int((replayed != after.positive).sum()),
    )


def _unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed[:, None] >> shifts) & 1).bool().reshape(-1)[:count]
