"""Error of the policy-gradient surrogate: J(p) - J(q) - L, L = E_q[(R - J(q)) sum_t p_t/q_t].

The bounds of "Trust Region Masking" (arXiv 2512.23075) with every constant halved: it bounds
|E_P f - E_Q f| by 2 max|f| TV twice, and (max f - min f) TV is enough. The halved coupling and
adaptive bounds are attained by small trees. Proportional to the reward's range, its unit.

T: most tokens of a response.  eps: largest TV, delta: largest KL(q||p), of *every* reachable
context: a mean does not bound a maximum. Needed for claims of monotone improvement only; for the
reward itself ``sequence.reward_drift`` is shorter and sharper.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernel_contracts.bounds._domain import Array, nonnegative, share
from kernel_contracts.errors import InputError

__all__ = [
    "surrogate_adaptive",
    "surrogate_classical",
    "surrogate_classical_kl",
    "surrogate_coupling",
    "surrogate_mixed_kl",
    "surrogate_mixed_tv",
    "surrogate_pinsker_marginal",
    "surrogate_pinsker_marginal_tv",
    "surrogate_unified",
]


def _tokens(tokens: int) -> int:
    if int(tokens) != tokens or tokens < 1:
        raise InputError(f"the number of tokens T must be a whole number >= 1, got {tokens}")
    return int(tokens)


def _prefix_tv(steps: Array, sup_tv: Array) -> Array:
    """min(1, n eps): TV of n steps by coupling."""
    return np.minimum(steps * sup_tv, 1.0)


def _prefix_pinsker(steps: Array, sup_kl: Array) -> Array:
    """min(1, sqrt(n delta / 2)): TV of n steps by the chain rule and Pinsker."""
    return np.asarray(np.minimum(np.sqrt(steps * sup_kl / 2), 1.0))


def surrogate_classical(tokens: int, sup_tv: float, reward_range: float = 1.0) -> float:
    """T (T - 1) eps^2 range(R). Attained as ``surrogate_coupling`` while (T - 1) eps <= 1."""
    t, eps = _tokens(tokens), share(sup_tv, "TV")
    return float(nonnegative(reward_range, "the reward range") * t * (t - 1) * eps**2)


def surrogate_classical_kl(tokens: int, sup_kl: float, reward_range: float = 1.0) -> float:
    """T (T - 1) delta/2 range(R): the classical bound with eps^2 <= delta/2 (Pinsker)."""
    t, delta = _tokens(tokens), nonnegative(sup_kl, "KL")
    return float(nonnegative(reward_range, "the reward range") * t * (t - 1) * delta / 2)


def surrogate_coupling(tokens: int, sup_tv: float, reward_range: float = 1.0) -> float:
    """2 min(1, eps) sum_{t=1..T} min(1, (t - 1) eps) range(R).

    Error = sum_t (E_P - E_Q)[g_t], g_t = E_p[advantage at t], which stays within +-eps range(R),
    and the prefixes' TV is at most (t - 1) eps. Attained at T = 2.
    """
    t, eps = _tokens(tokens), share(sup_tv, "TV")
    total = _prefix_tv(np.arange(t, dtype=np.float64), eps).sum()
    return float(nonnegative(reward_range, "the reward range") * 2 * eps * total)


def surrogate_pinsker_marginal(tokens: int, sup_kl: float, reward_range: float = 1.0) -> float:
    """2 min(1, sqrt(delta/2)) sum_t min(1, sqrt((t-1) delta/2)) range(R).

    At most (2/3) T^(3/2) delta range(R): the prefixes' TV by the chain rule of KL, not by coupling.
    """
    delta = nonnegative(sup_kl, "KL")
    eps = float(np.minimum(np.sqrt(delta / 2), 1.0))
    return surrogate_pinsker_marginal_tv(tokens, eps, sup_kl, reward_range)


def surrogate_pinsker_marginal_tv(
    tokens: int, sup_tv: float, sup_kl: float, reward_range: float = 1.0
) -> float:
    """2 min(1, eps) sum_t min(1, sqrt((t-1) delta/2)) range(R)."""
    t, eps, delta = _tokens(tokens), share(sup_tv, "TV"), nonnegative(sup_kl, "KL")
    total = _prefix_pinsker(np.arange(t, dtype=np.float64), delta).sum()
    return float(nonnegative(reward_range, "the reward range") * 2 * eps * total)


def surrogate_mixed_kl(
    tokens: int, sup_kl: float, kl_sequence: float, reward_range: float = 1.0
) -> float:
    """2 T min(1, sqrt(delta/2)) min(1, sqrt(KL_seq/2)) range(R).

    At most T sqrt(delta KL_seq) range(R).
    """
    delta, kl = nonnegative(sup_kl, "KL"), nonnegative(kl_sequence, "KL_seq")
    eps = np.minimum(np.sqrt(delta / 2), 1.0)
    tv = np.minimum(np.sqrt(kl / 2), 1.0)
    return surrogate_mixed_tv(tokens, float(eps), float(tv), reward_range)


def surrogate_mixed_tv(
    tokens: int, sup_tv: float, tv_sequence: float, reward_range: float = 1.0
) -> float:
    """2 T eps TV_seq range(R): every prefix's TV is at most that of the whole."""
    t, eps, tv = _tokens(tokens), share(sup_tv, "TV"), share(tv_sequence, "TV_seq")
    return float(nonnegative(reward_range, "the reward range") * 2 * t * eps * tv)


def surrogate_adaptive(
    mean_tv: npt.ArrayLike, sup_tv: float, sup_kl: float, reward_range: float = 1.0
) -> float:
    """2 sum_t Dbar_t min(1, (T - t) eps, sqrt((T - t) delta/2)) range(R).

    mean_tv ``[T]``: Dbar_t = E_Q[TV at t]. Error = sum_t E_Q[R (rho_t - 1)(prod_{j>t} rho_j - 1)],
    where E_q|rho_t - 1| = 2 TV_t, and what follows t changes R's mean by at most range(R) times the
    continuation's TV. Attained at T = 2.
    """
    tv = share(mean_tv, "the mean TV")
    if tv.ndim != 1 or not len(tv):
        raise InputError(f"mean_tv must hold one number per token, got shape {tv.shape}")
    left = np.arange(len(tv) - 1, -1, -1, dtype=np.float64)
    rest = np.minimum(
        _prefix_tv(left, share(sup_tv, "TV")), _prefix_pinsker(left, nonnegative(sup_kl, "KL"))
    )
    return float(nonnegative(reward_range, "the reward range") * 2 * (tv * rest).sum())


def surrogate_unified(
    mean_tv: npt.ArrayLike,
    sup_tv: float,
    sup_kl: float,
    tv_sequence: float,
    kl_sequence: float,
    reward_range: float = 1.0,
) -> float:
    """The least of the bounds above."""
    t = len(np.atleast_1d(np.asarray(mean_tv)))
    return min(
        surrogate_coupling(t, sup_tv, reward_range),
        surrogate_pinsker_marginal(t, sup_kl, reward_range),
        surrogate_pinsker_marginal_tv(t, sup_tv, sup_kl, reward_range),
        surrogate_mixed_kl(t, sup_kl, kl_sequence, reward_range),
        surrogate_mixed_tv(t, sup_tv, tv_sequence, reward_range),
        surrogate_adaptive(mean_tv, sup_tv, sup_kl, reward_range),
    )
