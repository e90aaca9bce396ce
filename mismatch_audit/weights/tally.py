"""The inner loop: a served block against the cast of its master, bit by bit.

Blocks of a quarter of a million elements stay in the last-level cache. Equal blocks, the normal
case, cost one cast and one comparison; statistics are only gathered for blocks that differ.
Measured on two cores against a page-cached pair, fp32 master and bf16 served: 1.0 ns a weight,
where reading and hashing both files with BLAKE3 takes 1.9 ns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from mismatch_audit.weights.rounding import Rounding, nearest, ordered, pattern

BLOCK_ELEMENTS = 1 << 18
_TASTE = 1 << 12


class Operand(Protocol):
    """A matrix that is read by blocks of rows and never whole."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def rows(self, begin: int, end: int) -> torch.Tensor: ...


@dataclass(frozen=True)
class Plain:
    """A stored tensor, seen as ``[rows, columns]`` (a vector is one column, a scalar 1 x 1)."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0], self.tensor.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return self.tensor[begin:end]


@dataclass(frozen=True)
class Wrapped:
    """An operand of another's shape and dtype, whose rows a subclass makes from ``inner``'s."""

    inner: Operand

    @property
    def shape(self) -> tuple[int, int]:
        return self.inner.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype


@dataclass(frozen=True)
class Unsigned(Wrapped):
    """An operand whose negative zeros are read as positive ones."""

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return self.inner.rows(begin, end) + 0.0


def plain(tensor: torch.Tensor) -> Plain:
    """Any tensor as a matrix operand."""
    if tensor.ndim == 0:
        return Plain(tensor.view(1, 1))
    if tensor.ndim == 1:
        return Plain(tensor.view(-1, 1))
    return Plain(tensor if tensor.ndim == 2 else tensor.reshape(tensor.shape[0], -1))


@dataclass
class Tally:
    """Sums over a comparison; two tallies of disjoint rows add up.

    differing: elements whose bits differ. max_ulp: in steps of the served format. The squares are
    sums over expected e, served s, the difference s - e and the product s * e; they cover only
    the blocks of rows with a difference (``touched``, ``tallied`` elements).
    """

    elements: int = 0
    differing: int = 0
    max_ulp: int = 0
    tallied: int = 0
    error_square: float = 0.0
    expected_square: float = 0.0
    served_square: float = 0.0
    product: float = 0.0
    nonfinite_served: int = 0
    nonfinite_expected: int = 0
    touched: list[tuple[int, int]] = field(default_factory=list)

    def __iadd__(self, other: Tally) -> Tally:
        self.elements += other.elements
        self.differing += other.differing
        self.max_ulp = max(self.max_ulp, other.max_ulp)
        self.tallied += other.tallied
        self.error_square += other.error_square
        self.expected_square += other.expected_square
        self.served_square += other.served_square
        self.product += other.product
        self.nonfinite_served += other.nonfinite_served
        self.nonfinite_expected += other.nonfinite_expected
        self.touched += other.touched
        return self

    @property
    def relative_error(self) -> float:
        """||s - e|| / ||e|| over the blocks that differ; inf when the expected is zero."""
        if self.error_square == 0:
            return 0.0
        return (
            math.sqrt(self.error_square / self.expected_square)
            if self.expected_square
            else math.inf
        )

    @property
    def cosine(self) -> float:
        """Between served and expected over the blocks that differ; nan when either is zero."""
        norm = math.sqrt(self.expected_square * self.served_square)
        return self.product / norm if norm else math.nan

    @property
    def scale(self) -> float:
        """The c that minimises ||s - c e||."""
        return self.product / self.expected_square if self.expected_square else math.nan


def blocks(rows: tuple[int, int], columns: int, taste: bool = False) -> Iterator[tuple[int, int]]:
    """Row ranges of about BLOCK_ELEMENTS elements. taste: a small one first."""
    step = max(1, BLOCK_ELEMENTS // max(1, columns))
    start = rows[0]
    if taste:
        start = min(start + max(1, _TASTE // max(1, columns)), rows[1])
        yield rows[0], start
    for begin in range(start, rows[1], step):
        yield begin, min(begin + step, rows[1])


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.dot(a, b))


def _count_nonfinite(values: torch.Tensor) -> int:
    return int((~torch.isfinite(values)).sum())


def _squares(e: torch.Tensor, d: torch.Tensor, tally: Tally) -> None:
    """Adds the sums of a block of expected values and differences."""
    own, cross, error = _dot(e, e), _dot(e, d), _dot(d, d)
    tally.expected_square += own
    tally.error_square += error
    tally.product += own + cross
    tally.served_square += own + 2 * cross + error


class _Scratch:
    """Two fp32 copies of a block, reused: allocating them anew costs a third of the statistics."""

    def __init__(self) -> None:
        self._room = torch.empty(2, 0)

    def floats(self, e: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = e.numel()
        if self._room.shape[1] < count:
            self._room = torch.empty(2, count)
        first, second = self._room[0, :count], self._room[1, :count]
        first.view(e.shape).copy_(e)
        second.view(s.shape).copy_(s)
        return first, second


def _statistics(
    expected: torch.Tensor, served: torch.Tensor, scratch: _Scratch, tally: Tally
) -> None:
    e, d = scratch.floats(expected, served)
    d -= e
    tally.tallied += e.numel()
    probe = Tally()
    _squares(e, d, probe)
    if not math.isfinite(probe.error_square):
        # Slow and rare: leave non-finite elements out of the sums, count them, and take the
        # sums in float64, where squares of float32 values cannot overflow.
        e, s = scratch.floats(expected, served)
        bad_e, bad_s = ~torch.isfinite(e), ~torch.isfinite(s)
        tally.nonfinite_expected += int(bad_e.sum())
        tally.nonfinite_served += int(bad_s.sum())
        kept = e[~(bad_e | bad_s)].double()
        probe = Tally()
        _squares(kept, s[~(bad_e | bad_s)].double() - kept, probe)
    tally += probe


def _max_ulp(bits_e: torch.Tensor, bits_s: torch.Tensor, gap: torch.Tensor) -> int:
    """Largest distance in steps; gap is bits_s - bits_e of a two-byte format, and is used up.

    Where the signs agree the gap is the distance. Where they differ, which is rare, it is the sum
    of the magnitudes. Four times faster than ordering all patterns (0.3 against 1.2 ns).
    """
    crossing = torch.bitwise_xor(bits_e, bits_s)
    largest = 0
    if int(crossing.min()) < 0:
        crossing >>= 15  # -1 where the signs differ, else 0
        places = torch.nonzero(crossing.reshape(-1)).flatten()
        e, s = (bits.reshape(-1)[places].int() & 0x7FFF for bits in (bits_e, bits_s))
        largest = int((e + s).max()) + 1  # +0 and -0 are one step apart
        gap &= crossing.bitwise_not_()
    low, high = torch.aminmax(gap)
    return max(largest, int(high), -int(low))


def _differing(
    expected: torch.Tensor,
    served: torch.Tensor,
    gap: torch.Tensor,
    scratch: _Scratch,
    tally: Tally,
) -> None:
    tally.differing += int(torch.count_nonzero(gap))
    if not expected.dtype.is_floating_point:
        return
    if expected.element_size() == 2:
        largest = _max_ulp(pattern(expected), pattern(served), gap)
    else:
        wide = torch.int32 if expected.element_size() < 4 else torch.int64
        distance = ordered(served).to(wide)
        distance -= ordered(expected)
        low, high = torch.aminmax(distance)
        largest = max(int(high), -int(low))
    tally.max_ulp = max(tally.max_ulp, largest)
    _statistics(expected, served, scratch, tally)


def _equal(a: torch.Tensor, b: torch.Tensor, room: torch.Tensor) -> bool:
    """Bit equality; room gets a - b. 5 times faster than torch.equal (0.15 ns an element)."""
    low, high = torch.aminmax(torch.sub(a, b, out=room))
    return int(low) == 0 == int(high)


def _all_finite(block: torch.Tensor) -> bool:
    """Cheap test for a block that is equal on both sides (a false alarm costs a slow test)."""
    if block.dtype == torch.float16:  # a sum of fp16 overflows too easily
        return int((pattern(block) & 0x7FFF).max()) < 0x7C00
    if block.element_size() == 1:
        return _count_nonfinite(block.float()) == 0
    return math.isfinite(float(block.sum()))


def tally_rows(
    master: Operand,
    served: Operand,
    rows: tuple[int, int],
    rounding: Rounding = nearest,
    stop_at_first: bool = False,
) -> Tally:
    """Compares rows [begin, end) of two operands of the same shape, in the served dtype.

    stop_at_first: return at the first block with a difference, which then counts as one element
    (to refute a hypothesis, most of which fall in the first few thousand elements).
    """
    tally, scratch = Tally(), _Scratch()
    columns = served.shape[1]
    direct = rounding is nearest and served.dtype != torch.float8_e4m3fn
    cast: torch.Tensor | None = None
    room: torch.Tensor | None = None
    for begin, end in blocks(rows, columns, stop_at_first):
        m, s = master.rows(begin, end), served.rows(begin, end)
        count = end - begin
        if room is not None and count > room.shape[0]:
            cast = room = None
        tally.elements += s.numel()
        if m.dtype == s.dtype:
            expected = m
        elif direct:
            cast = torch.empty(count, columns, dtype=s.dtype) if cast is None else cast
            expected = cast[:count].copy_(m)
        else:
            expected = rounding(m, s.dtype)
        bits_e, bits_s = pattern(expected), pattern(s)
        room = torch.empty(count, columns, dtype=bits_s.dtype) if room is None else room
        if _equal(bits_e, bits_s, room[:count]):
            if s.dtype.is_floating_point and not _all_finite(s):
                bad = _count_nonfinite(s.float())
                tally.nonfinite_served += bad
                tally.nonfinite_expected += bad
            continue
        tally.touched.append((begin, end))
        if stop_at_first:
            tally.differing = 1
            break
        _differing(expected, s, room[:count], scratch, tally)
    return tally
