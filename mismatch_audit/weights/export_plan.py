"""What an export will write: tensors, dtypes and places of every shard; and its journal."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kernel_contracts.errors import InputError
from mismatch_audit.weights.checkpoint import Checkpoint, TensorFile
from mismatch_audit.weights.formats import FORMATS
from mismatch_audit.weights.safetensors_file import encode_header, strict_json

JOURNAL = ".export.json"
STATE_FOLDER = "feedback"
DTYPES = {"bf16": "BF16", "fp16": "F16"}
_CAST_FROM = {"F64", "F32"}


@dataclass(frozen=True)
class ShardPlan:
    """One output file. codes: tensor -> safetensors dtype. places: absolute byte ranges."""

    file: TensorFile
    name: str
    header: bytes
    codes: dict[str, str]
    places: dict[str, tuple[int, int]]

    @property
    def size(self) -> int:
        return max([len(self.header), *(end for _, end in self.places.values())])

    def is_cast(self, name: str) -> bool:
        return self.codes[name] != self.file.infos[name].code


def plan_shards(checkpoint: Checkpoint, dtype: str) -> list[ShardPlan]:
    """Files, names and order of the source, with fp32 and fp64 tensors in ``dtype``.

    Raises InputError for an unknown dtype, rank files, or a source that has nothing to round.
    """
    if dtype not in DTYPES:
        raise InputError(f"cannot export to {dtype!r}", fix=f"one of {', '.join(DTYPES)}")
    if len(checkpoint.ranks) > 1:
        raise InputError("holds tensor-parallel shards, not a master", where=str(checkpoint.path))
    plans = []
    for file in checkpoint.files:
        codes = {
            name: DTYPES[dtype] if info.code in _CAST_FROM else info.code
            for name, info in file.infos.items()
        }
        entries = [(name, codes[name], info.shape) for name, info in file.infos.items()]
        header, places = encode_header(entries, {"format": "pt"})
        plans.append(ShardPlan(file, f"{file.path.stem}.safetensors", header, codes, places))
    if not any(plan.is_cast(name) for plan in plans for name in plan.codes):
        raise InputError(
            "holds no fp32 weights: there is nothing to round",
            where=str(checkpoint.path),
            fix="export from the fp32 master",
        )
    if len({plan.name for plan in plans}) < len(plans):
        raise InputError("two files of the source would get one name", where=str(checkpoint.path))
    return plans


@dataclass
class Journal:
    """What an export was asked to do and which tensors are on disk, so that it can go on.

    done: shard -> tensors whose bytes are written and flushed. finished: shards renamed.
    """

    source: str
    rounding: str
    dtype: str
    seed: int
    push: int
    state: str | None
    done: dict[str, list[str]] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)

    def options(self) -> dict[str, Any]:
        document = asdict(self)
        return {k: v for k, v in document.items() if k not in ("done", "finished")}

    def write(self, out: Path) -> None:
        """Replaces the journal in one step: a crash leaves the old or the new one."""
        partial = out / f"{JOURNAL}.partial"
        with partial.open("w", encoding="utf-8") as handle:
            json.dump(asdict(self), handle)
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(out / JOURNAL)


def open_journal(out: Path, wanted: Journal) -> Journal:
    """The journal of an interrupted export to ``out``, or a fresh one.

    Raises InputError when the folder holds something else, or an export with other options.
    """
    path = out / JOURNAL
    if not path.is_file():
        if out.is_dir() and any(out.iterdir()):
            raise InputError(
                "the output folder is not empty and holds no interrupted export",
                where=str(out),
                fix="name a new folder",
            )
        out.mkdir(parents=True, exist_ok=True)
        wanted.write(out)
        return wanted
    document = strict_json(path.read_bytes(), str(path))
    try:
        found = Journal(**document)
    except TypeError as error:
        raise InputError("is not the journal of an export", where=str(path)) from error
    changed = [k for k, v in wanted.options().items() if found.options()[k] != v]
    if changed:
        raise InputError(
            f"an export with another {', '.join(changed)} was interrupted here",
            where=str(out),
            fix="finish it with its own options, or name a new folder",
        )
    return found


def source_identity(checkpoint: Checkpoint) -> str:
    """Names, sizes and modification times of the source: enough to notice that it changed."""
    facts = []
    for file in checkpoint.files:
        status = file.path.stat()
        facts.append(f"{file.path.name}:{status.st_size}:{status.st_mtime_ns}")
    return ";".join(sorted(facts))


def element_bytes(code: str) -> int:
    return FORMATS[code][0]
