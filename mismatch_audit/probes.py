"""Cheap questions to the engine: does it agree with itself when only its execution changes?

Each probe gives one row a prompt: ``probe, prompt_id, n_tokens, kl, abs_dlp, flip_rate``, the
engine's first way of computing a row against the second, over the whole vocabulary. Repetition and
the reference's other micro-batching are also the noise floors of the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kernel_contracts.metrics import METRICS
from mismatch_audit.chunks import Bench
from mismatch_audit.programs.base import Sampling, Sequence_

if TYPE_CHECKING:
    import torch

    from mismatch_audit.compare.heads import Head

FLOOR_METRICS = ("kl_engine_reference", "kl_reference_engine", "tv", "chi2", "drift", "abs_dlp",
                 "k3", "mult_prob_error", "flip_rate")  # fmt: skip


SELF_COLUMNS = ("kl_engine_reference", "kl_reference_engine", "tv", "chi2", "drift",
                "engine_logprob", "reference_logprob", "flip", "nonfinite")  # fmt: skip


def self_comparison(
    bench: Bench, side: str, one: torch.Tensor, other: torch.Tensor, targets: torch.Tensor
) -> pd.DataFrame:
    """Two ways of computing the same rows of one program. Bit-equal rows are exact zeros."""
    import torch

    from mismatch_audit.compare import compare_hidden

    head: Head = bench.reference_head if side == "reference" else bench.engine_head
    one, other = one.to(head.weight.device), other.to(head.weight.device)
    differs = (one != other).any(-1)
    columns = {name: np.zeros(len(targets)) for name in SELF_COLUMNS}
    if bool(differs.any()):
        at = torch.nonzero(differs).flatten()
        result = compare_hidden(one[at], head, other[at], head, targets.to(head.weight.device)[at])
        for name, column in columns.items():
            column[at.cpu().numpy()] = result[name].double().cpu().numpy()
    return pd.DataFrame(columns)


def _per_prompt(probe: str, frame: pd.DataFrame, ids: Sequence[str]) -> list[dict[str, Any]]:
    values = pd.DataFrame(
        {
            "prompt_id": ids,
            "kl": METRICS["kl_engine_reference"].values(frame),
            "abs_dlp": METRICS["abs_dlp"].values(frame),
            "flip_rate": METRICS["flip_rate"].values(frame),
        }
    )
    grouped = values.groupby("prompt_id", sort=True)
    means = grouped.mean()
    means["n_tokens"] = grouped.size()
    return [
        {"probe": probe, "prompt_id": str(name), **{str(k): float(v) for k, v in row.items()}}
        for name, row in means.iterrows()
    ]


def floors_of(frame: pd.DataFrame) -> dict[str, float]:
    """Mean of every metric over a program's rows against itself."""
    return {name: float(np.mean(METRICS[name].values(frame))) for name in FLOOR_METRICS}


def _stack(scored: dict[str, torch.Tensor], sequences: Sequence[Sequence_]) -> torch.Tensor:
    import torch

    return torch.cat([scored[s.sequence_id] for s in sequences])


def _ids(sequences: Sequence[Sequence_]) -> list[str]:
    return [s.sequence_id for s in sequences for _ in s.response]


def _targets(sequences: Sequence[Sequence_]) -> torch.Tensor:
    import torch

    return torch.tensor([t for s in sequences for t in s.response])


def repeat_probe(bench: Bench, sequences: Sequence[Sequence_]) -> dict[str, Any]:
    """The engine scores the sequences, then again in reverse order; the reference once more under
    a quarter of the micro-batch. Returns ``{"rows": [...], "floors": {"engine", "reference"}}``.

    Where the reversed pass is bit-equal, it is the repetition too; else a third pass in the first
    order tells order and repetition apart.
    """
    engine, reference = bench.engine, bench.reference
    targets, ids = _targets(sequences), _ids(sequences)

    def scored(order: Sequence[Sequence_]) -> torch.Tensor:
        return _stack({s.sequence_id: s.hidden for s in engine.score(order)}, sequences)

    first, reverse = scored(sequences), scored(list(reversed(sequences)))
    order = self_comparison(bench, "engine", first, reverse, targets)
    again = order
    if bool((first != reverse).any()):
        again = self_comparison(bench, "engine", first, scored(sequences), targets)
    budget = reference.settings.token_budget
    one, two = (
        _stack(
            {s.sequence_id: s.hidden for s in reference.score(sequences, token_budget=tokens)},
            sequences,
        )
        for tokens in (budget, max(1, budget // 4))
    )
    own = self_comparison(bench, "reference", one, two, targets)
    return {
        "rows": _per_prompt("repetition", again, ids) + _per_prompt("order", order, ids),
        "floors": {"engine": floors_of(again), "reference": floors_of(own)},
    }


def lone_probe(bench: Bench, sequences: Sequence[Sequence_], tokens: int) -> dict[str, Any]:
    """Decode the same tokens again, teacher-forced: all requests together, then each one alone."""
    cut = [
        Sequence_(s.sequence_id, s.token_ids[: s.prompt_length + tokens], s.prompt_length)
        for s in sequences
    ]
    sampling = Sampling(max_tokens=tokens)

    def decode(some: Sequence[Sequence_]) -> dict[str, torch.Tensor]:
        prompts = [(s.sequence_id, s.token_ids[: s.prompt_length]) for s in some]
        forced = [s.response for s in some]
        return {
            r.sequence_id: r.hidden for r in bench.engine.generate(prompts, sampling, forced=forced)
        }

    together = decode(cut)
    alone: dict[str, torch.Tensor] = {}
    for sequence in cut:
        alone.update(decode([sequence]))
    frame = self_comparison(
        bench, "engine", _stack(together, cut), _stack(alone, cut), _targets(cut)
    )
    return {"rows": _per_prompt("batch_invariance", frame, _ids(cut))}


def path_rows(tokens: pd.DataFrame) -> list[dict[str, Any]]:
    """prefill_decode from the token table itself, where every row has both paths.

    The table holds each path against the reference; between the paths, the log-prob difference of
    the token gives k3, an unbiased estimate of KL(decode || prefill) on tokens drawn by decode.
    """
    both = tokens.pivot_table(
        index=["prompt_id", "position"],
        columns="path",
        values=["engine_logprob", "engine_top1"],
        dropna=True,
    )
    if both.empty or "prefill" not in both["engine_logprob"]:
        return []
    both = both.dropna()
    gap = both["engine_logprob"]["prefill"] - both["engine_logprob"]["decode"]
    frame = pd.DataFrame(
        {
            "kl": np.expm1(gap) - gap,
            "abs_dlp": gap.abs(),
            "flip_rate": (both["engine_top1"]["prefill"] != both["engine_top1"]["decode"]).astype(
                float
            ),
        }
    )
    grouped = frame.groupby(level="prompt_id")
    means = grouped.mean()
    means["n_tokens"] = grouped.size()
    return [
        {
            "probe": "prefill_decode",
            "prompt_id": str(name),
            **{str(k): float(v) for k, v in row.items()},
        }
        for name, row in means.iterrows()
    ]
