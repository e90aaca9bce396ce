"""A checkpoint on disk: a file, or a directory with shards, an index, a config.

Tensors stay in their files until a caller uses them. A directory may hold one copy per
tensor-parallel rank (files named ``...rank-0...``): each rank then is a namespace of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kernel_contracts.errors import InputError
from mismatch_audit.weights.safetensors_file import SafetensorsFile, TensorInfo, strict_json
from mismatch_audit.weights.torch_file import TorchFile

if TYPE_CHECKING:
    import torch

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_RANK = re.compile(r"(?:^|[-_.])(?:tp[-_])?rank[-_]?(\d+)(?=[-_.])")
_TORCH_SUFFIXES = {".bin", ".pt", ".pth"}
# Files of a training run that lie beside weights and hold none.
_NOT_WEIGHTS = ("optimizer", "scheduler", "rng_state", "training_args", "scaler")


class TensorFile(Protocol):
    """What both file readers give."""

    path: Path
    infos: dict[str, TensorInfo]

    def tensor(self, name: str) -> torch.Tensor: ...

    def release(self) -> None: ...


@dataclass(frozen=True)
class Stored:
    """One tensor in its file. ``where`` names both in an error."""

    info: TensorInfo
    file: TensorFile

    def tensor(self) -> torch.Tensor:
        return self.file.tensor(self.info.name)

    @property
    def where(self) -> str:
        return f"{self.file.path}:{self.info.name}"


@dataclass
class Checkpoint:
    """ranks: one mapping of stored names per tensor-parallel rank (a single one when unsharded)."""

    path: Path
    config: dict[str, Any]
    ranks: list[dict[str, Stored]]
    files: list[TensorFile] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        return sum(item.info.nbytes for rank in self.ranks for item in rank.values())

    def release(self) -> None:
        """Gives mapped pages back. Safe at any time: they are read again on use."""
        for file in self.files:
            file.release()


def open_file(path: Path) -> TensorFile:
    """A reader for one weight file, by its suffix. Raises InputError for an unknown one."""
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    if path.suffix in _TORCH_SUFFIXES:
        return TorchFile(path)
    raise InputError(
        "neither .safetensors nor .bin/.pt", where=str(path), fix="convert it to safetensors"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder, {} when there is none. Raises InputError when it does not parse."""
    path = folder / "config.json"
    if not path.is_file():
        return {}
    document = strict_json(path.read_bytes(), str(path))
    if not isinstance(document, dict):
        raise InputError("is not a mapping", where=str(path))
    return document


def _indexed(folder: Path, index: Path) -> tuple[list[TensorFile], dict[str, Stored]]:
    where = str(index)
    document = strict_json(index.read_bytes(), where)
    mapping = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(mapping, dict) or not mapping:
        raise InputError("has no weight_map", where=where)
    files: dict[str, TensorFile] = {}
    stored: dict[str, Stored] = {}
    for name, shard in mapping.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in (".", ".."):
            raise InputError(f"shard {shard!r} of {name!r} is not a file name", where=where)
        if shard not in files:
            files[shard] = open_file(folder / shard)
        if name not in files[shard].infos:
            raise InputError(
                f"tensor {name!r} is not in {shard}, where the index puts it",
                where=where,
                fix="copy the shard again, or rebuild the index",
            )
        stored[name] = Stored(files[shard].infos[name], files[shard])
    for shard, file in files.items():
        for name in file.infos:
            if mapping.get(name) != shard:
                raise InputError(
                    f"{shard} also holds {name!r}, which the index puts in "
                    f"{mapping.get(name, 'no shard')!r}: which copy is loaded is undefined",
                    where=where,
                    fix="rebuild the index",
                )
    return list(files.values()), stored


def _loose_files(folder: Path) -> list[Path]:
    entries = sorted(path for path in folder.iterdir() if path.is_file())
    safe = [path for path in entries if path.suffix == ".safetensors"]
    if safe:
        return safe
    return [
        path
        for path in entries
        if path.suffix in _TORCH_SUFFIXES and not path.name.startswith(_NOT_WEIGHTS)
    ]


def _by_rank(folder: Path, paths: list[Path]) -> tuple[list[TensorFile], list[dict[str, Stored]]]:
    ranks: dict[int, dict[str, Stored]] = {}
    files: list[TensorFile] = []
    matches = [_RANK.search(path.name) for path in paths]
    sharded = all(matches)
    for path, match in zip(paths, matches, strict=True):
        rank = int(match.group(1)) if sharded and match else 0
        file = open_file(path)
        files.append(file)
        names = ranks.setdefault(rank, {})
        for name, info in file.infos.items():
            if name in names:
                raise InputError(
                    f"tensor {name!r} is in two files ({names[name].file.path.name} and "
                    f"{path.name}): which copy is loaded is undefined",
                    where=str(folder),
                    fix="keep one, or add an index",
                )
            names[name] = Stored(info, file)
    if sorted(ranks) != list(range(len(ranks))):
        raise InputError(
            f"ranks {sorted(ranks)} are not 0..{len(ranks) - 1}: a rank's file is missing",
            where=str(folder),
        )
    return files, [ranks[rank] for rank in sorted(ranks)]


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Opens a directory or a single weight file and checks every header.

    Raises InputError for a missing path, no weights, and anything a header or index lies about.
    """
    path = Path(path)
    if path.is_file():
        file = open_file(path)
        names = {name: Stored(info, file) for name, info in file.infos.items()}
        return Checkpoint(path, read_config(path.parent), [names], [file])
    if not path.is_dir():
        raise InputError("no such file or directory", where=str(path))
    config = read_config(path)
    for name in INDEXES:
        if (path / name).is_file():
            files, stored = _indexed(path, path / name)
            return Checkpoint(path, config, [stored], files)
    paths = _loose_files(path)
    if not paths:
        raise InputError(
            "no .safetensors or .bin/.pt weights here",
            where=str(path),
            fix="name the directory that holds the weight files",
        )
    files, ranks = _by_rank(path, paths)
    if not any(ranks):
        raise InputError("the weight files hold no tensors", where=str(path))
    return Checkpoint(path, config, ranks, files)
