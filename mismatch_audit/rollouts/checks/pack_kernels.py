"""Compiled loops behind `TokenView`: one pass where numpy would take a dozen."""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatch_audit.compiling import compiled

N_SUMS = 4
"""Sums a sequence: d, |d|, p/q, doubt."""

_SURE = np.float32(-1e-6)  # a mean log-prob nearer to 0 counts as this: doubt stays above 0


@compiled
def mark(mask: Any, sampler: Any, trainer: Any, sentinel: float, offsets: Any,
         both: Any, edges: Any) -> None:  # fmt: skip
    """both[t] = the mask holds, and both log-probs are finite and above the sentinel; edges [S + 1]
    = how many of them lie before each sequence."""
    count = 0
    edges[0] = 0
    for s in range(offsets.size - 1):
        for t in range(offsets[s], offsets[s + 1]):
            q, p = sampler[t], trainer[t]
            ok = mask[t] and np.isfinite(q) and np.isfinite(p) and q > sentinel and p > sentinel
            both[t] = ok
            count += ok
        edges[s + 1] = count


@compiled
def pack(both: Any, sampler: Any, trainer: Any, cap: float, offsets: Any,
         where: Any, q: Any, p: Any, d: Any, size: Any, ratio: Any, doubt: Any, sums: Any,
         ) -> None:  # fmt: skip
    """The marked tokens side by side, [M] each, and their sums a sequence, [S, N_SUMS].

    d = log p - log q within the cap, size = |d|, ratio = p/q, doubt = 1 - sqrt(p q).
    """
    m = 0
    for s in range(offsets.size - 1):
        total_d = total_size = total_ratio = total_doubt = 0.0
        for t in range(offsets[s], offsets[s + 1]):
            if not both[t]:
                continue
            where[m] = t
            q[m], p[m] = sampler[t], trainer[t]
            gap = min(max(np.float64(trainer[t]) - np.float64(sampler[t]), -cap), cap)
            d[m], size[m], ratio[m] = gap, abs(gap), np.exp(gap)
            mean = min((sampler[t] + trainer[t]) * np.float32(0.5), _SURE)
            doubt[m] = -np.expm1(mean)
            total_d += d[m]
            total_size += size[m]
            total_ratio += ratio[m]
            total_doubt += doubt[m]
            m += 1
        sums[s, 0], sums[s, 1], sums[s, 2], sums[s, 3] = (
            total_d, total_size, total_ratio, total_doubt,
        )  # fmt: skip


@compiled
def add_lags(at: Any, d: Any, size: Any, ratio: Any, advantage: Any, clip: float,
             lowest: int, per_octave: int, table: Any, histogram: Any) -> None:  # fmt: skip
    """Adds tokens to the rows of their lags: `lag_sums._COLUMNS`, and |d| by octaves.

    at: [M] row.  advantage: [M], NaN or 0 where unknown or of no effect.  clip: half-width on p/q.
    """
    last = histogram.shape[1] - 1
    for m in range(at.size):
        row = table[at[m]]
        gap = ratio[m] - 1.0
        away = abs(gap)
        row[0] += 1.0
        row[1] += d[m]
        row[2] += size[m]
        row[3] += gap - d[m]
        row[4] += 0.5 * away
        row[5] += ratio[m]
        row[6] += ratio[m] * ratio[m]
        outside = away > clip
        row[7] += outside
        if np.isfinite(advantage[m]) and advantage[m] != 0.0:
            # A PPO clip removes the gradient: the ratio too high and A > 0, or too low and A < 0.
            row[8] += outside and gap * advantage[m] > 0.0
            row[9] += 1.0
        # Octave and place in it from the float's own bits: a logarithm costs twice as much. Within
        # an octave the bins are of equal width, so that a quantile is off by 1/per_octave at most.
        bits = np.int64(np.float32(size[m]).view(np.uint32))
        place = (bits >> 23) - 127 - lowest
        place = place * per_octave + (((bits & 0x7FFFFF) * per_octave) >> 23)
        histogram[at[m], min(max(place, 0), last)] += 1.0
