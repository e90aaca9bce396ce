"""A served quantised weight against the master, quantised again here: payload and scale bytes.

Error norms cannot judge a quantised weight: an unscaled e4m3 cast has the same 3% error as a
healthy MXFP8 weight. So both are compared byte by byte with what the stated quantiser makes of
the master, and the norm only grades what differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mismatch_audit.weights.findings import Fault
from mismatch_audit.weights.rearrange import matches
from mismatch_audit.weights.rounding import pattern
from mismatch_audit.weights.schemes import E8M0_UNWRITTEN, Scheme, infer_scheme
from mismatch_audit.weights.tally import Operand

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
    """One rank's payload and scale with the master's region (all of equal rows and columns)."""

    master: Operand
    payload: torch.Tensor
    scale: torch.Tensor
    amax: torch.Tensor | None = None


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
    whole_amax = region.amax
    if scheme.name == "tensor_fp8" and whole_amax is None:
        whole_amax = _amax(region.master)
    for begin, end in _blocks(region, scheme):
        master = region.master.rows(begin, end).float()
        payload = region.payload[begin:end]
        scale = _scale_rows(region, scheme, begin, end)
        want_payload, want_scale = scheme.encode(master, scale.dtype, whole_amax)
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
        swapped = QuantisedRegion(master, region.payload, region.scale)
        if tally_quantised(swapped, scheme, stop_at_first=True).equal:
            return fault, {"holds": label, **evidence}
    if not tally.payload_differing and _same_multiset(region, scheme):
        return Fault.PERMUTED, {"order_of": "scales", **evidence}
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
    if abs(_fit(tally) - 1) > 0.2 and tally.cosine > 0.99:
        return Fault.SCALED, {"factor": _fit(tally), **evidence}
    if tally.cosine >= 0.5:
        return Fault.STALE, {"by": "correlation with the master", **evidence}
    return Fault.UNRELATED, evidence


def _fit(tally: QuantisedTally) -> float:
    return tally.product / tally.master_square if tally.master_square else math.nan


def _same_multiset(region: QuantisedRegion, scheme: Scheme) -> bool:
    served, wanted = [], []
    for begin, end in _blocks(region, scheme):
        scale = _scale_rows(region, scheme, begin, end)
        served.append(scale.reshape(-1))
        wanted.append(
            scheme.encode(region.master.rows(begin, end), scale.dtype, region.amax)[1].reshape(-1)
        )
    return torch.equal(torch.cat(served).sort()[0], torch.cat(wanted).sort()[0])


def explain_unscaled(master: Operand, payload: Operand) -> tuple[Fault, dict[str, Any]]:
    """A one-byte weight without any scale."""
    if payload.dtype != torch.int8 and matches(master, payload):
        return Fault.UNSCALED, {"equals": "the master cast to e4m3 without a scale"}
    return Fault.SCALE_MISSING, {"payload": str(payload.dtype).removeprefix("torch.")}
