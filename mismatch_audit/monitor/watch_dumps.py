"""A trainer's dumps as a watch's source: files of recorded rollouts that appear in a folder."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernel_contracts.contract import Contract
from kernel_contracts.errors import InputError
from mismatch_audit.monitor.frames import ScoredRow, metadata_columns
from mismatch_audit.monitor.observe import BoundedClause
from mismatch_audit.monitor.watch_source import Chunk, units_of
from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.columns import column

SETTLE_SECONDS = 10.0
"""A file is finished when it has not changed for so long, or when a later one is there."""

_SUFFIXES = (".jsonl", ".parquet", ".pt", ".pth", ".pkl", ".npz", ".db", ".gz", ".zst")


class DumpSource:
    """Follows a folder. A file is read once it is finished, as a whole, and counted as a whole.

    A file that changes after it was read is told (note ``changed after reading``) and not read
    again. Files that are no dumps are noted and left alone. format: of the dumps, or auto.
    skip_bad: note a damaged dump instead of raising InputError.
    """

    def __init__(
        self,
        folder: Path,
        contract: Contract,
        clauses: Sequence[BoundedClause],
        *,
        format: str = "auto",
        settle: float = SETTLE_SECONDS,
        skip_bad: bool = False,
    ) -> None:
        if not folder.is_dir():
            raise InputError("no such folder", where=str(folder))
        self.folder, self.contract, self.clauses = folder, contract, clauses
        self.format, self.settle, self.skip_bad = format, settle, skip_bad
        self.identity = {"source": "dumps", "format": format}
        self.title = f"{folder}/"

    def poll(self, cursor: dict[str, Any], *, final: bool) -> Iterator[Chunk]:
        """One chunk a finished file. final: the last file counts as finished too."""
        done: dict[str, str] = dict(cursor.get("files", {}))
        files = self._files()
        for index, path in enumerate(files):
            name = str(path.relative_to(self.folder))
            stamp = _stamp(path)
            if name in done:
                if done[name].split(" ")[0] != stamp and not done[name].endswith("changed"):
                    done = {**done, name: f"{done[name]} changed"}
                    yield Chunk({"files": done}, notes=Counter({"changed after reading": 1}))
                continue
            if not (final or index + 1 < len(files) or self._settled(path)):
                return
            chunk = self._try(path, name)
            if _stamp(path) != stamp:  # it grew while it was read: it was not finished
                return
            done = {**done, name: f"{stamp} {_digest(path)}"}
            chunk.cursor = {"files": done}
            yield chunk

    def _files(self) -> list[Path]:
        from mismatch_audit.rollouts.formats.tidy import natural

        found = [
            p
            for p in self.folder.rglob("*")
            if p.is_file() and p.suffix in _SUFFIXES and not p.name.startswith(".")
        ]
        return sorted(found, key=lambda p: natural(p.relative_to(self.folder)))

    def _settled(self, path: Path) -> bool:
        return time.time() - path.stat().st_mtime >= self.settle

    def _try(self, path: Path, name: str) -> Chunk:
        from mismatch_audit.rollouts.formats.registry import detect

        if self.format == "auto" and not detect(path):
            return Chunk({}, notes=Counter({"files of no known format": 1}))
        try:
            return self._read(path, name)
        except InputError:
            if not self.skip_bad:
                raise
            return Chunk({}, notes=Counter({"damaged dumps": 1}))

    def _read(self, path: Path, name: str) -> Chunk:
        from mismatch_audit.rollouts.formats.registry import drain, open_sources

        chunk = Chunk({})
        sources, problems = open_sources([path], self.format)
        if problems:
            raise problems[0].error
        rows: list[ScoredRow] = []
        for source in sources:
            for batch in drain(source, lambda p: problems.append(p)):
                for row, why in _rows(batch, metadata_columns(self.contract), name, len(rows)):
                    if why is None:
                        rows.append(row)
                    else:
                        chunk.unusable[row.request_id] = why
        if problems:
            raise problems[0].error
        chunk.units = units_of(self.contract, self.clauses, rows)
        return chunk

    def backlog(self, cursor: dict[str, Any]) -> int:
        """Bytes of files that wait."""
        done = cursor.get("files", {})
        return sum(
            p.stat().st_size for p in self._files() if str(p.relative_to(self.folder)) not in done
        )

    def close(self) -> None:
        """Nothing is held."""


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size}:{status.st_mtime_ns}"


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:16]


def _rows(
    batch: TokenBatch, metadata: list[str], name: str, first: int
) -> Iterator[tuple[ScoredRow, str | None]]:
    """(row, why it cannot be judged) of each sequence. Only tokens that the policy sampled count.

    A prompt recurs in later steps by design, so its unit is the group with the step.
    """
    engine, trainer = batch.tokens("sampler_logprob"), batch.tokens("trainer_logprob")
    ids, prompt = batch.tokens("token_ids"), batch.scalar("prompt_len")
    sample, group, step = (batch.scalar(c) for c in ("sample_id", "group_id", "step"))
    entropy = batch.tokens("entropy")
    extra = {c: found for c in metadata if (found := column(batch, c)) is not None}
    for i in range(batch.n_sequences):
        low, high = int(batch.offsets[i]), int(batch.offsets[i + 1])
        keep = low + np.flatnonzero(batch.sampled[low:high])
        q, p = engine[keep].astype(np.float64), trainer[keep].astype(np.float64)
        unit = group[i] if group[i] is not None else sample[i]
        values = {
            c: v.labels[int(v.values[i])] if v.labels is not None else float(v.values[i])
            for c, v in extra.items()
            if not v.per_token and not v.null[i]
        }
        at = f"{name}@{int(step[i])}" if batch.has("step") and step[i] >= 0 else name
        row = ScoredRow(
            unit=f"{unit}@{at}",
            request_id=f"{sample[i]}@{at}",
            token_ids=tuple(int(t) for t in ids[keep]),
            prompt_length=int(prompt[i]),
            engine_logprob=q,
            reference={"reference_logprob": p, "entropy": entropy[keep].astype(np.float64)},
            metadata=values,
            position=(keep - low - int(prompt[i])).astype(np.int64),
        )
        yield row, _why_unusable(batch, i, q, p)


def _why_unusable(batch: TokenBatch, i: int, q: Any, p: Any) -> str | None:
    if not len(q):
        return "no sampled tokens"
    if not np.isfinite(q).all():
        return "sampler log-probs unknown or not finite"
    if np.isnan(p).any() or (p == np.inf).any():
        return "trainer log-probs unknown"
    if len(q) >= 4 and not q.any():
        return "sampler log-probs all 0.0: unknown ones are null"
    if batch.has("temperature") and batch.scalar("temperature")[i] not in (1.0,):
        value = batch.scalar("temperature")[i]
        if np.isfinite(value):
            return f"drawn at temperature {value:g}: no samples of q"
    for name, whole in (("top_p", (1.0,)), ("top_k", (0, -1)), ("min_p", (0.0,))):
        if batch.has(name):
            value = batch.scalar(name)[i]
            if value not in whole and np.isfinite(value):
                return "drawn with truncation (top_p, top_k, min_p): no samples of q"
    if batch.has("weights_version_max") and batch.has("trainer_version"):
        sampled, trained = (
            batch.scalar("weights_version_max")[i],
            batch.scalar("trainer_version")[i],
        )
        if sampled >= 0 and trained >= 0 and sampled != trained:
            return "sampled by other weights than the trainer's"
    return None
