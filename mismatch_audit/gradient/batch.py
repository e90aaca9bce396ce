"""Rollouts, corrections and slices -> the coefficient sets that autograd has to take.

A correction by sequence is a number times the response's plain gradient, so all of them share one
backward pass. One by token needs its own, unless its weights on this response equal another's (a
threshold that no token reaches): then it shares that one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kernel_contracts.errors import InputError
from mismatch_audit.gradient.corrections import NONE, TOKEN_WEIGHTS, Correction
from mismatch_audit.programs.base import Sequence_

Array = npt.NDArray[np.float64]
Slices = Mapping[str, "set[Any] | Mapping[str, Any]"]
"""name -> prompt ids, or {sequence id: bool or ``[T]`` bool}."""

__all__ = ["ALL", "NEGATIVE", "POSITIVE", "Batch", "Slices"]

ALL, POSITIVE, NEGATIVE = "all", "advantage > 0", "advantage < 0"


@dataclass
class Batch:
    """Rollouts in order, ``delta`` their log-ratios ``[T]``, ``prompts`` the unit of each.

    Raises InputError for a slice that names sequences or masks that do not fit.
    """

    sequences: Sequence[Sequence_]
    delta: list[Array]
    advantages: Array
    prompts: list[Hashable]
    corrections: list[Correction]
    target: Correction
    slices: dict[str, Any]
    _vectors: list[list[Array]] = field(default_factory=list)
    _use: dict[tuple[str, str, int], tuple[int | None, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [c.name for c in self.corrections]
        for needed in (self.target, NONE, TOKEN_WEIGHTS):
            if needed.name not in names:
                self.corrections.append(needed)
        self.slices = {
            ALL: set(self.prompts),
            POSITIVE: self._signed(1),
            NEGATIVE: self._signed(-1),
        } | self.slices
        self._masks = {
            name: self._mask(name, chosen)
            for name, chosen in self.slices.items()
            if isinstance(chosen, Mapping)
        }
        # Slices of tokens -> the responses that they cut.
        self._cut = {
            name: cut
            for name, masks in self._masks.items()
            if (cut := {i for i, mask in masks.items() if mask.any() and not mask.all()})
        }
        for i in range(len(self.sequences)):
            self._vectors.append([])
            self._plan(i)

    def slice_names(self) -> list[str]:
        return list(self.slices)

    def coefficients(self) -> list[Array]:
        """Per response ``[K, T]``, advantage included; K = 0 where the advantage is 0."""
        return [
            np.stack(rows) if rows else np.zeros((0, s.n_response))
            for rows, s in zip(self._vectors, self.sequences, strict=True)
        ]

    def members(self, name: str) -> list[int]:
        """Responses of a slice that have a token in it."""
        if name in self._masks:
            return [i for i, mask in self._masks[name].items() if mask.any()]
        return [i for i, prompt in enumerate(self.prompts) if prompt in self.slices[name]]

    def n_tokens(self, name: str) -> int:
        if name in self._masks:
            return sum(int(mask.sum()) for mask in self._masks[name].values())
        return sum(self.sequences[i].n_response for i in self.members(name))

    def estimators(self, name: str) -> list[Correction]:
        """Those measured on a slice; by token, a slice of tokens has only the plain weights."""
        if not self._cuts_tokens(name):
            return self.corrections
        return [
            c for c in self.corrections if c.level == "sequence" or c.name == TOKEN_WEIGHTS.name
        ]

    def use(self, name: str, correction: Correction, i: int) -> tuple[int | None, float]:
        """(which vector of response i, times what) is the correction's gradient on the slice."""
        part = name if self._cuts_tokens(name) and i in self._cut.get(name, ()) else ""
        return self._use[part, correction.name, i]

    # --- planning ---

    def _plan(self, i: int) -> None:
        if self.advantages[i] == 0:
            for part in ("", *self._cut):
                for correction in self.corrections:
                    self._use[part, correction.name, i] = (None, 0.0)
            return
        whole = np.ones(self.sequences[i].n_response)
        self._plan_part("", i, whole, self.corrections)
        for name, cut in self._cut.items():
            if i in cut:
                mask = self._masks[name][i].astype(np.float64)
                self._plan_part(name, i, mask, self.estimators(name))

    def _plan_part(self, part: str, i: int, mask: Array, corrections: list[Correction]) -> None:
        for correction in corrections:
            weights = correction.weights(self.delta[i])
            if correction.level == "sequence":
                wanted, scale = mask, float(weights[0])
            else:
                wanted, scale = mask * weights, 1.0
            self._use[part, correction.name, i] = (self._vector(i, wanted), scale)

    def _vector(self, i: int, weights: Array) -> int | None:
        if not weights.any():
            return None
        wanted = self.advantages[i] * weights
        rows = self._vectors[i]
        for k, row in enumerate(rows):
            if np.array_equal(row, wanted):
                return k
        rows.append(wanted)
        return len(rows) - 1

    # --- slices ---

    def _cuts_tokens(self, name: str) -> bool:
        return name in self._cut

    def _signed(self, sign: int) -> dict[str, bool]:
        return {
            s.sequence_id: bool(np.sign(a) == sign)
            for s, a in zip(self.sequences, self.advantages, strict=True)
        }

    def _mask(self, name: str, chosen: Mapping[str, Any]) -> dict[int, npt.NDArray[np.bool_]]:
        masks = {}
        for i, sequence in enumerate(self.sequences):
            mask = np.asarray(chosen.get(sequence.sequence_id, False), dtype=bool)
            if mask.ndim and mask.shape != (sequence.n_response,):
                raise InputError(
                    f"slice {name!r} masks {mask.shape} of the {sequence.n_response} response "
                    f"tokens of {sequence.sequence_id!r}"
                )
            masks[i] = np.broadcast_to(mask, (sequence.n_response,))
        return masks
