"""Compiled loops over flat token arrays. They release the interpreter lock; callers share rows out.

A *feature* is one number a token. Everything that is reported is made of sums of features, so that
batches, files and machines merge by adding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatch_audit.compiling import compiled

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

HISTOGRAM_BINS = 1 << 15
"""Sign, exponent and 6 bits of the mantissa of float32(d): bins 1.6 % wide at every magnitude."""

_SERIES_BELOW = 1e-3


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
    if a < _SERIES_BELOW:
        k3 = d * d * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d * (1 / 120 + d / 720))))
        w = 1.0 + d + k3
    else:
        w = np.exp(min(max(d, -EXPONENT_CAP), EXPONENT_CAP))
        k3 = w - 1.0 - d
    out[0] = 1.0
    out[1] = d
    out[2] = a
    out[3] = d * d
    out[4] = k3
    out[5] = w * w
    out[6] = w if d >= 0.0 else 1.0 / w
    # |p - q| = q |w - 1|, and w - 1 = d + k3: an exponential less
    out[7] = np.exp(q) * abs(d + k3) if a < EXPONENT_CAP else abs(np.exp(p) - np.exp(q))
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


@compiled
def bin_codes(values: Any, edges: Any, out: Any, start: int, stop: int) -> None:
    """Which of the intervals [edges[i], edges[i + 1]) a value is in, the last closed on the right;
    -1 outside, -2 where NaN. out: int16."""
    last = edges.size - 1
    code = 0
    for t in range(start, stop):
        value = np.float64(values[t])
        if np.isnan(value):
            out[t] = -2
            continue
        if not (value >= edges[0] and value <= edges[last]):
            out[t] = -1
            continue
        # Neighbours are often in one interval (positions are): the last one is asked first.
        if not (value >= edges[code] and value < edges[code + 1]):
            code = 0
            while code < last - 1 and value >= edges[code + 1]:
                code += 1
        out[t] = code


@compiled
def count_levels(values: Any, null: Any, low: int, counts: Any) -> None:
    """counts[v - low] += 1 for each value that is not null."""
    for t in range(values.size):
        if not null[t]:
            counts[np.int64(values[t]) - low] += 1


@compiled
def level_codes(values: Any, null: Any, low: int, rank: Any, out: Any) -> None:
    """out = rank[v - low], -2 where null."""
    for t in range(values.size):
        out[t] = -2 if null[t] else rank[np.int64(values[t]) - low]


@compiled
def nan_for_null(values: Any, bits: Any, offset: int, out: Any) -> None:
    """out[t] = values[t] where bit offset + t of Arrow's validity bitmap is set, else NaN."""
    for t in range(values.size):
        at = offset + t
        out[t] = values[t] if (bits[at >> 3] >> (at & 7)) & 1 else np.nan


@compiled
def positions(offsets: Any, starts: Any, out: Any) -> None:
    """out[t] = place of token t in its sequence, less starts[sequence]. int32 [N]."""
    for s in range(offsets.size - 1):
        for t in range(offsets[s], offsets[s + 1]):
            out[t] = t - offsets[s] - starts[s]


@compiled
def add_up(
    sampler: Any, trainer: Any, mask: Any, offsets: Any,
    order: Any, clusters: Any, first: int, last: int,
    sequence_codes: Any, token_codes: Any, token_base: Any, thresholds: Any,
    sequence_sums: Any, scratch: Any, touched: Any, is_touched: Any,
    out_slot: Any, out_cluster: Any, out_sums: Any,
    histogram: Any, extremes: Any, bands: Any, outside: Any, nulls: Any,
) -> tuple[int, int]:  # fmt: skip
    """Sums of features per cluster and slot (a slice definition's group), clusters [first, last).

    order: [S] sequences, those of one cluster side by side.  clusters: [C + 1] edges into order.
    sequence_codes: int32 [S, A] slot or -1 (no group), -2 (null).  token_codes: int16 [B, N], slot
    less token_base[B], same marks.  sequence_sums: [S, K], overwritten.  scratch: [slots, K] zeros.
    touched: int32 [slots].  is_touched: uint8 [slots] zeros.  out_*: rows given; there must be room
    for one cluster.  histogram: int64 [HISTOGRAM_BINS], added to by the high bits of float32(d).
    extremes: float64 [2], least and greatest d so far.  bands: float64 [C, 2] of d; outside: int64
    [C] tokens beyond each, added to.
    nulls: int64 [A + B] masked tokens whose group is unknown, added to.

    Returns (clusters done, rows given): the room may be used up before the last.
    """
    k_all = sequence_sums.shape[1]
    n_sequence, n_token = sequence_codes.shape[1], token_codes.shape[0]
    token = np.empty(k_all)
    given = 0
    for c in range(first, last):
        if given + scratch.shape[0] > out_slot.size:
            return c, given
        count = 0
        for place in range(clusters[c], clusters[c + 1]):
            s = order[place]
            for k in range(k_all):
                sequence_sums[s, k] = 0.0
            tokens = 0
            for t in range(offsets[s], offsets[s + 1]):
                if not mask[t]:
                    continue
                tokens += 1
                features(np.float64(sampler[t]), np.float64(trainer[t]), thresholds, token)
                if token[0] > 0.0:
                    bits = np.float32(token[1]).view(np.uint32)
                    histogram[bits >> np.uint32(17)] += 1
                    extremes[0] = min(extremes[0], token[1])
                    extremes[1] = max(extremes[1], token[1])
                    for i in range(outside.size):
                        if token[1] < bands[i, 0] or token[1] > bands[i, 1]:
                            outside[i] += 1
                for k in range(k_all):
                    sequence_sums[s, k] += token[k]
                for b in range(n_token):
                    code = token_codes[b, t]
                    if code < 0:
                        if code == -2:
                            nulls[n_sequence + b] += 1
                        continue
                    slot = token_base[b] + code
                    if is_touched[slot] == 0:
                        is_touched[slot] = 1
                        touched[count] = slot
                        count += 1
                    for k in range(k_all):
                        scratch[slot, k] += token[k]
            if tokens == 0:
                continue
            for a in range(n_sequence):
                slot = sequence_codes[s, a]
                if slot < 0:
                    if slot == -2:
                        nulls[a] += tokens
                    continue
                if is_touched[slot] == 0:
                    is_touched[slot] = 1
                    touched[count] = slot
                    count += 1
                for k in range(k_all):
                    scratch[slot, k] += sequence_sums[s, k]
        for i in range(count):
            slot = touched[i]
            is_touched[slot] = 0
            out_slot[given] = slot
            out_cluster[given] = c
            for k in range(k_all):
                out_sums[given, k] = scratch[slot, k]
                scratch[slot, k] = 0.0
            given += 1
    return last, given


@compiled
def add_groups(rows: Any, order: Any, edges: Any, out: Any) -> None:
    """out[i] = sum of rows[order[edges[i]:edges[i + 1]]]; rows, out: float64 [*, K]."""
    for i in range(out.shape[0]):
        for k in range(out.shape[1]):
            out[i, k] = 0.0
        for j in range(edges[i], edges[i + 1]):
            for k in range(out.shape[1]):
                out[i, k] += rows[order[j], k]
