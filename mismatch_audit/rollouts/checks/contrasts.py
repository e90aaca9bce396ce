"""Siblings: two rollouts of one prompt that share a prefix and then take different tokens.

There both tokens come from one context, so whatever is constant in a context cancels in the
difference of their log-probs: log p_T(a) - log p_T(b) = (z_a - z_b) / T with no normaliser. The
slope of the trainer's differences on the sampler's is the ratio of their temperatures, exactly;
renormalisation on a truncated support leaves the slope at 1 and shows as one common offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf, log, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from mismatch_audit.rollouts.checks.sample import Row, Sample
from mismatch_audit.rollouts.checks.strata import ALPHA, p_value

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Contrasts:
    """Pairs of tokens from one context: ``a``, ``b`` are ``[K, 2]`` (the column on the x axis and
    the one on the y axis), group ``[K]``."""

    a: Array
    b: Array
    group: Array

    @property
    def count(self) -> int:
        return len(self.group)

    @property
    def groups(self) -> int:
        return len(np.unique(self.group))

    def differences(self) -> tuple[Array, Array]:
        gap = self.a - self.b
        return gap[:, 0], gap[:, 1]

    def common_offset(self) -> float:
        """Share of the variation of d that both tokens of a context have in common, in [-1, 1]."""
        da, db = self.a[:, 1] - self.a[:, 0], self.b[:, 1] - self.b[:, 0]
        total = float((da**2 + db**2).sum())
        return 2 * float((da * db).sum()) / total if total > 0 else 0.0


def contrasts(sample: Sample, x: str = "sampler_logprob", y: str = "trainer_logprob") -> Contrasts:
    """Adjacent siblings in the order of their tokens give one pair each."""
    a, b, group = [], [], []
    for key in sorted(sample.groups):
        rows = [r for r in sample.groups[key] if x in r.columns and y in r.columns]
        rows.sort(key=lambda r: r.columns["token_ids"].tolist())
        for one, other in pairwise(rows):
            at = _parting(one, other)
            if at is None:
                continue
            pair = [[float(r.columns[c][at]) for c in (x, y)] for r in (one, other)]
            if np.isfinite(pair).all():
                a.append(pair[0])
                b.append(pair[1])
                group.append(key)
    codes = np.unique(np.array(group, dtype=object).astype(str), return_inverse=True)[1]
    return Contrasts(np.array(a).reshape(-1, 2), np.array(b).reshape(-1, 2), codes)


def _parting(one: Row, other: Row) -> int | None:
    a, b = one.columns["token_ids"], other.columns["token_ids"]
    n = min(len(a), len(b))
    where = np.flatnonzero(a[:n] != b[:n])
    if not len(where):
        return None
    at = int(where[0])
    # in the prompt, or at a forced token, nobody drew anything
    return at if one.used[at] and other.used[at] else None


@dataclass(frozen=True)
class Slope:
    """The fitted slope and how far it explains the gap between the two sides.

    log_se: jackknife over groups.  explained: 1 - SS(y - slope x) / SS(y - x).
    """

    slope: float
    log_se: float
    explained: float
    pairs: int
    groups: int

    def differs(self, band: float) -> bool:
        """Whether |log slope| exceeds the band, and the slope explains most of the gap."""
        if self.groups < 10 or not self.slope > 0 or self.explained < 0.5:
            return False
        return p_value(abs(log(self.slope)) - band, self.log_se, self.groups - 1) < ALPHA


def fit(x: Array, y: Array, group: Array) -> Slope:
    """Through the origin, by the ratio of sizes: noise on both axes does not flatten it."""
    sums = np.stack([np.bincount(group, v) for v in (x * x, y * y, x * y)], axis=1)
    total = sums.sum(0)
    k = len(sums)
    if k < 2 or min(total[0], total[1]) <= 0 or total[2] <= 0:
        return Slope(float("nan"), inf, 0.0, len(x), k)
    slope = sqrt(total[1] / total[0])
    rest = total - sums
    good = (rest[:, 0] > 0) & (rest[:, 1] > 0)
    logs = 0.5 * np.log(rest[good, 1] / rest[good, 0])
    se = sqrt((k - 1) / k * float(((logs - logs.mean()) ** 2).sum())) if good.all() else inf
    gap = float(((y - x) ** 2).sum())
    left = float(((y - slope * x) ** 2).sum())
    return Slope(slope, se, 1 - left / gap if gap > 0 else 0.0, len(x), k)


def near(slope: float, target: float) -> bool:
    """Within 10% of the way from 1 to the target, or 3%: enough to tell T from 1/T."""
    return abs(log(slope / target)) < max(0.03, 0.1 * abs(log(target)))
