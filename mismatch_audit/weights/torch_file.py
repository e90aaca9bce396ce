"""A .bin / .pt / .pth state dict, loaded with ``weights_only=True`` and nothing else.

A pickle can run code when it is loaded; torch's restricted unpickler refuses everything but
tensors and plain containers. Zip files are mapped; the old tar-like format cannot be, so it is
read whole and refused above a size.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_contracts.errors import InputError
from mismatch_audit.weights.formats import code_of
from mismatch_audit.weights.safetensors_file import TensorInfo

if TYPE_CHECKING:
    import torch

# An old-format file must fit in memory beside everything else.
MAX_LEGACY_BYTES = 512 << 20
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")


def _unwrap(document: Any, where: str) -> Mapping[str, Any]:
    import torch

    for _ in range(3):
        if not isinstance(document, Mapping):
            break
        inner = [document[key] for key in _WRAPPERS if isinstance(document.get(key), Mapping)]
        if any(isinstance(value, torch.Tensor) for value in document.values()) or len(inner) != 1:
            break
        document = inner[0]
    if not isinstance(document, Mapping):
        raise InputError(f"holds a {type(document).__name__}, not a state dict", where=where)
    return document


class TorchFile:
    """The tensors of a torch state dict, by name. Other values (steps, None) are left out."""

    def __init__(self, path: Path) -> None:
        """Raises InputError for a missing or truncated file and for pickled code."""
        import torch

        self.path = path
        where = str(path)
        try:
            size = path.stat().st_size
            mapped = zipfile.is_zipfile(path)
            if not mapped and size > MAX_LEGACY_BYTES:
                raise InputError(
                    f"an old-format torch file of {size >> 20} MiB cannot be mapped",
                    where=where,
                    fix="load and torch.save it again, or convert it to safetensors",
                )
            document = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError as error:
            raise self._refusal(str(error), where) from error
        except OSError as error:
            raise InputError(f"cannot read: {error.strerror or error}", where=where) from error
        except (RuntimeError, EOFError, ValueError, KeyError, TypeError, IndexError) as error:
            raise InputError(
                f"not a complete torch file: {str(error).splitlines()[:1]}", where=where
            ) from error
        self._tensors: dict[str, torch.Tensor] = {}
        self.infos: dict[str, TensorInfo] = {}
        for name, value in _unwrap(document, where).items():
            if not isinstance(value, torch.Tensor):
                continue
            if not isinstance(name, str) or not name.isprintable():
                raise InputError(f"tensor name {name!r} is not a printable string", where=where)
            if value.layout != torch.strided or value.is_quantized or value.is_meta:
                raise InputError(f"tensor {name!r} is not a dense tensor", where=where)
            code = code_of(value.dtype)
            self._tensors[name] = value
            self.infos[name] = TensorInfo(name, code, tuple(value.shape), 0, value.nbytes)
        if not self.infos:
            raise InputError("holds no tensors", where=where)

    @staticmethod
    def _refusal(reason: str, where: str) -> InputError:
        unsafe = re.search(r"(?:Unsupported (?:global|class|operand)|GLOBAL) \S+ ?\S*", reason)
        if unsafe:
            return InputError(
                f"holds more than tensors, and pickled code is never loaded: {unsafe.group(0)}",
                where=where,
                fix="convert it to safetensors where you trust it",
            )
        return InputError("not a complete torch file, or not one at all", where=where)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as stored; a view of the mapped file where the format allows it."""
        return self._tensors[name].detach()

    def release(self) -> None:
        """torch's own mapping has no handle to give pages back; the kernel evicts clean pages."""
