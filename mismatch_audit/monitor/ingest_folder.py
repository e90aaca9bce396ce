"""The folder of an ingest: token parts as of any run, and which requests are in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from mismatch_audit.monitor.frames import ScoredRow
from mismatch_audit.rundir import RunDirectory
from mismatch_audit.tokens import read_parts, write_part

if TYPE_CHECKING:
    import pyarrow as pa

JUDGED = "judged"


def request_schema() -> pa.Schema:
    """Arrow schema of the request table: one row a request, judged or not."""
    import pyarrow as pa

    return pa.schema(
        [
            ("request_id", pa.string()),
            ("prompt_id", pa.string()),
            ("outcome", pa.string()),
            ("metadata", pa.string()),
        ]
    )


class IngestFolder:
    """Parts are whole or not there; a request is in one part only.

    Raises InputError as `RunDirectory` does, for a folder with another contract or reference.
    """

    def __init__(self, path: Path, spec: dict[str, Any]) -> None:
        self.run = RunDirectory(path, spec, resume=True)
        (path / "requests").mkdir(exist_ok=True)
        self.path = path
        self._next = len(self._names())
        self.seen: set[str] = set(self.requests()["request_id"]) if self._next else set()

    def _names(self) -> list[str]:
        """The tokens part is written last, so it stands for the whole part."""
        return sorted(p.name for p in (self.path / "tokens").glob("part-*.parquet"))

    def write(self, tokens: pd.DataFrame, rows: list[ScoredRow], unusable: dict[str, str]) -> None:
        """Append one part."""
        requests = [
            {
                "request_id": row.request_id,
                "prompt_id": row.unit,
                "outcome": JUDGED,
                "metadata": json.dumps(dict(row.metadata), sort_keys=True),
            }
            for row in rows
        ] + [
            {"request_id": request, "prompt_id": None, "outcome": why, "metadata": None}
            for request, why in unusable.items()
        ]
        name = f"part-{self._next:05d}.parquet"
        write_part(pd.DataFrame(requests), request_schema(), self.path / "requests" / name)
        sequences = pd.DataFrame(  # objects: an empty part has no list to tell its type by
            {
                "prompt_id": [r.unit for r in rows],
                "sequence_id": [r.request_id for r in rows],
                "prompt_length": [r.prompt_length for r in rows],
                "response_length": [r.n_tokens for r in rows],
                "token_ids": [list(r.token_ids) for r in rows],
            },
            dtype=object,
        )
        self.run.write_chunk(self._next, tokens, sequences)
        self.seen |= {r["request_id"] for r in requests if r["request_id"] is not None}
        self._next += 1

    def requests(self) -> pd.DataFrame:
        """The request table of all finished parts."""
        return read_parts([self.path / "requests" / n for n in self._names()])

    def tokens(self) -> pd.DataFrame:
        """The token table of all finished parts."""
        return read_parts([self.path / "tokens" / n for n in self._names()])
