"""torch.save files read into numpy, by the restricted unpickler and without torch.

``torch.load(weights_only=True)`` refuses the whole file for one unknown class; here such a class is
inert and the tensors beside it are read. Storages of the zip format are mapped, so a tensor that is
not looked at costs nothing. Strides are checked: a crafted view cannot reach beyond its storage.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from kernel_contracts.errors import InputError
from mismatch_audit.rollouts.batch import Array
from mismatch_audit.rollouts.pickle_scan import scan
from mismatch_audit.rollouts.safe_pickle import (
    ERRORS,
    MAX_BYTES,
    Lazy,
    SafeUnpickler,
    Sealed,
    refusal,
)

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_DTYPES = {
    "double": "<f8", "float": "<f4", "half": "<f2", "bfloat16": "bf16", "long": "<i8",
    "int": "<i4", "short": "<i2", "char": "|i1", "byte": "|u1", "bool": "|b1",
}  # fmt: skip
_NAMES = {
    "float64": "double", "float32": "float", "float16": "half", "bfloat16": "bfloat16",
    "int64": "long", "int32": "int", "int16": "short", "int8": "char", "uint8": "byte",
    "bool": "bool",
}  # fmt: skip


class StorageType:
    """A storage class or a dtype: how to read bytes."""

    def __init__(self, name: str) -> None:
        self.code = _DTYPES[name]

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("state set on a type")

    @property
    def itemsize(self) -> int:
        return 2 if self.code == "bf16" else np.dtype(self.code).itemsize

    def view(self, data: Any) -> Array:
        """bfloat16 as float32: its bits are the upper half."""
        if self.code == "bf16":
            bits = np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16
            return bits.view(np.float32)
        return np.frombuffer(data, dtype=self.code)


class Storage:
    """Bytes of a storage; those of the old format come after the pickle that names them."""

    def __init__(self, kind: StorageType, numel: int, data: Any = None) -> None:
        self.kind, self.numel, self.data = kind, numel, data

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("state set on a storage")


class Tensor(Lazy):
    def __init__(self, storage: Any, offset: Any, size: Any, stride: Any, kind: Any = None) -> None:
        self.storage, self.offset, self.size, self.stride = storage, offset, size, stride
        self.kind = kind

    def __setstate__(self, state: Any) -> None:
        """Attributes set on a tensor object are not read."""

    def array(self) -> Array:
        if not isinstance(self.storage, Storage) or self.storage.data is None:
            raise ValueError("a tensor without its storage")
        kind = self.kind if isinstance(self.kind, StorageType) else self.storage.kind
        flat = kind.view(self.storage.data)
        size, stride = tuple(map(int, self.size)), tuple(map(int, self.stride))
        offset = int(self.offset)
        if len(size) != len(stride) or min((*size, *stride, offset), default=0) < 0:
            raise ValueError(f"no tensor has shape {size} and strides {stride}")
        count = 1
        for n in size:
            count *= n
        if count == 0:
            return np.zeros(size, dtype=flat.dtype)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if last >= len(flat) or count > max(len(flat), 1 << 20):
            raise ValueError(f"a tensor of shape {size} reaches beyond its {len(flat)} elements")
        steps = tuple(step * flat.itemsize for step in stride)
        return np.lib.stride_tricks.as_strided(flat[offset:], size, steps, writeable=False)


def known() -> dict[str, Any]:
    """Constructors that tensors in a pickle need."""
    kinds = {f"torch.{name.capitalize()}Storage": StorageType(name) for name in _DTYPES}
    kinds["torch.BFloat16Storage"] = StorageType("bfloat16")
    untyped = StorageType("byte")
    return {
        **kinds,
        **{f"torch.{name}": StorageType(short) for name, short in _NAMES.items()},
        "torch.UntypedStorage": untyped,
        "torch.storage.UntypedStorage": untyped,
        "torch._utils._rebuild_tensor_v2": Sealed(lambda s, o, n, d, *_: Tensor(s, o, n, d)),
        "torch._utils._rebuild_tensor_v3": Sealed(
            lambda s, o, n, d, _grad, _hooks, kind, *_: Tensor(s, o, n, d, kind)
        ),
        "torch._utils._rebuild_parameter": Sealed(lambda data, *_: data),
        "torch.storage._load_from_bytes": Sealed(lambda data: _legacy(io.BytesIO(data), data)),
    }


def load_torch(path: Path) -> Any:
    """What a ``torch.save`` file holds: containers, numbers, ``Lazy`` tensors, ``Inert`` objects.

    Raises InputError for a damaged, compressed or oversized file and for pickled code.
    """
    where = str(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            zipped = file.read(2) == b"PK"
        if zipped and not zipfile.is_zipfile(path):
            raise InputError("the end of the torch file is missing", where=where)
        if zipped:
            return _from_zip(path)
        if size > MAX_BYTES:
            raise InputError(
                f"an old-format torch file of {size >> 30} GiB is not read",
                where=where,
                fix="load and torch.save it again",
            )
        data = path.read_bytes()
        return _legacy(io.BytesIO(data), data)
    except OSError as error:
        raise InputError(f"cannot read: {error.strerror or error}", where=where) from error
    except (zipfile.BadZipFile, *ERRORS) as error:
        raise refusal(error, where) from None


def load_torch_bytes(data: bytes) -> Any:
    """As ``load_torch``, of bytes inside another pickle. Raises ValueError and its family."""
    if data[:2] == b"PK":
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                return _archive(archive, memoryview(data))
        except zipfile.BadZipFile as error:
            raise ValueError(f"not a whole torch file: {error}") from None
    return _legacy(io.BytesIO(data), data)


def _from_zip(path: Path) -> Any:
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    with zipfile.ZipFile(path) as archive:
        return _archive(archive, memoryview(cast(Any, mapped)))


def _archive(archive: zipfile.ZipFile, data: memoryview) -> Any:
    infos = {info.filename: info for info in archive.infolist()}
    pickles = [name for name in infos if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise ValueError("the archive has no data.pkl")
    folder = pickles[0].removesuffix("data.pkl")
    if (order := infos.get(f"{folder}byteorder")) and bytes(_entry(order, data)) != b"little":
        raise ValueError("written on a big-endian machine")

    def storage(pid: Any) -> Storage:
        kind, key, numel = _storage_id(pid)
        info = infos.get(f"{folder}data/{key}")
        if info is None:
            raise ValueError(f"storage {key[:40]} is missing")
        content = _entry(info, data)
        if len(content) < numel * kind.itemsize:
            raise ValueError(
                f"storage {key[:40]} declares {numel} elements in {len(content)} bytes"
            )
        return Storage(kind, numel, content)

    content = bytes(_entry(infos[pickles[0]], data))
    scan(content)
    return SafeUnpickler(io.BytesIO(content), known(), storage).load()


def _entry(info: zipfile.ZipInfo, data: memoryview) -> memoryview:
    """Bytes of a stored entry. torch never compresses; a compressed one could be a bomb."""
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise ValueError("a torch file with compressed or encrypted entries is not read")
    head = bytes(data[info.header_offset : info.header_offset + 30])
    if len(head) < 30 or head[:4] != b"PK\x03\x04":
        raise ValueError("the archive's index points nowhere")
    start = info.header_offset + 30
    start += int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    if start + info.file_size > len(data):
        raise ValueError("an entry reaches beyond the file")
    return data[start : start + info.file_size]


def _storage_id(pid: Any) -> tuple[StorageType, str, int]:
    if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
        raise ValueError("a reference that names no storage")
    kind, key, numel = pid[1], pid[2], pid[4]
    if not isinstance(kind, StorageType) or not isinstance(key, str):
        raise ValueError("a storage of unknown type")
    if not isinstance(numel, int) or not 0 <= numel < 1 << 48:
        raise ValueError(f"no storage has {str(numel)[:40]} elements")
    return kind, key, numel


def _legacy(file: BinaryIO, data: Any) -> Any:
    """The format before zip, which also holds a tensor's storage inside an ordinary pickle."""
    storages: dict[str, Storage] = {}

    def storage(pid: Any) -> Storage:
        kind, key, numel = _storage_id(pid)
        if len(pid) > 5 and pid[5] is not None:
            raise ValueError("views of a storage in the old format are not read")
        return storages.setdefault(key, Storage(kind, numel))

    def load() -> Any:
        scan(data, file.tell())
        return SafeUnpickler(file, known(), storage).load()

    if load() != _LEGACY_MAGIC:
        raise ValueError("not a torch file")
    load(), load()  # protocol version, facts of the machine
    result, keys = load(), load()
    if not isinstance(keys, list):
        raise ValueError("the list of storages is missing")
    for key in keys:
        if key not in storages:
            raise ValueError("a storage that nothing uses")
        one = storages[key]
        numel = int.from_bytes(file.read(8), "little")
        size = numel * one.kind.itemsize
        if numel < one.numel or size > len(data) - file.tell():
            raise ValueError("a storage is cut off")
        one.data = file.read(size)
    return result
