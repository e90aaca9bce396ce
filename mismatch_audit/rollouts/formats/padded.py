"""Batches of padded ``[B, T]`` arrays, as trainers hold them: padding cut, alignment undone.

Three alignments occur, told apart by width and by the format: *full* (element i describes token i),
*response* (the last R of the S columns), and *next* (element i describes token i + 1: S - 1 wide,
or S wide after a roll).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from mismatch_audit.rollouts.batch import Array
from mismatch_audit.rollouts.formats.tidy import first_true, logprobs, origins, prompt_group
from mismatch_audit.rollouts.safe_pickle import as_array

_Rows = Callable[[int], Array]

LOGPROBS = ("sampler_logprob", "trainer_logprob", "current_logprob", "ref_logprob")


@dataclass(frozen=True)
class Layout:
    """How a trainer names and aligns its arrays; the first name of a tuple that is there counts.

    ids, attention: full width.  sampled: mask of the model's own tokens.  response: mask (or ids)
    of the response, tool results included; without it the response starts at the first sampled
    token.  loss: mask of the trained tokens, where it is another.  columns: ours -> theirs, per
    token.  scalars: ours -> theirs, one value a sequence.  wide: alignment of arrays as wide as
    ids.  clamped: a log-prob that means "none".
    """

    ids: tuple[str, ...]
    columns: Mapping[str, tuple[str, ...]]
    sampled: tuple[str, ...]
    attention: tuple[str, ...] = ("attention_mask",)
    response: tuple[str, ...] = ()
    loss: tuple[str, ...] = ()
    scalars: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    wide: Literal["full", "next"] = "full"
    clamped: float | None = None


def rows(
    arrays: Mapping[str, Any], layout: Layout, constants: Mapping[str, Any], prefix: str
) -> Iterator[dict[str, Any]]:
    """Rows of one batch; ``prefix`` starts their sample ids. Raises ValueError, column named."""
    ids = _two(arrays, layout.ids)
    if ids is None:
        raise ValueError(f"has no {layout.ids[0]}")
    n, width = ids.shape
    if ids.dtype.kind not in "iu":
        raise ValueError(f"{layout.ids[0]} should hold integers, but holds {ids.dtype}")

    def aligned(names: tuple[str, ...]) -> _Rows | None:
        values = _two(arrays, names)
        return None if values is None else _align(values, names[0], n, width, layout.wide)

    sampled = aligned(layout.sampled)
    if sampled is None:
        raise ValueError(f"has no {' or '.join(layout.sampled)}: which tokens were sampled?")
    attention = _attention(arrays, layout, ids)
    response, loss = aligned(layout.response) or sampled, aligned(layout.loss)
    of_ids = response is not sampled and layout.response[0] == "responses"
    columns = {ours: found for ours, names in layout.columns.items()
               if (found := aligned(names)) is not None}  # fmt: skip
    scalars = {ours: each for ours, names in layout.scalars.items()
               if (each := _one_each(arrays, names, n)) is not None}  # fmt: skip
    for b in range(n):
        keep = np.ones(width, dtype=bool) if attention is None else attention[b] != 0
        if not keep.any():
            continue  # a row of padding that fills up the batch
        own, tokens = _positive(sampled(b)[keep]), ids[b][keep]
        # Ids count in every column that there is (0 is a token), a mask where it is 1.
        reply = ~np.isnan(response(b)) if of_ids else _positive(response(b))
        prompt = first_true(reply[keep])
        if not own.any():  # nothing trained on: the whole response counts as the model's own
            own = np.arange(len(tokens)) >= prompt
            trained = np.zeros(len(tokens), dtype=bool)
        else:
            trained = own if loss is None else _positive(loss(b)[keep])
        row: dict[str, Any] = {
            **constants,
            "sample_id": f"{prefix}{b}",
            "group_id": prompt_group(tokens, prompt),
            "token_ids": tokens,
            "prompt_len": prompt,
            "n_left_pad": first_true(keep),
            "origin": origins(own, prompt),
            "loss_mask": trained,
        }
        for ours, values in columns.items():
            row[ours] = _column(ours, values(b)[keep], ~own, layout.clamped)
        row.update({ours: each[b] for ours, each in scalars.items()})
        yield row


def _positive(values: Array) -> Array:
    return np.asarray(np.nan_to_num(values) > 0)


def _attention(arrays: Mapping[str, Any], layout: Layout, ids: Array) -> Array | None:
    """``[B, S]``, not 0 where a token is real. None: all are."""
    attention = _two(arrays, layout.attention)
    if attention is not None and attention.shape != ids.shape:
        raise ValueError(f"attention_mask has shape {attention.shape} for tokens {ids.shape}")
    return attention


def _column(ours: str, values: Array, outside: Array, clamped: float | None) -> Any:
    if ours in LOGPROBS:
        return logprobs(values, outside, clamped)
    if ours == "token_version":
        whole = np.where(np.isnan(values) | outside, -1, values)
        return whole.astype(np.int64)
    if ours == "position_ids":
        return np.where(np.isnan(values), -1, values).astype(np.int64)
    if ours in ("advantage", "applied_weight", "entropy"):
        values = values.astype(np.float32)
        values[outside & (values == 0)] = np.nan
    return values


def _align(values: Array, name: str, n: int, width: int, wide: str) -> _Rows:
    """Row b -> ``[S]`` float64 with NaN where the array says nothing; made when asked for, since a
    batch of long sequences is large."""
    if len(values) != n:
        raise ValueError(f"{name} has {len(values)} rows for {n} sequences")
    if values.dtype.kind not in "biuf":
        raise ValueError(f"{name} should hold numbers, but holds {values.dtype}")
    own = values.shape[1]
    if own > width:
        raise ValueError(f"{name} is {own} wide, the tokens are {width}")

    def row(b: int) -> Array:
        full = np.full(width, np.nan)
        if wide == "next" and own == width:
            full[1:] = values[b, :-1]
        else:  # the last ``own`` columns: all, the response, or those after the first token
            full[width - own :] = values[b]
        return full

    return row


def _two(arrays: Mapping[str, Any], names: tuple[str, ...]) -> Array | None:
    for name in names:
        if arrays.get(name) is None:
            continue
        found = np.asarray(as_array(arrays[name]))
        if found.ndim == 1:  # one sequence
            found = found[None, :]
        if found.ndim != 2:
            raise ValueError(f"{name} has {found.ndim} dimensions where [sequences, tokens] is due")
        return found
    return None


def _one_each(arrays: Mapping[str, Any], names: tuple[str, ...], n: int) -> list[Any] | None:
    """One value a sequence; None where the array is per token or there is none."""
    for name in names:
        if arrays.get(name) is None:
            continue
        try:
            found = np.asarray(as_array(arrays[name]))
        except ValueError:
            return None
        if found.shape in ((n,), (n, 1)):
            return list(found.reshape(n).tolist())
    return None
