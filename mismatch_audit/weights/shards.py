"""Where a tensor differs: a window to look at, and whether the place is one shard."""

from __future__ import annotations

import torch

from mismatch_audit.weights.rounding import nearest, pattern
from mismatch_audit.weights.sides import Overlap
from mismatch_audit.weights.tally import Tally, blocks

_WINDOW = 1 << 14
_BITE = 1 << 12


def window(overlap: Overlap, tally: Tally) -> tuple[torch.Tensor, torch.Tensor]:
    """Some ten thousand elements from the first differing row on: master (as stored), served."""
    first = edge_row(overlap, *min(tally.touched), last=False)
    end = min(max(tally.touched)[1], first + max(1, _WINDOW // max(1, overlap.served.shape[1])))
    return overlap.trainer.rows(first, end), overlap.served.rows(first, end)


def edge_row(overlap: Overlap, begin: int, end: int, last: bool) -> int:
    """The first or last differing row of a touched block, found in small bites from that end."""
    bite = max(1, _BITE // max(1, overlap.served.shape[1]))
    starts = range(begin, end, bite)
    for start in reversed(starts) if last else starts:
        served = overlap.served.rows(start, min(start + bite, end))
        expected = nearest(overlap.trainer.rows(start, min(start + bite, end)), served.dtype)
        hit = torch.nonzero((pattern(expected) != pattern(served)).any(1)).flatten()
        if len(hit):
            return start + int(hit[-1 if last else 0])
    return begin


def may_be_shard(overlap: Overlap, tally: Tally) -> bool:
    """Cheap refutation: differences in the first and last rows, and in the first and last columns
    of one block, are no single shard."""
    rows, columns = overlap.served.shape
    first = edge_row(overlap, *min(tally.touched), last=False)
    last = edge_row(overlap, *max(tally.touched), last=True)
    if first > rows // 16 or last < rows - 1 - rows // 16:
        return True
    master, served = window(overlap, tally)
    unequal = (pattern(nearest(master, served.dtype)) != pattern(served)).any(0)
    hit = torch.nonzero(unequal).flatten()
    return len(hit) > 0 and (int(hit[0]) > columns // 4 or int(hit[-1]) < columns - columns // 4)


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
