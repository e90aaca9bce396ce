"""Policy-gradient bias that importance weights leave, or bring in.

w_t = p/q of token t, W their product over the response. F = A_max G for one token's term, F_T =
sup ||A S|| <= T F for a response's. Notation else: ``bounds.gradient``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernel_contracts.bounds._domain import Array, between, nonnegative, product, share, steps
from kernel_contracts.bounds.gradient import score_scale
from kernel_contracts.bounds.token import (
    hockey_stick_from_chi2,
    hockey_stick_from_drift,
    kl_from_drift,
)
from kernel_contracts.errors import InputError

__all__ = [
    "bias_clipped",
    "bias_clipped_from_drift",
    "bias_cumulative_weights",
    "bias_full_weights",
    "bias_masked",
    "bias_token_weights",
    "bias_truncated",
    "bias_truncated_from_chi2",
    "bias_truncated_from_drift",
    "bias_truncated_from_exceedance",
    "clip_distance",
    "truncation_is_noop",
    "weight_tail_from_drift",
]


def bias_token_weights(
    sup_tv: npt.ArrayLike,
    tokens: npt.ArrayLike,
    advantage_bound: npt.ArrayLike = 1.0,
    score_norm: npt.ArrayLike = 1.0,
) -> Array:
    """Weights w_t on each token: <= 2 F T min(1, (T - 1) eps).

    They put right the action's own shift only; prefix and continuation stay the engine's. Still
    O(T^2 eps), and larger than without weights in some cases (6.5% of random small trees): less
    variance than sequence weights, no certificate. Attained at T = 2.
    """
    eps, t = share(sup_tv, "TV"), steps(tokens)
    rest = np.minimum(product(t - 1, eps), 1.0)
    return product(2 * score_scale(advantage_bound, score_norm), t, rest)


def bias_cumulative_weights(
    sup_tv: float, tokens: int, advantage_bound: float = 1.0, score_norm: float = 1.0
) -> float:
    """Weights w_1 ... w_t on token t: <= 2 F sum_t min(1, (T - t) eps). Attained at T = 2.

    Prefix and action are the reference's, the continuation stays the engine's. Where A depends on
    what precedes and includes t only, nothing is left.
    """
    eps, t = share(sup_tv, "TV"), int(steps(tokens))
    left = np.minimum(np.arange(t, dtype=np.float64) * eps, 1.0).sum()
    return float(2 * score_scale(advantage_bound, score_norm) * left)


def bias_full_weights(unsupported: npt.ArrayLike = 0.0, bound: npt.ArrayLike = 1.0) -> Array:
    """Weight W of the whole response: 0 where q > 0 wherever p > 0, else F_T times P's mass where
    Q has none. F_T = sup ||A S|| <= T F. Attained by A S constant there."""
    return product(share(unsupported, "the unsupported mass"), nonnegative(bound, "F_T"))


def bias_truncated(mean_excess: npt.ArrayLike, bound: npt.ArrayLike = 1.0) -> Array:
    """Weights min(W, C): <= F_T E_Q(W - C)_+. F_T = sup ||A S||, F for one token, at most T F.

    mean_excess: E_Q(W - C)_+, the hockey-stick divergence of P from Q. Attained by A S constant
    where W > C.
    """
    return product(share(mean_excess, "E_Q(W - C)_+"), nonnegative(bound, "F_T"))


def bias_truncated_from_drift(
    drift: npt.ArrayLike, threshold: npt.ArrayLike, bound: npt.ArrayLike = 1.0
) -> Array:
    """Weights min(w, C), one token: <= F (e^(D/2) - sqrt C)^2/(e^D - 1); 0 from C = e^D on.

    Attained as ``hockey_stick_from_drift``.
    """
    return bias_truncated(hockey_stick_from_drift(drift, threshold), bound)


def bias_truncated_from_chi2(
    chi2: npt.ArrayLike, threshold: npt.ArrayLike, bound: npt.ArrayLike = 1.0
) -> Array:
    """Weights min(W, C), C > 1: <= F_T chi2(P||Q)/(4 (C - 1)), and at most F_T.

    Approached as ``hockey_stick_from_chi2``.
    """
    return bias_truncated(hockey_stick_from_chi2(chi2, threshold), bound)


def bias_truncated_from_exceedance(exceedance: npt.ArrayLike, bound: npt.ArrayLike = 1.0) -> Array:
    """Weights min(W, C): <= F_T P_P(W > C), the share of *reference* responses over the threshold.

    Approached when W is far over C wherever it is over.
    """
    return bias_truncated(share(exceedance, "P_P(W > C)"), bound)


def bias_masked(outside: npt.ArrayLike, bound: npt.ArrayLike = 1.0) -> Array:
    """Weights W 1{alpha <= W <= beta}: <= F_T P_P(W outside [alpha, beta]).

    What is masked is missing from E_P[A S]. Attained by A S constant there.
    """
    return product(share(outside, "P_P(W outside)"), nonnegative(bound, "F_T"))


def clip_distance(weights: npt.ArrayLike, clip: float) -> Array:
    """|w - clip(w, 1 - c, 1 + c)| for each weight. c = 0 takes every weight off."""
    w = nonnegative(weights, "the weights")
    c = float(nonnegative(clip, "the clip c"))
    return np.abs(w - np.clip(w, 1 - c, 1 + c))


def bias_clipped(mean_distance: npt.ArrayLike, bound: npt.ArrayLike = 1.0) -> Array:
    """Weights clip(w, 1-c, 1+c): <= F E_q|w - clip w|. Attained by A s following its sign.

    mean_distance: mean of ``clip_distance`` on the engine's tokens. c = 0 is the estimator
    *without* weights, 2 F TV: a limit on ratios is never a clip at 0.
    """
    return product(between(mean_distance, "E_q|w - clip w|", 0.0, 2.0), nonnegative(bound, "F"))


def bias_clipped_from_drift(
    drift: npt.ArrayLike, clip: npt.ArrayLike, bound: npt.ArrayLike = 1.0
) -> Array:
    """Weights clip(w, 1-c, 1+c), 0 <= c < 1: F times the sum of both sides' hockey sticks.

    E_q(w - 1 - c)_+ is E_{1+c}(p||q), E_q(1 - c - w)_+ is (1 - c) E_{1/(1-c)}(q||p). Attained at
    c = 0 (2 F tanh(D/4)); elsewhere the two are largest for different laws.
    """
    c = share(clip, "the clip c")
    if bool((c >= 1).any()):
        raise InputError("the clip c must be below 1")
    above = hockey_stick_from_drift(drift, 1 + c)
    below = (1 - c) * hockey_stick_from_drift(drift, 1 / (1 - c))
    return bias_clipped(above + below, bound)


def weight_tail_from_drift(
    drift: npt.ArrayLike, tokens: npt.ArrayLike, threshold: npt.ArrayLike
) -> Array:
    """P_P(W > C) <= exp(-2 (ln C - T K(D))_+^2 / (T D^2)), in [0, 1].

    Azuma-Hoeffding: under P each step of ln W has mean KL(p||q) <= K(D) <= D^2/8 and lies, given
    the past, in an interval of length D. 0 from C = e^(T D) on. A large-deviation bound: right in
    the exponent, nowhere attained.
    """
    d, t = nonnegative(drift, "the drift D"), steps(tokens)
    log_c = np.log(between(threshold, "the threshold C", 1.0))
    excess = np.maximum(log_c - product(t, kl_from_drift(d)), 0)
    safe = np.where(d > 0, d, 1.0)
    value = np.exp(-2 * excess**2 / (t * safe**2))
    return np.where(log_c >= product(t, d), 0.0, value)


def truncation_is_noop(
    threshold: npt.ArrayLike, drift: npt.ArrayLike, tokens: npt.ArrayLike = 1
) -> npt.NDArray[np.bool_]:
    """True where weights cannot reach the threshold: C >= e^(T D), so truncation does nothing.

    T = 1 for token weights. |ln w| <= D for each token. False where the drift is NaN.
    """
    log_c = np.log(between(threshold, "the threshold C", 1.0))
    return np.asarray(log_c >= product(steps(tokens), nonnegative(drift, "the drift D")))
