"""The comparison's CPU kernel: three passes over a row that stays in the core's own cache.

Pass 1 reads both rows from memory (block extrema, non-finite check), passes 2 and 3 find them in
L2 (V = 49,152: 295 KB for fp32 against bf16). Arithmetic is fp32 in SIMD lanes over blocks of
``BLOCK`` logits, block sums are added in float64. Compiled by numba on first use and cached beside
this file.

Accuracy. c = log sum e^{z_p} - log sum e^{z_q} carries fp32 error (1e-7), which would swamp a tiny
drift; but E_q[e^x] = 1 holds exactly for the true x = log p - log q, so its residual u, measured in
pass 3 relative to the drift itself, corrects every sum (``_finish``). Measured against float64 at
V = 49,152: KL, chi2 and the variance to 4e-7 relative from KL = 0.5 down to 1e-15; TV to 1e-8
absolute. chi2 loses x / 2^24 of itself at log-ratio x.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from mismatch_audit.compiling import compiled

BLOCK = 512
WIDEST = 80.0
"""Largest log-ratio that the fp32 lanes carry (e^80 = 5e34); a row beyond goes to float64."""

RESULTS = 15
(
    KL_QP, KL_PQ, TV, CHI2, DRIFT, TAIL, VAR, ENTROPY, TOP_P, MARGIN_P, TARGET_P,
    TOP_Q, MARGIN_Q, TARGET_Q, STATUS,
) = range(RESULTS)  # fmt: skip
OK, NONFINITE, TOO_WIDE = 0.0, 1.0, 2.0

f32 = np.float32
_LOG2E, _LN2_HI, _LN2_LO = f32(1.4426950408889634), f32(0.693359375), f32(-2.12194440e-4)
_ROUND = f32(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer held in the low bits
_LOWEST = f32(-87.0)  # e^-87 is the smallest that stays a normal number
ZERO, ONE, INF = f32(0.0), f32(1.0), f32(np.inf)
BIG = f32(3e38)  # stands for infinity where LLVM folds infinity into code without SIMD
# e^r = 1 + r + r^2 (E0 + E1 r + ..), |r| <= ln 2 / 2 (the coefficients of Cephes' expf)
_E = tuple(map(f32, (5.0000001201e-1, 1.6666665459e-1, 4.1665795894e-2, 8.3334519073e-3,
                     1.3981999507e-3, 1.9875691500e-4)))  # fmt: skip


def _fit_centred(degree: int = 7) -> tuple[Any, ...]:
    """Coefficients of (e^x - 1 - x) / x^2 on [-1, 1] at Chebyshev points (error 3e-9)."""
    x = np.cos((np.arange(64) + 0.5) * np.pi / 64)
    series = sum(x**k / math.factorial(k + 2) for k in range(20))
    fit = np.polynomial.chebyshev.chebfit(x, series, degree)
    return tuple(f32(c) for c in np.polynomial.chebyshev.cheb2poly(fit))


_C = _fit_centred()


@intrinsic
def _widen(typingctx, x):  # type: ignore[no-untyped-def]
    """float32 as it is; bits of bfloat16 (uint16) or float16 (int16) to float32."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        (value,), (kind,) = args, signature.args
        if kind == types.float32:
            return value
        i32, single = ir.IntType(32), ir.FloatType()
        wide = builder.zext(value, i32)
        if kind == types.uint16:
            return builder.bitcast(builder.shl(wide, i32(16)), single)
        # float16 by integer arithmetic: any CPU, any LLVM target. 2^112 moves the exponent bias,
        # also of subnormals; what lands on 2^16 or above was inf or NaN.
        magnitude = builder.shl(builder.and_(wide, i32(0x7FFF)), i32(13))
        scaled = builder.fmul(builder.bitcast(magnitude, single), single(2.0**112))
        over = builder.fcmp_ordered(">=", scaled, single(65536.0))
        scaled = builder.select(over, single(float("inf")), scaled)
        sign = builder.shl(builder.and_(wide, i32(0x8000)), i32(16))
        return builder.bitcast(builder.or_(builder.bitcast(scaled, i32), sign), single)

    return types.float32(x), codegen


@intrinsic
def _scale_by_power(typingctx, x, n):  # type: ignore[no-untyped-def]
    """x * 2^k, k in the low bits of the float n (see ``_ROUND``)."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        i32, single = ir.IntType(32), ir.FloatType()
        k = builder.shl(builder.bitcast(args[1], i32), i32(23))
        return builder.bitcast(builder.add(builder.bitcast(args[0], i32), k), single)

    return types.float32(types.float32, types.float32), codegen


def _extremum(name: str) -> Any:
    @intrinsic
    def pick(typingctx, a, b):  # type: ignore[no-untyped-def]
        """Larger (smaller) of two floats in one instruction; undefined for NaN, checked apart."""

        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            single = ir.FloatType()
            kind = ir.FunctionType(single, [single, single])
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.call(function, args, fastmath=("nnan", "nsz"))

        return types.float32(types.float32, types.float32), codegen

    return pick


_larger, _smaller = _extremum("llvm.maxnum.f32"), _extremum("llvm.minnum.f32")


@intrinsic
def _select(typingctx, condition, a, b):  # type: ignore[no-untyped-def]
    """a if condition else b, without a branch: LLVM gives up SIMD for the branch (7x slower)."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.select(*args)

    return types.float32(types.boolean, types.float32, types.float32), codegen


@njit(fastmath={"reassoc"})
def _add(a, b):  # type: ignore[no-untyped-def]
    """A sum whose order is free, so that it runs in SIMD lanes. Nothing else may be reordered."""
    return a + b


@njit(fastmath={"contract"})
def _exp(x):  # type: ignore[no-untyped-def]
    """e^x in float32 for -87 <= x <= 88 (2 ulp); below, e^-87."""
    x = x if x > _LOWEST else _LOWEST
    n = x * _LOG2E + _ROUND
    k = n - _ROUND
    r = (x - k * _LN2_HI) - k * _LN2_LO
    e = _E[0] + r * (_E[1] + r * (_E[2] + r * (_E[3] + r * (_E[4] + r * _E[5]))))
    return _scale_by_power(ONE + (r + r * r * e), n)


@njit(fastmath={"contract"})
def _centred(x):  # type: ignore[no-untyped-def]
    """e^x - 1 - x to fp32 rounding for |x| <= 1."""
    c = _C[4] + x * (_C[5] + x * (_C[6] + x * _C[7]))
    return x * x * (_C[0] + x * (_C[1] + x * (_C[2] + x * (_C[3] + x * c))))


@njit(fastmath={"contract"})
def _scan(z_p, z_q, extrema):  # type: ignore[no-untyped-def]
    """Pass 1. Per block: max z_p, max z_q, min and max of z_p - z_q. False if any is not finite."""
    bad = ZERO
    for block in range(extrema.shape[1]):
        start, stop = block * BLOCK, min((block + 1) * BLOCK, len(z_p))
        top_p, top_q, low, high = -INF, -INF, INF, -INF
        for v in range(start, stop):
            p, q = _widen(z_p[v]), _widen(z_q[v])
            d = p - q
            top_p, top_q = _larger(top_p, p), _larger(top_q, q)
            low, high = _smaller(low, d), _larger(high, d)
            bad = _add(bad, p * ZERO + q * ZERO)
        extrema[0, block], extrema[1, block] = top_p, top_q
        extrema[2, block], extrema[3, block] = low, high
    return bad == ZERO


@njit(fastmath={"contract"})
def _block_sums(z, m):  # type: ignore[no-untyped-def]
    """Over one block: sums of e^(z - m) and of e^(z - m) (m - z)."""
    s = w = ZERO
    for v in range(len(z)):
        gap = _widen(z[v]) - m
        e = _exp(gap)
        s = _add(s, e)
        w = _add(w, -gap * e)
    return np.float64(s), np.float64(w)


@njit
def _sums(z, m, top):  # type: ignore[no-untyped-def]
    """Pass 2, of one side: the block sums added up, without the ``top`` token, whose terms are
    1 and 0. Left in, its 1 would cost the others their low bits (3e-7 in a log-prob)."""
    s = w = 0.0
    for start in range(0, len(z), BLOCK):
        stop = min(start + BLOCK, len(z))
        cut = top if start <= top < stop else stop
        a, b = _block_sums(z[start:cut], m)
        s, w = s + a, w + b
        a, b = _block_sums(z[cut + 1 : stop], m)
        s, w = s + a, w + b
    return s, w


@njit
def _top_two(z, tops):  # type: ignore[no-untyped-def]
    """(lowest index of the maximum, largest of the rest), from the blocks' maxima."""
    block = 0
    for b in range(1, len(tops)):
        if tops[b] > tops[block]:
            block = b
    second, best, index = -INF, tops[block], -1
    for b in range(len(tops)):
        if b != block:
            second = max(second, tops[b])
    for v in range(block * BLOCK, min((block + 1) * BLOCK, len(z))):
        value = _widen(z[v])
        if index < 0 and value == best:
            index = v
        else:
            second = max(second, value)
    return index, second


def _third_pass(broad: bool) -> Any:
    """Pass 3 over a block. Narrow: |x| <= 1 throughout, so one exponential and
    p = q + q (e^x - 1). Broad: |x| up to ``WIDEST``, p and e^x by exponentials of their own; for
    |x| > 1 nothing cancels, and p - q replaces q (e^x - 1), whose q may be clamped.
    """

    @njit(fastmath={"contract"})
    def block(z_p, z_q, m_p, m_q, inv_p, inv_q, c_hi, c_lo, x_top, eta, acc):  # type: ignore[no-untyped-def]
        s = gap = size = sign = kl = rev = chi = square = entropy = tail_p = tail_q = ZERO
        low, high = BIG, -BIG
        for v in range(len(z_p)):
            a, b = _widen(z_p[v]), _widen(z_q[v])
            d = a - b
            x = (d - c_hi) - c_lo
            q = _exp(b - m_q) * inv_q
            if broad:
                p = _exp(a - m_p) * inv_p
                near = abs(x) <= ONE
                y = _select(near, x, ZERO)
                f = _centred(y)
                e = _select(near, y + f, _exp(x) - ONE)
                qe = _select(near, q * e, p - q)
                p = _select(near, q + qe, p)
                k = _select(near, q * f, qe - q * x)
                r = _select(near, q * (x * e - f), p * x - qe)
            else:
                f = _centred(x)
                e = x + f
                qe = q * e
                p = q + qe
                k, r = q * f, q * (x * e - f)
            s = _add(s, q)
            gap = _add(gap, qe)
            size = _add(size, abs(qe))
            sign = _add(sign, _select(x > ZERO, q, -q))
            kl = _add(kl, k)
            rev = _add(rev, r)
            chi = _add(chi, qe * e)
            from_top = x - x_top
            square = _add(square, q * from_top * from_top)
            entropy = _add(entropy, p * (m_p - a))
            inside = _larger(p, q) >= eta
            tail_p = _add(tail_p, _select(inside, ZERO, p))
            tail_q = _add(tail_q, _select(inside, ZERO, q))
            low = _smaller(low, _select(inside, d, BIG))
            high = _larger(high, _select(inside, d, -BIG))
        sums = (s, gap, size, sign, kl, rev, chi, square, entropy, tail_p, tail_q)
        for i in range(len(sums)):
            acc[i] += sums[i]
        acc[11], acc[12] = min(acc[11], low), max(acc[12], high)

    return block


_narrow, _broad = _third_pass(False), _third_pass(True)


@njit
def _finish(acc, x_top, out):  # type: ignore[no-untyped-def]
    """Divergences from the sums, corrected for the error of c.

    The sums used y = x - (error of c) and q up to a factor s. With E over q and
    u = E[e^y] - 1, the true ratio is e^y / (1 + u); u is 1e-7 at most, so terms in u^2 of the
    log are exact in float64 and TV needs the first order only. ``square`` is taken around x of the
    engine's top token: around 0 it cancels where q is concentrated (5e-6 lost).
    """
    s = acc[0]
    u, size, sign = acc[1] / s, acc[2] / s, acc[3] / s
    kl, rev, chi, square = acc[4] / s, acc[5] / s, acc[6] / s, acc[7] / s
    log1u, w = math.log1p(u), 1.0 + u
    out[KL_QP] = max(kl + (log1u - u), 0.0)
    out[KL_PQ] = max((rev + (u - w * log1u)) / w, 0.0)
    out[TV] = max(0.5 * (size - u * sign) / w, 0.0)
    out[CHI2] = max((chi - u * u) / (w * w), 0.0)
    mean = (u - kl) - x_top
    out[VAR] = max(square - mean * mean, 0.0)
    out[ENTROPY] = acc[8] / (s * w)
    out[TAIL] = max(acc[9] / (s * w), acc[10] / s)
    out[DRIFT] = acc[12] - acc[11] if acc[12] >= acc[11] else np.nan


@compiled
def compare_rows(z_p, z_q, targets, eta, start, stop, out, top1):  # type: ignore[no-untyped-def]
    """Rows start..stop. A row whose STATUS is not OK holds nothing else of use."""
    vocab = z_p.shape[1]
    blocks = (vocab + BLOCK - 1) // BLOCK
    extrema, acc = np.empty((4, blocks), np.float32), np.empty(13, np.float64)
    for t in range(start, stop):
        row_p, row_q, result = z_p[t], z_q[t], out[t]
        if not _scan(row_p, row_q, extrema):
            result[STATUS] = NONFINITE
            continue
        i_p, second_p = _top_two(row_p, extrema[0])
        i_q, second_q = _top_two(row_q, extrema[1])
        m_p, m_q = _widen(row_p[i_p]), _widen(row_q[i_q])
        rest_p, rest_q = _sums(row_p, m_p, i_p)[0], _sums(row_q, m_q, i_q)[0]
        log_p, log_q = math.log1p(rest_p), math.log1p(rest_q)
        c = (np.float64(m_p) - np.float64(m_q)) + (log_p - log_q)
        c_hi = np.float32(c)
        c_lo = np.float32(c - np.float64(c_hi))
        if not (extrema[3].max() - c <= WIDEST and extrema[2].min() - c > -1e30):
            result[STATUS] = TOO_WIDE
            continue
        inv_p, inv_q = np.float32(1.0 / (1.0 + rest_p)), np.float32(1.0 / (1.0 + rest_q))
        x_top = ((_widen(row_p[i_q]) - m_q) - c_hi) - c_lo
        acc[:] = 0.0
        acc[11], acc[12] = BIG, -BIG
        for b in range(blocks):
            lo, hi = b * BLOCK, min((b + 1) * BLOCK, vocab)
            if extrema[2, b] - c >= -1.0 and extrema[3, b] - c <= 1.0:
                _narrow(
                    row_p[lo:hi], row_q[lo:hi], m_p, m_q, inv_p, inv_q, c_hi, c_lo, x_top, eta, acc
                )
            else:
                _broad(
                    row_p[lo:hi], row_q[lo:hi], m_p, m_q, inv_p, inv_q, c_hi, c_lo, x_top, eta, acc
                )
        acc[8] += log_p * (acc[0] + acc[1])
        _finish(acc, np.float64(x_top), result)
        top1[t, 0], top1[t, 1] = i_p, i_q
        result[TOP_P], result[TOP_Q] = -log_p, -log_q
        result[MARGIN_P] = np.float64(m_p) - np.float64(second_p)
        result[MARGIN_Q] = np.float64(m_q) - np.float64(second_q)
        result[TARGET_P] = (np.float64(_widen(row_p[targets[t]])) - np.float64(m_p)) - log_p
        result[TARGET_Q] = (np.float64(_widen(row_q[targets[t]])) - np.float64(m_q)) - log_q
        result[STATUS] = OK


@compiled
def score_rows(z_all, targets, start, stop, out, top1):  # type: ignore[no-untyped-def]
    """As ``compare_rows`` for one side: log-prob, margin, top-1 and entropy."""
    vocab = z_all.shape[1]
    extrema = np.empty((4, (vocab + BLOCK - 1) // BLOCK), np.float32)
    for t in range(start, stop):
        row, result = z_all[t], out[t]
        if not _scan(row, row, extrema):
            result[STATUS] = NONFINITE
            continue
        index, second = _top_two(row, extrema[0])
        m = _widen(row[index])
        rest, spread = _sums(row, m, index)
        log_total = math.log1p(rest)
        top1[t, 0] = index
        result[TOP_P] = -log_total
        result[MARGIN_P] = np.float64(m) - np.float64(second)
        result[TARGET_P] = (np.float64(_widen(row[targets[t]])) - np.float64(m)) - log_total
        result[ENTROPY] = log_total + spread / (1.0 + rest)
        result[STATUS] = OK
