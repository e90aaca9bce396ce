"""Schema of the token and sequence tables, and their Parquet parts.

One part per chunk of prompts, written to a temporary name and renamed, so that a part is either
whole or not there: a run killed at any moment resumes at the first missing part.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from kernel_contracts.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

COMPARED = (
    "engine_logprob",
    "reference_logprob",
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
    "nonfinite",
)
"""Columns that the full-vocabulary comparison fills (see docs/token-table.md for units)."""


def token_schema() -> pa.Schema:
    """Arrow schema of the token table: one row per scored response token and path."""
    import pyarrow as pa

    integers = {"engine_top1", "reference_top1", "nonfinite"}
    fields: list[tuple[str, Any]] = [
        ("prompt_id", pa.string()),
        ("sequence_id", pa.string()),
        ("position", pa.int32()),
        ("context_length", pa.int32()),
        ("token_id", pa.int32()),
        ("path", pa.string()),
        ("weights_version", pa.int64()),
        ("trainer_version", pa.int64()),
    ]
    for name in COMPARED:
        kind = pa.int32() if name in integers else pa.bool_() if name == "flip" else pa.float64()
        fields.append((name, kind))
    fields += [
        ("engine_reported_logprob", pa.float64()),
        ("kl_lower", pa.float64()),
        ("kl_upper", pa.float64()),
        ("tv_lower", pa.float64()),
        ("tv_upper", pa.float64()),
        ("kl_method", pa.string()),
        ("n_cached_tokens", pa.int32()),
        ("batch_rows", pa.int32()),
        ("loss_mask", pa.bool_()),
        ("advantage", pa.float64()),
        ("applied_weight", pa.float64()),
    ]
    return pa.schema(fields)


def sequence_schema() -> pa.Schema:
    """Arrow schema of the sequence table: one row per rollout."""
    import pyarrow as pa

    return pa.schema(
        [
            ("prompt_id", pa.string()),
            ("sequence_id", pa.string()),
            ("prompt_length", pa.int32()),
            ("response_length", pa.int32()),
            ("token_ids", pa.list_(pa.int32())),
            ("finish_reason", pa.string()),
            ("reward", pa.float64()),
        ]
    )


def write_part(frame: pd.DataFrame, schema: pa.Schema, path: Path) -> None:
    """Write one part atomically. Columns that the frame lacks are null.

    Raises InputError when the disk is full; parts already written stay as they are.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = [
        pa.array(frame[field.name], type=field.type, from_pandas=True)
        if field.name in frame
        else pa.nulls(len(frame), field.type)
        for field in schema
    ]
    temporary = path.with_suffix(".tmp")
    try:
        pq.write_table(pa.Table.from_arrays(columns, schema=schema), temporary)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(
            f"cannot write {path.name}: {error.strerror or error}",
            where=str(path.parent),
            fix="free some space, then run the same command again with --resume",
        ) from error


def read_parts(paths: Sequence[Path]) -> pd.DataFrame:
    """All parts as one frame, in the given order. Raises InputError for a damaged part."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    frames = []
    for path in paths:
        try:
            frames.append(pq.read_table(path).to_pandas())
        except (OSError, pa.ArrowInvalid) as error:
            raise InputError(
                f"damaged part: {error}",
                where=str(path),
                fix=f"remove {path} and run again with --resume",
            ) from error
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
