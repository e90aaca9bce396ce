"""Compare two programs' next-token distributions, row by row, over the whole vocabulary.

p is the reference's softmax, q the engine's. Logits are taken as the heads produced them (bf16,
fp16 or fp32) and widened only inside the sums. Three routes give the same columns, chosen by what
the machine can do: numba on a CPU, Triton on CUDA, plain torch in float64 for all else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from kernel_contracts.errors import InputError, NotComparableError
from mismatch_audit.compare import torch_rows
from mismatch_audit.compare.capabilities import loads
from mismatch_audit.compare.heads import Head
from mismatch_audit.tokens import COMPARED

COLUMNS = COMPARED
"""What a comparison gives, one ``[T]`` tensor each (see the token table for their meaning)."""

NUCLEUS = 1e-6
MAX_BYTES = 512 << 20
ROWS_PER_CHUNK = {"cpu": 128, "cuda": 4096}
"""Rows at a time at most. On a CPU matmuls are at their full speed from 64 (fp32) and 128 (bf16) on
(benchmarks/compare.py), and a small chunk stays in the last cache until it is compared."""


@dataclass(frozen=True)
class Route:
    """A way to compute the columns. bytes_per_logit: its temporaries, for logits of one side."""

    name: str
    compare: Callable[..., dict[str, torch.Tensor]]
    log_probs: Callable[..., dict[str, torch.Tensor]]
    bytes_per_logit: int = 0


def compare_logits(
    reference_logits: torch.Tensor,
    engine_logits: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    eta: float = NUCLEUS,
) -> dict[str, torch.Tensor]:
    """Every column of ``COLUMNS`` for ``[T, V]`` logits of both sides and ``[T]`` token ids.

    Units: nats. float64 columns, except ``*_top1`` and ``nonfinite`` (int64) and ``flip`` (bool),
    on the reference's device. eta: the nucleus of ``drift`` is {v: p(v) >= eta or q(v) >= eta};
    where it is empty, drift is NaN.
    A row with a non-finite logit on either side has ``nonfinite`` > 0, NaN in every float column
    and -1 in both top-1 columns. Of equal maxima the lowest index is top-1 and the margin is 0.
    Raises InputError for shapes, dtypes or ids that do not fit, NotComparableError where the
    vocabularies differ.
    """
    _check(reference_logits, engine_logits, target_ids, eta)
    _check_vocabulary(reference_logits.shape[1], engine_logits.shape[1], target_ids)
    route = choose_route(reference_logits.device, reference_logits.dtype, engine_logits.dtype)
    return route.compare(
        reference_logits, engine_logits.to(reference_logits.device), target_ids, eta=eta
    )


def compare_hidden(
    reference_hidden: torch.Tensor,
    reference_head: Head,
    engine_hidden: torch.Tensor,
    engine_head: Head,
    target_ids: torch.Tensor,
    *,
    eta: float = NUCLEUS,
    max_bytes: int = MAX_BYTES,
) -> dict[str, torch.Tensor]:
    """As ``compare_logits``, from final hidden states ``[T, H]`` and ``[T, H']`` and both heads.

    Rows are taken in chunks, and a row is cut over the vocabulary where one alone does not fit, so
    that extra memory stays within ``max_bytes`` at any T and V.
    """
    _check(reference_hidden, engine_hidden, target_ids, eta)
    _check_vocabulary(reference_head.vocab_size, engine_head.vocab_size, target_ids)
    device = reference_head.weight.device
    targets, heads = target_ids.to(device), (reference_head, engine_head)
    route = choose_route(device, *(head.weight.dtype for head in heads))
    rows = _rows_that_fit(route, heads, max_bytes)
    if rows == 0 and len(targets):
        width = max(1, max_bytes // (2 * torch_rows.BYTES_PER_LOGIT))
        pairs = (
            (
                _sliced(reference_head, reference_hidden[t : t + 1], width, device),
                _sliced(engine_head, engine_hidden[t : t + 1], width, device),
                targets[t : t + 1],
            )
            for t in range(len(targets))
        )
        return _joined(torch_rows.compare(p, q, ids, eta=eta) for p, q, ids in pairs)

    buffers = [_buffer(head, min(rows, len(targets))) for head in heads]
    parts = []
    for start in range(0, max(len(targets), 1), max(rows, 1)):
        chunk = slice(start, start + rows)
        ids = targets[chunk]
        z_p = reference_head.logits(reference_hidden[chunk], out=buffers[0][: len(ids)])
        z_q = engine_head.logits(engine_hidden[chunk], out=buffers[1][: len(ids)])
        parts.append(route.compare(z_p, z_q.to(device), ids, eta=eta))
    return _joined(parts)


def log_probs_of(
    hidden: torch.Tensor, head: Head, target_ids: torch.Tensor, *, max_bytes: int = MAX_BYTES
) -> dict[str, torch.Tensor]:
    """One side alone: ``logprob, margin, top1, top1_logprob, entropy, nonfinite``, each ``[T]``."""
    _check(hidden, hidden, target_ids, NUCLEUS)
    _check_vocabulary(head.vocab_size, head.vocab_size, target_ids)
    device = head.weight.device
    targets, route = target_ids.to(device), choose_route(device, head.weight.dtype)
    rows = _rows_that_fit(route, (head,), max_bytes)
    if rows == 0 and len(targets):
        width = max(1, max_bytes // torch_rows.BYTES_PER_LOGIT)
        return _joined(
            torch_rows.log_probs(
                _sliced(head, hidden[t : t + 1], width, device), targets[t : t + 1]
            )
            for t in range(len(targets))
        )
    buffer = _buffer(head, min(rows, len(targets)))
    parts = []
    for start in range(0, max(len(targets), 1), max(rows, 1)):
        ids = targets[start : start + rows]
        z = head.logits(hidden[start : start + rows], out=buffer[: len(ids)])
        parts.append(route.log_probs(z, ids))
    return _joined(parts)


def choose_route(device: torch.device, *dtypes: torch.dtype) -> Route:
    """The fastest route for logits of these dtypes on this device."""
    if device.type == "cpu" and loads("numba"):
        from mismatch_audit.compare import cpu

        if all(map(cpu.supports, dtypes)):
            return Route("numba", cpu.compare, cpu.log_probs)
    if device.type == "cuda" and loads("triton"):
        from mismatch_audit.compare import triton_kernel

        if all(map(triton_kernel.supports, dtypes)):
            return Route("triton", triton_kernel.compare, triton_kernel.log_probs)
    return Route(
        "torch",
        torch_rows.compare_whole,
        torch_rows.log_probs_whole,
        bytes_per_logit=torch_rows.BYTES_PER_LOGIT,
    )


def _rows_that_fit(route: Route, heads: tuple[Head, ...], max_bytes: int) -> int:
    """Rows of a chunk, 0 where not even one fits."""
    row_bytes = sum(
        head.vocab_size * (head.weight.element_size() + route.bytes_per_logit) for head in heads
    )
    device = heads[0].weight.device.type
    free = max_bytes - max(head.workspace_bytes for head in heads)
    return max(0, min(free // row_bytes, ROWS_PER_CHUNK.get(device, 64)))


def _buffer(head: Head, rows: int) -> torch.Tensor:
    weight = head.weight
    return torch.empty(rows, head.vocab_size, dtype=weight.dtype, device=weight.device)


def _sliced(
    head: Head, hidden: torch.Tensor, width: int, device: torch.device
) -> torch_rows.Slices:
    def slices() -> Iterator[tuple[int, torch.Tensor]]:
        for start in range(0, head.vocab_size, width):
            stop = min(start + width, head.vocab_size)
            yield start, head.logits(hidden, start=start, stop=stop).to(device)

    return slices


def _joined(parts: Iterable[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    parts = list(parts)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _check(reference: torch.Tensor, engine: torch.Tensor, ids: torch.Tensor, eta: float) -> None:
    for name, rows in (("reference", reference), ("engine", engine)):
        if rows.ndim != 2 or not rows.is_floating_point():
            raise InputError(
                f"the {name} rows must be a float tensor [T, n], got {rows.dtype} "
                f"{tuple(rows.shape)}"
            )
    if ids.ndim != 1 or ids.is_floating_point() or not len(reference) == len(engine) == len(ids):
        raise InputError(
            f"rows do not pair up: {len(reference)} of the reference, {len(engine)} of the engine, "
            f"token ids {tuple(ids.shape)} {ids.dtype}",
            fix="pass one row of each side for each token id",
        )
    if not 0 <= eta < 1:
        raise InputError(f"the nucleus threshold must be in [0, 1), got {eta}")


def _check_vocabulary(reference: int, engine: int, ids: torch.Tensor) -> None:
    if reference != engine:
        raise NotComparableError(
            f"the reference's vocabulary has {reference} tokens, the engine's {engine}",
            fix="cut padding rows off both heads, to the tokenizer's size",
        )
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < reference:
        raise InputError(
            f"token ids reach from {int(ids.min())} to {int(ids.max())}, "
            f"the vocabulary from 0 to {reference - 1}"
        )
