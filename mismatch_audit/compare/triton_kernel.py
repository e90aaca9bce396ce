"""The comparison on a GPU: a Triton kernel per pass, one program to a row.

Pass 1, once for each side: maximum, runner-up, sum of e^(z - max), entropy term, non-finite count,
all online in one sweep. Pass 2: the sums of the divergences. No fp64 on the [T, V] side: lanes add
in fp32, and the few numbers of a row are finished in float64 ([T] tensors), with the same
correction for the error of the normalisers as on the CPU (see ``cpu_kernel``).

Written and tested under Triton's interpreter on a CPU; it was not run on a real GPU. There ``exp``
is the hardware's approximation (relative error about |x| / 2^23), which the tests on a CPU cannot
see: run ``pytest -m gpu`` on a machine with CUDA before relying on the last digits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mismatch_audit.compare import torch_rows

WIDEST = 80.0  # largest log-ratio that fp32 carries; a row beyond is done again in float64
_BLOCK = 1024
_WARPS = 8  # 4 logits a thread: pass 2 keeps 13 accumulators for each in registers
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# (e^x - 1 - x) / x^2 on [-1, 1], as in cpu_kernel (degree 7, error 3e-9)
C0, C1 = tl.constexpr(0.5), tl.constexpr(0.1666666716337204)
C2, C3 = tl.constexpr(0.04166673496365547), tl.constexpr(0.00833334494382143)
C4, C5 = tl.constexpr(0.0013885394437238574), tl.constexpr(0.00019836986029986292)
C6, C7 = tl.constexpr(2.5358644052175805e-05), tl.constexpr(2.812654656736413e-06)


def supports(dtype: torch.dtype) -> bool:
    """Whether these kernels take logits of this dtype: fp32, bf16 or fp16."""
    return dtype in _DTYPES


@triton.jit  # type: ignore[untyped-decorator]
def _scan_row(z_ptr, floats, ints, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One side of a row: (max, second, sum, spread) to ``floats``, (index, bad) to ``ints``.

    sum: of e^(z - max) over all but the top token. spread: of e^(z - max) (max - z). Each lane
    keeps its own maximum m, and in ``s`` the terms of all it saw except that maximum.
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    m = tl.full((BLOCK,), float("-inf"), tl.float32)
    second = tl.full((BLOCK,), float("-inf"), tl.float32)
    s = tl.zeros((BLOCK,), tl.float32)
    w = tl.zeros((BLOCK,), tl.float32)
    index = tl.full((BLOCK,), vocab, tl.int32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        v = start + lanes
        there = v < vocab
        z = tl.load(z_ptr + row * vocab + v, mask=there, other=0.0).to(tl.float32)
        bad += tl.where(there & (z - z != 0.0), 1, 0)
        more = there & (z > m)
        gap = tl.where(there, tl.abs(z - m), 0.0)
        e = tl.where(there, tl.exp(-gap), 0.0)
        old = tl.where(m == float("-inf"), 0.0, (w + (s + 1.0) * gap) * e)
        w = tl.where(more, old, w + tl.where(m == float("-inf"), 0.0, gap * e))
        s = tl.where(more, tl.where(m == float("-inf"), 0.0, (s + 1.0) * e), s + e)
        second = tl.where(more, m, tl.where(there, tl.maximum(second, z), second))
        index = tl.where(more, v, index)
        m = tl.where(more, z, m)
    top = tl.max(m, 0)
    best = tl.min(tl.where(m == top, index, vocab), 0)
    winner = index == best
    runner_up = tl.max(tl.where(winner, second, m), 0)
    used = m > float("-inf")
    down = tl.where(used, top - m, 0.0)
    e = tl.where(used, tl.exp(-down), 0.0)
    # The lane's own maximum is a term too, except the row's top token.
    rest = tl.sum(tl.where(winner, s, (s + 1.0) * e), 0)
    spread = tl.sum(tl.where(winner, w, (w + (s + 1.0) * down) * e), 0)
    tl.store(floats + row * 4 + 0, top)
    tl.store(floats + row * 4 + 1, runner_up)
    tl.store(floats + row * 4 + 2, rest)
    tl.store(floats + row * 4 + 3, spread)
    tl.store(ints + row * 2 + 0, best)
    tl.store(ints + row * 2 + 1, tl.sum(bad, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _compare_row(  # type: ignore[no-untyped-def]
    p_ptr, q_ptr, rows, sums, vocab, eta, BLOCK: tl.constexpr
):
    """The sums of a row. ``rows [T, 7]``: m_p, m_q, 1/sum_p, 1/sum_q, c_hi, c_lo, x of q's top."""
    row = tl.program_id(0).to(tl.int64)
    m_p = tl.load(rows + row * 7 + 0)
    m_q = tl.load(rows + row * 7 + 1)
    inv_p = tl.load(rows + row * 7 + 2)
    inv_q = tl.load(rows + row * 7 + 3)
    c_hi = tl.load(rows + row * 7 + 4)
    c_lo = tl.load(rows + row * 7 + 5)
    x_top = tl.load(rows + row * 7 + 6)
    lanes = tl.arange(0, BLOCK)
    s = tl.zeros((BLOCK,), tl.float32)
    gap = tl.zeros((BLOCK,), tl.float32)
    size = tl.zeros((BLOCK,), tl.float32)
    sign = tl.zeros((BLOCK,), tl.float32)
    kl = tl.zeros((BLOCK,), tl.float32)
    rev = tl.zeros((BLOCK,), tl.float32)
    chi = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)
    tail_p = tl.zeros((BLOCK,), tl.float32)
    tail_q = tl.zeros((BLOCK,), tl.float32)
    low = tl.full((BLOCK,), float("inf"), tl.float32)
    high = tl.full((BLOCK,), float("-inf"), tl.float32)
    widest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        v = start + lanes
        there = v < vocab
        a = tl.load(p_ptr + row * vocab + v, mask=there, other=0.0).to(tl.float32)
        b = tl.load(q_ptr + row * vocab + v, mask=there, other=0.0).to(tl.float32)
        d = a - b
        x = (d - c_hi) - c_lo
        q = tl.where(there, tl.exp(b - m_q) * inv_q, 0.0)
        own_p = tl.where(there, tl.exp(a - m_p) * inv_p, 0.0)
        near = tl.abs(x) <= 1.0
        y = tl.where(near, x, 0.0)
        f = C4 + y * (C5 + y * (C6 + y * C7))
        f = y * y * (C0 + y * (C1 + y * (C2 + y * (C3 + y * f))))
        e = tl.where(near, y + f, tl.exp(tl.minimum(x, 88.0)) - 1.0)
        qe = tl.where(near, q * e, own_p - q)
        p = tl.where(near, q + qe, own_p)
        s += q
        gap += qe
        size += tl.abs(qe)
        sign += tl.where(x > 0, q, -q)
        kl += tl.where(near, q * f, qe - q * x)
        rev += tl.where(near, q * (x * e - f), p * x - qe)
        chi += tl.where(there, qe * e, 0.0)
        square += q * (x - x_top) * (x - x_top)
        inside = there & ((p >= eta) | (q >= eta))
        tail_p += tl.where(inside, 0.0, p)
        tail_q += tl.where(inside, 0.0, q)
        low = tl.where(inside, tl.minimum(low, d), low)
        high = tl.where(inside, tl.maximum(high, d), high)
        widest = tl.where(there, tl.maximum(widest, x), widest)
    out = sums + row * 13
    tl.store(out + 0, tl.sum(s, 0))
    tl.store(out + 1, tl.sum(gap, 0))
    tl.store(out + 2, tl.sum(size, 0))
    tl.store(out + 3, tl.sum(sign, 0))
    tl.store(out + 4, tl.sum(kl, 0))
    tl.store(out + 5, tl.sum(rev, 0))
    tl.store(out + 6, tl.sum(chi, 0))
    tl.store(out + 7, tl.sum(square, 0))
    tl.store(out + 8, tl.sum(tail_p, 0))
    tl.store(out + 9, tl.sum(tail_q, 0))
    tl.store(out + 10, tl.min(low, 0))
    tl.store(out + 11, tl.max(high, 0))
    tl.store(out + 12, tl.max(widest, 0))


class _Side:
    """One side's pass 1: float64 and int64 ``[T]`` tensors."""

    def __init__(self, z: torch.Tensor, target_ids: torch.Tensor) -> None:
        rows, vocab = z.shape
        floats = torch.empty(rows, 4, device=z.device)
        ints = torch.empty(rows, 2, dtype=torch.int32, device=z.device)
        if rows:
            _scan_row[(rows,)](z, floats, ints, vocab, BLOCK=_BLOCK, num_warps=_WARPS)
        top, second, self.rest, self.spread = floats.double().unbind(1)
        best, self.bad = ints.long().unbind(1)
        self.top, self.log_total = top, self.rest.log1p()
        self.safe_best = best.clamp(max=vocab - 1)  # a row of NaN alone has none
        target = z.gather(1, target_ids[:, None])[:, 0].double()
        spoilt = self.bad > 0
        self.columns = {
            "logprob": (target - top) - self.log_total,
            "margin": top - second,
            "top1_logprob": -self.log_total,
            "entropy": self.log_total + self.spread / (1.0 + self.rest),
        }
        self.columns = {k: c.masked_fill(spoilt, torch.nan) for k, c in self.columns.items()}
        self.columns["top1"] = best.masked_fill(spoilt, -1)
        self.columns["nonfinite"] = self.bad


def log_probs(logits: torch.Tensor, target_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of one side: ``logprob, margin, top1, top1_logprob, entropy, nonfinite``, each ``[T]``."""
    return _Side(logits.contiguous(), target_ids.to(logits.device)).columns


def compare(
    z_p: torch.Tensor, z_q: torch.Tensor, target_ids: torch.Tensor, *, eta: float
) -> dict[str, torch.Tensor]:
    """Every column of the comparison, each ``[T]``, from ``[T, V]`` logits on one CUDA device."""
    z_p, z_q, target_ids = z_p.contiguous(), z_q.contiguous(), target_ids.to(z_p.device)
    p, q = _Side(z_p, target_ids), _Side(z_q, target_ids)
    rows, vocab = z_p.shape
    c = (p.top - q.top) + (p.log_total - q.log_total)
    c_hi = c.float().double()
    at = q.safe_best[:, None]
    x_top = ((z_p.gather(1, at).double() - z_q.gather(1, at).double())[:, 0] - c).float()
    inputs = torch.stack(
        [p.top, q.top, 1 / (1 + p.rest), 1 / (1 + q.rest), c_hi, c - c_hi, x_top.double()], 1
    ).float()
    sums = torch.empty(rows, 13, device=z_p.device)
    if rows:
        _compare_row[(rows,)](z_p, z_q, inputs, sums, vocab, eta, BLOCK=_BLOCK, num_warps=_WARPS)
    columns = _finish(sums.double(), x_top.double())
    columns["entropy"] = p.columns["entropy"]
    for name, side in (("reference", p), ("engine", q)):
        for part in ("logprob", "margin", "top1_logprob", "top1"):
            columns[f"{name}_{part}"] = side.columns[part]
    nonfinite = p.bad + q.bad
    for name, column in columns.items():
        fill = -1 if name.endswith("top1") else torch.nan
        columns[name] = column.masked_fill(nonfinite > 0, fill)
    columns["flip"] = columns["reference_top1"] != columns["engine_top1"]
    columns["nonfinite"] = nonfinite
    fits = (sums[:, 12] <= WIDEST) & sums[:, :10].isfinite().all(1)
    for t in ((nonfinite == 0) & ~fits).nonzero()[:, 0].tolist():
        one = slice(t, t + 1)
        row = torch_rows.compare_whole(z_p[one], z_q[one], target_ids[one], eta=eta)
        for name, column in columns.items():
            column[one] = row[name]
    return columns


def _finish(sums: torch.Tensor, x_top: torch.Tensor) -> dict[str, torch.Tensor]:
    """Divergences from the sums ``[T, 13]``; the formulas are those of ``cpu_kernel._finish``."""
    s = sums[:, 0]
    u, size, sign, kl, rev, chi, square, tail_p, tail_q = (sums[:, 1:10] / s[:, None]).unbind(1)
    low, high = sums[:, 10], sums[:, 11]
    log1u, w = u.log1p(), 1 + u
    mean = (u - kl) - x_top
    return {
        "kl_engine_reference": (kl + (log1u - u)).clamp(min=0),
        "kl_reference_engine": ((rev + (u - w * log1u)) / w).clamp(min=0),
        "tv": ((size - u * sign) / (2 * w)).clamp(min=0),
        "chi2": ((chi - u * u) / (w * w)).clamp(min=0),
        "logit_var": (square - mean * mean).clamp(min=0),
        "tail_mass": torch.maximum(tail_p / w, tail_q),
        "drift": torch.where(high >= low, high - low, torch.nan),
    }
