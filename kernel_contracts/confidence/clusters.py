"""From token rows to prompts, the unit of every verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from kernel_contracts.confidence._checks import FloatArray, finite_vector
from kernel_contracts.errors import InputError


@dataclass(frozen=True, slots=True)
class PromptSums:
    """Per-prompt statistics; index i of each array is prompt_ids[i].

    mean, sum: float64 [n_prompts], in the unit of the values.  count: int64 [n_prompts], rows.
    """

    prompt_ids: tuple[str, ...]
    mean: FloatArray
    sum: FloatArray
    count: NDArray[np.int64]


def prompt_order(prompt_ids: Sequence[str]) -> list[str]:
    """The ids sorted by SHA-256: the same in every run, and independent of any measured value."""
    return sorted(prompt_ids, key=lambda name: sha256(name.encode()).digest())


def by_prompt(values: ArrayLike, prompt_ids: Sequence[str] | ArrayLike) -> PromptSums:
    """Group token values by prompt, in `prompt_order`.

    values: [rows], finite (booleans count as 0 and 1).  prompt_ids: [rows].  Raises InputError on
    non-finite values, on a missing prompt id, and when the lengths differ.
    """
    rows = finite_vector("values", values)
    codes, names = pd.factorize(np.asarray(prompt_ids, dtype=object))
    if codes.size != rows.size:
        raise InputError(f"{codes.size} prompt ids for {rows.size} values", where="prompt_ids")
    if np.any(codes < 0):
        raise InputError(
            f"{int(np.sum(codes < 0))} rows have no prompt id",
            where="prompt_id",
            fix="every row must name its prompt: rows of one prompt are not independent",
        )
    position = {str(name): i for i, name in enumerate(names)}
    if len(position) != len(names):
        raise InputError("prompt ids of different types print alike", where="prompt_id")
    ordered = prompt_order(list(position))
    order = np.array([position[name] for name in ordered], dtype=np.int64)
    count = np.bincount(codes, minlength=len(names)).astype(np.int64)[order]
    sums: FloatArray = np.bincount(codes, weights=rows, minlength=len(names))[order].astype(
        np.float64
    )
    return PromptSums(tuple(ordered), sums / count, sums, count)
