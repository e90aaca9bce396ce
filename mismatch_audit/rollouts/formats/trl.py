"""TRL: ``completions/completions_<step>.parquet`` (log_completions=True), text only.

The hook of this project (``mismatch_audit.trainers``) writes the sequence table itself, with token
ids and both log-probs; the plain reader reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kernel_contracts.errors import InputError
from mismatch_audit.rollouts.formats.base import Detection, ReadOptions, Source
from mismatch_audit.rollouts.formats.files import matching
from mismatch_audit.rollouts.formats.text import Fields, text_source
from mismatch_audit.rollouts.schema import Header

FORMAT = "trl"

_GLOBS = ("completions_*.parquet", "completions/completions_*.parquet")
TEXT = Fields(prompt=("prompt",), completion=("completion",), advantage=("advantage",))
_COLUMNS = ("step", "prompt", "completion", "advantage")


def files(path: Path) -> list[Path]:
    return matching(path, *_GLOBS)


def detect(path: Path) -> Detection | None:
    found = files(path) if path.is_dir() else [path] if path.suffix == ".parquet" else []
    if not found:
        return None
    names = _column_names(found[0])
    if "token_ids" not in names and {"step", "prompt", "completion"} <= names:
        return Detection(FORMAT, 0.9, f"{len(found)} file(s) with columns prompt and completion")
    if not names and files(found[0]):
        return Detection(FORMAT, 0.5, "named completions_<step>.parquet")
    return None


def read(path: Path, options: ReadOptions) -> Source:
    """Raises InputError without a tokenizer: the dump is text only."""
    record = "attach(trainer, contract=..., record=DIR) writes token ids and both log-probs "
    record += "(docs/trainers.md)"
    header = Header(framework="trl", format=FORMAT)
    header.lacks = {
        "sampler_logprob": record,
        "trainer_logprob": record,
        "weights_version_min": record,
    }
    chosen = files(path) if path.is_dir() else [path]
    return text_source(path, chosen, TEXT, header, options, _records)


def _column_names(path: Path) -> set[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return set(pq.read_schema(path).names)
    except (OSError, pa.ArrowException):
        return set()


def _records(file: Path, options: ReadOptions) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(file) as table:
            names = [name for name in _COLUMNS if name in table.schema_arrow.names]
            for batch in table.iter_batches(1024, columns=names):
                for record in batch.to_pylist():
                    yield f"{file}, row {row}", record
                    row += 1
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"not a readable Parquet file: {reason}", where=str(file)) from None
