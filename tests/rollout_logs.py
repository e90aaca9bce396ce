"""Small logs of recorded rollouts, as record batches and files, for the tests of their audit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

PROMPT = 4


def log(
    prompts: int = 60,
    group: int = 4,
    *,
    seed: int = 0,
    sd: float = 0.02,
    shift: int = 0,
    drop: tuple[str, ...] = (),
    **columns: Any,
) -> pa.RecordBatch:
    """prompts x group sequences. sd: of log p - log q.  shift: tokens by which the sampler's
    log-probs are moved.  drop: columns to leave out.  columns: a scalar column's values [S]."""
    rng = np.random.default_rng(seed)
    s = prompts * group
    lengths = rng.integers(8, 40, s) + PROMPT
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    n = int(offsets[-1])
    index = np.arange(n) - np.repeat(offsets[:-1], lengths)
    response = index >= PROMPT
    q = -rng.exponential(0.5, n)
    p = q + rng.normal(0, sd, n)
    if shift:
        q = np.roll(q, shift)

    def listed(values: np.ndarray, kind: str, mask: np.ndarray | None = None) -> pa.Array:
        inner = pa.array(values.astype(kind), mask=mask)
        return pa.ListArray.from_arrays(pa.array(offsets), inner)

    data = {
        "sample_id": pa.array([f"s{i}" for i in range(s)]),
        "group_id": pa.array([f"p{i // group}" for i in range(s)]),
        "step": pa.array((np.arange(s) // group % 3).astype(np.int32)),
        "environment": pa.array(np.array(["math", "code"])[np.arange(s) // group % 2]),
        "prompt_len": pa.array(np.full(s, PROMPT, dtype=np.int32)),
        "finish_reason": pa.array(np.where(lengths > 30, "length", "stop")),
        "sequence_advantage": pa.array(rng.standard_normal(s).astype(np.float32)),
        "token_ids": listed(rng.integers(5, 900, n), "int32"),
        "origin": listed(response, "int8"),
        "loss_mask": listed(response, "bool"),
        "sampler_logprob": listed(q, "float32", ~response),
        "trainer_logprob": listed(p, "float32", ~response),
        "entropy": listed(np.abs(rng.standard_normal(n)), "float32", ~response),
    }
    data |= {name: pa.array(values) for name, values in columns.items()}
    return pa.RecordBatch.from_pydict({k: v for k, v in data.items() if k not in drop})


def parquet(path: Path, batch: pa.RecordBatch, rows_a_group: int = 100) -> Path:
    """Write a Parquet file."""
    pq.write_table(pa.Table.from_batches([batch]), path, row_group_size=rows_a_group)
    return path


def jsonl(path: Path, batch: pa.RecordBatch) -> Path:
    """Write a JSONL file, every float in full."""
    path.write_text("".join(json.dumps(row) + "\n" for row in batch.to_pylist()))
    return path


def frame(batch: pa.RecordBatch) -> Any:
    """The same log as a token table (sampled tokens only), for judging row by row."""
    import pandas as pd

    from mismatch_audit.rollouts.batch import TokenBatch

    view = TokenBatch(batch)
    keep = view.sampled
    rows = pd.DataFrame(
        {
            "prompt_id": view.spread(view.scalar("group_id")),
            "sequence_id": view.spread(view.scalar("sample_id")),
            "path": "decode",
            "step": view.spread(view.scalar("step")),
            "environment": view.spread(view.scalar("environment")),
            "position": view.position,
            "entropy": view.tokens("entropy"),
            "engine_logprob": view.tokens("sampler_logprob").astype(np.float64),
            "reference_logprob": view.tokens("trainer_logprob").astype(np.float64),
            "nonfinite": 0,
        }
    )
    return rows[keep].reset_index(drop=True)
