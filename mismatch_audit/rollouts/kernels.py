"""Compiled loops over flat token arrays. They release the interpreter lock; callers share rows out.

A *feature* is one number a token. Everything that is reported is made of sums of features, so that
batches, files and machines merge by adding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

FEATURES = (
    "rows",  # 1 where both log-probs are finite; the features below are 0 elsewhere
    "dlp",  # log p - log q
    "abs_dlp",
    "dlp2",
    "k3",  # w - 1 - ln w
    "w2",  # (p / q)^2
    "mult",  # exp |log p - log q|
    "abs_dp",  # |p - q|
    "sampler_logprob",
    "missing",  # 1 where a log-prob is null or NaN
    "nonfinite",  # 1 where a log-prob is infinite
)
"""Columns of a row of sums. Shares above thresholds follow, one column a threshold."""

ROWS, DLP, ABS_DLP, DLP2, K3, W2, MULT, ABS_DP, SAMPLER, MISSING, NONFINITE = range(11)
N_FEATURES = len(FEATURES)

EXPONENT_CAP = 300.0
"""|log p - log q| counts as at most this in exp(): e^600 still fits a float64. Log-probs of real
tokens stay within 150 nats, so nothing that a model says is touched (verl clamps at 20)."""

LOG_SPACE_BINS = 1 << 15
_SERIES_BELOW = 1e-3


def compiled(function: Callable[..., Any]) -> Any:
    """Compiled on first use and kept on disk where that can be written.

    numba's cache watches the function's own file alone, so all that it calls belongs there too.
    """
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # "no locator available": a read-only install and no home directory
        return njit(nogil=True)(function)


@compiled
def features(q: float, p: float, thresholds: Any, out: Any) -> None:
    """Features of one token into ``out`` [N_FEATURES + thresholds].

    k3 is computed by its series where w - 1 - ln w would cancel (fp32 against fp32: 1e-12).
    """
    out[:] = 0.0
    if np.isnan(q) or np.isnan(p):
        out[9] = 1.0
        return
    if np.isinf(q) or np.isinf(p):
        out[10] = 1.0
        return
    d = p - q
    a = abs(d)
    capped = min(max(d, -EXPONENT_CAP), EXPONENT_CAP)
    w = np.exp(capped)
    out[0] = 1.0
    out[1] = d
    out[2] = a
    out[3] = d * d
    if a < _SERIES_BELOW:
        out[4] = d * d * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d * (1 / 120 + d / 720))))
    else:
        out[4] = w - 1.0 - d
    out[5] = w * w
    out[6] = w if d >= 0.0 else 1.0 / w
    out[7] = abs(np.exp(p) - np.exp(q))
    out[8] = q
    for j in range(thresholds.size):
        if a > thresholds[j]:
            out[11 + j] = 1.0


@compiled
def sum_sequences(
    sampler: Any, trainer: Any, mask: Any, offsets: Any, thresholds: Any, out: Any
) -> None:
    """Sums of features over each sequence's masked tokens.

    sampler, trainer: float [N].  mask: bool [N].  offsets: int64 [S + 1].  thresholds: float64 [J].
    out: float64 [S, N_FEATURES + J], overwritten.
    """
    token = np.empty(out.shape[1])
    for s in range(offsets.size - 1):
        for k in range(out.shape[1]):
            out[s, k] = 0.0
        for t in range(offsets[s], offsets[s + 1]):
            if mask[t]:
                features(np.float64(sampler[t]), np.float64(trainer[t]), thresholds, token)
                for k in range(out.shape[1]):
                    out[s, k] += token[k]
