"""The folder of one run: its settings, parts and report. Two runs never mix in one folder."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from kernel_contracts.errors import InputError
from mismatch_audit.tokens import read_parts, sequence_schema, token_schema, write_part

STATE = "run.json"


def digest_of(document: Any) -> str:
    """SHA-256 of the canonical JSON of plain data."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


class RunDirectory:
    """Parts and state under one path.

    Raises InputError when the folder holds another run, or this one without ``resume``.
    """

    def __init__(self, path: Path, spec: dict[str, Any], *, resume: bool) -> None:
        self.path = path
        self.spec = spec
        state = path / STATE
        digest = digest_of(spec)
        if state.exists():
            known = read_json(state)
            if known.get("digest") != digest:
                changed = _changed(known.get("spec", {}), spec)
                raise InputError(
                    f"this folder holds another run; different: {', '.join(changed)}",
                    where=str(path),
                    fix="give another --out, or repeat the old settings with --resume",
                )
            if not resume:
                raise InputError(
                    "this folder already holds this run",
                    where=str(path),
                    fix="add --resume to finish it, or give another --out",
                )
        elif path.exists() and any(path.iterdir()):
            raise InputError(
                "the folder is not empty and holds no run of ours",
                where=str(path),
                fix="give another --out",
            )
        try:
            for name in ("tokens", "sequences", "probes"):
                (path / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot create it: {error.strerror}", where=str(path)) from error
        if not state.exists():
            write_json({"digest": digest, "spec": spec}, state)

    @property
    def engine_log(self) -> Path:
        return self.path / "engine.log"

    def has_chunk(self, index: int) -> bool:
        """The tokens part is written last, so it stands for the whole chunk."""
        return (self.path / "tokens" / f"part-{index:05d}.parquet").exists()

    def write_chunk(self, index: int, tokens: pd.DataFrame, sequences: pd.DataFrame) -> None:
        """Write one chunk's rows, sequences first."""
        name = f"part-{index:05d}.parquet"
        write_part(sequences, sequence_schema(), self.path / "sequences" / name)
        write_part(tokens, token_schema(), self.path / "tokens" / name)

    def tables(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """(token table, sequence table) of all finished chunks."""
        tokens = sorted((self.path / "tokens").glob("part-*.parquet"))
        return read_parts(tokens), read_parts([self.path / "sequences" / p.name for p in tokens])

    def cached_json(self, name: str) -> Any:
        """A small finished result (``probes/<name>.json``), or None."""
        path = self.path / "probes" / f"{name}.json"
        return read_json(path) if path.exists() else None

    def finished(self, name: str) -> Any:
        """A small result that must be there. Raises InputError when the run is not finished."""
        value = self.cached_json(name)
        if value is None:
            raise InputError(
                "the run is not finished",
                where=str(self.path),
                fix="repeat its command with --resume",
            )
        return value

    def cache_json(self, name: str, value: Any) -> Any:
        """Keep a small result; returns it as it will be read back."""
        path = self.path / "probes" / f"{name}.json"
        write_json(value, path)
        return read_json(path)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder for hidden states in transit, removed at the end; in memory where possible."""
        shm = Path("/dev/shm")
        base = shm if shm.is_dir() and shutil.disk_usage(shm).free > 2 << 30 else self.path
        with tempfile.TemporaryDirectory(prefix="mismatch-audit-", dir=base) as folder:
            yield Path(folder)


def remove_run(path: Path) -> None:
    """Remove a run of ours; a folder that holds none is left alone."""
    if (path / STATE).exists():
        shutil.rmtree(path)


def write_json(value: Any, path: Path) -> None:
    """Atomic, sorted, readable. Raises InputError when the disk is full."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(
            f"cannot write it: {error.strerror or error}",
            where=str(path),
            fix="free some space, then run the same command again with --resume",
        ) from error


def read_json(path: Path) -> Any:
    """JSON of a file. Raises InputError when it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"damaged: {error}", where=str(path), fix="give another --out") from error


def _changed(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    names: list[str] = []
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            names += _changed(a, b, f"{prefix}{key}.")
        elif a != b:
            names.append(f"{prefix}{key}")
    return names
