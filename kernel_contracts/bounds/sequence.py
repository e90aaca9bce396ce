"""Sequences: per-token divergences to those of whole responses, and to the expected reward.

P, Q: the laws of responses of at most T tokens under p and q. A response that has ended adds
nothing. Notation else: ``bounds.token``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernel_contracts.bounds._domain import (
    Array,
    between,
    log_cosh,
    nonnegative,
    product,
    share,
    steps,
)
from kernel_contracts.bounds.ratio import tv_from_kl
from kernel_contracts.errors import InputError

__all__ = [
    "horizon_from_drift",
    "horizon_from_mean_kl",
    "horizon_from_sup_tv",
    "reward_drift",
    "sequence_chi2_from_drift",
    "sequence_ess_from_drift",
    "sequence_ess_typical",
    "sequence_kl",
    "sequence_tv_from_drift",
    "sequence_tv_from_mean_kl",
    "sequence_tv_from_mean_tv",
    "sequence_tv_from_sup_tv",
]


def sequence_kl(token_kl: npt.ArrayLike) -> Array:
    """KL(Q||P) = sum over t of E_Q[KL(q||p) at t], exactly; ``[..., T] -> [...]``, nats.

    The chain rule. The contexts are the engine's own rollouts: re-scored other text gives no KL of
    trajectories. With unequal lengths, average each response's *sum*, not its mean.
    """
    return np.asarray(nonnegative(token_kl, "KL").sum(-1))


def sequence_tv_from_mean_kl(mean_kl: npt.ArrayLike, tokens: npt.ArrayLike) -> Array:
    """TV_seq <= min(sqrt(T kappa/2), sqrt(1 - e^(-T kappa))), in [0, 1].

    kappa: mean KL(q||p) per token on the engine's rollouts, nats (KL_seq / T when lengths vary).
    The chain rule, then ``tv_from_kl``; concave, so kappa may be a mean over prompts and the result
    bounds the mean TV. Needs no supremum. Approached for T kappa -> 0 when one token carries all
    the drift; spread over many tokens (log W then is Gaussian) TV_seq is 0.80 of the bound.
    """
    return tv_from_kl(product(nonnegative(mean_kl, "the mean KL"), steps(tokens)))


def sequence_tv_from_mean_tv(token_tv: npt.ArrayLike) -> Array:
    """TV_seq <= sum over t of E_Q[TV at t]; ``[..., T] -> [...]``, in [0, 1].

    Step-wise maximal coupling. Attained when every difference stays on its own branch.
    """
    return np.asarray(np.minimum(share(token_tv, "TV").sum(-1), 1.0))


def sequence_tv_from_sup_tv(sup_tv: npt.ArrayLike, tokens: npt.ArrayLike) -> Array:
    """TV_seq <= 1 - (1 - eps)^T <= T eps, eps the largest TV of any reachable context, in [0, 1].

    The same coupling. Attained when p and q at each step agree on one token, and nowhere else.
    """
    eps, t = share(sup_tv, "TV"), steps(tokens)
    with np.errstate(divide="ignore"):
        return np.asarray(-np.expm1(t * np.log1p(-eps)))


def sequence_tv_from_drift(drift: npt.ArrayLike, tokens: npt.ArrayLike) -> Array:
    """TV_seq <= sqrt(1 - sech^(2T)(D/4)) <= sqrt(T) D/4, in [0, 1].

    BC_seq >= the product of sech(D/4), and TV <= sqrt(1 - BC^2). Attained at T = 1 (there it is
    tanh(D/4)); always under 1, and grows as sqrt T where T tanh(D/4) grows as T.
    """
    d = nonnegative(drift, "the drift D")
    return np.asarray(np.sqrt(-np.expm1(-2 * product(steps(tokens), log_cosh(d / 4)))))


def sequence_chi2_from_drift(drift: npt.ArrayLike, tokens: npt.ArrayLike) -> Array:
    """Either chi2 of sequences <= cosh^(2T)(D/2) - 1. Attained by independent steps that attain
    sinh^2(D/2): 1 + chi2 multiplies."""
    d = nonnegative(drift, "the drift D")
    with np.errstate(over="ignore"):
        return np.asarray(np.expm1(2 * product(steps(tokens), log_cosh(d / 2))))


def sequence_ess_from_drift(drift: npt.ArrayLike, tokens: npt.ArrayLike) -> Array:
    """Effective sample share of sequence weights >= sech^(2T)(D/2) (a *lower* bound), about
    e^(-T D^2/4). Attained as ``sequence_chi2_from_drift``."""
    d = nonnegative(drift, "the drift D")
    return np.asarray(np.exp(-2 * product(steps(tokens), log_cosh(d / 2))))


def sequence_ess_typical(rms_log_ratio: npt.ArrayLike, tokens: npt.ArrayLike) -> Array:
    """Estimate (no bound) of the effective sample share: e^(-T sigma^2), sigma the rms of log w.

    Exact for log W Gaussian with independent steps. A sample's own ESS is optimistic when its tail
    was not drawn.
    """
    sigma = nonnegative(rms_log_ratio, "the rms log-ratio")
    return np.exp(-product(steps(tokens), sigma**2))


def reward_drift(sequence_tv: npt.ArrayLike, reward_range: npt.ArrayLike = 1.0) -> Array:
    """|E_P[R] - E_Q[R]| <= range(R) TV_seq, in units of the reward.

    range(R) = max R - min R. Attained by R = 1{P > Q}. Vacuous at range(R).
    """
    return product(share(sequence_tv, "TV_seq"), nonnegative(reward_range, "the reward range"))


def horizon_from_mean_kl(mean_kl: npt.ArrayLike, tv_budget: npt.ArrayLike) -> Array:
    """Tokens T up to which ``sequence_tv_from_mean_kl`` stays within the budget b < 1.

    max(2 b^2, -ln(1 - b^2)) / kappa: Pinsker, or from b = 0.893 on Bretagnolle-Huber. Not rounded;
    under 1 it says that one token is too many. b = reward drift / reward range.
    """
    b = _budget(tv_budget)
    kl = np.maximum(2 * b**2, -np.log1p(-(b**2)))
    return _ratio(kl, nonnegative(mean_kl, "the mean KL"))


def horizon_from_drift(drift: npt.ArrayLike, tv_budget: npt.ArrayLike) -> Array:
    """Tokens T up to which ``sequence_tv_from_drift`` stays within b: -ln(1-b^2)/(2 ln cosh D/4).

    Not rounded.
    """
    d = nonnegative(drift, "the drift D")
    return _ratio(-np.log1p(-(_budget(tv_budget) ** 2)), 2 * log_cosh(d / 4))


def horizon_from_sup_tv(sup_tv: npt.ArrayLike, tv_budget: npt.ArrayLike) -> Array:
    """Tokens T up to which ``sequence_tv_from_sup_tv`` stays within b: ln(1-b)/ln(1-eps).

    Not rounded.
    """
    with np.errstate(divide="ignore"):
        return _ratio(np.log1p(-_budget(tv_budget)), np.log1p(-share(sup_tv, "TV")))


def _budget(tv_budget: npt.ArrayLike) -> Array:
    b = between(tv_budget, "the budget (reward drift / reward range)", 0.0, above=True)
    if bool((b >= 1).any()):
        raise InputError("the budget must be below the reward range: beyond it nothing is promised")
    return b


def _ratio(budget: Array, per_token: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.abs(budget / per_token)
