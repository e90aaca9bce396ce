"""Per-prompt sums of every slice, merged as batches come, in bounded memory.

Rows (slice, prompt, sums) are buffered, merged by sorting when the buffer is full, and written to a
temporary file as a sorted run when merging no longer helps. At the end one slice is read at a time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatch_audit.rollouts.kernels import add_groups

FloatArray = NDArray[np.float64]
Keys = NDArray[np.uint64]
Ids = NDArray[np.int32]

ROW_LIMIT = 2_000_000
"""Rows in memory: with 16 sums some 300 MB, twice that while they are merged."""


class SumStore:
    """width: sums a row.  limit: rows held in memory."""

    def __init__(self, width: int, limit: int = ROW_LIMIT) -> None:
        self.width, self.limit = width, limit
        self._parts: list[tuple[Ids, Keys, FloatArray]] = []
        self._rows, self._sorted = 0, True
        self._runs: list[_Run] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def add(self, ids: Ids, prompts: Keys, sums: FloatArray) -> None:
        """Rows to add. ids: [n] slices.  prompts: [n] keys.  sums: [n, width]."""
        self._parts.append((ids, prompts, sums))
        self._rows += len(ids)
        self._sorted = False
        if self._rows > self.limit:
            self._compact()
            if self._rows > self.limit // 2:
                self._spill()

    def slice(self, ids: Sequence[int]) -> tuple[Keys, FloatArray]:
        """Prompts, in rising order of their keys, and their sums over all of these slices."""
        self._compact()
        keys, sums = [], []
        for part in (*self._runs, *self._parts):
            for one in ids:
                # in the column's own type: otherwise numpy converts a million ids at every call
                low, high = np.searchsorted(part[0], np.array((one, one + 1), dtype=np.int32))
                if high > low:
                    keys.append(np.asarray(part[1][low:high]))
                    sums.append(np.asarray(part[2][low:high]))
        if not keys:
            return np.empty(0, dtype=np.uint64), np.empty((0, self.width))
        if len(keys) == 1:
            return keys[0], sums[0]
        merged = _merge(np.zeros(sum(map(len, keys)), np.int32), np.concatenate(keys),
                        np.concatenate(sums))  # fmt: skip
        return merged[1], merged[2]

    def close(self) -> None:
        """Remove the temporary files."""
        self._runs.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _compact(self) -> None:
        if self._sorted:
            return
        ids, keys, sums = (np.concatenate(columns) for columns in zip(*self._parts, strict=True))
        self._parts = [_merge(ids, keys, sums)]
        self._rows, self._sorted = len(self._parts[0][0]), True

    def _spill(self) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="mismatch-audit-")
        stem = Path(self._folder.name) / str(len(self._runs))
        arrays = []
        for name, array in zip(("ids", "keys", "sums"), self._parts.pop(), strict=True):
            path = stem.with_suffix(f".{name}.npy")
            np.save(path, np.asarray(array))
            arrays.append(np.load(path, mmap_mode="r"))
        self._runs.append((arrays[0], arrays[1], arrays[2]))
        self._rows = 0


_Run = tuple[Any, Any, Any]


def _merge(ids: Ids, keys: Keys, sums: FloatArray) -> tuple[Ids, Keys, FloatArray]:
    """Sorted by slice and prompt, one row each."""
    if len(ids) < 2:
        return ids, keys, sums
    # Sorting by key (vectorised), then a stable radix sort by a 16-bit slice number: 0.3 s for 2
    # million rows, where np.lexsort takes 0.7 s.
    by_key = np.argsort(keys)
    slices = ids[by_key]
    small = slices.astype(np.uint16) if slices.max() < 1 << 16 else slices
    order = by_key[np.argsort(small, kind="stable")]
    ids, keys = ids[order], keys[order]
    new = np.empty(len(ids), dtype=bool)
    new[0] = True
    np.logical_or(ids[1:] != ids[:-1], keys[1:] != keys[:-1], out=new[1:])
    starts = np.flatnonzero(new)
    merged = np.empty((len(starts), sums.shape[1]))
    add_groups(sums, order, np.append(starts, len(ids)), merged)
    return ids[starts], keys[starts], merged
