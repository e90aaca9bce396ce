"""Quantised weight layouts, encoded and decoded exactly as engines store them.

A weight ``[out, in]`` becomes a payload of the same shape and scales:

=============  ========  =======================================  =========================
scheme         payload   scale                                    one scale covers
=============  ========  =======================================  =========================
mxfp8          e4m3      e8m0 byte ``[out, in / 32]``             32 inputs of one output
block_fp8      e4m3      fp32 ``[ceil(out/128), ceil(in/128)]``   a 128 x 128 block
channel_fp8    e4m3      float ``[out, 1]``                       an output
channel_int8   int8      float ``[out, 1]``                       an output
tensor_fp8     e4m3      float scalar                             the tensor
=============  ========  =======================================  =========================

The value is payload * scale. E8M0 holds powers of two: byte b is 2^(b - 127), 0xFF is NaN
(OCP Microscaling Formats 1.0, section 5.4.1); its section 6.3 rounds the scale's exponent down
("floor"), some libraries round up so that nothing saturates ("ceil").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from kernel_contracts.errors import InputError
from mismatch_audit.weights.rounding import E4M3_MAX, Rounding, nearest, toward_zero

MX_BLOCK = 32
BLOCK = 128
_E4M3_TOP_EXPONENT = 8
E8M0_UNWRITTEN = 0xFF


@cache
def _e4m3_values() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def e4m3_to_float(payload: torch.Tensor) -> torch.Tensor:
    """Exact values, by table (4 times faster than torch's own conversion on a CPU)."""
    index = payload.contiguous().view(torch.uint8).to(torch.int32).reshape(-1)
    return _e4m3_values().index_select(0, index).view(payload.shape)


def e8m0_to_float(scale: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127); NaN for 0xFF."""
    return scale.contiguous().view(torch.uint8).view(torch.float8_e8m0fnu).float()


def e8m0_bytes(amax: torch.Tensor, mode: str = "floor") -> torch.Tensor:
    """The scale byte of blocks whose largest magnitude is amax.

    floor: 2^(floor(log2 amax) - 8). ceil: the smallest power of two at or above amax / 448.
    nearest: amax's exponent after its mantissa is rounded to a power of two.
    """
    if mode == "ceil":
        bits = (amax.float() / E4M3_MAX).view(torch.int32)
        exponent = (bits >> 23) & 0xFF
        byte = exponent + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    else:
        bits = amax.float().view(torch.int32)
        if mode == "nearest":
            bits = bits + 0x400000
        byte = ((bits >> 23) & 0xFF) - _E4M3_TOP_EXPONENT
    return byte.clamp(0, 254).to(torch.uint8)


@dataclass(frozen=True)
class Scheme:
    """How a weight is stored. ``variant`` fields are what exporters get wrong or do differently.

    scale_mode: floor | ceil | nearest (mxfp8 only). payload: rounding of the scaled weight.
    stored_scale: divide by the scale as stored (True) or by the fp32 scale before its cast.
    """

    name: str
    scale_mode: str = "floor"
    truncated: bool = False
    stored_scale: bool = False

    @property
    def variant(self) -> str:
        parts = []
        if self.name == "mxfp8":
            parts.append(f"{self.scale_mode} scales")
        if self.truncated:
            parts.append("truncated payload")
        if self.stored_scale:
            parts.append("payload from the stored scale")
        return f"{self.name} ({', '.join(parts)})" if parts else self.name

    @property
    def row_multiple(self) -> int:
        """Blocks of rows must start at a multiple of this to be encoded alone."""
        return BLOCK if self.name == "block_fp8" else 1

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        rows, columns = shape
        if self.name == "mxfp8":
            return rows, -(-columns // MX_BLOCK)
        if self.name == "block_fp8":
            return -(-rows // BLOCK), -(-columns // BLOCK)
        return () if self.name == "tensor_fp8" else (rows, 1)

    def encode(
        self,
        weight: torch.Tensor,
        scale_dtype: torch.dtype | None = None,
        amax: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(payload, scale) of ``[rows, columns]``. amax: the whole tensor's, for tensor_fp8.

        mxfp8 scales come as uint8. Raises InputError when the inputs are no multiple of 32.
        """
        weight = weight.float()
        if self.name == "mxfp8":
            scale = e8m0_bytes(_block_amax(weight, 1, MX_BLOCK), self.scale_mode)
            divisor = spread(e8m0_to_float(scale), 1, MX_BLOCK, weight.shape)
            return self._e4m3(weight / divisor), scale
        if self.name == "block_fp8":
            exact = _block_amax(weight, BLOCK, BLOCK) / E4M3_MAX
        elif self.name == "tensor_fp8":
            exact = (weight.abs().max() if amax is None else amax) / E4M3_MAX
        else:
            top = 127.0 if self.name == "channel_int8" else E4M3_MAX
            exact = weight.abs().amax(1, keepdim=True) / top
        exact = exact.clamp_min(torch.finfo(torch.float32).tiny)
        stored = exact.to(scale_dtype or torch.float32)
        used = stored.float() if self.stored_scale else exact
        if self.name == "block_fp8":
            used = spread(used, BLOCK, BLOCK, weight.shape)
        scaled = weight / used
        if self.name == "channel_int8":
            whole = scaled.trunc() if self.truncated else scaled.round()
            return whole.clamp(-128, 127).to(torch.int8), stored
        return self._e4m3(scaled), stored

    def _e4m3(self, scaled: torch.Tensor) -> torch.Tensor:
        rounding: Rounding = toward_zero if self.truncated else nearest
        return rounding(scaled, torch.float8_e4m3fn)

    def decode(self, payload: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The fp32 weight that the payload and its scales stand for."""
        values = payload.float() if payload.dtype == torch.int8 else e4m3_to_float(payload)
        if self.name == "mxfp8":
            return values * spread(e8m0_to_float(scale), 1, MX_BLOCK, values.shape)
        if self.name == "block_fp8":
            return values * spread(scale.float(), BLOCK, BLOCK, values.shape)
        return values * scale.float()

    def variants(self) -> list[Scheme]:
        """The other ways in which this layout is filled, likeliest first."""
        found = []
        if self.name == "mxfp8":
            found += [
                replace(self, scale_mode=mode)
                for mode in ("floor", "ceil", "nearest")
                if mode != self.scale_mode
            ]
        found.append(replace(self, truncated=not self.truncated))
        if self.name != "mxfp8":
            found.append(replace(self, stored_scale=not self.stored_scale))
        return found


SCHEMES = {
    name: Scheme(name)
    for name in ("mxfp8", "block_fp8", "channel_fp8", "channel_int8", "tensor_fp8")
}


def scheme_by_name(text: str) -> Scheme:
    """``mxfp8``, ``mxfp8:ceil``, ``channel_int8:stored``, ``...:truncated``."""
    name, *options = text.split(":")
    if name not in SCHEMES:
        raise InputError(f"unknown quantiser {name!r}", fix=f"one of {', '.join(SCHEMES)}")
    scheme = SCHEMES[name]
    for option in options:
        if option in ("floor", "ceil", "nearest"):
            scheme = replace(scheme, scale_mode=option)
        elif option == "truncated":
            scheme = replace(scheme, truncated=True)
        elif option == "stored":
            scheme = replace(scheme, stored_scale=True)
        else:
            raise InputError(
                f"unknown quantiser option {option!r}",
                fix="floor, ceil, nearest, truncated or stored",
            )
    return scheme


def infer_scheme(
    payload: torch.dtype, shape: tuple[int, int], scale: torch.dtype, scale_shape: tuple[int, ...]
) -> Scheme | None:
    """The scheme whose scales look like these, or None."""
    one_byte = scale in (torch.uint8, torch.float8_e8m0fnu)
    count = 1
    for size in scale_shape:
        count *= size
    for scheme in SCHEMES.values():
        is_int8 = scheme.name == "channel_int8"
        if is_int8 != (payload == torch.int8) or one_byte != (scheme.name == "mxfp8"):
            continue
        wanted = scheme.scale_shape(shape)
        if scale_shape == wanted or (wanted[1:] == (1,) and scale_shape == wanted[:1]):
            return scheme
        if scheme.name == "tensor_fp8" and count == 1:
            return scheme
    return None


def _block_amax(weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Largest magnitude of every rows x columns block; the last ones may be partial."""
    height, width = weight.shape
    pad = (0, -width % columns, 0, -height % rows)
    padded = torch.nn.functional.pad(weight, pad) if any(pad) else weight
    grid = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    return grid.abs().amax((1, 3))


def spread(scale: torch.Tensor, rows: int, columns: int, shape: torch.Size) -> torch.Tensor:
    """Every element's own scale."""
    wide = scale.repeat_interleave(columns, 1)[:, : shape[1]]
    return wide.repeat_interleave(rows, 0)[: shape[0]] if rows > 1 else wide


def swizzle(scale: torch.Tensor) -> torch.Tensor:
    """Scales ``[rows, columns]`` in the order that block-scaled tensor-core GEMMs read.

    Tiles of 128 x 4 bytes, each stored as 32 rows of 16 bytes (cuBLAS, "1D block scaling factors
    layout"); padding holds the neutral byte 127. Flat result.
    """
    rows, columns = scale.shape
    padded = torch.full((-(-rows // 128) * 128, -(-columns // 4) * 4), 127, dtype=torch.uint8)
    padded[:rows, :columns] = scale.view(torch.uint8)
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).contiguous()


def unswizzle(flat: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The scales ``[rows, columns]`` that a swizzled copy holds."""
    rows, columns = shape
    tall, wide = -(-rows // 128), -(-columns // 4)
    tiles = flat.view(tall, wide, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(tall * 128, wide * 4)[:rows, :columns].contiguous()
