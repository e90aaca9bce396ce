"""How far two next-token distributions are apart: the float64 yardstick of every faster kernel.

p is the reference's softmax, q the engine's. Every function takes one row ``[V]`` or rows
``[..., V]`` of logits or log-probs (they are normalised here; a log-prob is a logit) and returns
``[...]`` float64, in nats where a logarithm is meant. A row with a value that is not finite gives
NaN and is counted, never replaced; with ``truncated=True`` minus infinity is a legal log-prob, that
of a token outside the support.

Differences are summed from ``x = log p - log q`` in the form ``q (e^x - 1 - x)``, whose terms are
all >= 0. The plain sum of ``q (log q - log p)`` cancels: at a drift of 1e-3 it is wrong by 20%, at
1e-8 it has no correct digit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernel_contracts.errors import InputError

__all__ = [
    "NUCLEUS",
    "bhattacharyya",
    "chi_squared",
    "compare_rows",
    "drift",
    "entropy",
    "expm1_minus",
    "hockey_stick",
    "kl_divergence",
    "log_ratio",
    "log_softmax",
    "logit_variance",
    "margin",
    "race_disagreement",
    "tail_mass",
    "top1",
    "total_variation",
]

Array = npt.NDArray[np.float64]

NUCLEUS = 1e-6
"""Default nucleus: tokens with p or q at least this. Full-vocabulary drift is ruled by tokens at
log-prob -40 that nobody will ever sample."""

_CHUNK = 1 << 20  # logits of one side worked on at a time: twelve float64 temporaries = 100 MB


def compare_rows(
    reference: npt.ArrayLike,
    engine: npt.ArrayLike,
    *,
    eta: float = NUCLEUS,
    token_ids: npt.ArrayLike | None = None,
    truncated: bool = False,
) -> dict[str, npt.NDArray[np.generic]]:
    """The token table's columns for rows ``[..., V]`` of both sides, each ``[...]``.

    kl_engine_reference KL(q||p), kl_reference_engine KL(p||q), tv, chi2 = E_q[(p/q-1)^2], drift
    (oscillation of x on the nucleus, NaN if that is empty), tail_mass (the larger mass outside it),
    logit_var = Var_q(x), entropy (of p), and for both sides margin (top-1 minus top-2), top1
    (lowest index of equal maxima), top1_logprob; flip; nonfinite. With ``token_ids [...]`` also
    engine_logprob and reference_logprob.

    A row with a value that is not finite: NaN in the float columns, -1 as top-1, flip False,
    and nonfinite says how many values on both sides together. Under ``truncated`` a side without
    any token counts all V as not finite; where the supports differ KL, chi2, drift and logit_var
    are infinite as their definitions say.

    Raises InputError for shapes that differ, an empty vocabulary, ids outside it, eta not in [0,1).
    """
    z_p, z_q = _rows(reference, "reference"), _rows(engine, "engine")
    _same_shape(z_p, z_q)
    if not 0 <= eta < 1:
        raise InputError(f"the nucleus threshold must be in [0, 1), got {eta}")
    shape, vocab = z_p.shape[:-1], z_p.shape[-1]
    z_p, z_q = z_p.reshape(-1, vocab), z_q.reshape(-1, vocab)
    ids = None if token_ids is None else _token_ids(token_ids, shape, vocab)
    parts = [
        _columns(z_p[rows], z_q[rows], eta, None if ids is None else ids[rows], truncated)
        for rows in _chunks(len(z_p), vocab)
    ]
    return {name: np.concatenate([p[name] for p in parts]).reshape(shape) for name in parts[0]}


def log_softmax(logits: npt.ArrayLike) -> Array:
    """Normalised log-probs ``[..., V]``; minus infinity stays, any other non-finite spreads NaN."""
    z = _rows(logits, "logit")
    return np.asarray(z - _lse(z)[..., None])


def log_ratio(p: npt.ArrayLike, q: npt.ArrayLike) -> Array:
    """x = log p - log q ``[..., V]``, normalised so that E_q[e^x] = 1 relative to x itself."""
    return _pair(p, q).x


def kl_divergence(first: npt.ArrayLike, second: npt.ArrayLike) -> Array:
    """KL(first || second) ``[...]`` in nats; infinite where first has mass and second none."""
    return _kl(_pair(second, first))


def total_variation(p: npt.ArrayLike, q: npt.ArrayLike) -> Array:
    """TV = 1/2 sum |p - q| ``[...]``, in [0, 1]."""
    return np.asarray(np.abs(_pair(p, q).gap).sum(-1) / 2)


def chi_squared(first: npt.ArrayLike, second: npt.ArrayLike) -> Array:
    """chi2(first || second) = E_second[(first/second - 1)^2] ``[...]``."""
    return _chi2(_pair(first, second))


def bhattacharyya(p: npt.ArrayLike, q: npt.ArrayLike) -> Array:
    """BC = sum sqrt(p q) ``[...]``, in [0, 1]; the squared Hellinger distance is 1 - BC."""
    pair = _pair(p, q)
    return np.asarray(np.exp((pair.logp + pair.logq) / 2).sum(-1))


def hockey_stick(p: npt.ArrayLike, q: npt.ArrayLike, threshold: npt.ArrayLike) -> Array:
    """E_C(p || q) = sum (p - C q)_+ = E_q(w - C)_+ ``[...]`` for C = ``threshold >= 1``."""
    c = np.asarray(threshold, np.float64)
    if not bool(np.all(c >= 1)):
        raise InputError("the hockey-stick threshold C must be >= 1")
    pair = _pair(p, q)
    # q expm1(x) - (C - 1) q: the same as p - C q without cancellation when C = 1 and x is tiny.
    return np.asarray(np.maximum(pair.gap - (c[..., None] - 1) * pair.q, 0).sum(-1))


def drift(p: npt.ArrayLike, q: npt.ArrayLike, *, eta: float = NUCLEUS) -> Array:
    """max x - min x over the nucleus {p >= eta or q >= eta} ``[...]``; eta = 0: all tokens."""
    pair = _pair(p, q)
    return _oscillation(pair, _nucleus(pair, eta))


def tail_mass(p: npt.ArrayLike, q: npt.ArrayLike, *, eta: float = NUCLEUS) -> Array:
    """The larger of p's and q's mass outside the nucleus ``[...]``."""
    pair = _pair(p, q)
    return _tail(pair, _nucleus(pair, eta))


def logit_variance(p: npt.ArrayLike, q: npt.ArrayLike) -> Array:
    """Var_q(x) = Var_q(d) ``[...]``, nats^2: to leading order twice the KL divergence."""
    return _variance(_pair(p, q))


def entropy(logits: npt.ArrayLike) -> Array:
    """-sum p log p ``[...]`` in nats."""
    return _entropy(log_softmax(logits))


def margin(logits: npt.ArrayLike) -> Array:
    """Top-1 minus top-2 ``[...]``: the same in logits and in log-probs. 0 at a tie; infinite where
    only one token has mass."""
    return _margin(_rows(logits, "logit"))


def top1(logits: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Index of the largest value ``[...]`` (the lowest of equal ones); -1 in a row with NaN."""
    z = _rows(logits, "logit")
    return np.where(np.isnan(z).any(-1), -1, z.argmax(-1)).astype(np.int64)


def race_disagreement(p: npt.ArrayLike, q: npt.ArrayLike) -> Array:
    """Exact P(tokens differ) ``[...]`` when both sides sample by the same exponential race.

    Token i wins both races with probability 1 / sum_j max(p_j/p_i, q_j/q_i), so the answer is one
    minus their sum over i. (The same-seed Gumbel-max sampler is this race.) O(V^2) per row.
    """
    pair = _pair(p, q)
    with np.errstate(invalid="ignore"):  # outside the support, where nothing is won
        ratio_p = pair.logp[..., None, :] - pair.logp[..., :, None]
        ratio_q = pair.logq[..., None, :] - pair.logq[..., :, None]
    both = np.isfinite(pair.logp) & np.isfinite(pair.logq)
    worst = np.exp(np.maximum(ratio_p, ratio_q)).sum(-1)
    agree = np.divide(1.0, worst, out=np.zeros_like(worst), where=both)
    bad = np.isnan(pair.x).any(-1)
    return np.where(bad, np.nan, np.maximum(1 - agree.sum(-1), 0))


def expm1_minus(x: npt.ArrayLike) -> Array:
    """e^x - 1 - x to full relative precision: by its series where the difference would cancel."""
    x = np.asarray(x, np.float64)
    small = np.abs(x) < 0.05
    s = np.where(small, x, 0.0)
    # x^2/2 (1 + x/3 (1 + x/4 (...))): eight terms leave 1e-18 at |x| = 0.05.
    series = np.ones_like(s)
    for n in range(10, 2, -1):
        series = 1 + s / n * series
    wide = np.where(small, 0.0, x)
    with np.errstate(over="ignore"):
        return np.where(small, s * s / 2 * series, np.expm1(wide) - wide)


@dataclass(frozen=True)
class _Pair:
    """Both sides normalised. x = logp - logq (0 where neither has mass); gap = p - q from x."""

    logp: Array
    logq: Array
    p: Array
    q: Array
    x: Array
    gap: Array


def _pair(p_rows: npt.ArrayLike, q_rows: npt.ArrayLike) -> _Pair:
    z_p, z_q = _rows(p_rows, "p"), _rows(q_rows, "q")
    _same_shape(z_p, z_q)
    lse_p, lse_q = _lse(z_p)[..., None], _lse(z_q)[..., None]
    logp, logq = z_p - lse_p, z_q - lse_q
    p, q = np.exp(logp), np.exp(logq)
    with np.errstate(invalid="ignore"):
        x = (z_p - z_q) - (lse_p - lse_q)
    nowhere = (z_p == -np.inf) & (z_q == -np.inf) & np.isfinite(lse_p) & np.isfinite(lse_q)
    x = np.where(nowhere, 0.0, x)
    # The two log-sum-exps carry 1e-15 each, which would swamp a drift of 1e-14. E_q[e^x] = 1 holds
    # for the true x, and the residual is summed here with errors relative to x itself.
    x = x - np.log1p(_gap(p, q, x).sum(-1, keepdims=True))
    x = np.where(nowhere, 0.0, x)
    return _Pair(logp, logq, p, q, x, _gap(p, q, x))


def _gap(p: Array, q: Array, x: Array) -> Array:
    """p - q, from x where it would cancel."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(np.abs(x) <= 1, q * np.expm1(x), p - q)


def _kl(pair: _Pair) -> Array:
    """KL(q || p) = sum q (e^x - 1 - x)."""
    with np.errstate(over="ignore", invalid="ignore"):
        near = pair.q * expm1_minus(np.clip(pair.x, -1, 1))
        far = pair.p - pair.q - np.where(pair.q > 0, pair.q * pair.x, 0.0)
    return np.asarray(np.where(np.abs(pair.x) <= 1, near, far).sum(-1))


def _chi2(pair: _Pair) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        terms = np.where(pair.gap == 0, 0.0, pair.gap * np.expm1(pair.x))
    return np.asarray(terms.sum(-1))


def _nucleus(pair: _Pair, eta: float) -> npt.NDArray[np.bool_]:
    return np.asarray((pair.p >= eta) | (pair.q >= eta))


def _oscillation(pair: _Pair, inside: npt.NDArray[np.bool_]) -> Array:
    """max - min of x inside, over tokens that at least one side can emit; NaN if there is none."""
    inside = inside & ((pair.logp > -np.inf) | (pair.logq > -np.inf))
    bad = np.isnan(pair.x).any(-1) | ~inside.any(-1)
    high = np.where(inside, pair.x, -np.inf).max(-1)
    low = np.where(inside, pair.x, np.inf).min(-1)
    with np.errstate(invalid="ignore"):
        return np.where(bad, np.nan, np.maximum(high - low, 0))


def _tail(pair: _Pair, inside: npt.NDArray[np.bool_]) -> Array:
    bad = np.isnan(pair.x).any(-1)
    outside_p = np.where(inside, 0.0, pair.p).sum(-1)
    outside_q = np.where(inside, 0.0, pair.q).sum(-1)
    return np.where(bad, np.nan, np.maximum(outside_p, outside_q))


def _variance(pair: _Pair) -> Array:
    bad = np.isnan(pair.x).any(-1)
    lost = ((pair.q > 0) & (pair.x == -np.inf)).any(-1)
    x = np.where((pair.q > 0) & np.isfinite(pair.x), pair.x, 0.0)
    centred = x - (pair.q * x).sum(-1, keepdims=True)
    variance = (pair.q * centred * centred).sum(-1)
    return np.where(bad, np.nan, np.where(lost, np.inf, variance))


def _entropy(logp: Array) -> Array:
    p = np.exp(logp)
    with np.errstate(invalid="ignore"):
        return np.asarray(-np.where(p == 0, 0.0, p * logp).sum(-1))


def _margin(z: Array) -> Array:
    if z.shape[-1] == 1:
        return np.where(np.isnan(z[..., 0]), np.nan, np.inf)
    top = np.partition(z, z.shape[-1] - 2, axis=-1)[..., -2:]
    with np.errstate(invalid="ignore"):
        gap = top[..., 1] - top[..., 0]
    return np.where(np.isnan(z).any(-1), np.nan, gap)


def _columns(
    z_p: Array, z_q: Array, eta: float, ids: npt.NDArray[np.int64] | None, truncated: bool
) -> dict[str, npt.NDArray[np.generic]]:
    nonfinite = _count_nonfinite(z_p, truncated) + _count_nonfinite(z_q, truncated)
    bad = nonfinite > 0
    z_p, z_q = (np.where(bad[:, None], np.nan, z) for z in (z_p, z_q))
    pair, back = _pair(z_p, z_q), _pair(z_q, z_p)
    inside = _nucleus(pair, eta)
    columns: dict[str, npt.NDArray[np.generic]] = {
        "kl_engine_reference": _kl(pair),
        "kl_reference_engine": _kl(back),
        "tv": np.abs(pair.gap).sum(-1) / 2,
        "chi2": _chi2(pair),
        "drift": _oscillation(pair, inside),
        "tail_mass": _tail(pair, inside),
        "logit_var": _variance(pair),
        "entropy": _entropy(pair.logp),
        "engine_margin": _margin(z_q),
        "reference_margin": _margin(z_p),
    }
    tops = {"engine": top1(z_q), "reference": top1(z_p)}
    for side, log in (("engine", pair.logq), ("reference", pair.logp)):
        columns[f"{side}_top1"] = tops[side]
        columns[f"{side}_top1_logprob"] = log.max(-1)
        if ids is not None:
            columns[f"{side}_logprob"] = np.take_along_axis(log, ids[:, None], -1)[:, 0]
    columns["flip"] = tops["engine"] != tops["reference"]
    columns["nonfinite"] = nonfinite
    return columns


def _count_nonfinite(z: Array, truncated: bool) -> npt.NDArray[np.int64]:
    outside = z == -np.inf
    bad = ~np.isfinite(z)
    if truncated:
        bad &= ~(outside & ~outside.all(-1, keepdims=True))
    return np.asarray(bad.sum(-1), np.int64)


def _lse(z: Array) -> Array:
    """Log-sum-exp; a row of minus infinities or with NaN or plus infinity gives NaN."""
    top = z.max(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return np.asarray(top[..., 0] + np.log(np.exp(z - top).sum(-1)))


def _rows(values: npt.ArrayLike, name: str) -> Array:
    try:
        rows = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"the {name} rows are not numbers: {error}") from error
    if rows.ndim == 0 or rows.shape[-1] == 0:
        raise InputError(f"the {name} rows need a vocabulary axis, got shape {rows.shape}")
    return rows


def _same_shape(z_p: Array, z_q: Array) -> None:
    if z_p.shape != z_q.shape:
        raise InputError(
            f"rows do not pair up: {z_p.shape} of the reference, {z_q.shape} of the engine",
            fix="score the same tokens on both sides, over the same vocabulary",
        )


def _token_ids(
    token_ids: npt.ArrayLike, shape: tuple[int, ...], vocab: int
) -> npt.NDArray[np.int64]:
    ids = np.asarray(token_ids)
    if ids.shape != shape or not np.issubdtype(ids.dtype, np.integer):
        raise InputError(f"token ids must be integers {shape}, got {ids.dtype} {ids.shape}")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise InputError(f"token ids leave the vocabulary of {vocab} tokens")
    return ids.reshape(-1).astype(np.int64)


def _chunks(rows: int, vocab: int) -> Iterator[slice]:
    step = max(1, _CHUNK // vocab)
    yield slice(0, step)
    for start in range(step, rows, step):
        yield slice(start, start + step)
