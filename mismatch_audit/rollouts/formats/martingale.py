"""martingale's token record (``tokens.db``, SQLite): exact sampler and trainer log-probs.

Sequences and scores are JSON in the tables ``sequences`` and ``scores``, log-probs the bits of a
float ("f32:bf800000"). A revision's step is taken as the weights version. The hash chain is not
checked here; ``martingale verify`` does that.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kernel_contracts.errors import InputError
from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.formats.base import Detection, ReadOptions, Source
from mismatch_audit.rollouts.formats.files import Files, matching, size_of
from mismatch_audit.rollouts.formats.table import Row, batches
from mismatch_audit.rollouts.schema import Header, Origin

FORMAT = "martingale"

_MAGIC = b"SQLite format 3\0"
_TABLES = {"llm_revisions", "sequences", "scores"}


class _Token(msgspec.Struct):
    token_id: int
    logprob_bits: str
    revision_digest: str


class _Replay(msgspec.Struct):
    is_weight_num: int
    is_weight_den: int
    rescale_num: int = 1
    rescale_den: int = 1


class _Sequence(msgspec.Struct):
    actor_id: int
    sequence_index: int
    sequence_id: str
    digest: str
    prompt_digest: str
    prompt_len: int
    tokens: list[_Token]
    prompt_ids: list[int] | None = None
    reward_bits: str | None = None
    replay: _Replay | None = None


class _Score(msgspec.Struct):
    position: int
    logprob_bits: str
    train_revision_digest: str


class _Revision(msgspec.Struct):
    step: int
    digest: str = ""
    sampler: dict[str, Any] = {}


def files(path: Path) -> list[Path]:
    return matching(path, "tokens.db") if path.is_dir() else [path] if detect(path) else []


def detect(path: Path) -> Detection | None:
    for file in matching(path, "tokens.db") if path.is_dir() else [path]:
        try:
            if not file.is_file() or not _is_sqlite(file):
                continue
            with closing(_open(file)) as database:
                names = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
                if {name for (name,) in names} >= _TABLES:
                    return Detection(FORMAT, 0.95, "SQLite tables llm_revisions, sequences, scores")
        except (OSError, sqlite3.Error):
            continue
    return None


def _is_sqlite(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(16) == _MAGIC


def _open(path: Path) -> sqlite3.Connection:
    """Read-only; without a writer's log beside it, without side files either."""
    idle = not path.with_name(path.name + "-wal").exists()
    uri = f"{path.resolve().as_uri()}?mode=ro" + ("&immutable=1" if idle else "")
    database = sqlite3.connect(uri, uri=True, timeout=30.0)
    database.execute("PRAGMA query_only = ON")
    database.execute("PRAGMA trusted_schema = OFF")
    return database


def read(path: Path, options: ReadOptions) -> Source:
    """Raises InputError where there is no token record."""
    chosen = matching(path, "tokens.db") if path.is_dir() else [path]
    if not chosen:
        raise InputError("holds no tokens.db", where=str(path))
    header = Header(
        framework="martingale",
        format=FORMAT,
        notes=[
            "the step of a token's revision is its weights version, group_id the prompt's digest",
            "of several scores of a token the one with the latest revision counts",
            "a sequence recorded without its prompt's ids has prompt_len 0",
        ],
        lacks={
            "loss_mask": "not in the record: every recorded token counts as trained",
            "advantage": "not in the record",
            "entropy": "not in the record",
        },
    )
    seen: set[str] = set()

    def read_file(file: Path) -> Iterator[TokenBatch]:
        return batches(str(file), _rows(file), options, seen)

    return Source(path, header, Files(chosen, read_file), size_of(chosen))


def _rows(file: Path) -> Iterator[Row]:
    where = str(file)
    try:
        with closing(_open(file)) as database:
            revisions = {}
            for digest, manifest in database.execute(
                "SELECT digest, manifest_json FROM llm_revisions"
            ):
                revisions[digest] = msgspec.json.decode(manifest, type=_Revision)
            for rowid, record in database.execute(
                "SELECT rowid, record_json FROM sequences ORDER BY rowid"
            ):
                where = f"{file}, sequence {rowid}"
                sequence = msgspec.json.decode(record, type=_Sequence)
                yield where, _row(sequence, _scores(database, sequence.digest), revisions)
    except (sqlite3.Error, OSError) as error:
        raise InputError(f"not a readable token record: {error}", where=where) from None
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise InputError(str(error), where=where) from None


def _scores(database: sqlite3.Connection, digest: str) -> list[_Score]:
    found = database.execute(
        "SELECT record_json FROM scores WHERE sequence_digest = ? ORDER BY rowid", (digest,)
    )
    return [msgspec.json.decode(record, type=_Score) for (record,) in found]


def _row(
    sequence: _Sequence, scores: list[_Score], revisions: dict[str, _Revision]
) -> dict[str, Any]:
    prompt = sequence.prompt_ids or []
    if sequence.prompt_ids is not None and len(prompt) != sequence.prompt_len:
        raise ValueError(f"prompt_len {sequence.prompt_len} for {len(prompt)} prompt ids")
    start, n = len(prompt), len(prompt) + len(sequence.tokens)
    sampler, trainer = (np.full(n, np.nan, dtype=np.float32) for _ in range(2))
    versions = np.full(n, -1, dtype=np.int64)
    for i, token in enumerate(sequence.tokens):
        sampler[start + i] = number(token.logprob_bits)
        versions[start + i] = _step(token.revision_digest, revisions)
    latest = max((_step(s.train_revision_digest, revisions) for s in scores), default=None)
    for score in scores:
        if _step(score.train_revision_digest, revisions) == latest:
            if not 0 <= score.position < len(sequence.tokens):
                raise ValueError(f"a score of position {score.position}")
            trainer[start + score.position] = number(score.logprob_bits)
    first = revisions.get(sequence.tokens[0].revision_digest) if sequence.tokens else None
    sampling = first.sampler if first else {}
    known = versions[versions >= 0]
    replay = sequence.replay
    weight = None
    if replay is not None:
        ratio = replay.is_weight_num / replay.is_weight_den
        weight = np.full(n, np.nan, dtype=np.float32)
        weight[start:] = ratio * replay.rescale_num / replay.rescale_den
    return {
        "framework": "martingale",
        "engine": sampling.get("engine"),
        "step": latest,
        "trainer_version": latest,
        "sample_id": f"{sequence.actor_id}/{sequence.sequence_index}/{sequence.sequence_id}",
        "group_id": sequence.prompt_digest[:16],
        "token_ids": prompt + [token.token_id for token in sequence.tokens],
        "prompt_len": start,
        "origin": np.where(np.arange(n) < start, Origin.PROMPT, Origin.SAMPLED),
        "sampler_logprob": sampler,
        "trainer_logprob": trainer if scores else None,
        "token_version": versions,
        "weights_version_min": int(known.min()) if len(known) else None,
        "weights_version_max": int(known.max()) if len(known) else None,
        "applied_weight": weight,
        "reward": number(sequence.reward_bits) if sequence.reward_bits else None,
        **{
            name: sampling.get(name)
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        },
        "logprobs_mode": sampling.get("logprobs_mode"),
    }


def _step(digest: str, revisions: dict[str, _Revision]) -> int:
    revision = revisions.get(digest)
    if revision is None:
        raise ValueError(f"revision {digest[:16]} is not in the record")
    return revision.step


def number(bits: str) -> float:
    """``"f32:bf800000"`` (big-endian hex) -> -1.0. Raises ValueError."""
    kind, _, digits = bits.partition(":")
    form = {"f32": ">f", "f64": ">d"}.get(kind)
    try:
        raw = bytes.fromhex(digits)
        if form is None or len(raw) != struct.calcsize(form):
            raise ValueError
    except ValueError:
        raise ValueError(f"{bits[:40]!r} is no float's bits") from None
    return float(struct.unpack(form, raw)[0])
