"""What most checks need of a batch, worked out once: the comparable tokens and sums a sequence."""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.checks.pack_kernels import N_SUMS, mark, pack

Array = npt.NDArray[Any]

LOG_RATIO_CAP = 20.0
"""|log p - log q| beyond this counts as this much: exp stays finite (verl's SAFETY_BOUND)."""

SENTINEL = -1000.0
"""No softmax over a vocabulary gives this: it is a placeholder (SkyRL writes -9999)."""


class _Packed(NamedTuple):
    where: Array
    sampler: Array
    trainer: Array
    d: Array
    size: Array
    ratio: Array
    doubt: Array
    sums: Array

    @classmethod
    def empty(cls, m: int, s: int) -> _Packed:
        sampler, trainer, doubt = np.empty((3, m), dtype=np.float32)
        d, size, ratio = np.empty((3, m))
        where = np.empty(m, dtype=np.int64)
        return cls(where, sampler, trainer, d, size, ratio, doubt, np.empty((s, N_SUMS)))


class TokenView:
    """The M tokens of a batch with a log-prob on both sides, packed; S sequences.

    Sums a sequence rather than a token are what the checks keep: tokens of one sequence hang
    together, so a test that counts them as independent cries wolf.

    Lives as long as its batch, to which it refers weakly: in a cycle some 100 MB a batch would wait
    for the garbage collector, which counts objects and not bytes (1.2 GB more at the peak).
    """

    def __init__(self, batch: TokenBatch) -> None:
        self._batch = weakref.ref(batch)
        self._has: dict[str, bool] = {}
        self._scalars: dict[str, Array] = {}

    @property
    def batch(self) -> TokenBatch:
        """Raises ReferenceError where it is used after the batch is gone."""
        batch = self._batch()
        if batch is None:
            raise ReferenceError("the view's batch is gone")
        return batch

    def has(self, name: str) -> bool:
        """``TokenBatch.has``, asked once."""
        if name not in self._has:
            self._has[name] = self.batch.has(name)
        return self._has[name]

    def scalar(self, name: str) -> Array:
        """``TokenBatch.scalar``, decoded once."""
        if name not in self._scalars:
            self._scalars[name] = self.batch.scalar(name)
        return self._scalars[name]

    @cached_property
    def both(self) -> Array:
        """``[N]`` bool: sampled, with a log-prob on both sides that is finite and no sentinel."""
        return self._marked[0]

    @cached_property
    def _marked(self) -> tuple[Array, Array]:
        """(``both``, ``[S + 1]`` int64 edges of the sequences in the packed tokens)."""
        batch = self.batch
        both = np.empty(batch.n_tokens, dtype=np.bool_)
        edges = np.empty(batch.n_sequences + 1, dtype=np.int64)
        sampler, trainer = batch.tokens("sampler_logprob"), batch.tokens("trainer_logprob")
        mark(batch.sampled, sampler, trainer, SENTINEL, batch.offsets, both, edges)
        return both, edges

    @property
    def _edges(self) -> Array:
        return self._marked[1]

    @cached_property
    def _packed(self) -> _Packed:
        batch = self.batch
        packed = _Packed.empty(int(self._edges[-1]), batch.n_sequences)
        sampler, trainer = batch.tokens("sampler_logprob"), batch.tokens("trainer_logprob")
        pack(self.both, sampler, trainer, LOG_RATIO_CAP, batch.offsets, *packed)
        return packed

    @property
    def where(self) -> Array:
        """``[M]`` int64: index of each packed token in the batch."""
        return self._packed.where

    @cached_property
    def n(self) -> Array:
        """``[S]`` float64: comparable tokens a sequence."""
        return self._edges[1:] - self._edges[:-1] + 0.0

    def pack(self, name: str) -> Array:
        """``[M]`` values of a token column."""
        return np.asarray(self.batch.tokens(name)[self.where])

    @property
    def sampler(self) -> Array:
        """``[M]`` float32: log q."""
        return self._packed.sampler

    @property
    def trainer(self) -> Array:
        """``[M]`` float32: log p."""
        return self._packed.trainer

    @property
    def d(self) -> Array:
        """``[M]`` float64: log p - log q, within ``LOG_RATIO_CAP``."""
        return self._packed.d

    @property
    def abs_d(self) -> Array:
        """``[M]`` float64."""
        return self._packed.size

    @property
    def ratio(self) -> Array:
        """``[M]`` float64: p/q."""
        return self._packed.ratio

    def sums(self, values: Array) -> Array:
        """``[M] -> [S]`` float64 sums a sequence (0 for one without comparable tokens)."""
        return segment_sums(values, self._edges)

    @property
    def sum_d(self) -> Array:
        return self._packed.sums[:, 0]

    @property
    def sum_abs(self) -> Array:
        return self._packed.sums[:, 1]

    @property
    def sum_ratio(self) -> Array:
        return self._packed.sums[:, 2]

    @property
    def sum_doubt(self) -> Array:
        """``[S]``: sum of 1 - sqrt(p q), the mismatch that unit noise on the logits would give.

        d = (e_y - p) . noise, so its sd is between (1 - p_y) and sqrt(2) (1 - p_y) times that of
        the noise. sum|d| over this compares strata of unequal confidence: a harder environment
        has more mismatch per token and not more per doubt.
        """
        return self._packed.sums[:, 3]

    @property
    def doubt(self) -> Array:
        """``[M]`` float32: 1 - sqrt(p q)."""
        return self._packed.doubt

    @cached_property
    def sum_k3(self) -> Array:
        """``[S]``: sum of r - 1 - log r, an estimate of KL(q || p) a token."""
        return self.sum_ratio - self.n - self.sum_d

    @cached_property
    def last(self) -> Array:
        """``[S']`` int64: packed index of each sequence's last comparable token."""
        return self._edges[1:][self.n > 0] - 1

    @cached_property
    def keys(self) -> Array:
        """``[S]`` object: the prompt's id, else the sample's: the unit of statistics."""
        names = self.scalar("group_id")
        missing = unknown(names)
        return np.where(missing, self.scalar("sample_id"), names) if missing.any() else names

    @cached_property
    def clusters(self) -> Array:
        """``[S]`` int64: the prompt a sequence belongs to, numbered within the batch."""
        names = self.keys
        return np.unique(names.astype(str), return_inverse=True)[1]

    @cached_property
    def version(self) -> Array:
        """``[S]`` int64: the sampler's weights version (the newest it used), -1 unknown."""
        newest = self.scalar("weights_version_max")
        if not (newest < 0).any():
            return newest
        return np.where(newest < 0, self.scalar("weights_version_min"), newest)

    @cached_property
    def lag(self) -> Array:
        """``[S]`` int64: trainer's version less the sampler's oldest; 0 where either is unknown."""
        trainer = self.scalar("trainer_version")
        oldest = self.scalar("weights_version_min")
        oldest = np.where(oldest < 0, self.version, oldest)
        return np.where((trainer >= 0) & (oldest >= 0), trainer - oldest, 0)


def view(batch: TokenBatch) -> TokenView:
    """The batch's view, built by the first check that asks."""
    held = batch.__dict__.get("_token_view")
    if held is None:
        held = batch.__dict__["_token_view"] = TokenView(batch)
    return held


def unknown(names: Array) -> Array:
    """``[S]`` bool: where a string column is null."""
    return np.array([name is None for name in names.tolist()], dtype=bool)


def segment_sums(values: Array, edges: Array) -> Array:
    """``[M]``, edges ``[S + 1]`` -> ``[S]`` float64 sums of ``values[edges[s]:edges[s + 1]]``."""
    out = np.zeros(len(edges) - 1)
    full = edges[1:] > edges[:-1]
    if full.any():
        # reduceat sums up to the next start: right only when empty segments are left out
        out[full] = np.add.reduceat(values, edges[:-1][full], dtype=np.float64)
    return out
