"""Observed steps on disk: one Parquet file a step in the schema of the sequence table.

``audit rollouts FOLDER`` reads the folder later. A file is written under a temporary name and
renamed, so a run that is killed leaves whole steps only.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from kernel_contracts.errors import InputError
from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.schema import HEADER_KEY, Header, sequence_schema


def record_step(
    folder: Path, batch: TokenBatch, header: Header, step: int, rank: int = 0, part: int = 0
) -> Path:
    """Write one step; a file of the same name (of a run that was resumed) is replaced.

    part: counts the generations of one step, where a trainer makes several.

    Raises InputError when it cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema, records = sequence_schema(), batch.records
    columns = [
        records.column(f.name).cast(f.type)
        if f.name in records.schema.names
        else pa.nulls(records.num_rows, f.type)
        for f in schema
    ]
    metadata = {HEADER_KEY: json.dumps(asdict(header))}
    table = pa.Table.from_arrays(columns, schema=schema.with_metadata(metadata))
    target = folder / f"step-{step:08d}-rank-{rank:04d}-{part:02d}.parquet"
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, temporary, compression="zstd")
        temporary.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise InputError(
            f"cannot write it: {error.strerror or error}",
            where=str(target),
            fix="free some space, or attach without `record`",
        ) from error
    return target
