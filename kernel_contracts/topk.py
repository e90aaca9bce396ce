"""KL and TV when each row has only k logged log-probs: what is certain, as an interval.

Both sides log the same k token ids per row; everything else is one *rest bucket* of mass P_t
(reference) and Q_t (engine). Merging tokens can only bring two laws closer, so the divergence of
the bucketed laws is a lower bound: it can prove a FAIL and never a PASS. Above, what the rest can
hide is bounded by its drift, if that is known; for KL not at all if it is not. The sum over the
logged tokens alone is neither bound (it can be negative) and is not used.

p: reference, q: engine, x = log p - log q, in nats; K(D): ``bounds.kl_from_drift``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernel_contracts.bounds import kl_from_drift, tv_from_drift
from kernel_contracts.divergence import expm1_minus
from kernel_contracts.errors import InputError

__all__ = ["RESOLUTION", "TopkIntervals", "topk_intervals"]

Array = npt.NDArray[np.float64]

RESOLUTION = 1e-6
"""How well the rest masses are known: 1 minus a sum of fp32 log-probs' exponentials."""


@dataclass(frozen=True)
class TopkIntervals:
    """Per row ``[...]``. kl_*: KL(q||p), nats.  tv_*: in [0, 1].  rest_*: P_t and Q_t.

    NaN in a row that has a log-prob that is not finite, of which ``nonfinite`` counts them.
    """

    kl_lower: Array
    kl_upper: Array
    tv_lower: Array
    tv_upper: Array
    rest_reference: Array
    rest_engine: Array
    nonfinite: npt.NDArray[np.int64]


def topk_intervals(
    reference_logprobs: npt.ArrayLike,
    engine_logprobs: npt.ArrayLike,
    *,
    rest_drift: npt.ArrayLike | None = None,
    drift: npt.ArrayLike | None = None,
    resolution: float = RESOLUTION,
) -> TopkIntervals:
    """Intervals of KL(q||p) and TV from log-probs ``[..., k]`` of the *same* ids on both sides.

    The log-probs are over the whole vocabulary (raw, not renormalised on the k tokens), in nats.
    For KL(p||q) exchange the sides.

    rest_drift ``[...]``: a bound on max x - min x over the rest tokens.  drift ``[...]``: the same
    over all tokens (so also over the rest), dropped in rows whose logged tokens refute it.  Known
    from a full-vocabulary audit of the same pair of programs, for instance. With
    f(q, p) = p - q - q ln(p/q) >= 0,

        sum f(q, p) + f(Q_t, P_t)  <=  KL  <=  the same + Q_t K(D_t)
        sum |p-q|/2 + |P_t - Q_t|/2  <=  TV  <=  the same + min(P_t, Q_t) tanh(D_t/4)

    Without either drift, KL has no upper bound (infinity, unless the rest is empty) and TV's is
    sum |p-q|/2 + (P_t + Q_t)/2. resolution: rest masses are taken as known to within this, in the
    direction that widens the interval; 0 for exact log-probs. The logged log-probs themselves are
    taken as exact: an interval finer than their rounding says nothing.

    Raises InputError for shapes that differ, negative drifts, and log-probs that sum to more than
    1 + resolution: they are of another distribution, or too coarse.
    """
    logp, logq = _rows(reference_logprobs, "reference"), _rows(engine_logprobs, "engine")
    if logp.shape != logq.shape:
        raise InputError(
            f"the log-probs of both sides differ in shape: {logp.shape}, {logq.shape}",
            fix="score the same k token ids on both sides",
        )
    if not 0 <= resolution < 1:
        raise InputError(f"the resolution must lie in [0, 1), got {resolution}")
    shape = logp.shape[:-1]
    nonfinite = (~np.isfinite(logp)).sum(-1) + (~np.isfinite(logq)).sum(-1)
    bad = nonfinite > 0
    rest_p = _rest_mass(logp, bad, resolution, "reference")
    rest_q = _rest_mass(logq, bad, resolution, "engine")
    with np.errstate(invalid="ignore"):
        x = logp - logq
        p, q = np.exp(logp), np.exp(logq)
        kl_top = _f(q, p, x).sum(-1)
        tv_top = np.abs(np.where(np.abs(x) <= 1, q * np.expm1(x), p - q)).sum(-1) / 2

    low_p, high_p = np.maximum(rest_p - resolution, 0), np.minimum(rest_p + resolution, 1)
    low_q, high_q = np.maximum(rest_q - resolution, 0), np.minimum(rest_q + resolution, 1)
    # f is 0 at Q_t = P_t and convex, so its least value is where the two ranges come closest, its
    # largest at a corner.
    apart_p, apart_q = _closest(low_p, high_p, low_q, high_q)
    kl_lower = kl_top + _f(apart_q, apart_p)
    corners = [_f(a, b) for a in (low_q, high_q) for b in (low_p, high_p)]
    tv_lower = tv_top + np.abs(apart_p - apart_q) / 2
    tv_upper = tv_top + (high_p + high_q) / 2

    d_all = _drift(drift, shape)
    # A row whose logged tokens alone drift further refutes the bound: nothing is known of it.
    d_all = np.where(x.max(-1) - x.min(-1) > d_all * (1 + 1e-9) + 1e-12, np.inf, d_all)
    d_rest = np.minimum(_drift(rest_drift, shape), d_all)
    with np.errstate(invalid="ignore"):
        hidden = np.where(high_q == 0, 0.0, high_q * kl_from_drift(d_rest))
        kl_upper = kl_top + np.maximum.reduce(corners) + hidden
        # If all of x lies within D of every logged x, so does each rest token's.
        kl_upper = np.fmin(kl_upper, kl_top + _rest_from_all(x, d_all, high_q))
        parted = np.maximum(high_p - low_q, high_q - low_p) / 2
        tv_drift = tv_top + parted + np.minimum(high_p, high_q) * tv_from_drift(d_rest)
    tv_upper = np.minimum(np.fmin(tv_upper, tv_drift), 1.0)

    def shown(values: Array) -> Array:
        return np.where(bad, np.nan, values)

    return TopkIntervals(
        kl_lower=shown(kl_lower),
        kl_upper=shown(np.maximum(kl_upper, kl_lower)),
        tv_lower=shown(np.minimum(tv_lower, 1.0)),
        tv_upper=shown(tv_upper),
        rest_reference=shown(rest_p),
        rest_engine=shown(rest_q),
        nonfinite=np.asarray(nonfinite, np.int64),
    )


def _f(q: Array, p: Array, x: Array | None = None) -> Array:
    """p - q - q ln(p/q) >= 0: one token's share of KL(q||p). Infinite for p = 0 < q."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log(p / q) if x is None else x
        near = q * expm1_minus(np.clip(ratio, -1, 1))
        far = p - q - q * ratio
    value = np.where(np.abs(ratio) <= 1, near, far)
    return np.where(q == 0, p, np.maximum(value, 0))


def _rest_mass(log: Array, bad: npt.NDArray[np.bool_], resolution: float, side: str) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):
        rest = 1 - np.exp(log).sum(-1)
    short = float(rest[~bad].min()) if bool((~bad).any()) else 0.0
    if short < -max(resolution, 1e-12):
        raise InputError(
            f"the {side}'s k probabilities sum to {1 - short:.9g}",
            fix="log raw log-probs over the whole vocabulary, or say how coarse they are "
            "(resolution=)",
        )
    return np.asarray(np.where(bad, 0.0, np.clip(rest, 0, 1)))


def _closest(low_p: Array, high_p: Array, low_q: Array, high_q: Array) -> tuple[Array, Array]:
    """The pair (P, Q) in the two ranges that are closest: equal where the ranges overlap."""
    p = np.where(low_p > high_q, low_p, np.where(high_p < low_q, high_p, 0.0))
    q = np.where(low_p > high_q, high_q, np.where(high_p < low_q, low_q, 0.0))
    return p, q


def _rest_from_all(x: Array, drift: Array, rest_q: Array) -> Array:
    """Q_t times the largest e^x - 1 - x of the x that a drift over all tokens allows the rest."""
    high = np.minimum(x.min(-1) + drift, drift)
    low = np.maximum(x.max(-1) - drift, -drift)
    with np.errstate(over="ignore", invalid="ignore"):
        value = rest_q * np.maximum(expm1_minus(low), expm1_minus(high))
    unknown = ~np.isfinite(drift)
    return np.where(rest_q == 0, 0.0, np.where(unknown, np.inf, value))


def _drift(drift: npt.ArrayLike | None, shape: tuple[int, ...]) -> Array:
    """``[...]``; infinite where nothing is known."""
    if drift is None:
        return np.full(shape, np.inf)
    d = np.asarray(drift, np.float64)
    if bool((d < 0).any()):
        raise InputError("a drift cannot be negative")
    try:
        d = np.broadcast_to(d, shape)
    except ValueError as error:
        raise InputError(f"drifts {d.shape} do not fit rows {shape}") from error
    return np.where(np.isnan(d), np.inf, d)


def _rows(values: npt.ArrayLike, side: str) -> Array:
    rows = np.asarray(values, np.float64)
    if rows.ndim == 0 or rows.shape[-1] == 0:
        raise InputError(f"the {side} needs at least one log-prob per row, got shape {rows.shape}")
    return rows
