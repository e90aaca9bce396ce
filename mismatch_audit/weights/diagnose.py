"""From "these bytes differ" to the likeliest cause, with the numbers that show it.

Every hypothesis is an alternative master (a transpose, a sibling, an earlier version, another
rounding). It is refuted on the first block that disagrees and accepted only when every bit of
the region agrees; what no exact hypothesis explains is described by correlation and scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from mismatch_audit.weights.findings import Fault
from mismatch_audit.weights.rearrange import (
    Reordered,
    matches,
    permutation,
    rolled,
    rotary_order,
)
from mismatch_audit.weights.rounding import (
    WRONG_ROUNDINGS,
    Rounding,
    away_from_zero,
    nearest,
    pattern,
    toward_zero,
)
from mismatch_audit.weights.shards import window
from mismatch_audit.weights.sides import Overlap
from mismatch_audit.weights.tally import Operand, Tally

# Residual of a fit s = c e that rounding to 8 significant bits leaves: 2^-9 / sqrt(3) rms, with
# room for a rounded c. A stale tensor leaves 0.02 and more.
_FIT_RESIDUAL = 4e-3
_SCALE_MARGIN = 1e-2
# Elements that a verdict of stochastic rounding needs, and the share within one step of the
# master above which a difference is called a small update.
_ENOUGH = 256
# Differences (or expected ones) below which no rounding is recognised: they could be chance.
_FEW = 16
_DOUBLE = ("via_fp16", "via_bf16")
_INSIDE = 0.99


@dataclass
class Alternatives:
    """Other masters for one region, by what it would mean if they matched."""

    previous: Operand | None = None
    base: Operand | None = None
    transpose: Operand | None = None
    siblings: dict[str, Callable[[], Operand | None]] = field(default_factory=dict)
    lookup: Callable[[Operand], str | None] = lambda _: None
    rotary_heads: int = 0


Verdict = tuple[Fault, dict[str, Any]]


@dataclass
class _Case:
    """One differing region under examination."""

    overlap: Overlap
    tally: Tally
    other: Alternatives

    @cached_property
    def window(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ten thousands of elements from the first differing row on: master (as stored), served."""
        return window(self.overlap, self.tally)

    def cast_by(self, rounding: Rounding) -> bool:
        """Whether another rounding of the master explains every bit."""
        return matches(self.overlap.trainer, self.overlap.served, rounding)


def explain(overlap: Overlap, tally: Tally, alternatives: Alternatives) -> Verdict:
    """The likeliest fault of a region that differs, and its evidence."""
    case = _Case(overlap, tally, alternatives)
    for check in (_nonfinite, _zeroed, _known_versions, _misplaced, _rearranged, _rounded, _scaled):
        if (verdict := check(case)) is not None:
            return verdict
    return _leftover(overlap, tally)


def _nonfinite(case: _Case) -> Verdict | None:
    if case.tally.nonfinite_served <= case.tally.nonfinite_expected:
        return None
    served = case.window[1]
    bits = pattern(served)
    filled = float((bits == -1).float().mean())
    evidence = {"nonfinite": case.tally.nonfinite_served, "of": case.tally.elements}
    if filled > 0:
        return Fault.UNWRITTEN, {**evidence, "all_ones_share": filled}
    return Fault.NONFINITE, evidence


def _zeroed(case: _Case) -> Verdict | None:
    if not case.tally.expected_square:
        return None
    served = case.window[1]
    if case.tally.served_square == 0 or not bool(pattern(served).any()):
        rows = sum(end - begin for begin, end in case.tally.touched)
        return Fault.ZEROED, {"rows": rows, "expected_norm": math.sqrt(case.tally.expected_square)}
    return None


def _known_versions(case: _Case) -> Verdict | None:
    if matches(case.other.previous, case.overlap.served):
        return Fault.STALE, {"equals": "the previous version, bit for bit"}
    if matches(case.other.base, case.overlap.served):
        return Fault.ADAPTER_OFF, {"equals": "the base without its adapter, bit for bit"}
    return None


def _misplaced(case: _Case) -> Verdict | None:
    for name, sibling in case.other.siblings.items():
        if matches(sibling(), case.overlap.served):
            return Fault.SWAPPED, {"holds": name}
    found = case.other.lookup(case.overlap.served)
    if found is not None:
        return Fault.SWAPPED, {"holds": found}
    return None


def _rearranged(case: _Case) -> Verdict | None:
    served, master = case.overlap.served, case.overlap.trainer
    rows, columns = served.shape
    if matches(case.other.transpose, served):
        return Fault.TRANSPOSED, {"equals": "the transpose of the master, bit for bit"}
    for axis, size in (("rows", rows), ("columns", columns)):
        if size > 1 and size % 2 == 0 and matches(rolled(master, axis), served):
            return Fault.HALVES, {"halves_of": axis}
    if case.other.rotary_heads and rows % (2 * case.other.rotary_heads) == 0:
        order = rotary_order(rows, case.other.rotary_heads)
        for pairs, way in (("interleaved", order), ("split", torch.argsort(order))):
            if matches(Reordered(master, way), served):
                return Fault.ROTARY, {"served_pairs": pairs, "heads": case.other.rotary_heads}
    moved = permutation(case.overlap, case.tally)
    if moved is not None:
        return Fault.PERMUTED, {"order_of": moved, "elements": case.tally.differing}
    return None


def _rounded(case: _Case) -> Verdict | None:
    """Every element within one step of its master: a rounding, or a tiny missing update."""
    dtype = case.overlap.served.dtype
    if not dtype.is_floating_point:
        return None
    if case.tally.max_ulp > 1 and dtype != torch.float8_e4m3fn:
        return _double_rounded(case)
    if dtype in (torch.float32, case.overlap.trainer.dtype):
        return None
    for name, rounding in WRONG_ROUNDINGS.items():
        if name != "half_away" and case.tally.differing < _FEW:
            continue  # a coin toss for each differing element; exact ties are no chance
        if case.cast_by(rounding):
            return Fault.ROUNDING, {"rounding": name, "differing_share": _share(case.tally)}
    master, served = case.window
    return _bracketed(master.float(), served, case.tally)


def _bracketed(master: torch.Tensor, served: torch.Tensor, tally: Tally) -> Verdict | None:
    """Stochastic rounding against a missing update that is smaller than a step.

    With f the master's place between its two neighbours (0 at the one towards zero), stochastic
    rounding takes the far one with probability f; a missing small update flips only elements
    whose f is near 1/2. Compared in two bins of f, folded to [0, 1/2], at four deviations.
    """
    dtype = served.dtype
    low, high = toward_zero(master, dtype).float(), away_from_zero(master, dtype).float()
    value, inexact = served.float(), low != high
    inside = float(((value == low) | (value == high)).float().mean())
    place = ((master - low) / (high - low))[inexact]
    far = (value == torch.where(place_of(master, low, high) < 0.5, high, low))[inexact].double()
    folded = torch.minimum(place, 1 - place)
    evidence: dict[str, Any] = {"differing_share": _share(tally), "within_one_step_share": inside}
    stochastic = inside == 1.0 and len(folded) >= _ENOUGH and float(folded.sum()) >= _FEW
    for low_edge, high_edge in ((0.0, 0.25), (0.25, 0.5)):
        members = (folded >= low_edge) & (folded < high_edge)
        count, expected = int(members.sum()), float(folded[members].double().sum())
        seen = float(far[members].sum())
        evidence[f"flipped_share_at_{low_edge}_to_{high_edge}"] = seen / max(1, count)
        stochastic &= abs(seen - expected) <= 4 * math.sqrt(max(expected, 1.0))
    if stochastic:
        return Fault.ROUNDING, {"rounding": "stochastic", **evidence}
    if inside > _INSIDE:
        return Fault.STALE, {"by": "an update smaller than one step", **evidence}
    return None


def place_of(master: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Where the master lies between its neighbours: 0 at the one towards zero, 1 at the other."""
    return torch.where(low == high, torch.zeros_like(master), (master - low) / (high - low))


def _double_rounded(case: _Case) -> Verdict | None:
    if case.overlap.trainer.dtype == torch.float32 and case.tally.differing >= _FEW:
        for name in _DOUBLE:
            if case.cast_by(WRONG_ROUNDINGS[name]):
                return Fault.ROUNDING, {"rounding": name}
    return None


def _share(tally: Tally) -> float:
    return tally.differing / tally.elements if tally.elements else 0.0


def _scaled(case: _Case) -> Verdict | None:
    if not case.tally.expected_square or not case.tally.served_square or case.tally.tallied < 2:
        return None
    scale = case.tally.scale
    left = max(0.0, case.tally.served_square - case.tally.product**2 / case.tally.expected_square)
    residual = math.sqrt(left / case.tally.served_square)
    if residual <= _FIT_RESIDUAL and abs(scale - 1) > _SCALE_MARGIN:
        return Fault.SCALED, {"factor": scale, "residual": residual}
    master, served = case.window
    e, s = master.double(), served.double()
    if e.shape[1] < 2:
        return None
    own = (e * e).sum(1, keepdim=True)
    per_row = (e * s).sum(1, keepdim=True) / own.clamp_min(1e-300)
    rest = float((s - per_row * e).norm() / s.norm()) if bool(s.any()) else math.inf
    if rest <= _FIT_RESIDUAL and float((per_row - 1).abs().max()) > _SCALE_MARGIN:
        low, high = float(per_row.min()), float(per_row.max())
        return Fault.SCALED, {"factor_per_row": [low, high], "residual": rest}
    return None


def _leftover(overlap: Overlap, tally: Tally) -> Verdict:
    evidence = {
        "cosine": tally.cosine,
        "relative_error": tally.relative_error,
        "differing_share": _share(tally),
    }
    if tally.cosine >= 0.5 or not overlap.served.dtype.is_floating_point:
        return Fault.STALE, {"by": "correlation with the master", **evidence}
    return Fault.UNRELATED, evidence


def fingerprint(master: Operand, dtype: torch.dtype) -> bytes:
    """The first elements of a cast master, to find which tensor a misplaced one is."""
    rows = max(1, min(master.shape[0], 4096 // max(1, master.shape[1])))
    head = nearest(master.rows(0, rows)[:, :4096], dtype).contiguous()
    return bytes(pattern(head).numpy().tobytes())
