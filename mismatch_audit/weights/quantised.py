"""A served quantised weight against the master, quantised again here: payload and scale bytes.

Error norms cannot judge a quantised weight: an unscaled e4m3 cast has the same 3% error as a
healthy MXFP8 weight. So both are compared byte by byte with what the stated quantiser makes of
the master, and the norm only grades what differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from mismatch_audit.weights.findings import Fault
from mismatch_audit.weights.rearrange import matches
from mismatch_audit.weights.rounding import pattern
from mismatch_audit.weights.schemes import (
    BLOCK,
    E8M0_UNWRITTEN,
    MX_BLOCK,
    Scheme,
    infer_scheme,
)
from mismatch_audit.weights.tally import Operand, Plain

_ROWS_ELEMENTS = 1 << 20
# Relative error of a healthy copy against its master, with room: e4m3 0.027, int8 0.01.
_HEALTHY = {"channel_int8": 0.03}
_HEALTHY_E4M3 = 0.06
# One step of training moves few payload bytes; another scale rounding moves 19% of all scales.
_QUANTIZER_SHARE = 0.05


@dataclass
class QuantisedTally:
    """payload_differing / scale_differing: bytes (elements) unlike the expected ones."""

    elements: int = 0
    scales: int = 0
    payload_differing: int = 0
    scale_differing: int = 0
    bad_scales: int = 0
    error_square: float = 0.0
    master_square: float = 0.0
    served_square: float = 0.0
    product: float = 0.0

    @property
    def equal(self) -> bool:
        return not (self.payload_differing or self.scale_differing or self.bad_scales)

    @property
    def relative_error(self) -> float:
        return math.sqrt(self.error_square / self.master_square) if self.master_square else 0.0

    @property
    def cosine(self) -> float:
        norm = math.sqrt(self.master_square * self.served_square)
        return self.product / norm if norm else math.nan


@dataclass(frozen=True)
class QuantisedRegion:
    """One rank's payload and scale, with the same rows of the master.

    master has all columns, of which the rank holds [first, first + payload columns): scales were
    made before tensor parallelism cut the inputs. whole: the uncut master, for tensor_fp8.
    """

    master: Operand
    payload: torch.Tensor
    scale: torch.Tensor
    first: int = 0
    whole: Operand | None = None

    def encode(
        self, scheme: Scheme, rows: tuple[int, int], amax: torch.Tensor | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(master, payload, scale) of the rank's columns of some rows."""
        master = self.master.rows(*rows).float()
        payload, scale = scheme.encode(master, dtype, amax)
        last = self.first + self.payload.shape[1]
        if last - self.first == master.shape[1]:
            return master, payload, scale
        width = {"mxfp8": MX_BLOCK, "block_fp8": BLOCK}.get(scheme.name)
        if width is not None:
            scale = scale[:, self.first // width : -(-last // width)]
        return master[:, self.first : last], payload[:, self.first : last], scale


def scheme_of(region: QuantisedRegion) -> Scheme | None:
    rows, columns = region.payload.shape
    return infer_scheme(
        region.payload.dtype, (rows, columns), region.scale.dtype, tuple(region.scale.shape)
    )


def _scale_rows(region: QuantisedRegion, scheme: Scheme, begin: int, end: int) -> torch.Tensor:
    if scheme.name == "tensor_fp8":
        return region.scale.reshape(())
    if scheme.name == "block_fp8":
        return region.scale[begin // 128 : -(-end // 128)]
    if scheme.name == "mxfp8":
        return region.scale[begin:end].view(torch.uint8)
    return region.scale.reshape(-1, 1)[begin:end]


def _blocks(region: QuantisedRegion, scheme: Scheme) -> Iterator[tuple[int, int]]:
    rows, columns = region.payload.shape
    step = max(1, _ROWS_ELEMENTS // columns)
    step = max(scheme.row_multiple, step // scheme.row_multiple * scheme.row_multiple)
    for begin in range(0, rows, step):
        yield begin, min(begin + step, rows)


def _bad(scale: torch.Tensor) -> torch.Tensor:
    if scale.dtype == torch.uint8:
        return scale == E8M0_UNWRITTEN
    return ~torch.isfinite(scale.float()) | (scale.float() <= 0)


def tally_quantised(
    region: QuantisedRegion, scheme: Scheme, stop_at_first: bool = False
) -> QuantisedTally:
    """Compares stored bytes with ``scheme.encode(master)``, and values with the master."""
    tally = QuantisedTally()
    amax = _amax(region.whole or region.master) if scheme.name == "tensor_fp8" else None
    for begin, end in _blocks(region, scheme):
        payload = region.payload[begin:end]
        scale = _scale_rows(region, scheme, begin, end)
        master, want_payload, want_scale = region.encode(scheme, (begin, end), amax, scale.dtype)
        tally.elements += payload.numel()
        tally.scales += scale.numel()
        tally.payload_differing += int(
            torch.count_nonzero(pattern(want_payload) != pattern(payload))
        )
        if scheme.name != "tensor_fp8" or begin == 0:
            tally.scale_differing += int(torch.count_nonzero(want_scale != scale))
            tally.bad_scales += int(torch.count_nonzero(_bad(scale)))
        if stop_at_first:
            if not tally.equal:
                break
            continue
        value = torch.nan_to_num(scheme.decode(payload, scale))  # bad scales are counted above
        tally.master_square += float((master * master).sum())
        tally.served_square += float((value * value).sum())
        tally.product += float((master * value).sum())
        tally.error_square += float(((value - master) ** 2).sum())
    return tally


def _amax(master: Operand) -> torch.Tensor:
    largest = torch.zeros(())
    step = max(1, _ROWS_ELEMENTS // max(1, master.shape[1]))
    for begin in range(0, master.shape[0], step):
        block = master.rows(begin, min(begin + step, master.shape[0]))
        largest = torch.maximum(largest, block.abs().max().float())
    return largest


Alternative = Callable[[], Operand | None]


def explain_quantised(
    region: QuantisedRegion,
    scheme: Scheme,
    tally: QuantisedTally,
    others: dict[str, tuple[Fault, Alternative]],
) -> tuple[Fault, dict[str, Any]]:
    """The likeliest fault of a quantised weight that differs, and its evidence.

    others: label -> (what a match would mean, an alternative master).
    """
    evidence: dict[str, Any] = {
        "payload_differing_share": tally.payload_differing / max(1, tally.elements),
        "scale_differing_share": tally.scale_differing / max(1, tally.scales),
        "value_error": tally.relative_error,
        "cosine": tally.cosine,
    }
    if tally.bad_scales:
        return Fault.UNWRITTEN, {"bad_scales": tally.bad_scales, "of": tally.scales, **evidence}
    if tally.served_square == 0 and tally.master_square:
        return Fault.ZEROED, evidence
    if _unscaled(region, scheme):
        return Fault.UNSCALED, evidence
    for variant in scheme.variants():
        if tally_quantised(region, variant, stop_at_first=True).equal:
            return Fault.QUANTIZER, {
                "stated": scheme.variant,
                "served": variant.variant,
                **evidence,
            }
    for label, (fault, make) in others.items():
        master = make()
        if master is None or master.shape != region.master.shape:
            continue
        swapped = replace(region, master=master)
        if tally_quantised(swapped, scheme, stop_at_first=True).equal:
            return fault, {"holds": label, **evidence}
    if not tally.payload_differing and _same_multiset(region, scheme):
        return Fault.PERMUTED, {"order_of": "scales", **evidence}
    scaled = abs(_fit(tally) - 1) > 0.2 and tally.cosine > 0.99
    if not tally.payload_differing and scaled:
        return Fault.SCALED, {"factor": _fit(tally), **evidence}
    if not tally.payload_differing:
        return Fault.STALE, {"by": "its scales alone: the payload is new", **evidence}
    limit = _HEALTHY.get(scheme.name, _HEALTHY_E4M3)
    if tally.relative_error <= limit:
        share = max(evidence["payload_differing_share"], evidence["scale_differing_share"])
        if share >= _QUANTIZER_SHARE:
            return Fault.QUANTIZER, {
                "stated": scheme.variant,
                "served": "no known variant",
                **evidence,
            }
        return Fault.STALE, {"by": "an update smaller than most steps", **evidence}
    if scaled:
        return Fault.SCALED, {"factor": _fit(tally), **evidence}
    if tally.cosine >= 0.5:
        return Fault.STALE, {"by": "correlation with the master", **evidence}
    return Fault.UNRELATED, evidence


def _unscaled(region: QuantisedRegion, scheme: Scheme) -> bool:
    """Neutral scales beside a payload that is the master's plain cast."""
    if scheme.name == "channel_int8":
        return False
    scale = region.scale
    neutral = scale.view(torch.uint8) == 127 if scheme.name == "mxfp8" else scale.float() == 1
    columns = (region.first, region.first + region.payload.shape[1])
    return bool(neutral.all()) and matches(_Columns(region.master, *columns), Plain(region.payload))


@dataclass(frozen=True)
class _Columns:
    """Some columns of an operand."""

    inner: Operand
    first: int
    last: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.inner.shape[0], self.last - self.first

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return self.inner.rows(begin, end)[:, self.first : self.last]


def _fit(tally: QuantisedTally) -> float:
    return tally.product / tally.master_square if tally.master_square else math.nan


def _same_multiset(region: QuantisedRegion, scheme: Scheme) -> bool:
    if scheme.name == "tensor_fp8":
        return False
    served, wanted = [], []
    for begin, end in _blocks(region, scheme):
        scale = _scale_rows(region, scheme, begin, end)
        served.append(scale.reshape(-1))
        wanted.append(region.encode(scheme, (begin, end), None, scale.dtype)[2].reshape(-1))
    return torch.equal(torch.cat(served).sort()[0], torch.cat(wanted).sort()[0])


def explain_unscaled(master: Operand, payload: Operand) -> tuple[Fault, dict[str, Any]]:
    """A one-byte weight without any scale."""
    if payload.dtype != torch.int8 and matches(master, payload):
        return Fault.UNSCALED, {"equals": "the master cast to e4m3 without a scale"}
    return Fault.SCALE_MISSING, {"payload": str(payload.dtype).removeprefix("torch.")}
