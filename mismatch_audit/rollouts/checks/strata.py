"""Means of a token quantity by stratum, with errors that respect prompts; bounded memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from kernel_contracts.confidence.laws import student_sf

Array = npt.NDArray[Any]

ALPHA = 1e-5
"""One check's chance of a false alarm by its test alone. About 40 checks look at a log, some at
several strata, so a clean log is called faulty in well under 1 in 100; the bands that a finding
must leave too make it rarer still."""


@dataclass(frozen=True)
class Mean:
    """A ratio of sums over clusters (a token mean) with its standard error."""

    value: float
    se: float
    clusters: float
    tokens: float

    def above(self, other: Mean, factor: float = 1.0) -> bool:
        """Whether this mean exceeds factor times the other, at level ``ALPHA``."""
        if min(self.clusters, other.clusters) < 2:
            return False
        gap = self.value - factor * other.value
        mine, theirs = self.se**2, (factor * other.se) ** 2
        if not gap > 0:
            return False
        if mine + theirs == 0.0:
            return True
        df = (mine + theirs) ** 2 / (
            mine**2 / (self.clusters - 1) + theirs**2 / (other.clusters - 1)
        )  # Welch and Satterthwaite
        return p_value(gap, sqrt(mine + theirs), df) < ALPHA

    def beyond(self, limit: float) -> bool:
        """Whether this mean exceeds the limit, at level ``ALPHA``."""
        gap = self.value - limit
        return self.clusters >= 2 and gap > 0 and p_value(gap, self.se, self.clusters - 1) < ALPHA


def p_value(gap: float, se: float, df: float) -> float:
    """One-sided p of a gap by Student's t."""
    return student_sf(gap / se, max(df, 1.0)) if se > 0 else 0.0


@dataclass
class Strata:
    """Cluster sums by key. A cluster is a prompt within a batch.

    Kept a key: clusters K, and sums of n, x, n^2, n x, x^2, from which the ratio sum(x)/sum(n) and
    its linearised variance follow.  limit: at most so many keys; integer keys beyond it are merged
    pairwise (``width`` doubles), so memory does not grow with the run.
    """

    limit: int = 2048
    width: int = 1
    table: dict[Any, Array] = field(default_factory=dict)

    def add(self, key: Array, clusters: Array, n: Array, x: Array) -> None:
        """key, clusters, n, x: ``[S]``; rows with n = 0 say nothing."""
        use = n > 0
        if not use.any():
            return
        key, clusters, n, x = key[use], clusters[use], n[use], x[use]
        names, code = np.unique(
            key if key.dtype.kind != "O" else key.astype(str), return_inverse=True
        )
        pair, inverse = np.unique(code * (int(clusters.max()) + 1) + clusters, return_inverse=True)
        cn = np.bincount(inverse, n)
        cx = np.bincount(inverse, x)
        owner = pair // (int(clusters.max()) + 1)
        rows = [np.ones_like(cn), cn, cx, cn * cn, cn * cx, cx * cx]
        sums = np.stack([np.bincount(owner, r, len(names)) for r in rows], axis=1)
        for name, row in zip(names.tolist(), sums, strict=True):
            self._put(name // self.width if isinstance(name, int) else name, row)
        while len(self.table) > self.limit and self._merge():
            pass

    def _put(self, key: Any, row: Array) -> None:
        if not isinstance(key, int) and key not in self.table and len(self.table) >= self.limit:
            key = "(others)"
        held = self.table.get(key)
        self.table[key] = row if held is None else held + row

    def _merge(self) -> bool:
        if not all(isinstance(k, int) for k in self.table):
            return False  # names: further ones are counted as "(others)"
        self.width *= 2
        old, self.table = self.table, {}
        for key, row in old.items():
            self._put(key // 2, row)
        return True

    def order(self) -> list[Any]:
        return sorted(self.table)

    def mean(self, *chosen: Any) -> Mean:
        """Over the chosen keys together."""
        rows = [self.table[k] for k in chosen if k in self.table]
        return _mean(np.sum(rows, axis=0)) if rows else Mean(float("nan"), inf, 0, 0)

    def mean_where(self, wanted: Any) -> Mean:
        """Over the keys for which ``wanted(key)`` holds."""
        return self.mean(*(k for k in self.table if wanted(k)))

    def label(self, key: Any) -> Any:
        """The key as a reader knows it: its first value where keys were merged."""
        return key * self.width if isinstance(key, int) else key


def _mean(row: Array) -> Mean:
    k, n, x, nn, nx, xx = (float(v) for v in row)
    if n == 0:
        return Mean(float("nan"), inf, 0, 0)
    r = x / n
    residual = max(xx - 2 * r * nx + r * r * nn, 0.0)
    se = sqrt(residual * k / (k - 1)) / n if k > 1 else inf
    return Mean(r, se, k, n)


def mean_of(n: Array, x: Array) -> Mean:
    """Ratio sum(x)/sum(n) over clusters ``[K]``."""
    ones = np.ones_like(n, dtype=np.float64)
    return _mean(np.array([v.sum() for v in (ones, n, x, n * n, n * x, x * x)]))
