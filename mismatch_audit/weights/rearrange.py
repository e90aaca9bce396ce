"""Right values in the wrong order: transposes, halves, rotary layouts, permutations."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mismatch_audit.weights.rounding import Rounding, nearest, pattern
from mismatch_audit.weights.sides import Overlap
from mismatch_audit.weights.tally import Operand, Plain, Tally, Wrapped, blocks, tally_rows

# Larger tensors are tested for permutations only when the sums agree; far larger ones never.
_ALWAYS, _NEVER = 1 << 20, 1 << 28


def matches(master: Operand | None, served: Operand, rounding: Rounding = nearest) -> bool:
    """Whether served equals the rounding of this master in every bit.

    A corner of four rows refutes nearly every wrong hypothesis in some 50 microseconds; a
    transposed master is read along its columns, where every element costs a page.
    """
    if master is None or master.shape != served.shape:
        return False
    corner = served.rows(0, min(4, served.shape[0]))[:, :64]
    other = master.rows(0, corner.shape[0])[:, :64]
    expected = other if other.dtype == corner.dtype else rounding(other, corner.dtype)
    if bool((pattern(expected) != pattern(corner)).any()):
        return False
    rows = (0, served.shape[0])
    return tally_rows(master, served, rows, rounding, stop_at_first=True).differing == 0


def transposed(master: Operand) -> Operand | None:
    """The transpose of a stored matrix as an operand (None for one that is computed)."""
    if isinstance(master, Plain) and master.shape[1] > 1:
        return Plain(master.tensor.t())
    return None


@dataclass(frozen=True)
class Reordered(Wrapped):
    """Rows of a master in another order (gathered block by block)."""

    order: torch.Tensor

    def rows(self, begin: int, end: int) -> torch.Tensor:
        wanted = self.order[begin:end].tolist()
        return torch.cat([self.inner.rows(row, row + 1) for row in wanted])


def rotary_order(rows: int, heads: int) -> torch.Tensor:
    """Row order that turns split-half rotary pairs into interleaved ones, per head."""
    size = rows // heads
    inside = torch.arange(size).view(2, size // 2).t().reshape(-1)
    return (torch.arange(heads)[:, None] * size + inside).reshape(-1)


def rolled(master: Operand, axis: str) -> Operand:
    """The second half of the rows or columns first."""
    return _Halves(master, master.shape[0] // 2) if axis == "rows" else _ColumnHalves(master)


@dataclass(frozen=True)
class _Halves(Wrapped):
    """The lower half of the rows first."""

    half: int

    def rows(self, begin: int, end: int) -> torch.Tensor:
        parts = []
        if begin < self.half:
            parts.append(self.inner.rows(begin + self.half, min(end, self.half) + self.half))
        if end > self.half:
            parts.append(self.inner.rows(max(begin, self.half) - self.half, end - self.half))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class _ColumnHalves(Wrapped):
    """The right half of the columns first."""

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return self.inner.rows(begin, end).roll(self.shape[1] // 2, 1)


def _expected(overlap: Overlap) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for begin, end in blocks((0, overlap.served.shape[0]), overlap.served.shape[1]):
        served = overlap.served.rows(begin, end)
        yield nearest(overlap.trainer.rows(begin, end), served.dtype), served


def _plausible(tally: Tally) -> bool:
    """Cheap refutation: a permutation keeps the sum of squares and moves values far."""
    if tally.differing < 2 or tally.max_ulp == 1 or tally.elements > _NEVER:
        return False
    if tally.elements <= _ALWAYS:
        return True
    change = abs(tally.served_square - tally.expected_square)
    return change <= 1e-3 * tally.expected_square and tally.relative_error > 0.05


def permutation(overlap: Overlap, tally: Tally) -> str | None:
    """ "rows", "columns" or "elements" when the same multiset lies in another order."""
    if not _plausible(tally):
        return None
    balance: torch.Tensor | None = None
    for expected, served in _expected(overlap):
        step = _histogram(expected) - _histogram(served)
        balance = step if balance is None else balance + step
    if balance is None or bool(balance.any()):
        return None
    return _order(overlap)


def _histogram(values: torch.Tensor) -> torch.Tensor:
    """Counts of every bit pattern; wide formats are folded by a multiplicative hash."""
    bits = pattern(values.contiguous()).reshape(-1).to(torch.int64)
    if values.element_size() > 2:
        bits = (bits * 0x9E3779B1) >> 12
    return torch.bincount(bits & 0xFFFF, minlength=1 << 16)


def _order(overlap: Overlap) -> str:
    rows, width = overlap.served.shape
    if width == 1 or rows > _ALWAYS:
        return "elements"
    sums: dict[str, list[list[bytes]]] = {"rows": [[], []]}
    for pair in _expected(overlap):
        for side, block in enumerate(pair):
            sums["rows"][side] += [
                hashlib.blake2b(row.tobytes(), digest_size=8).digest()
                for row in pattern(block.contiguous()).numpy()
            ]
    if sorted(sums["rows"][0]) == sorted(sums["rows"][1]):
        return "rows"
    columns: list[torch.Tensor | None] = [None, None]
    generator = torch.Generator().manual_seed(0)
    for pair in _expected(overlap):
        weights = torch.randint(1 << 31, (pair[0].shape[0], 1), generator=generator)
        for side, block in enumerate(pair):
            part = (pattern(block.contiguous()).to(torch.int64) * weights).sum(0)
            before = columns[side]
            columns[side] = part if before is None else before + part
    left, right = columns
    if left is not None and right is not None and torch.equal(left.sort()[0], right.sort()[0]):
        return "columns"
    return "elements"
