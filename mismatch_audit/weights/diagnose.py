"""From "these bytes differ" to the likeliest cause, with the numbers that show it.

Every hypothesis is an alternative master (a transpose, a sibling, an earlier version, another
rounding). It is refuted on the first block that disagrees and accepted only when every bit of
the region agrees; what no exact hypothesis explains is described by correlation and scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
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
    away_from_zero,
    nearest,
    pattern,
    toward_zero,
)
from mismatch_audit.weights.sides import Overlap
from mismatch_audit.weights.tally import Operand, Tally, blocks, tally_rows

# Residual of a fit s = c e that rounding to 8 significant bits leaves: 2^-9 / sqrt(3) rms, with
# room for a rounded c. A stale tensor leaves 0.02 and more.
_FIT_RESIDUAL = 4e-3
_SCALE_MARGIN = 1e-2
# Elements that a verdict of stochastic rounding needs, and the share within one step of the
# master above which a difference is called a small update.
_ENOUGH = 256
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


def _window(overlap: Overlap, tally: Tally) -> tuple[torch.Tensor, torch.Tensor]:
    """The first touched block: master (as stored) and served."""
    begin, end = tally.touched[0]
    return overlap.trainer.rows(begin, end), overlap.served.rows(begin, end)


def explain(overlap: Overlap, tally: Tally, alternatives: Alternatives) -> Verdict:
    """The likeliest fault of a region that differs, and its evidence."""
    for check in (_nonfinite, _zeroed, _known_versions, _misplaced, _rearranged, _rounded, _scaled):
        if (verdict := check(overlap, tally, alternatives)) is not None:
            return verdict
    return _leftover(overlap, tally)


def _nonfinite(overlap: Overlap, tally: Tally, _: Alternatives) -> Verdict | None:
    if tally.nonfinite_served <= tally.nonfinite_expected:
        return None
    served = _window(overlap, tally)[1]
    bits = pattern(served)
    filled = float((bits == -1).float().mean())
    evidence = {"nonfinite": tally.nonfinite_served, "of": tally.elements}
    if filled > 0:
        return Fault.UNWRITTEN, {**evidence, "all_ones_share": filled}
    return Fault.NONFINITE, evidence


def _zeroed(overlap: Overlap, tally: Tally, _: Alternatives) -> Verdict | None:
    if not tally.expected_square:
        return None
    served = _window(overlap, tally)[1]
    if tally.served_square == 0 or not bool(pattern(served).any()):
        rows = sum(end - begin for begin, end in tally.touched)
        return Fault.ZEROED, {"rows": rows, "expected_norm": math.sqrt(tally.expected_square)}
    return None


def _known_versions(overlap: Overlap, _: Tally, other: Alternatives) -> Verdict | None:
    if matches(other.previous, overlap.served):
        return Fault.STALE, {"equals": "the previous version, bit for bit"}
    if matches(other.base, overlap.served):
        return Fault.ADAPTER_OFF, {"equals": "the base without its adapter, bit for bit"}
    return None


def _misplaced(overlap: Overlap, _: Tally, other: Alternatives) -> Verdict | None:
    for name, sibling in other.siblings.items():
        if matches(sibling(), overlap.served):
            return Fault.SWAPPED, {"holds": name}
    found = other.lookup(overlap.served)
    if found is not None:
        return Fault.SWAPPED, {"holds": found}
    return None


def _rearranged(overlap: Overlap, tally: Tally, other: Alternatives) -> Verdict | None:
    served, master = overlap.served, overlap.trainer
    rows, columns = served.shape
    if matches(other.transpose, served):
        return Fault.TRANSPOSED, {"equals": "the transpose of the master, bit for bit"}
    for axis, size in (("rows", rows), ("columns", columns)):
        if size > 1 and size % 2 == 0 and matches(rolled(master, axis), served):
            return Fault.HALVES, {"halves_of": axis}
    if other.rotary_heads and rows % (2 * other.rotary_heads) == 0:
        order = rotary_order(rows, other.rotary_heads)
        for pairs, way in (("interleaved", order), ("split", torch.argsort(order))):
            if matches(Reordered(master, way), served):
                return Fault.ROTARY, {"served_pairs": pairs, "heads": other.rotary_heads}
    moved = permutation(overlap, tally)
    if moved is not None:
        return Fault.PERMUTED, {"order_of": moved, "elements": tally.differing}
    return None


def _rounded(overlap: Overlap, tally: Tally, _: Alternatives) -> Verdict | None:
    """Every element within one step of its master: a rounding, or a tiny missing update."""
    dtype = overlap.served.dtype
    if tally.max_ulp > 1 and dtype != torch.float8_e4m3fn:
        return _double_rounded(overlap)
    if not dtype.is_floating_point or dtype in (torch.float32, overlap.trainer.dtype):
        return None
    for name, rounding in WRONG_ROUNDINGS.items():
        whole = tally_rows(
            overlap.trainer, overlap.served, (0, overlap.served.shape[0]), rounding, True
        )
        if whole.differing == 0:
            return Fault.ROUNDING, {"rounding": name, "differing_share": _share(tally)}
    master, served = _window(overlap, tally)
    return _bracketed(master.float(), served, tally)


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
    stochastic = inside == 1.0 and len(folded) >= _ENOUGH
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


def _double_rounded(overlap: Overlap) -> Verdict | None:
    for name in ("via_fp16", "via_bf16"):
        if overlap.served.dtype.is_floating_point and overlap.trainer.dtype == torch.float32:
            whole = tally_rows(
                overlap.trainer,
                overlap.served,
                (0, overlap.served.shape[0]),
                WRONG_ROUNDINGS[name],
                True,
            )
            if whole.differing == 0:
                return Fault.ROUNDING, {"rounding": name}
    return None


def _share(tally: Tally) -> float:
    return tally.differing / tally.elements if tally.elements else 0.0


def _scaled(overlap: Overlap, tally: Tally, _: Alternatives) -> Verdict | None:
    if not tally.expected_square or not tally.served_square or tally.tallied < 2:
        return None
    scale = tally.scale
    left = max(0.0, tally.served_square - tally.product**2 / tally.expected_square)
    residual = math.sqrt(left / tally.served_square)
    if residual <= _FIT_RESIDUAL and abs(scale - 1) > _SCALE_MARGIN:
        return Fault.SCALED, {"factor": scale, "residual": residual}
    master, served = _window(overlap, tally)
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


def touched_region(overlap: Overlap, tally: Tally) -> dict[str, tuple[int, int]]:
    """The smallest row and column ranges that hold every difference."""
    first, last = overlap.served.shape[0], -1
    columns: torch.Tensor | None = None
    for begin, end in tally.touched:
        for low, high in blocks((begin, end), overlap.served.shape[1]):
            served = overlap.served.rows(low, high)
            expected = nearest(overlap.trainer.rows(low, high), served.dtype)
            unequal = pattern(expected) != pattern(served)
            hit = torch.nonzero(unequal.any(1)).flatten()
            if len(hit):
                first, last = min(first, low + int(hit[0])), max(last, low + int(hit[-1]))
            here = unequal.any(0)
            columns = here if columns is None else columns | here
    touched = torch.nonzero(columns).flatten() if columns is not None else torch.empty(0)
    if last < 0 or not len(touched):
        return {}
    return {
        "rows": (first, last + 1),
        "columns": (int(touched[0]), int(touched[-1]) + 1),
    }


def shard_of(begin: int, end: int, size: int) -> tuple[int, int] | None:
    """(rank, ranks) when [begin, end) lies in one equal part of size, with 2, 4, 8 or 16 parts.

    The region must reach close to both ends of the part: a tiny region is no shard.
    """
    for ranks in (2, 4, 8, 16):
        part = size / ranks
        rank = int(begin // part)
        inside = rank * part <= begin and end <= (rank + 1) * part
        if inside and end - begin >= 0.9 * part and size % ranks == 0:
            return rank, ranks
    return None


def fingerprint(master: Operand, dtype: torch.dtype) -> bytes:
    """The first elements of a cast master, to find which tensor a misplaced one is."""
    rows = max(1, min(master.shape[0], 4096 // max(1, master.shape[1])))
    head = nearest(master.rows(0, rows)[:, :4096], dtype).contiguous()
    return bytes(pattern(head).numpy().tobytes())
