"""Number formats of stored weights: safetensors names, torch dtypes, short names for people.

Nothing here imports torch at import time: headers can be read and listed without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_contracts.errors import InputError

if TYPE_CHECKING:
    import torch

# safetensors name -> (bytes per element, torch attribute, short name)
FORMATS: dict[str, tuple[int, str, str]] = {
    "F64": (8, "float64", "fp64"),
    "F32": (4, "float32", "fp32"),
    "F16": (2, "float16", "fp16"),
    "BF16": (2, "bfloat16", "bf16"),
    "F8_E4M3": (1, "float8_e4m3fn", "e4m3"),
    "F8_E5M2": (1, "float8_e5m2", "e5m2"),
    "F8_E8M0": (1, "float8_e8m0fnu", "e8m0"),
    "I64": (8, "int64", "int64"),
    "I32": (4, "int32", "int32"),
    "I16": (2, "int16", "int16"),
    "I8": (1, "int8", "int8"),
    "U8": (1, "uint8", "uint8"),
    "U16": (2, "uint16", "uint16"),
    "U32": (4, "uint32", "uint32"),
    "U64": (8, "uint64", "uint64"),
    "BOOL": (1, "bool", "bool"),
}

# Formats of the specification that pack several elements in a byte. No reader of ours unpacks
# them, and a silent byte-wise comparison would hide a layout fault, so they are refused by name.
PACKED = {"F4", "F6_E2M3", "F6_E3M2"}

FLOATING = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}


def itemsize(code: str) -> int:
    """Bytes per element of a safetensors dtype name."""
    return FORMATS[code][0]


def torch_dtype(code: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype name. Raises InputError when torch lacks it."""
    import torch

    dtype = getattr(torch, FORMATS[code][1], None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(
            f"this torch ({torch.__version__}) has no dtype for {code}",
            fix="pip install -U torch",
        )
    return dtype


def code_of(dtype: torch.dtype) -> str:
    """The safetensors dtype name of a torch dtype. Raises InputError for one it cannot store."""
    name = str(dtype).removeprefix("torch.")
    for code, (_, attribute, _) in FORMATS.items():
        if attribute == name:
            return code
    raise InputError(f"tensors of dtype {name} cannot be compared or stored")


def short(code: str) -> str:
    """What people call a format: ``BF16`` -> ``bf16``."""
    return FORMATS[code][2] if code in FORMATS else code.lower()
