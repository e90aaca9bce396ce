"""One step's sampled tokens as the token table that contracts speak of."""

from __future__ import annotations

import numpy as np
import pandas as pd

from mismatch_audit.rollouts.batch import TokenBatch

_SEQUENCE = (
    "environment",
    "finish_reason",
    "modality",
    "logprobs_mode",
    "framework",
    "engine",
    "step",
    "n_left_pad",
    "temperature",
    "reward",
    "engine_age",
)
_TOKEN = ("entropy", "advantage", "applied_weight", "kept_mask", "kept_mass", "turn_index")


def token_frame(batch: TokenBatch) -> pd.DataFrame:
    """One row a sampled token of the loss, path ``decode``; log-probs null where unknown.

    prompt_id is the group (the sample where there is none), the unit of statistics. Columns that
    the batch lacks are left out, so that a clause on them is UNOBSERVED and not about nulls.
    nonfinite counts infinite log-probs of a token; a NaN is a missing one.
    """
    rows, owner = batch.sampled, batch.sequence_of
    sequence = owner[rows]
    sample = batch.scalar("sample_id")
    group = batch.scalar("group_id") if batch.has("group_id") else sample
    group = np.where(pd.isna(group), sample, group)
    data: dict[str, object] = {
        "prompt_id": group[sequence],
        "sequence_id": sample[sequence],
        "sequence": sequence,
        "position": batch.position[rows],
        "context_length": batch.index_in_sequence[rows],
        "token_id": batch.tokens("token_ids")[rows],
        "path": "decode",
    }
    for ours, theirs in (
        ("engine_logprob", "sampler_logprob"),
        ("reference_logprob", "trainer_logprob"),
    ):
        if batch.has(theirs):
            data[ours] = batch.tokens(theirs)[rows].astype(np.float64)
    sides = [data[c] for c in ("engine_logprob", "reference_logprob") if c in data]
    if len(sides) == 2:
        data["nonfinite"] = np.sum([np.isinf(side) for side in sides], axis=0)  # type: ignore[arg-type]
    for ours, theirs in (
        ("weights_version", "weights_version_min"),
        ("trainer_version", "trainer_version"),
        ("n_cached_tokens", "num_cached_tokens"),
        ("batch_rows", "microbatch_rows"),
        *((name, name) for name in _SEQUENCE),
    ):
        if batch.has(theirs):
            column = batch.records.column(theirs).to_pandas()
            data[ours] = column.to_numpy()[sequence]
    for name in _TOKEN:
        if batch.has(name):
            values = batch.tokens(name)[rows]
            data[name] = values.astype(np.float64) if values.dtype.kind == "f" else values
    if "advantage" not in data and batch.has("sequence_advantage"):
        data["advantage"] = batch.scalar("sequence_advantage")[sequence].astype(np.float64)
    return pd.DataFrame(data)
