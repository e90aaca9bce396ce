"""A bounded sample of whole prompts, for what is too costly to work out on every token."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.checks.view import view
from mismatch_audit.rollouts.schema import LISTS, SCALARS

Array = npt.NDArray[Any]

TOKEN_BUDGET = 400_000
"""Tokens held in all; about 50 bytes each, so 20 MB."""
ROWS_A_PROMPT = 16
LONGEST = 16_384
"""A longer sequence is cut: its first so many tokens are kept."""

LIST_COLUMNS = tuple(LISTS)
SCALAR_COLUMNS = (
    "step", "prompt_len", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "logprobs_mode", "finish_reason", "sample_id", "n_left_pad", "weights_version_max",
)  # fmt: skip


@dataclass
class Row:
    """One sequence: columns as arrays ``[L]``, scalars by name; ``used`` where both sides and the
    sample mask hold (``TokenView.both``)."""

    group: str
    scalars: dict[str, Any]
    columns: dict[str, Array]
    used: Array
    whole: bool

    @property
    def d(self) -> Array:
        """``[L]`` float64, trainer less sampler."""
        trainer = self.columns["trainer_logprob"].astype(np.float64)
        return np.asarray(trainer - self.columns["sampler_logprob"])


class Sample:
    """The prompts with the smallest hashes of (prompt, step), as many as fit the token budget.

    The choice depends on the names alone, so it is the same in every run and order of batches,
    and it is independent of what was measured. Several checks share one sample.
    """

    def __init__(self, budget: int = TOKEN_BUDGET) -> None:
        self.budget = budget
        self.groups: dict[int, list[Row]] = {}
        self.tokens = 0
        self._heap: list[int] = []
        self._ceiling = 1 << 64
        self._last: weakref.ref[TokenBatch] | None = None

    def update(self, batch: TokenBatch) -> None:
        """Take what belongs; a second call with the same batch does nothing."""
        if self._last is not None and batch is self._last():
            return
        self._last = weakref.ref(batch)
        tokens = view(batch)
        names, steps = tokens.keys, tokens.scalar("step")
        code = np.array([_hash(f"{n}/{s}") for n, s in zip(names, steps, strict=True)], object)
        for s in np.flatnonzero(code < self._ceiling):
            if code[s] < self._ceiling:
                self._take(batch, int(s), int(code[s]), str(names[s]))

    def rows(self) -> Iterator[Row]:
        """Every kept sequence, prompts in order of their hash."""
        for key in sorted(self.groups):
            yield from self.groups[key]

    def _take(self, batch: TokenBatch, s: int, key: int, name: str) -> None:
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = []
            heappush(self._heap, -key)
        if len(group) >= ROWS_A_PROMPT:
            return
        start, end = int(batch.offsets[s]), int(batch.offsets[s + 1])
        end, whole = min(end, start + LONGEST), end - start <= LONGEST
        here = slice(start, end)
        present = batch.records.schema.names
        columns = {c: batch.tokens(c)[here].copy() for c in LIST_COLUMNS if c in present}
        scalars = {c: view(batch).scalar(c)[s] for c in SCALAR_COLUMNS if c in SCALARS}
        group.append(Row(name, scalars, columns, view(batch).both[here].copy(), whole))
        self.tokens += end - start
        while self.tokens > self.budget and len(self.groups) > 1:
            worst = -heappop(self._heap)
            self.tokens -= sum(len(row.used) for row in self.groups.pop(worst))
            self._ceiling = worst  # nothing from here on may come back


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
