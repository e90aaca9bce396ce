"""One chunk of prompts through both programs: rollouts, scores, comparison, table rows.

Rows of the prefill path whose hidden state is bit-equal to the decode path's are not compared
again: the same head gives the same numbers (on a CPU that is 97 to 100 % of them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kernel_contracts.errors import UnsoundError
from mismatch_audit.programs.base import Rollout, Sampling, ScoredSequence, Sequence_
from mismatch_audit.prompts import EncodedPrompt
from mismatch_audit.tokens import COMPARED

if TYPE_CHECKING:
    import torch

    from mismatch_audit.compare.heads import Head
    from mismatch_audit.programs.reference import TransformersReference
    from mismatch_audit.programs.vllm_engine import VllmEngine

REPORTED_TOLERANCE = 1e-3
"""Nats between a row's log-prob and what the engine itself reported: beyond it the engine's head is
not what we re-applied, and rows are reduced from the engine's own logits instead."""


@dataclass
class Bench:
    """Both programs of a run and how the engine's rows become logits.

    route: ``head`` (the engine's head re-applied to its hidden states) or ``engine_logits`` (the
    engine's own code made the logits).  head_error: largest disagreement seen, nats.
    """

    reference: TransformersReference
    engine: VllmEngine
    reference_head: Head
    engine_head: Head
    route: str = "head"
    head_error: float = 0.0
    rounding: float = REPORTED_TOLERANCE

    def compare(
        self, reference: torch.Tensor, engine: torch.Tensor, targets: torch.Tensor
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Table columns for hidden rows of both sides, ``[T, H]`` and ``[T, H']``."""
        from mismatch_audit.compare import compare_hidden, compare_logits

        if self.route == "head":
            result = compare_hidden(
                reference, self.reference_head, engine, self.engine_head, targets
            )
            return {name: column.cpu().numpy() for name, column in result.items()}
        parts = []
        for at in range(0, len(targets), 256):  # 256 rows of a 152k vocabulary: 80 MB in bf16
            rows = slice(at, at + 256)
            logits = self.engine.own_logits({"rows": engine[rows]})["rows"]
            mine = self.reference_head.logits(reference[rows])
            parts.append(compare_logits(mine, logits.to(mine.device), targets[rows]))
        return {name: np.concatenate([p[name].cpu().numpy() for p in parts]) for name in parts[0]}


def run_chunk(
    bench: Bench, prompts: Sequence[EncodedPrompt], sampling: Sampling, prefill: set[str]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(token rows, sequence rows) of the prompts; prefill: prompt ids scored on that path too."""
    bench.engine.new_batch()
    rollouts = [
        r
        for r in bench.engine.generate([(p.id, p.token_ids) for p in prompts], sampling)
        if r.sequence.n_response
    ]
    sequences = [r.sequence for r in rollouts]
    chosen = [s for s in sequences if s.sequence_id in prefill]
    scored = {s.sequence_id: s for s in bench.engine.score(chosen)} if chosen else {}
    reference = {s.sequence_id: s for s in bench.reference.score(sequences)}
    frames = _compare(bench, rollouts, scored, reference)
    return pd.concat(frames, ignore_index=True), sequence_rows(rollouts)


def _compare(
    bench: Bench,
    rollouts: list[Rollout],
    scored: dict[str, ScoredSequence],
    reference: dict[str, ScoredSequence],
) -> list[pd.DataFrame]:
    import torch

    device = bench.reference_head.weight.device
    mine = torch.cat([reference[r.sequence_id].hidden for r in rollouts])
    targets = torch.tensor([t for r in rollouts for t in r.sequence.response], device=device)
    decode = torch.cat([r.hidden for r in rollouts]).to(device)
    frame = _frame([r.sequence for r in rollouts], "decode", {r.sequence_id: r for r in rollouts})
    columns = _checked(bench, mine, decode, targets, frame)
    frames = [frame.assign(**columns)]
    if scored:
        keep = torch.cat(
            [
                torch.full((r.sequence.n_response,), r.sequence_id in scored, dtype=torch.bool)
                for r in rollouts
            ]
        ).to(device)
        again = [r for r in rollouts if r.sequence_id in scored]
        prefill = torch.cat([scored[r.sequence_id].hidden for r in again]).to(device)
        differs = (prefill != decode[keep]).any(-1)
        frame = _frame([r.sequence for r in again], "prefill", scored)
        frames.append(
            frame.assign(
                **_prefill_columns(bench, columns, mine, prefill, targets, keep, differs, frame)
            )
        )
    return frames


def _prefill_columns(
    bench: Bench,
    decode_columns: dict[str, Any],
    mine: torch.Tensor,
    prefill: torch.Tensor,
    targets: torch.Tensor,
    keep: torch.Tensor,
    differs: torch.Tensor,
    frame: pd.DataFrame,
) -> dict[str, Any]:
    columns = {name: np.array(c[keep.cpu().numpy()]) for name, c in decode_columns.items()}
    at = differs.cpu().numpy()
    if at.any():
        new = _checked(
            bench, mine[keep][differs], prefill[differs], targets[keep][differs], frame[at]
        )
        for name, column in new.items():
            columns[name][at] = column
    _check_reported(bench, columns["engine_logprob"], frame)
    return columns


def _checked(
    bench: Bench,
    mine: torch.Tensor,
    engine: torch.Tensor,
    targets: torch.Tensor,
    frame: pd.DataFrame,
) -> dict[str, Any]:
    """Compare, and cross-check every row against the engine's own report.

    A disagreement beyond rounding moves the whole run to the engine's own logits; a second one
    means that captured rows are not what the engine sampled from, and raises UnsoundError.
    """
    columns = bench.compare(mine, engine, targets)
    if (
        _report_error(columns["engine_logprob"], frame) > REPORTED_TOLERANCE
        and bench.route == "head"
    ):
        bench.route = "engine_logits"
        columns = bench.compare(mine, engine, targets)
    _check_reported(bench, columns["engine_logprob"], frame)
    return {name: columns[name] for name in COMPARED}


def _report_error(logprob: np.ndarray[Any, Any], frame: pd.DataFrame) -> float:
    """Largest |ours - reported| where both are finite."""
    difference = np.abs(logprob - frame["engine_reported_logprob"].to_numpy(dtype=np.float64))
    finite = difference[np.isfinite(difference)]
    return float(finite.max()) if len(finite) else 0.0


def _check_reported(bench: Bench, logprob: np.ndarray[Any, Any], frame: pd.DataFrame) -> None:
    error = _report_error(logprob, frame)
    bench.head_error = max(bench.head_error, error)
    allowed = REPORTED_TOLERANCE if bench.route == "head" else bench.rounding
    if error > allowed:
        worst = frame.iloc[
            int(np.nanargmax(np.abs(logprob - frame["engine_reported_logprob"].to_numpy(float))))
        ]
        raise UnsoundError(
            f"captured rows disagree with the engine's own log-probs by up to {error:.3g} nats "
            f"(rounding explains {allowed:.3g}); first seen at prompt {worst['prompt_id']!r}, "
            f"position {worst['position']}",
            where=f"engine route {bench.route}",
            fix="this engine setting changes what the hooks see; report its version and arguments",
        )


def _frame(sequences: Sequence[Sequence_], path: str, rows: dict[str, Any]) -> pd.DataFrame:
    frame = token_frame(
        sequences, path, {s.sequence_id: rows[s.sequence_id].n_cached_tokens for s in sequences}
    )
    reported = [rows[s.sequence_id].reported_logprob for s in sequences]
    return frame.assign(
        engine_reported_logprob=[v for values in reported for v in values], kl_method="full"
    )


def token_frame(
    sequences: Sequence[Sequence_], path: str, cached: Mapping[str, int]
) -> pd.DataFrame:
    """Rows of the token table before anything is compared: who, where, which token."""
    lengths = [s.n_response for s in sequences]
    position = np.concatenate([np.arange(n) for n in lengths])
    ids = np.repeat([s.sequence_id for s in sequences], lengths)
    return pd.DataFrame(
        {
            "prompt_id": ids,
            "sequence_id": ids,
            "position": position,
            "context_length": np.repeat([s.prompt_length for s in sequences], lengths) + position,
            "token_id": [t for s in sequences for t in s.response],
            "path": path,
            "weights_version": 0,
            "trainer_version": 0,
            "n_cached_tokens": np.repeat([cached[s.sequence_id] for s in sequences], lengths),
            "batch_rows": len(sequences),
            "loss_mask": True,
        }
    )


def sequence_rows(rollouts: Sequence[Any]) -> pd.DataFrame:
    """Rows of the sequence table, of anything that has a ``sequence`` and a ``finish_reason``."""
    sequences: list[Sequence_] = [r.sequence for r in rollouts]
    ids = [s.sequence_id for s in sequences]
    return pd.DataFrame(
        {
            "prompt_id": ids,
            "sequence_id": ids,
            "prompt_length": [s.prompt_length for s in sequences],
            "response_length": [s.n_response for s in sequences],
            "token_ids": [list(s.token_ids) for s in sequences],
            "finish_reason": [r.finish_reason for r in rollouts],
        }
    )
