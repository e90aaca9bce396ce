"""Policy-gradient bias without importance weights: engine rollouts, the reference's gradient.

s = grad log p(token | context), ||s|| <= G; |A| <= A_max; F = A_max G. The target is g = E_P[A S],
S the sum of the scores of a response; what is computed is a mean over the engine's rollouts
(``bounds.weighted`` for those with weights). Bounds are on the norm of their difference, in units
of A_max G, and assume q > 0 wherever p > 0. For losses averaged over tokens, divide by T. Notation
else: ``bounds.token``.

The natural-gradient forms measure the bias by the inverse Fisher matrix of the reference (of one
token, or of a response), E[s s^T]: they need no G and do not depend on the parameterisation.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernel_contracts.bounds._domain import Array, nonnegative, product, share, steps
from kernel_contracts.bounds.sequence import sequence_chi2_from_drift, sequence_tv_from_drift

__all__ = [
    "bias_baseline",
    "bias_none_token",
    "bias_none_trajectory",
    "bias_none_trajectory_from_drift",
    "bias_none_trajectory_from_sup_tv",
    "bias_token_centred",
    "l2_bias",
    "l2_bias_from_drift",
    "logit_space_bias",
    "natural_bias",
    "natural_bias_from_drift",
    "score_norm_squared",
]


def score_scale(advantage_bound: npt.ArrayLike, score_norm: npt.ArrayLike) -> Array:
    """F = A_max G."""
    return product(_advantage(advantage_bound), nonnegative(score_norm, "the score norm G"))


def _advantage(advantage_bound: npt.ArrayLike) -> Array:
    return nonnegative(advantage_bound, "the advantage bound A_max")


# --- one token ---


def bias_none_token(
    tv: npt.ArrayLike, advantage_bound: npt.ArrayLike = 1.0, score_norm: npt.ArrayLike = 1.0
) -> Array:
    """No weights, one token: ||g_0 - g|| <= F E_q|w - 1| = 2 F TV.

    At most F rho where |w - 1| <= rho (give ``tv_from_ratio``), 2 F tanh(D/4) under a drift D (give
    ``tv_from_drift``). Attained by scores of norm G along one line, the sign of A following 1 - w.
    """
    return product(2 * share(tv, "TV"), score_scale(advantage_bound, score_norm))


def bias_token_centred(tv: npt.ArrayLike, radius: npt.ArrayLike) -> Array:
    """No weights, one token: ||g_0 - g|| <= 2 TV min over v of sup ||A s - v||.

    Any constant v may be taken off A s, since E_q[1 - w] = 0. radius: that minimum. Attained as
    ``bias_none_token``.
    """
    return product(2 * share(tv, "TV"), nonnegative(radius, "the radius of A s"))


def bias_baseline(
    tv: npt.ArrayLike, baseline: npt.ArrayLike, score_norm: npt.ArrayLike = 1.0
) -> Array:
    """A baseline b is no longer free: ||E_q[b s]|| = |b| ||E_q[(1-w) s]|| <= 2 |b| G TV.

    E_p[s] = 0, E_q[s] is not. Attained by scores along one line that follow the sign of 1 - w.
    """
    return bias_none_token(tv, np.abs(np.asarray(baseline, np.float64)), score_norm)


def l2_bias(
    chi2_engine_reference: npt.ArrayLike,
    mean_square_score: npt.ArrayLike,
    advantage_bound: npt.ArrayLike = 1.0,
) -> Array:
    """No weights, L2 route: ||g_0 - g|| <= A_max sqrt(chi2(q||p)) sqrt(E_p ||s||^2).

    Cauchy-Schwarz on E_p[(q/p - 1) A s]. For a response: chi2(Q||P) and E_P ||S||^2, which is the
    sum of the tokens' E_P ||s_t||^2 (scores are orthogonal increments) and so at most T G^2.
    Attained by A = A_max and s proportional to q/p - 1 (for responses to the increments of Q/P).
    """
    chi2 = nonnegative(chi2_engine_reference, "chi2(q||p)")
    square = nonnegative(mean_square_score, "the mean square score")
    return product(_advantage(advantage_bound), np.sqrt(chi2), np.sqrt(square))


def natural_bias(
    chi2_engine_reference: npt.ArrayLike, advantage_bound: npt.ArrayLike = 1.0
) -> Array:
    """No weights, natural-gradient norm: sqrt(b^T E[s s^T]^-1 b) <= A_max sqrt(chi2(q||p)).

    For a token, or with chi2(Q||P) for a response. Attained by A = A_max whenever the scores span
    q/p - 1; softmax logits always do.
    """
    chi2 = nonnegative(chi2_engine_reference, "chi2(q||p)")
    return product(_advantage(advantage_bound), np.sqrt(chi2))


def logit_space_bias(p: npt.ArrayLike, q: npt.ArrayLike, advantages: npt.ArrayLike) -> Array:
    """Exact bias in logit space, one token: b = sum_y (q_y - p_y) A_y (e_y - p); ``[..., V]``.

    s = e_y - p, so E_q[s] = q - p and ||E_q s||_1 = 2 TV. In parameters the bias is J^T b, at most
    sigma_max(J) ||b||.
    """
    p, q = share(p, "p"), share(q, "q")
    moved = (q - p) * np.asarray(advantages, np.float64)
    return np.asarray(moved - p * moved.sum(-1, keepdims=True))


def score_norm_squared(token_probability: npt.ArrayLike, sum_of_squares: npt.ArrayLike) -> Array:
    """||e_y - p||^2 = 1 - 2 p_y + sum p^2, exactly; at most 2. For weighting, forward pass only."""
    p = share(token_probability, "the probability")
    return np.asarray(1 - 2 * p + share(sum_of_squares, "sum p^2"))


# --- responses of T tokens ---


def bias_none_trajectory(
    tv_sequence: npt.ArrayLike,
    tokens: npt.ArrayLike,
    advantage_bound: npt.ArrayLike = 1.0,
    score_norm: npt.ArrayLike = 1.0,
) -> Array:
    """No weights: ||g_0 - g|| <= 2 T F TV_seq. Attained at T = 1."""
    return product(bias_none_token(tv_sequence, advantage_bound, score_norm), steps(tokens))


def bias_none_trajectory_from_sup_tv(
    sup_tv: npt.ArrayLike,
    tokens: npt.ArrayLike,
    advantage_bound: npt.ArrayLike = 1.0,
    score_norm: npt.ArrayLike = 1.0,
) -> Array:
    """No weights: <= 2 T F min(1, T eps), the T^2 law. eps: the largest TV of any context."""
    tv = np.minimum(product(share(sup_tv, "TV"), steps(tokens)), 1.0)
    return bias_none_trajectory(tv, tokens, advantage_bound, score_norm)


def l2_bias_from_drift(
    drift: npt.ArrayLike,
    tokens: npt.ArrayLike = 1,
    advantage_bound: npt.ArrayLike = 1.0,
    score_norm: npt.ArrayLike = 1.0,
) -> Array:
    """No weights: <= F sqrt(T) sqrt(cosh^(2T)(D/2) - 1), about T F D/2.

    ``l2_bias`` with the chi2 that a drift allows and E_P||S||^2 <= T G^2. At T = 1:
    F sinh(D/2). Approached, at any T, as D -> 0.
    """
    chi2 = sequence_chi2_from_drift(drift, tokens)
    return product(score_scale(advantage_bound, score_norm), np.sqrt(steps(tokens)), np.sqrt(chi2))


def natural_bias_from_drift(
    drift: npt.ArrayLike, tokens: npt.ArrayLike = 1, advantage_bound: npt.ArrayLike = 1.0
) -> Array:
    """No weights, natural-gradient norm: <= A_max sqrt(cosh^(2T)(D/2) - 1); sinh(D/2) at T = 1.

    Attained by independent steps of two blocks, half each under q, and A = A_max.
    """
    return natural_bias(sequence_chi2_from_drift(drift, tokens), advantage_bound)


def bias_none_trajectory_from_drift(
    drift: npt.ArrayLike,
    tokens: npt.ArrayLike,
    advantage_bound: npt.ArrayLike = 1.0,
    score_norm: npt.ArrayLike = 1.0,
) -> Array:
    """No weights: the lesser of 2 T F sqrt(1 - sech^(2T)(D/4)) (at most T^(3/2) F D/2, and 2 T F)
    and ``l2_bias_from_drift``."""
    tv = sequence_tv_from_drift(drift, tokens)
    return np.minimum(
        bias_none_trajectory(tv, tokens, advantage_bound, score_norm),
        l2_bias_from_drift(drift, tokens, advantage_bound, score_norm),
    )
