"""The comparison where the engine gives only its top k log-probs a row: intervals, not values.

The reference still has its whole row, so both sides are known on the engine's k tokens (and on the
sampled one, which may lie outside them); the rest is one bucket. See ``kernel_contracts.topk``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernel_contracts.errors import InputError
from kernel_contracts.topk import topk_intervals
from mismatch_audit.compare.heads import Head

__all__ = ["INTERVAL_COLUMNS", "compare_topk", "pad_rows"]

INTERVAL_COLUMNS = ("kl_lower", "kl_upper", "tv_lower", "tv_upper")
ROWS = 128
"""At a time: 128 rows of a 49k vocabulary in float64 are 50 MB."""

Array = npt.NDArray[Any]
Row = list[tuple[int, float]]


def pad_rows(rows: list[Row]) -> tuple[Array, Array]:
    """Lists of (token id, log-prob) -> ids ``[T, w]`` int64 (-1 for none) and log-probs ``[T, w]``
    float64 (NaN for none), best first."""
    width = max((len(row) for row in rows), default=0)
    ids = np.full((len(rows), width), -1, dtype=np.int64)
    logprobs = np.full((len(rows), width), np.nan)
    for at, row in enumerate(rows):
        # Of equal log-probs the lowest id first, as in the full comparison.
        ordered = sorted(row, key=lambda entry: (-entry[1], entry[0]))
        ids[at, : len(row)] = [token for token, _ in ordered]
        logprobs[at, : len(row)] = [value for _, value in ordered]
    return ids, logprobs


def compare_topk(
    reference_hidden: torch.Tensor,
    reference_head: Head,
    engine_ids: Array,
    engine_logprobs: Array,
    target_ids: Array,
) -> dict[str, Array]:
    """Columns of the token table for hidden rows ``[T, H]`` of the reference and padded top rows
    ``[T, w]`` of the engine (``pad_rows``); target_ids ``[T]`` must be among each row's ids.

    Units: nats. Gives ``INTERVAL_COLUMNS`` and, exact, both sides' log-prob of the token, top-1 and
    margin, ``flip``, ``entropy`` (of the reference), ``nonfinite``. What needs the engine's whole
    row (drift, chi2, ...) is absent. engine_margin is NaN with fewer than two log-probs.
    Raises InputError where shapes do not fit, or a row lacks its token.
    """
    rows, width = engine_ids.shape
    if not rows == len(reference_hidden) == len(target_ids) or engine_logprobs.shape != (
        rows,
        width,
    ):
        raise InputError(
            f"rows do not pair up: {len(reference_hidden)} of the reference, {rows} of the engine, "
            f"{len(target_ids)} token ids"
        )
    hit = engine_ids == target_ids[:, None]
    if not hit.any(1).all():
        at = int(np.flatnonzero(~hit.any(1))[0])
        raise InputError(
            f"row {at}: the engine gave no log-prob of the token {int(target_ids[at])} itself",
            fix="ask the engine for the sampled token's log-prob as well",
        )
    mine = _reference_columns(reference_hidden, reference_head, engine_ids, target_ids)
    logprobs_at = mine.pop("logprobs_at")
    columns = {f"reference_{name}": value for name, value in mine.items() if name in _OWN}
    columns["entropy"] = mine["entropy"]
    columns["engine_logprob"] = engine_logprobs[hit]
    columns["engine_top1"] = engine_ids[:, 0]
    columns["engine_top1_logprob"] = engine_logprobs[:, 0]
    gap = engine_logprobs[:, 0] - engine_logprobs[:, 1] if width > 1 else np.full(rows, np.nan)
    columns["engine_margin"] = gap
    given = engine_ids >= 0
    odd = (given & ~np.isfinite(engine_logprobs)).sum(1)
    columns["nonfinite"] = mine["nonfinite"] + odd
    columns["flip"] = columns["engine_top1"] != columns["reference_top1"]
    return columns | _intervals(logprobs_at, engine_logprobs, given, columns["nonfinite"] > 0)


_OWN = ("logprob", "margin", "top1", "top1_logprob")


def _reference_columns(
    hidden: torch.Tensor, head: Head, ids: Array, targets: Array
) -> dict[str, Array]:
    parts: list[dict[str, torch.Tensor]] = []
    device = head.weight.device
    for start in range(0, len(hidden), ROWS):
        chunk = slice(start, start + ROWS)
        z = head.logits(hidden[chunk].to(device)).double()
        finite = torch.isfinite(z)
        logp = torch.log_softmax(z, -1)
        top = z.topk(2, -1).values
        best = z.max(-1)
        at = torch.tensor(ids[chunk], device=device).clamp(min=0)
        target = torch.tensor(targets[chunk], device=device)[:, None]
        parts.append(
            {
                "logprob": logp.gather(1, target)[:, 0],
                "logprobs_at": logp.gather(1, at),
                "margin": top[:, 0] - top[:, 1],
                "top1": best.indices,
                "top1_logprob": logp.max(-1).values,
                "entropy": -(logp.exp() * logp).nan_to_num(0.0).sum(-1),
                "nonfinite": (~finite).sum(-1),
            }
        )
    names = parts[0] if parts else ()
    return {name: torch.cat([p[name] for p in parts]).cpu().numpy() for name in names}


def _intervals(reference: Array, engine: Array, given: Array, bad: Array) -> dict[str, Array]:
    """Rows of one width at a time: the sampled token widens some rows by one."""
    found = {name: np.full(len(engine), np.nan) for name in INTERVAL_COLUMNS}
    width = given.sum(1)
    for w in np.unique(width[~bad]):
        at = np.flatnonzero((width == w) & ~bad)
        result = topk_intervals(reference[at, :w], engine[at, :w])
        for name in INTERVAL_COLUMNS:
            found[name][at] = getattr(result, name)
    return found
