"""One training step as the sequence table has it, made from the padded tensors that trainers keep.

    batch = from_padded(prompt_ids, prompt_mask, response_ids, response_mask,
                        tokens={"sampler_logprob": q, "trainer_logprob": p},
                        scalars={"step": 12, "group_id": ["a", "a", "b", "b"]})

Arrays may be NumPy, nested lists or torch tensors on any device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kernel_contracts.errors import InputError
from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.schema import LISTS, SCALARS, Origin

if TYPE_CHECKING:
    import pyarrow as pa

Array = npt.NDArray[Any]


def plain_array(values: Any) -> Array:
    """A host array of a tensor, an array or lists. bfloat16, which NumPy has not, becomes float32;
    a nested or padded tensor of TensorDict is unpacked by its own ``to_padded_tensor``."""
    if hasattr(values, "to_padded_tensor") and getattr(values, "is_nested", False):
        values = values.to_padded_tensor(float("nan") if values.is_floating_point() else 0)
    if hasattr(values, "detach"):
        values = values.detach()
        if values.is_floating_point():
            values = values.float()
        return np.asarray(values.cpu().numpy())
    return np.asarray(values)


def from_padded(
    prompt_ids: Any,
    prompt_mask: Any,
    response_ids: Any,
    response_mask: Any,
    *,
    tokens: Mapping[str, Any] | None = None,
    scalars: Mapping[str, Any] | None = None,
    loss_mask: Any = None,
    source: str = "",
) -> TokenBatch:
    """A batch of B padded sequences: prompts ``[B, P]`` and responses ``[B, T]``, any padding side.

    prompt_mask, response_mask: 1 where there is a token. loss_mask: ``[B, T]`` or None (every
    response token); a response token outside it was not sampled (a tool's answer). tokens: columns
    of ``LISTS`` -> ``[B, T]`` response-aligned, or ``[B]`` (spread). scalars: columns of
    ``SCALARS`` -> one value, or B of them. Columns that are None are left out, which is not the
    same as zeros. Raises InputError where shapes disagree.
    """
    p_ids, p_mask = plain_array(prompt_ids), plain_array(prompt_mask).astype(bool)
    r_ids, r_mask = plain_array(response_ids), plain_array(response_mask).astype(bool)
    _same_shape("prompt_mask", p_mask, p_ids.shape)
    _same_shape("response_mask", r_mask, r_ids.shape)
    keep = np.concatenate([p_mask, r_mask], axis=1)
    width, total = p_ids.shape[1], keep.shape
    ids = np.concatenate([p_ids, r_ids], axis=1)
    trained = r_mask if loss_mask is None else r_mask & plain_array(loss_mask).astype(bool)
    _same_shape("loss_mask", trained, r_ids.shape)
    flat: dict[str, tuple[Array, Array | None]] = {"token_ids": (ids[keep], None)}
    origin = np.zeros(total, dtype=np.int8)
    origin[:, width:] = np.where(trained, Origin.SAMPLED, Origin.ENVIRONMENT)
    flat["origin"] = (origin[keep], None)
    flat["loss_mask"] = (np.pad(trained, ((0, 0), (width, 0)))[keep], None)
    for name, values in (tokens or {}).items():
        if values is None:
            continue
        array = plain_array(values)
        if array.ndim == 1 or array.shape == (len(r_ids), 1):
            array = np.broadcast_to(array.reshape(-1, 1), r_ids.shape)
        _same_shape(name, array, r_ids.shape)
        known = np.broadcast_to(trained if name != "kept_mask" else r_mask, r_ids.shape)
        padded = np.zeros(total, dtype=array.dtype)
        padded[:, width:] = array
        flat[name] = (padded[keep], np.pad(known, ((0, 0), (width, 0)))[keep])
    offsets = np.concatenate([[0], np.cumsum(keep.sum(axis=1))])
    prompt_len = p_mask.sum(axis=1)
    given: dict[str, Any] = {"prompt_len": prompt_len, "n_left_pad": width - prompt_len}
    return _assemble(flat, offsets, {**given, **(scalars or {})}, source)


def from_sequences(
    token_ids: Sequence[Any],
    prompt_len: Sequence[int],
    *,
    tokens: Mapping[str, Sequence[Any] | None] | None = None,
    scalars: Mapping[str, Any] | None = None,
    source: str = "",
) -> TokenBatch:
    """A batch of ragged sequences. tokens: columns of ``LISTS`` -> one list a sequence, as long as
    its response (it is put behind a prompt of nulls); None for a sequence that has none."""
    ids = [plain_array(one).astype(np.int64) for one in token_ids]
    lengths = np.asarray([len(one) for one in ids], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    position = np.concatenate([np.arange(n) for n in lengths]) if len(ids) else np.empty(0)
    response = position >= np.repeat(np.asarray(prompt_len, dtype=np.int64), lengths)
    flat: dict[str, tuple[Array, Array | None]] = {
        "token_ids": (np.concatenate(ids) if ids else np.empty(0, dtype=np.int64), None)
    }
    for name, column in (tokens or {}).items():
        if column is None:
            continue
        _known(name, LISTS)
        values = np.zeros(int(offsets[-1]), dtype=LISTS[name])
        known = np.zeros(int(offsets[-1]), dtype=bool)
        for s, one in enumerate(column):
            if one is None:
                continue
            got, need = plain_array(one), int(lengths[s]) - int(prompt_len[s])
            if len(got) != need:
                raise InputError(
                    f"{name} has {len(got)} values for a response of {need} tokens",
                    where=f"{source or 'step'}, sequence {s}",
                    fix="align it with the response: one value per response token",
                )
            values[offsets[s + 1] - need : offsets[s + 1]] = got
            known[offsets[s + 1] - need : offsets[s + 1]] = True
        flat[name] = (values, known)
    if "loss_mask" in flat and "origin" not in flat:
        trained = flat["loss_mask"][0].astype(bool)
        origin = np.where(trained, Origin.SAMPLED, Origin.ENVIRONMENT)
        flat["origin"] = (np.where(response, origin, Origin.PROMPT), None)
    return _assemble(flat, offsets, {"prompt_len": prompt_len, **(scalars or {})}, source)


def _assemble(
    flat: Mapping[str, tuple[Array, Array | None]],
    offsets: Array,
    scalars: Mapping[str, Any],
    source: str,
) -> TokenBatch:
    import pyarrow as pa

    n = len(offsets) - 1
    columns: dict[str, pa.Array] = {}
    for name, value in scalars.items():
        if value is None:
            continue
        _known(name, SCALARS)
        kind = pa.type_for_alias(SCALARS[name])
        many = plain_array(value) if not isinstance(value, str | int | float) else None
        if many is None or many.ndim == 0:
            listed = [value if many is None else many.item()] * n
        else:
            listed = many.tolist()
        if len(listed) != n:
            raise InputError(f"{name} has {len(listed)} values for {n} sequences", where=source)
        columns[name] = pa.array(listed, type=kind)
    if "sample_id" not in columns:
        step = columns["step"][0].as_py() if "step" in columns and n else 0
        columns["sample_id"] = pa.array([f"{step}-{s}" for s in range(n)])
    start = pa.array(offsets.astype(np.int32))
    for name, (values, known) in flat.items():
        _known(name, LISTS)
        kind = pa.type_for_alias(LISTS[name])
        inner = pa.array(values.astype(LISTS[name]), mask=None if known is None else ~known)
        columns[name] = pa.ListArray.from_arrays(start, inner.cast(kind))
    return TokenBatch(pa.RecordBatch.from_pydict(columns), source)


def _known(name: str, names: Mapping[str, str]) -> None:
    if name not in names:
        raise InputError(
            f"{name} is no column of the sequence table", fix=f"one of {', '.join(names)}"
        )


def _same_shape(name: str, array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise InputError(
            f"{name} is {list(array.shape)}, the tokens are {list(shape)}",
            fix="give it the shape of the token ids",
        )
