"""Compare two programs' next-token distributions, row by row, over the whole vocabulary.

p is the reference's softmax, q the engine's. Logits are taken as the heads produced them (bf16,
fp16 or fp32) and widened only inside the sums.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernel_contracts.errors import InputError, NotComparableError
from mismatch_audit.compare import torch_rows
from mismatch_audit.compare.heads import Head

COLUMNS = (
    "kl_engine_reference",
    "kl_reference_engine",
    "tv",
    "chi2",
    "drift",
    "tail_mass",
    "logit_var",
    "entropy",
    "engine_margin",
    "reference_margin",
    "engine_top1",
    "reference_top1",
    "engine_top1_logprob",
    "reference_top1_logprob",
    "flip",
    "engine_logprob",
    "reference_logprob",
    "nonfinite",
)
"""What a comparison gives, one ``[T]`` tensor each (see the token table for their meaning)."""

NUCLEUS = 1e-6
MAX_BYTES = 512 << 20
ROWS_PER_CHUNK = 128


def compare_logits(
    reference_logits: torch.Tensor,
    engine_logits: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    eta: float = NUCLEUS,
) -> dict[str, torch.Tensor]:
    """Every column of ``COLUMNS`` for ``[T, V]`` logits of both sides and ``[T]`` token ids.

    Units: nats. float64 columns, except ``*_top1`` and ``nonfinite`` (int64) and ``flip`` (bool).
    eta: the nucleus of ``drift`` is {v: p(v) >= eta or q(v) >= eta}.
    A row with a non-finite logit on either side has ``nonfinite`` > 0, NaN in every float column
    and -1 in both top-1 columns. Of equal maxima the lowest index is top-1 and the margin is 0.
    Raises InputError for shapes, dtypes or ids that do not fit, NotComparableError where the
    vocabularies differ.
    """
    _check(reference_logits, engine_logits, target_ids, eta)
    if reference_logits.shape[1] != engine_logits.shape[1]:
        raise _vocabulary(reference_logits.shape[1], engine_logits.shape[1])
    _check_ids(target_ids, reference_logits.shape[1])
    return _core(reference_logits, engine_logits, target_ids, eta)


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
    if reference_head.vocab_size != engine_head.vocab_size:
        raise _vocabulary(reference_head.vocab_size, engine_head.vocab_size)
    vocab = reference_head.vocab_size
    _check_ids(target_ids, vocab)
    device = reference_head.weight.device
    targets = target_ids.to(device)

    heads = (reference_head, engine_head)
    row_bytes = vocab * sum(_bytes_per_logit(head) for head in heads)
    rows = min(ROWS_PER_CHUNK, max_bytes // row_bytes, len(targets))
    if rows == 0 and len(targets):
        width = max(1, max_bytes // torch_rows.BYTES_PER_LOGIT)
        parts = []
        for t in range(len(targets)):
            p_slices = _sliced(reference_head, reference_hidden[t : t + 1], width, device)
            q_slices = _sliced(engine_head, engine_hidden[t : t + 1], width, device)
            parts.append(torch_rows.compare(p_slices, q_slices, targets[t : t + 1], eta=eta))
        return _joined(parts)

    buffers = [
        torch.empty(rows, vocab, dtype=head.weight.dtype, device=head.weight.device)
        for head in heads
    ]
    parts = []
    for start in range(0, max(len(targets), 1), max(rows, 1)):
        chunk = slice(start, start + rows)
        ids = targets[chunk]
        z_p = reference_head.logits(reference_hidden[chunk], out=buffers[0][: len(ids)])
        z_q = engine_head.logits(engine_hidden[chunk], out=buffers[1][: len(ids)])
        parts.append(_core(z_p, z_q.to(device), ids, eta))
    return _joined(parts)


def log_probs_of(
    hidden: torch.Tensor, head: Head, target_ids: torch.Tensor, *, max_bytes: int = MAX_BYTES
) -> dict[str, torch.Tensor]:
    """One side alone: ``logprob, margin, top1, top1_logprob, entropy, nonfinite``, each ``[T]``."""
    _check(hidden, hidden, target_ids, NUCLEUS)
    _check_ids(target_ids, head.vocab_size)
    targets = target_ids.to(head.weight.device)
    width = min(head.vocab_size, max(1, max_bytes // torch_rows.BYTES_PER_LOGIT))
    rows = max(1, min(ROWS_PER_CHUNK, max_bytes // (width * torch_rows.BYTES_PER_LOGIT)))
    parts = []
    for start in range(0, max(len(targets), 1), rows):
        chunk = slice(start, start + rows)
        slices = _sliced(head, hidden[chunk], width, head.weight.device)
        parts.append(torch_rows.log_probs(slices, targets[chunk]))
    return _joined(parts)


def _core(
    z_p: torch.Tensor, z_q: torch.Tensor, target_ids: torch.Tensor, eta: float
) -> dict[str, torch.Tensor]:
    return torch_rows.compare(
        lambda: [(0, z_p)], lambda: [(0, z_q)], target_ids.to(z_p.device), eta=eta
    )


def _bytes_per_logit(head: Head) -> int:
    return head.weight.element_size() + torch_rows.BYTES_PER_LOGIT // 2


def _sliced(
    head: Head, hidden: torch.Tensor, width: int, device: torch.device
) -> torch_rows.Slices:
    def slices() -> Iterator[tuple[int, torch.Tensor]]:
        for start in range(0, head.vocab_size, width):
            stop = min(start + width, head.vocab_size)
            yield start, head.logits(hidden, start=start, stop=stop).to(device)

    return slices


def _joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
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


def _check_ids(ids: torch.Tensor, vocab: int) -> None:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise InputError(
            f"token ids reach from {int(ids.min())} to {int(ids.max())}, "
            f"the vocabulary from 0 to {vocab - 1}"
        )


def _vocabulary(reference: int, engine: int) -> NotComparableError:
    return NotComparableError(
        f"the reference's vocabulary has {reference} tokens, the engine's {engine}",
        fix="cut padding rows off both heads, to the tokenizer's size",
    )
