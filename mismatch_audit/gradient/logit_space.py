"""Scores and bias in logit space: exact, forward pass only.

The score of a sampled token in logit space is s = e_y - p. So, with y drawn from q, E s = q - p,
whose 1-norm is 2 TV: the mean score itself detects a mismatch. The exact bias of one position is
sum_y (q_y - p_y) A_y (e_y - p). Rows of ``[T, V]`` are made a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kernel_contracts.errors import InputError, NotComparableError
from mismatch_audit.compare.heads import Head

__all__ = [
    "PositionBias",
    "ScoreRows",
    "pooled_scores",
    "position_bias",
    "score_rows",
]

MAX_BYTES = 128 << 20
_BYTES_PER_LOGIT = 24  # logits, probabilities, the score and its cast, with room


@dataclass
class ScoreRows:
    """Per response token: logprob ``[T]`` (float64); norm_squared ``[T]``, |e_y - p|^2 = 1 - 2 p_y
    + sum p^2; hidden ``[T, H]``, the score's gradient by the hidden state; sides, both halves of
    the projected gradient of the head's weight, ``[T, 64]`` each; bias, of the head's bias."""

    logprob: torch.Tensor
    norm_squared: torch.Tensor
    hidden: torch.Tensor
    sides: tuple[torch.Tensor, torch.Tensor] | None
    bias: torch.Tensor | None


def score_rows(
    hidden: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    *,
    sides: tuple[torch.Tensor, torch.Tensor] | None = None,
    bias: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    width: int = 0,
    max_bytes: int = MAX_BYTES,
) -> ScoreRows:
    """Scores of the tokens ``targets [T]`` predicted from ``hidden [T, H]``.

    sides: projections of the head's rows ``[V, 64]`` and columns ``[H, 64]``.  bias: adds scores of
    the raw logits, ``[n, V]``, to a projection ``[n, width]``.
    """
    logprob, norms, onto_hidden, left, onto_bias = [], [], [], [], []
    for rows, z, log_p in _chunks(hidden, head, targets, max_bytes):
        p = log_p.exp()
        own = log_p.gather(1, targets[rows][:, None])[:, 0]
        logprob.append(own.double())
        norms.append((1 - 2 * own.exp() + p.square().sum(1)).clamp_min(0).double())
        score = p.neg_()
        score[torch.arange(len(score)), targets[rows]] += 1
        if head.softcap is not None:
            score *= 1 - (z.float() / (head.scale * head.softcap)).square()
        if head.scale != 1.0:
            score *= head.scale
        onto_hidden.append((score.to(head.weight.dtype) @ head.weight).float())
        if sides is not None:
            left.append(score.float() @ sides[0])
        if bias is not None:
            total = torch.zeros(len(score), width, device=score.device)
            bias(score.float(), total)
            onto_bias.append(total)
    return ScoreRows(
        torch.cat(logprob),
        torch.cat(norms),
        torch.cat(onto_hidden),
        None if sides is None else (torch.cat(left), hidden.float() @ sides[1]),
        torch.cat(onto_bias) if bias is not None else None,
    )


@dataclass
class PositionBias:
    """Exact, per position: l1, l2 ``[T]`` norms of the bias vector; mean_score_l1, 2 TV; mean
    ``[V]``, the bias averaged over the positions (a bias of the head's would be moved by it)."""

    l1: torch.Tensor
    l2: torch.Tensor
    mean_score_l1: torch.Tensor
    mean: torch.Tensor


def position_bias(
    reference_hidden: torch.Tensor,
    reference_head: Head,
    engine_hidden: torch.Tensor,
    engine_head: Head,
    advantages: torch.Tensor | None = None,
    *,
    max_bytes: int = MAX_BYTES,
) -> PositionBias:
    """b = sum_y (q_y - p_y) A_y (e_y - p) at each of T positions.

    advantages: ``[T]`` (the same for every token: b = A (q - p)), ``[T, V]``, or None for 1. Raises
    NotComparableError where the vocabularies differ, InputError where rows do not pair up.
    """
    if reference_head.vocab_size != engine_head.vocab_size:
        raise NotComparableError(
            f"the reference's vocabulary has {reference_head.vocab_size} tokens, the engine's "
            f"{engine_head.vocab_size}",
            fix="cut padding rows off both heads, to the tokenizer's size",
        )
    if len(reference_hidden) != len(engine_hidden):
        raise InputError(
            f"{len(reference_hidden)} reference rows, {len(engine_hidden)} engine rows"
        )
    zeros = torch.zeros(len(reference_hidden), dtype=torch.long)
    mean = torch.zeros(reference_head.vocab_size, dtype=torch.float64)
    l1, l2, scores = [], [], []
    for rows, _, log_p in _chunks(reference_hidden, reference_head, zeros, max_bytes // 4):
        log_q = _log_softmax(engine_head.logits(engine_hidden[rows])).to(log_p.device)
        p = log_p.double().exp()
        moved = log_q.double().exp() - p
        scores.append(moved.abs().sum(1))
        if advantages is not None:
            a = advantages[rows].to(moved)
            moved = moved * (a if a.ndim == 2 else a[:, None])
        bias = moved - p * moved.sum(1, keepdim=True)
        l1.append(bias.abs().sum(1))
        l2.append(bias.norm(dim=1))
        mean += bias.sum(0).cpu()
    return PositionBias(
        torch.cat(l1), torch.cat(l2), torch.cat(scores), mean / max(len(reference_hidden), 1)
    )


def pooled_scores(
    hidden: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    coefficients: torch.Tensor,
    owner: torch.Tensor,
    n_owners: int,
    *,
    max_bytes: int = MAX_BYTES,
) -> torch.Tensor:
    """``[K, n_owners, V]`` float32: sum over each owner's tokens of c_t (e_y - p_t).

    coefficients: ``[K, T]``, such as (1 - w_t) A and w_t A.  owner: ``[T]`` prompt of each token.
    This is the exact gradient of a bias vector on the logits, so ``relative_bias`` applies to it;
    cheap, and blind to a bias that cancels over contexts.
    """
    device = head.weight.device
    coefficients = coefficients.to(device, torch.float32)
    owner, targets = owner.to(device), targets.to(device)
    total = torch.zeros(len(coefficients), n_owners, head.vocab_size, device=device)
    for rows, _, log_p in _chunks(hidden, head, targets, max_bytes):
        score = log_p.exp().neg_()
        score[torch.arange(len(score)), targets[rows]] += 1
        for k, c in enumerate(coefficients):
            total[k].index_add_(0, owner[rows], c[rows][:, None] * score)
    return total


def _chunks(
    hidden: torch.Tensor, head: Head, targets: torch.Tensor, max_bytes: int
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """(rows, logits, log p in float32) a few rows at a time."""
    if len(hidden) != len(targets):
        raise InputError(f"{len(hidden)} rows but {len(targets)} token ids")
    size = max(1, max_bytes // (head.vocab_size * _BYTES_PER_LOGIT))
    for start in range(0, len(targets), size):
        rows = slice(start, min(start + size, len(targets)))
        z = head.logits(hidden[rows])
        yield rows, z, _log_softmax(z)


def _log_softmax(z: torch.Tensor) -> torch.Tensor:
    wide = z if z.dtype == torch.float64 else z.float()
    return wide.log_softmax(-1)
