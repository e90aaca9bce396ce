"""The bits of torch's bf16 ``linear``, 3 times faster, on x86 CPUs without AVX-512.

There torch has no fast bf16 matmul (measured, V = 49,152, H = 576, 2 cores: 3.0 ms a row, where
fp32 takes 0.6 ms), and an engine's bf16 head runs on it too. A bf16 logit is an fp32 dot product
rounded once, so the fp32 matmul of the widened operands gives the same logit unless the dot product
lies so near a rounding boundary that the order of summation decides. Such logits (1 in 100) are
found by their distance to the boundary and computed again by the slow ``linear`` itself. The first
rows are checked bit for bit; were they to differ, ``linear`` would be used for all.

The distance is ``units x 2^-24 |h| |w|``. On 6 million logits of the sample model the two orders
were at most 1.4 units apart; 8 are used at that width.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from mismatch_audit.compare.numba_support import one_thread, share_out
from mismatch_audit.compiling import compiled

_SLICE_BYTES = 16 << 20  # of widened weights at a time: they stay in the last cache for the matmul
_ROWS = 128  # rows at a time
_FEW = 32  # rows below which widening the weights costs more than it saves
_SHARE = 16  # more than V / 16 logits of a row on the boundary: the row goes to ``linear`` whole
_BLOCK = 512
_EXPONENT = np.uint32(0x7F800000)  # all ones in inf and NaN


def applies(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether torch is slow for this head on this machine and the route takes it."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and bias is None
        and torch.backends.cpu.get_cpu_capability() == "AVX2"
    )


@intrinsic
def _bits(typingctx, x):  # type: ignore[no-untyped-def]
    """The 32 bits of a float32."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@njit
def _round(x):  # type: ignore[no-untyped-def]
    """float32 to the nearest bf16 (its bits), ties to even; meaningless for inf and NaN."""
    bits = _bits(x)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> 16)


@compiled
def round_rows(y, norms, reach, out, offset, columns, counts, start, stop):  # type: ignore[no-untyped-def]
    """Round ``y [T, n]`` into ``out[:, offset:offset + n]`` and note the undecided columns.

    A logit is undecided if it would round otherwise within ``reach[t] * norms[v]``. counts[t] goes
    to ``len(columns[t]) + 1`` where there are too many, or where a value is not finite.
    """
    n = y.shape[1]
    near = np.zeros(_BLOCK, np.uint16)
    groups = near.view(np.uint64)
    full = columns.shape[1]
    for t in range(start, stop):
        for begin in range(0, n, _BLOCK):
            size = min(_BLOCK, n - begin)
            odd = 0
            for i in range(size):
                value = y[t, begin + i]
                e = reach[t] * norms[offset + begin + i]
                out[t, offset + begin + i] = _round(value)
                near[i] = _round(value - e) ^ _round(value + e)
                odd += _bits(value) & _EXPONENT == _EXPONENT
            near[size:] = 0
            if odd:
                counts[t] = full + 1
            for g in range((size + 3) // 4):
                if groups[g] != 0:
                    for i in range(4 * g, 4 * g + 4):
                        if near[i] != 0:
                            if counts[t] < full:
                                columns[t, counts[t]] = offset + begin + i
                            counts[t] = min(counts[t] + 1, full + 1)


class RoundedMatmul:
    """``hidden @ weight.T`` in bf16, bit for bit as ``torch.nn.functional.linear`` gives it."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        vocab, width = weight.shape
        self.slice = max(_BLOCK, min(8192, _SLICE_BYTES // (4 * width)))
        self.norms = torch.empty(vocab)
        for a in range(0, vocab, self.slice):
            self.norms[a : a + self.slice] = weight[a : a + self.slice].float().norm(dim=1)
        # Rounding errors of a sum of H terms grow as sqrt(H): 8 units at H = 576.
        self.reach = math.sqrt(width) / 3 * 2.0**-24
        self._same: bool | None = None  # as torch's bits, on the first rows

    @property
    def workspace_bytes(self) -> int:
        """Memory beside the result: a slice of weights, its product, undecided columns."""
        vocab, width = self.weight.shape
        return 4 * self.slice * (width + _ROWS) + 8 * _ROWS * (vocab // _SHARE + 1)

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """``[T, H]`` bf16 to ``[T, V]`` bf16."""
        if out is None:
            out = torch.empty(len(hidden), len(self.weight), dtype=self.weight.dtype)
        if len(hidden) < _FEW or not self._proven(hidden[:4]):
            return torch.mm(hidden, self.weight.t(), out=out)
        for a in range(0, len(hidden), _ROWS):
            self._rows(hidden[a : a + _ROWS], out[a : a + _ROWS])
        return out

    def _proven(self, hidden: torch.Tensor) -> bool:
        if self._same is None:
            out = torch.empty(len(hidden), len(self.weight), dtype=self.weight.dtype)
            self._rows(hidden, out)
            wanted = torch.nn.functional.linear(hidden, self.weight)
            self._same = torch.equal(out.view(torch.int16), wanted.view(torch.int16))
        return self._same

    def _rows(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        rows, (vocab, width) = len(hidden), self.weight.shape
        wide = hidden.float()
        reach = (wide.norm(dim=1) * self.reach).numpy()
        columns = np.empty((rows, vocab // _SHARE + 1), np.int64)
        counts = np.zeros(rows, np.int64)
        weight, product = torch.empty(self.slice, width), torch.empty(rows * self.slice)
        bits: Any = out.view(torch.uint16).numpy()
        for a in range(0, vocab, self.slice):
            part = self.weight[a : a + self.slice]
            w = weight[: len(part)].copy_(part)
            y = torch.mm(wide, w.t(), out=product[: rows * len(part)].view(rows, len(part)))
            task = partial(
                round_rows, y.numpy(), self.norms.numpy(), reach, bits, a, columns, counts
            )
            share_out(rows, task)
        with one_thread():  # hundreds of 50 us calls: waking a team for each costs up to 8 ms
            for t in range(rows):
                self._repair(hidden[t : t + 1], out[t], columns[t], int(counts[t]))

    def _repair(self, hidden: torch.Tensor, out: torch.Tensor, columns: Any, count: int) -> None:
        if count > len(columns):
            out.copy_(torch.nn.functional.linear(hidden, self.weight)[0])
        elif count:
            undecided = torch.from_numpy(columns[:count])
            again = torch.nn.functional.linear(hidden, self.weight.index_select(0, undecided))
            out.index_copy_(0, undecided, again[0])
