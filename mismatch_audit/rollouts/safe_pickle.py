"""Pickles of trainers, read as data: no name that a pickle asks for is ever imported or called.

A pickle is a program. This reader knows the few constructors that arrays and tensors need and has
its own version of each; every other class becomes an ``Inert`` record of its name, arguments and
state. Names of the standard library that no dump needs (os, subprocess, builtins.eval, ...) are
refused by name, so that an attack is seen and not only harmless.
"""

from __future__ import annotations

import io
import mmap
import pickle
import re
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from kernel_contracts.errors import InputError
from mismatch_audit.rollouts.batch import Array
from mismatch_audit.rollouts.pickle_scan import scan

MAX_BYTES = 8 << 30
"""A pickle is held in memory whole; a larger one is refused."""

ERRORS = (
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a damaged pickle can make the unpickler raise."""


class Inert:
    """An object of a class that is not loaded. path: its dotted name.  args: what it was made with.
    state: what was set on it.  entries: items of a dict or list subclass."""

    path = ""
    __slots__ = ("args", "entries", "state")
    args: tuple[Any, ...]
    entries: list[Any]
    state: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        made = object.__new__(cls)
        made.args, made.state, made.entries = (*args, *kwargs.values()), None, []
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.entries.append(item)

    def extend(self, items: Any) -> None:
        self.entries.extend(items)

    add = append

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries.append((key, value))

    def __repr__(self) -> str:
        return f"<{self.path}>"


class Sealed:
    """A constructor of ours in the place of one that the pickle names. It cannot be changed by the
    pickle's BUILD opcode, unlike a function or a class."""

    __slots__ = ("_make",)
    _make: Callable[..., Any]

    def __init__(self, make: Callable[..., Any]) -> None:
        object.__setattr__(self, "_make", make)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._make(*args, **kwargs)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("state set on a constructor")

    def __setattr__(self, name: str, value: Any) -> None:
        raise pickle.UnpicklingError("attribute set on a constructor")


class Lazy:
    """An array that is whole only at the end of the pickle; ``array()`` builds it."""

    def array(self) -> Array | list[Any]:
        raise NotImplementedError


class _DType:
    _CODE = re.compile(r"[<>|=]?[biufO?SU]\d{0,4}")

    def __init__(self, code: Any = "", *_: Any) -> None:
        if not isinstance(code, str) or not self._CODE.fullmatch(code):
            raise pickle.UnpicklingError(f"array type {str(code)[:40]!r} is not read")
        self.code, self.order = code.lstrip("<>|="), "<"

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "="):
            self.order = "<" if state[1] in "|=" else state[1]

    def numpy(self) -> Any:
        return np.dtype(self.code).newbyteorder(cast(Any, self.order))


class _NumpyArray(Lazy):
    """numpy's own pickle: made empty, then given (version, shape, dtype, fortran, data)."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> Array | list[Any]:
        if not isinstance(self.state, tuple) or len(self.state) != 5:
            raise ValueError("an array without content")
        _, shape, dtype, fortran, data = self.state
        if isinstance(data, list):
            return data
        return from_bytes(data, _numpy_dtype(dtype), shape, "F" if fortran else "C")


def from_bytes(data: Any, dtype: Any, shape: Any, order: Any = "C") -> Array:
    """A view of ``data`` as an array. Raises ValueError where the shape does not fit the bytes."""
    dims = tuple(int(n) for n in shape)
    if any(n < 0 for n in dims) or dtype.hasobject:
        raise ValueError(f"no array has shape {dims}")
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ValueError("an array's content is no bytes")
    count = 1
    for n in dims:
        count *= n
    if count * dtype.itemsize != len(data):
        raise ValueError(f"an array of shape {dims} and {dtype} has {len(data)} bytes")
    return np.frombuffer(data, dtype=dtype).reshape(dims, order=order)


def _numpy_dtype(dtype: Any) -> Any:
    if not isinstance(dtype, _DType):
        raise ValueError("an array's type is missing")
    return dtype.numpy()


def _numpy_scalar(dtype: Any, data: Any = b"") -> Any:
    kind = _numpy_dtype(dtype)
    if kind.hasobject or not isinstance(data, bytes) or len(data) != kind.itemsize:
        raise ValueError("a number without its bytes")
    return np.frombuffer(data, dtype=kind)[0].item()


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or str(encoding).replace("-", "") not in ("latin1", "utf8"):
        raise ValueError("bytes in an unknown encoding")
    return text.encode(encoding)


def _bytes(value: Any = b"") -> bytes:
    if not isinstance(value, bytes):  # bytearray(10**12) would allocate
        raise ValueError("bytes made from something else")
    return value


_NUMPY = {
    "multiarray._reconstruct": Sealed(lambda *_: _NumpyArray()),
    "multiarray.scalar": Sealed(_numpy_scalar),
    "numeric._frombuffer": Sealed(lambda b, d, s, o="C": from_bytes(b, _numpy_dtype(d), s, o)),
}
_KNOWN: dict[str, Any] = {
    "collections.OrderedDict": Sealed(lambda pairs=(): dict(pairs)),
    "collections.defaultdict": Sealed(lambda *_: {}),
    "builtins.set": Sealed(lambda items=(): set(items)),
    "builtins.frozenset": Sealed(lambda items=(): frozenset(items)),
    "builtins.list": Sealed(lambda items=(): list(items)),
    "builtins.tuple": Sealed(lambda items=(): tuple(items)),
    "builtins.dict": Sealed(lambda pairs=(): dict(pairs)),
    "builtins.bytearray": Sealed(_bytes),
    "builtins.bytes": Sealed(_bytes),
    "_codecs.encode": Sealed(_encode),
    "numpy.dtype": Sealed(_DType),
    "torch.Size": Sealed(lambda dims=(): tuple(dims)),
    **{f"numpy.{core}.{name}": made for core in ("core", "_core") for name, made in _NUMPY.items()},
}
# Values that dumps carry beside their tensors; they stay inert.
_PLAIN = {"types.SimpleNamespace"}
_HARMLESS = {"argparse", "copyreg", "datetime", "decimal", "enum", "fractions", "pathlib", "uuid"}


class SafeUnpickler(pickle.Unpickler):
    """known: more constructors by dotted name.  storage: what a persistent id stands for."""

    def __init__(
        self,
        file: BinaryIO,
        known: dict[str, Any] | None = None,
        storage: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(file, encoding="latin1")
        self._known, self._storage = {**_KNOWN, **(known or {})}, storage
        self._classes: dict[str, type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        # Protocols below 3 name Python 2's modules: __builtin__, copy_reg, commands.
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        path = f"{module}.{name}"
        if path in self._known:
            return self._known[path]
        root = module.split(".")[0]
        if root == "nt":  # another system's os
            root = "os"
        if (
            root in sys.stdlib_module_names
            and root not in _HARMLESS
            and path != "types.SimpleNamespace"
        ):
            raise pickle.UnpicklingError(f"asks for {path}")
        if path not in self._classes:
            self._classes[path] = type("Inert", (Inert,), {"path": path, "__slots__": ()})
        return self._classes[path]

    def persistent_load(self, pid: Any) -> Any:
        if self._storage is None:
            raise pickle.UnpicklingError("a reference to data outside the pickle")
        return self._storage(pid)


def as_array(value: Any) -> Array | list[Any]:
    """The array or list that a loaded value stands for. Raises ValueError for anything else."""
    if isinstance(value, Lazy):
        return value.array()
    if isinstance(value, np.ndarray | list):
        return value
    if isinstance(value, tuple):
        return list(value)
    kind = value.path if isinstance(value, Inert) else type(value).__name__
    raise ValueError(f"a {kind} where an array is expected")


def load_pickle(path: Path) -> Any:
    """What a pickle file holds, with ``Inert`` for every class. Raises InputError."""
    from mismatch_audit.rollouts.safe_torch import known

    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise InputError(
                f"a pickle of {size >> 30} GiB is not read (the limit is {MAX_BYTES >> 30} GiB)",
                where=str(path),
                fix="dump fewer sequences a step, or write the sequence table instead",
            )
        if size == 0:
            raise InputError("the file is empty", where=str(path))
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            scan(data)
            return SafeUnpickler(cast(BinaryIO, data), known()).load()
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"cannot read: {reason}", where=str(path)) from error
    except ERRORS as error:
        raise refusal(error, str(path)) from None


def loads(data: bytes, where: str = "pickle") -> Any:
    """As ``load_pickle``, of bytes."""
    from mismatch_audit.rollouts.safe_torch import known

    try:
        scan(data)
        return SafeUnpickler(io.BytesIO(data), known()).load()
    except ERRORS as error:
        raise refusal(error, where) from None


def refusal(error: BaseException, where: str) -> InputError:
    """The InputError for what the unpickler raised."""
    text = str(error) or type(error).__name__
    if text.startswith("asks for "):
        return InputError(
            f"the pickle {text}; pickled code is never run",
            where=where,
            fix="write the dump again with a trainer that you trust; do not load this file",
        )
    return InputError(f"not a readable pickle: {text.splitlines()[0][:200]}", where=where)
