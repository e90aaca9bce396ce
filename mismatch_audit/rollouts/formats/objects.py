"""Sources made of one object a file (pickle, torch, npz), read one file at a time."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernel_contracts.errors import InputError
from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.formats.base import ReadOptions, Source
from mismatch_audit.rollouts.formats.files import Files, size_of
from mismatch_audit.rollouts.formats.table import Row, batches
from mismatch_audit.rollouts.safe_pickle import ERRORS, Inert, Lazy, load_pickle
from mismatch_audit.rollouts.safe_torch import Tensor, load_torch, load_torch_bytes
from mismatch_audit.rollouts.schema import Header

_HEAD = 1 << 16
_BATCH_OF_ONE = 64 << 20


def object_source(
    path: Path,
    files: Sequence[Path],
    convert: Callable[[Path, Any], Iterator[dict[str, Any]]],
    header: Header,
    options: ReadOptions,
) -> Source:
    """A source of files that hold an object each. convert: given the file and what it holds, gives
    rows, or raises ValueError."""
    seen: set[str] = set()

    def rows(file: Path) -> Iterator[Row]:
        number = 0
        try:
            for row in convert(file, load_object(file)):
                yield f"{file}, sequence {number}", row
                number += 1
        except (*ERRORS, AttributeError) as error:
            reason = str(error) or type(error).__name__
            raise InputError(reason, where=f"{file}, sequence {number}") from None

    def read(file: Path) -> Iterator[TokenBatch]:
        return batches(str(file), rows(file), options, seen)

    return Source(path, header, Files(files, read), size_of(files))


def load_object(path: Path) -> Any:
    """What a .pt, .pth, .npz or pickle file holds. Raises InputError."""
    if path.suffix == ".npz":
        return _load_npz(path)
    if path.suffix in (".pt", ".pth", ".bin"):
        return load_torch(path)
    return load_pickle(path)


def _load_npz(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, zipfile.BadZipFile, *ERRORS) as error:
        reason = str(error) or type(error).__name__
        raise InputError(f"not a readable npz file: {reason}", where=str(path)) from None


def head(path: Path) -> bytes:
    """The first bytes of the pickle that a file holds, or the names of an npz's arrays: enough to
    recognise it by. Empty where it cannot be read."""
    try:
        if path.suffix == ".npz":
            with zipfile.ZipFile(path) as archive:
                return " ".join(archive.namelist()).encode()
        with path.open("rb") as file:
            content = file.read(_HEAD)
        if content[:2] == b"PK":
            with zipfile.ZipFile(path) as archive:
                names = [n for n in archive.namelist() if n.endswith("data.pkl")]
                if not names:
                    return b""
                with archive.open(names[0]) as entry:
                    return entry.read(_HEAD * 16)
        return content
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError):
        return b""


def mapping(value: Any) -> dict[str, Any]:
    """A dict from a dict, an object's attributes, a TensorDict or a DataProto; {} where it is none.
    Raises ValueError for a damaged one."""
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if not isinstance(value, Inert):
        return {}
    name = value.path.rsplit(".", 1)[-1]
    if name == "_rebuild_tensordict_files_consolidated":
        return _consolidated(value)
    if name == "_make_td":
        state = value.args[1] if len(value.args) > 1 else {}
        return mapping(state.get("_tensordict")) if isinstance(state, Mapping) else {}
    if name.endswith("DataProto") and isinstance(value.state, tuple):
        return data_proto(value.state)
    state = value.state
    if isinstance(state, tuple) and len(state) == 2:  # (attributes, slots)
        state = {**mapping(state[0]), **mapping(state[1])}
    found = mapping(state) if isinstance(state, Mapping) else {}
    return {**found, **{str(k): v for k, v in (e for e in value.entries if isinstance(e, tuple))}}


def data_proto(state: tuple[Any, ...]) -> dict[str, Any]:
    """Columns of a pickled DataProto: tensors saved by torch, non-tensor columns, meta_info."""
    if len(state) != 3 or not isinstance(state[0], bytes):
        raise ValueError("a DataProto without its tensors")
    columns = mapping(load_torch_bytes(state[0]))
    columns.update(mapping(state[1]))
    columns["meta_info"] = mapping(state[2])
    return columns


def _consolidated(value: Inert) -> dict[str, Any]:
    """A consolidated TensorDict: one storage; of each leaf (dtype, shape, start, stop, padding)."""
    if len(value.args) != 2 or not isinstance(value.args[0], Mapping):
        raise ValueError("a TensorDict without its description")
    storage = value.args[1]
    if not isinstance(storage, Tensor):
        raise ValueError("a TensorDict without its storage")
    raw = np.ascontiguousarray(storage.array()).view(np.uint8)
    found: dict[str, Any] = {}
    for name, leaf in mapping(value.args[0].get("leaves")).items():
        kind, shape, start, stop, pad = leaf
        found[name] = _leaf(str(kind), list(shape), raw[int(start) : int(stop) - int(pad)])
    return found


def _leaf(kind: str, shape: list[int], raw: Any) -> Any:
    name = kind.removeprefix("torch.")
    if name == "bfloat16":
        values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    elif re.fullmatch(r"bool|u?int\d+|float\d+", name):
        values = raw.view(name)
    else:
        raise ValueError(f"a tensor of type {kind} is not read")
    return values.reshape(shape)


def serialized(blob: Any) -> Any:
    """SkyRL's own form of a tensor: {"format", "data", "dtype", "shape"}; other values as they
    are. Raises ValueError."""
    if not isinstance(blob, Mapping) or "data" not in blob:
        return blob
    data, kind = blob["data"], blob.get("format", "numpy")
    if not isinstance(data, bytes):
        return None  # a ragged list of tensors: images, nothing per token
    if kind == "torch":
        loaded = load_torch_bytes(data)
        return loaded.array() if isinstance(loaded, Lazy) else loaded
    name = str(blob.get("dtype"))
    if not re.fullmatch(r"[<|=]?(bool|u?int\d+|float\d+|[biuf?]\d?)", name):
        raise ValueError(f"a tensor of type {name[:40]} is not read")
    return np.frombuffer(io.BytesIO(data).getbuffer(), dtype=np.dtype(name)).reshape(blob["shape"])
