"""Sums by lag: everything about one lag in a fixed number of floats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mismatch_audit.rollouts.checks.pack_kernels import add_lags
from mismatch_audit.rollouts.checks.view import TokenView

Array = npt.NDArray[Any]

PER_OCTAVE = 8
OCTAVES = 40
"""|d| from 2^-30 to 2^10, 8 bins of equal width an octave: a quantile is off by at most 12.5 %."""
LOWEST = -30


@dataclass(frozen=True)
class Sums:
    """Of one lag. ``SIZE - 2`` stands for it and every larger one, -1 for a version ahead."""

    lag: int
    largest: bool
    by_token: bool
    tokens: float
    d: float
    size: float
    k3: float
    tv: float
    ratio: float
    ratio2: float
    outside: float
    gated: float
    advantages: float
    histogram: Array
    length_histogram: Array

    def row(self) -> dict[str, Any]:
        """Plain numbers, with p = trainer and q = sampler."""
        n = self.tokens
        return {
            "lag": f"{self.lag}+" if self.largest else self.lag,
            "tokens": int(n),
            "mean_log_ratio": self.d / n,
            "mean_abs_log_ratio": self.size / n,
            "q90_abs_log_ratio": _quantile(self.histogram, 0.9),
            "kl_engine_reference": self.k3 / n,
            "tv": self.tv / n,
            "mean_ratio": self.ratio / n,
            "ess_raw": self.ratio**2 / (n * self.ratio2) if self.ratio2 > 0 else None,
            "share_outside_clip": self.outside / n,
            "share_gated_by_clip": self.gated / self.advantages if self.advantages else None,
        }

    def lengths(self) -> dict[str, int]:
        """Median, 95th percentile and longest response (upper edge of their octave's quarter)."""
        total = np.cumsum(self.length_histogram)
        if total[-1] == 0:
            return {}
        chosen = {"median": 0.5, "q95": 0.95, "longest": 1.0}
        at = {k: int(np.searchsorted(total, v * total[-1] - 1e-9)) for k, v in chosen.items()}
        return {k: max(1, int(np.ceil(2 ** ((i + 1) / 4)))) for k, i in at.items()}


_COLUMNS = (
    "tokens", "d", "size", "k3", "tv", "ratio", "ratio2", "outside", "gated", "advantages",
)  # fmt: skip


class LagSums:
    """Accumulates ``Sums``. Lags -1 .. 63; larger ones count as 63."""

    SIZE = 65

    def __init__(self, clip: float) -> None:
        self.clip = clip
        self.by_token = False
        self.table = np.zeros((self.SIZE, len(_COLUMNS)))
        self.histogram = np.zeros((self.SIZE, PER_OCTAVE * OCTAVES))
        self.lengths = np.zeros((self.SIZE, 100))

    @classmethod
    def index(cls, lag: Array) -> Array:
        return np.clip(lag, -1, cls.SIZE - 2).astype(np.int64) + 1

    @staticmethod
    def lag(index: int) -> int:
        return index - 1

    def tokens(self) -> int:
        return int(self.table[:, 0].sum())

    def add(self, tokens: TokenView, lag: Array, known: Array) -> None:
        """lag, known: ``[M]`` of the view's comparable tokens."""
        self.by_token |= tokens.has("token_version")
        at = self.index(lag)
        if not known.all():
            at = np.where(known, at, self.SIZE)  # a row of its own, dropped below
        table = np.zeros((self.SIZE + 1, len(_COLUMNS)))
        histogram = np.zeros((self.SIZE + 1, PER_OCTAVE * OCTAVES))
        add_lags(
            at, tokens.d, tokens.abs_d, tokens.ratio, _advantage(tokens), self.clip,
            LOWEST, PER_OCTAVE, table, histogram,
        )  # fmt: skip
        self.table += table[: self.SIZE]
        self.histogram += histogram[: self.SIZE]
        self._lengths(tokens, lag, known)

    def _lengths(self, tokens: TokenView, lag: Array, known: Array) -> None:
        full = tokens.n > 0
        n = tokens.n[full]
        last = tokens.last
        at = np.where(known[last], self.index(lag[last]), self.SIZE)
        bins = np.clip(np.log2(n) * 4 - 1e-9, 0, 99).astype(np.int64)
        flat = np.bincount(at * 100 + bins, None, (self.SIZE + 1) * 100)
        self.lengths += flat[: self.SIZE * 100].reshape(self.SIZE, 100)

    def rows(self) -> Iterator[Sums]:
        """Lags in order, those seen."""
        for i in np.flatnonzero(self.table[:, 0]).tolist():
            sums = dict(zip(_COLUMNS, self.table[i].tolist(), strict=True))
            yield Sums(
                lag=self.lag(i),
                largest=i == self.SIZE - 1,
                by_token=self.by_token,
                histogram=self.histogram[i],
                length_histogram=self.lengths[i],
                **sums,
            )


def _advantage(tokens: TokenView) -> Array:
    """``[M]``, NaN where it is not known."""
    if tokens.has("advantage"):
        return tokens.pack("advantage")
    if tokens.has("sequence_advantage"):
        return np.repeat(tokens.scalar("sequence_advantage"), tokens.n.astype(np.int64))
    return np.full(len(tokens.d), np.nan, dtype=np.float32)


def _quantile(histogram: Array, q: float) -> float:
    """Upper edge of the bin that holds the quantile: at most 12.5 % above it."""
    total = np.cumsum(histogram)
    i = int(np.searchsorted(total, q * total[-1] - 1e-9))
    octave, place = divmod(i + 1, PER_OCTAVE)
    return 0.0 if i == 0 else float(2.0 ** (LOWEST + octave) * (1 + place / PER_OCTAVE))
