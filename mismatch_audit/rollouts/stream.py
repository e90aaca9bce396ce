"""One pass over recorded rollouts: sums per slice and prompt, and what the whole log adds up to."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kernel_contracts.contract import Contract
from mismatch_audit.rollouts import kernels as k
from mismatch_audit.rollouts.batch import Array, TokenBatch
from mismatch_audit.rollouts.columns import column
from mismatch_audit.rollouts.slices import Codes, SlicePlan
from mismatch_audit.rollouts.statistics import BANDS, QUANTILES, SequenceParts, Statistics
from mismatch_audit.rollouts.store import SumStore

FloatArray = NDArray[np.float64]

POINTS = 2000
_ROOM = 1 << 16
_NEUTRAL = (np.inf, -np.inf)


@dataclass
class Distribution:
    """How the tokens' log ratios d are spread. histogram: by the high bits of float32(d).
    extremes: least and greatest d.  outside: tokens beyond each of the bands."""

    histogram: NDArray[np.int64]
    extremes: FloatArray
    outside: NDArray[np.int64]

    @classmethod
    def empty(cls) -> Distribution:
        return cls(
            np.zeros(k.HISTOGRAM_BINS, dtype=np.int64),
            np.array(_NEUTRAL),
            np.zeros(len(BANDS), dtype=np.int64),
        )

    def add(self, other: Distribution) -> None:
        self.histogram += other.histogram
        self.outside += other.outside
        self.extremes[0] = min(self.extremes[0], other.extremes[0])
        self.extremes[1] = max(self.extremes[1], other.extremes[1])

    def quantiles(self, levels: Sequence[float] = QUANTILES) -> dict[float, float]:
        """Of the ratio e^d. Exact to the bin's width, 1.6 % of d."""
        bits = np.arange(k.HISTOGRAM_BINS, dtype=np.uint32) << np.uint32(17)
        with np.errstate(invalid="ignore"):
            middle = (bits | np.uint32(1 << 16)).view(np.float32).astype(np.float64)
        middle[(self.histogram == 0) | ~np.isfinite(middle)] = np.inf
        order = np.argsort(middle, kind="stable")
        total = np.cumsum(self.histogram[order])
        if not total[-1]:
            return dict.fromkeys(levels, float("nan"))
        places = [np.searchsorted(total, level * total[-1]) for level in levels]
        d = np.clip(middle[order[places]], *self.extremes)
        return {level: float(np.exp(v)) for level, v in zip(levels, d, strict=True)}


class Stream:
    """Adds batches up. thresholds: of |d|, whose exceedance is counted per prompt and slice.

    Memory is bounded by the store's row limit and one batch, whatever the log's length.
    """

    def __init__(
        self, contract: Contract, thresholds: Sequence[float] = (), store: SumStore | None = None
    ) -> None:
        self.plan = SlicePlan(contract)
        self.thresholds = np.array(sorted(set(thresholds)), dtype=np.float64)
        self.width = k.N_FEATURES + self.thresholds.size
        self.store = store or SumStore(self.width)
        self.distribution = Distribution.empty()
        self.parts: SequenceParts | None = None
        self.by_step: dict[int, SequenceParts] = {}
        self.sequences = self.tokens = self.sampled = 0
        self.largest_group = 0
        self.points = np.empty((0, 3))
        self._random = np.random.default_rng(contract.seed)
        self._bands = np.log(np.array(BANDS))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
        self._workers = min(cores, 8)  # each has a buffer of its own; reading is slower than 8
        self._pool = ThreadPoolExecutor(self._workers, "rollouts")

    def prepare(self, batch: TokenBatch) -> Codes | None:
        """The batch's groups: may run in another thread than `update`, one batch at a time and in
        the same order."""
        return self.plan.codes(batch) if batch.n_tokens else None

    def update(self, batch: TokenBatch, codes: Codes | None = None) -> None:
        """Count a batch in. codes: of `prepare`, where that was done already."""
        self.start(batch, codes)()

    def start(self, batch: TokenBatch, codes: Codes | None = None) -> Callable[[], None]:
        """Begin to count a batch in, in other threads; what is returned waits for them and must be
        called before the next batch is started."""
        self.sequences += batch.n_sequences
        self.tokens += batch.n_tokens
        if not batch.n_tokens:
            return lambda: None
        codes = codes or self.plan.codes(batch)
        keys, order, clusters = _clusters(batch)
        sums = np.empty((batch.n_sequences, self.width))
        shares = _shares(batch, order, clusters, self._workers)
        tasks = [
            self._pool.submit(self._add_up, batch, codes, keys, order, clusters, sums, low, high)
            for low, high in shares
        ]

        def finish() -> None:
            for task in tasks:
                distribution, nulls, rows = task.result()
                self.distribution.add(distribution)
                for one, count in zip(codes.owners, nulls, strict=True):
                    one.nulls += int(count)
                for ids, prompts, values in rows:
                    self.store.add(ids, prompts, values)
            self._keep_totals(batch, sums)
            self._keep_points(batch)

        return finish

    def _add_up(
        self, batch: TokenBatch, codes: Codes, keys: Array, order: Array, clusters: Array,
        sums: FloatArray, low: int, high: int,
    ) -> tuple[Distribution, Array, list[tuple[Array, Array, Array]]]:  # fmt: skip
        slots, width = len(codes.ids), self.width
        room = max(_ROOM, slots + 1)
        scratch, touched = np.zeros((slots, width)), np.empty(slots, dtype=np.int32)
        marks = np.zeros(slots, dtype=np.uint8)
        slot, cluster = np.empty(room, dtype=np.int32), np.empty(room, dtype=np.int64)
        values = np.empty((room, width))
        seen, nulls = Distribution.empty(), np.zeros(len(codes.owners), dtype=np.int64)
        rows = []
        while low < high:
            low, given = k.add_up(
                batch.tokens("sampler_logprob"), batch.tokens("trainer_logprob"), batch.sampled,
                batch.offsets, order, clusters, low, high, codes.sequence, codes.token, codes.base,
                self.thresholds, sums, scratch, touched, marks, slot, cluster, values,
                seen.histogram, seen.extremes, self._bands, seen.outside, nulls,
            )  # fmt: skip
            rows.append((codes.ids[slot[:given]], keys[cluster[:given]], values[:given].copy()))
        return seen, nulls, rows

    def _keep_totals(self, batch: TokenBatch, sums: FloatArray) -> None:
        self.sampled += int(sums[:, [k.ROWS, k.MISSING, k.NONFINITE]].sum())
        whole = SequenceParts.of(sums)
        self.parts = whole if self.parts is None else self.parts + whole
        steps = column(batch, "step")
        if steps is None:
            return
        for step in np.unique(steps.values[~steps.null]):
            part = SequenceParts.of(sums[(steps.values == step) & ~steps.null])
            known = self.by_step.get(int(step))
            self.by_step[int(step)] = part if known is None else known + part

    def _keep_points(self, batch: TokenBatch) -> None:
        """A uniform sample of tokens, for the eye: those with the greatest of one random number
        each. Of a batch, as many candidates as could be kept at all."""
        take = min(POINTS, batch.n_tokens)
        at = self._random.integers(0, batch.n_tokens, take)
        q, p = batch.tokens("sampler_logprob")[at], batch.tokens("trainer_logprob")[at]
        # The greatest of n numbers, so that a long batch weighs as much as its tokens do.
        luck = self._random.random(take) ** (take / batch.n_tokens)
        keep = batch.sampled[at] & np.isfinite(q) & np.isfinite(p)
        rows = np.concatenate([self.points, np.stack([luck, q, p], axis=1)[keep]])
        self.points = rows[np.argsort(-rows[:, 0], kind="stable")[:POINTS]]

    def statistics(self) -> Statistics:
        """Of the whole log."""
        parts = self.parts or SequenceParts.of(np.zeros((0, self.width)))
        rows = float(parts.token[k.ROWS])
        low, high = np.exp(self.distribution.extremes) if rows else (float("nan"),) * 2
        shares = self.distribution.outside / rows if rows else [float("nan")] * len(BANDS)
        return parts.statistics(
            float(low),
            float(high),
            self.distribution.quantiles(),
            {band: float(share) for band, share in zip(BANDS, shares, strict=True)},
        )

    def close(self) -> None:
        """Give threads and temporary files back."""
        self._pool.shutdown()
        self.store.close()


def prompt_keys(names: Sequence[str]) -> NDArray[np.uint64]:
    """The first 8 bytes of each id's SHA-256: rising keys are the order in which
    ``kernel_contracts.confidence.prompt_order`` bets. Two of 10 million prompts share one with
    probability 3e-6; they would count as one prompt."""
    return np.array(
        [int.from_bytes(sha256(name.encode()).digest()[:8]) for name in names], dtype=np.uint64
    )


def _clusters(batch: TokenBatch) -> tuple[Array, Array, Array]:
    """(key per prompt, sequences ordered by prompt, [C + 1] edges into that order)."""
    names = batch.scalar("group_id")
    if any(name is None for name in names):
        own = batch.scalar("sample_id")
        names = np.array(
            [o if g is None else g for g, o in zip(names, own, strict=True)], dtype=object
        )
    codes, found = pd.factorize(names)
    order = np.argsort(codes, kind="stable")
    edges = np.zeros(len(found) + 1, dtype=np.int64)
    np.cumsum(np.bincount(codes, minlength=len(found)), out=edges[1:])
    return prompt_keys([str(name) for name in found]), order, edges


def _shares(
    batch: TokenBatch, order: Array, clusters: Array, workers: int
) -> list[tuple[int, int]]:
    """Ranges of prompts with about as many tokens each."""
    tokens = np.concatenate([[0], np.cumsum(batch.lengths[order])])[clusters]
    goals = np.linspace(0, tokens[-1], workers + 1)
    edges = np.searchsorted(tokens, goals)
    edges[0], edges[-1] = 0, len(clusters) - 1
    return [(int(a), int(b)) for a, b in itertools.pairwise(edges) if b > a]
