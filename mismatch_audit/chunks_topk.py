"""One chunk of prompts where the engine gives top-k rows: the same tables, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from mismatch_audit.chunks import sequence_rows, token_frame
from mismatch_audit.programs.base import Sampling
from mismatch_audit.programs.top_rows import TopRollout, TopRowsEngine
from mismatch_audit.prompts import EncodedPrompt

if TYPE_CHECKING:
    from mismatch_audit.compare.heads import Head
    from mismatch_audit.programs.base import ScoredSequence
    from mismatch_audit.programs.reference import TransformersReference


@dataclass
class TopkBench:
    """Both programs of a run whose engine shows k log-probs a row."""

    reference: TransformersReference
    engine: TopRowsEngine
    reference_head: Head

    @property
    def route(self) -> str:
        return f"top-{self.engine.k}"


def run_topk_chunk(
    bench: TopkBench, prompts: Sequence[EncodedPrompt], sampling: Sampling, prefill: set[str]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(token rows, sequence rows), as ``chunks.run_chunk``; ``kl_method`` names k."""
    bench.engine.new_batch()
    rollouts = [
        r
        for r in bench.engine.generate([(p.id, p.token_ids) for p in prompts], sampling)
        if r.sequence.n_response
    ]
    sequences = [r.sequence for r in rollouts]
    reference = {s.sequence_id: s for s in bench.reference.score(sequences)}
    frames = [_rows(bench, rollouts, reference, "decode")]
    chosen = [s for s in sequences if s.sequence_id in prefill]
    if chosen:
        reason = {r.sequence.sequence_id: r.finish_reason for r in rollouts}
        again = [
            replace(s, finish_reason=reason[s.sequence.sequence_id])
            for s in bench.engine.score(chosen)
        ]
        frames.append(_rows(bench, again, reference, "prefill"))
    return pd.concat(frames, ignore_index=True), sequence_rows(rollouts)


def _rows(
    bench: TopkBench,
    rollouts: list[TopRollout],
    reference: dict[str, ScoredSequence],
    path: str,
) -> pd.DataFrame:
    import torch

    from mismatch_audit.compare.topk_rows import compare_topk, pad_rows

    ids, logprobs = pad_rows([row for r in rollouts for row in r.rows])
    hidden = torch.cat([reference[r.sequence.sequence_id].hidden for r in rollouts])
    frame = token_frame(
        [r.sequence for r in rollouts],
        path,
        {r.sequence.sequence_id: r.n_cached_tokens for r in rollouts},
    )
    targets = frame["token_id"].to_numpy(dtype=np.int64)
    columns = compare_topk(hidden, bench.reference_head, ids, logprobs, targets)
    return frame.assign(
        **columns, engine_reported_logprob=columns["engine_logprob"], kl_method=bench.route
    )
