"""Projected policy-gradient vectors of single responses, by autograd of the reference.

A response's vector is sum_t c_t grad log p(y_t | context) for given coefficients c. Several sets of
coefficients share one forward pass. The head is differentiated by hand (d log p_y / d logits =
e_y - p), a few rows at a time, so that ``[T, V]`` logits of a batch are never held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kernel_contracts.errors import InputError, UnsoundError
from mismatch_audit.gradient.capture import Capture
from mismatch_audit.gradient.logit_space import ScoreRows, score_rows
from mismatch_audit.gradient.projection import REPLICAS, Projection
from mismatch_audit.programs.base import Sequence_
from mismatch_audit.programs.batching import pad_batch, token_budget_batches

if TYPE_CHECKING:
    from mismatch_audit.programs.reference import TransformersReference

Array = npt.NDArray[np.float64]

__all__ = ["ResponseGradients", "exact_gradient", "response_gradients"]

_AGREEMENT = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest relative difference of the two routes' vectors that rounding explains, by dtype."""


@dataclass
class ResponseGradients:
    """vectors: per response, ``[K, width]`` float32 for its K sets of coefficients.
    logprob: per response, ``[T]`` log p of its tokens in this forward.  score_norm: ``[T]`` norms
    |e_y - p| of the scores in logit space.  agreement: relative difference from ordinary autograd
    on one response (None where not checked)."""

    vectors: list[npt.NDArray[np.float32]]
    logprob: list[Array]
    score_norm: list[Array]
    agreement: float | None = None
    replicas: int = REPLICAS
    parameters: int = 0
    batches: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


def response_gradients(
    reference: TransformersReference,
    sequences: Sequence[Sequence_],
    coefficients: Sequence[npt.ArrayLike],
    *,
    width: int = 8192,
    seed: int = 0,
    token_budget: int | None = None,
    alone: bool = False,
    check: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> ResponseGradients:
    """One ``[K_i, width]`` block of projected gradients a response.

    coefficients: per response ``[K_i, T_i]``; K_i may differ, and 0 skips it.  token_budget: padded
    tokens a batch (default: the reference's own).  alone: one response a batch, for models whose
    layers mix them.  check: compare the shortest response with ordinary autograd first, which holds
    one whole gradient. Raises InputError for coefficients that do not fit, UnsoundError where the
    two routes disagree beyond rounding.
    """
    wanted = [np.atleast_2d(np.asarray(c, dtype=np.float64)) for c in coefficients]
    _check(sequences, wanted)
    projection = Projection(width, seed, reference.device)
    capture = Capture(reference.model, projection)
    empty = np.zeros(0)
    result = ResponseGradients(
        vectors=[np.zeros((len(c), width), np.float32) for c in wanted],
        logprob=[empty] * len(sequences),
        score_norm=[empty] * len(sequences),
        parameters=sum(p.numel() for p in reference.model.parameters() if p.requires_grad),
    )
    todo = [i for i, c in enumerate(wanted) if c.size]
    if check and todo:
        shortest = min(todo, key=lambda i: (len(sequences[i].token_ids), i))
        result.agreement = _check_route(
            reference, capture, sequences[shortest], wanted[shortest][:1]
        )
    budget = token_budget or reference.settings.token_budget
    done = 0
    with capture.recording():
        for batch in _batches(sequences, wanted, todo, 1 if alone or capture.alone else budget):
            vectors, rows, places = _run(
                reference, capture, [sequences[i] for i in batch], [wanted[i] for i in batch]
            )
            for j, i in enumerate(batch):
                result.vectors[i] = vectors[: len(wanted[i]), j].cpu().numpy()
                result.logprob[i] = rows.logprob[places[j]].cpu().numpy()
                result.score_norm[i] = rows.norm_squared[places[j]].sqrt().cpu().numpy()
            done, result.batches = done + len(batch), result.batches + 1
            if progress is not None:
                progress(done, len(todo))
    return result


def _batches(
    sequences: Sequence[Sequence_], wanted: list[Array], todo: list[int], budget: int
) -> list[list[int]]:
    """Responses with equally many backward passes together: a pass costs its whole batch."""
    batches = []
    for passes in sorted({len(wanted[i]) for i in todo}):
        group = [i for i in todo if len(wanted[i]) == passes]
        lengths = [len(sequences[i].token_ids) for i in group]
        batches += [[group[j] for j in b] for b in token_budget_batches(lengths, budget)]
    return batches


def _run(
    reference: TransformersReference,
    capture: Capture,
    batch: list[Sequence_],
    coefficients: list[Array],
) -> tuple[torch.Tensor, ScoreRows, list[slice]]:
    """``[K, B, width]`` vectors of one batch, its score rows, and where each response's are."""
    device, passes = reference.device, max(len(c) for c in coefficients)
    capture.start(len(batch))
    hidden = _forward(reference, batch)
    where_b = torch.cat([torch.full((s.n_response,), b) for b, s in enumerate(batch)]).to(device)
    where_t = torch.cat(
        [torch.arange(s.prompt_length - 1, len(s.token_ids) - 1) for s in batch]
    ).to(device)
    targets = torch.tensor([t for s in batch for t in s.response], device=device)
    rows = _scores(reference, capture, hidden.detach()[where_b, where_t], targets)
    total = torch.zeros(passes, len(batch), capture.projection.width, device=device)
    for k in range(passes):
        column = np.concatenate(
            [c[k] if k < len(c) else np.zeros(c.shape[1]) for c in coefficients]
        )
        weights = torch.from_numpy(column).to(device=device, dtype=torch.float32)[:, None]
        gradient = torch.zeros_like(hidden)
        gradient[where_b, where_t] = (weights * rows.hidden).to(hidden.dtype)
        capture.backward(hidden, gradient, total[k], keep=k < passes - 1)
        _add_head(capture, rows, weights, where_b, total[k])
    ends = np.cumsum([s.n_response for s in batch]).tolist()
    starts = [0, *ends[:-1]]
    return total, rows, [slice(a, b) for a, b in zip(starts, ends, strict=True)]


def _forward(reference: TransformersReference, batch: list[Sequence_]) -> torch.Tensor:
    """Final hidden states ``[B, L, H]`` with their graph, as the reference scores them.

    Padded on the right whatever the reference does: a row of nothing but masked keys, which left
    padding makes, has no gradient.
    """
    ids, mask, positions = pad_batch(
        [s.token_ids for s in batch], reference.pad_id, "right", reference.device
    )
    with torch.enable_grad():
        out = reference.model.base_model(
            input_ids=ids,
            attention_mask=mask if bool((mask == 0).any()) else None,
            position_ids=positions,
            use_cache=False,
        )
    hidden: torch.Tensor = out.last_hidden_state
    return hidden


def _scores(
    reference: TransformersReference, capture: Capture, hidden: torch.Tensor, targets: torch.Tensor
) -> ScoreRows:
    layer, projection = capture.head, capture.projection
    name, bias = capture.name_of(layer.weight), capture.name_of(layer.bias)
    return score_rows(
        hidden,
        reference.head(),
        targets,
        sides=None
        if name is None
        else (
            projection.side(name, "rows", layer.weight.shape[0]),
            projection.side(name, "columns", layer.weight.shape[1]),
        ),
        bias=None
        if bias is None
        else lambda scores, total: projection.add_vector(total, bias, scores),
        width=projection.width,
    )


def _add_head(
    capture: Capture,
    rows: ScoreRows,
    weights: torch.Tensor,
    owner: torch.Tensor,
    total: torch.Tensor,
) -> None:
    """The head's own gradient: sum_t c_t (score of the logits) x (hidden state)."""
    name = capture.name_of(capture.head.weight)
    for b in range(len(total)):
        mine = owner == b
        if name is not None and rows.sides is not None:
            left, right = rows.sides
            capture.total = total[b : b + 1]
            capture.add_products(name, (weights * left)[mine][None], right[mine][None])
        if rows.bias is not None:
            total[b] += (weights * rows.bias)[mine].sum(0)


def exact_gradient(
    reference: TransformersReference, sequence: Sequence_, coefficients: npt.ArrayLike
) -> dict[str, torch.Tensor]:
    """sum_t c_t grad log p(y_t) of one response by ordinary autograd, by parameter name.

    coefficients: ``[T]``. Holds one whole gradient and the response's logits.
    """
    named = {n: p for n, p in reference.model.named_parameters() if p.requires_grad}
    rows = slice(sequence.prompt_length - 1, len(sequence.token_ids) - 1)
    ids, mask, positions = pad_batch(
        [sequence.token_ids], reference.pad_id, "right", reference.device
    )
    with torch.enable_grad():
        logits = reference.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits[0, rows]
        targets = torch.tensor(sequence.response, device=reference.device)
        logprob = logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
        weights = torch.as_tensor(np.asarray(coefficients, np.float64), device=reference.device)
        loss = (weights * logprob).sum()
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: g for name, g in zip(named, found, strict=True) if g is not None}


def _check_route(
    reference: TransformersReference, capture: Capture, sequence: Sequence_, coefficients: Array
) -> float:
    with capture.recording():
        ours = _run(reference, capture, [sequence], [coefficients])[0][0, 0]
    truth = torch.zeros_like(ours)
    for name, gradient in exact_gradient(reference, sequence, coefficients[0]).items():
        capture.projection.add_tensor(truth, name, gradient)
    error = float((ours - truth).norm() / truth.norm().clamp_min(1e-30))
    limit = _AGREEMENT.get(reference.head().weight.dtype, 1e-3)
    if not error <= limit:
        raise UnsoundError(
            f"the projected gradient of {sequence.sequence_id!r} differs from ordinary autograd by "
            f"{error:.2e} of its size (rounding explains {limit:.0e})",
            where=f"reference {reference.path}",
            fix="the architecture uses a parameter in a way that is not covered; report its config",
        )
    return error


def _check(sequences: Sequence[Sequence_], wanted: list[Array]) -> None:
    if len(sequences) != len(wanted):
        raise InputError(f"{len(sequences)} sequences but {len(wanted)} sets of coefficients")
    for sequence, c in zip(sequences, wanted, strict=True):
        if c.size and (c.shape[1] != sequence.n_response or not np.isfinite(c).all()):
            raise InputError(
                f"coefficients {c.shape} of {sequence.sequence_id!r} must be finite, one for each "
                f"of its {sequence.n_response} response tokens"
            )
        if c.size and sequence.prompt_length < 1:
            raise InputError(f"{sequence.sequence_id!r} has no prompt token to predict from")
