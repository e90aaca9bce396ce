"""What holds when only a part of the vocabulary, or of the contexts, is under the drift limit.

Over a whole vocabulary drift is ruled by tokens that nobody samples, and over all contexts it has
no supremum that a sample could show. Notation: ``bounds.token``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernel_contracts.bounds._domain import Array, between, share
from kernel_contracts.bounds.token import kl_from_drift, tv_from_drift
from kernel_contracts.errors import InputError

__all__ = [
    "binary_kl",
    "exceedance_upper",
    "kl_from_nucleus",
    "tv_from_nucleus",
    "tv_mean_from_clause",
]


def tv_from_nucleus(nucleus_drift: npt.ArrayLike, tail_mass: npt.ArrayLike) -> Array:
    """TV <= (1 - tau) tanh(D_S/4) + tau for any token set S, in [0, 1].

    D_S: drift on S.  tau: the larger of both sides' masses outside S.  Couple the two laws on S,
    give up the rest. Attained when both tails have mass tau and no token in common.
    """
    tau = share(tail_mass, "the tail mass")
    return (1 - tau) * tv_from_drift(nucleus_drift) + tau


def kl_from_nucleus(
    engine_tail: npt.ArrayLike,
    reference_tail: npt.ArrayLike,
    nucleus_drift: npt.ArrayLike,
    tail_drift: npt.ArrayLike,
) -> Array:
    """KL(q||p) <= kl_bin(Q_t || P_t) + (1 - Q_t) K(D_S) + Q_t K(D_tail), nats.

    Q_t, P_t: mass of each side outside S.  The chain rule of KL over "inside or outside S", and
    K(D) for each part (at most D^2/8).  Attained when both parts attain K.
    """
    q, p = share(engine_tail, "the engine's tail"), share(reference_tail, "the reference's tail")
    inside = np.where(q == 1, 0.0, kl_from_drift(nucleus_drift))
    outside = np.where(q == 0, 0.0, kl_from_drift(tail_drift))
    return np.asarray(binary_kl(q, p) + (1 - q) * inside + q * outside)


def binary_kl(q: npt.ArrayLike, p: npt.ArrayLike) -> Array:
    """KL(q||p) of two coins with those chances of heads, nats. Infinite for p = 0 < q."""
    q, p = share(q, "q"), share(p, "p")
    with np.errstate(divide="ignore", invalid="ignore"):
        one = np.where(q == 0, p, q * np.log(q / p) - q + p)
        other = np.where(q == 1, 1 - p, (1 - q) * np.log1p((p - q) / (1 - p)) + q - p)
        return np.asarray(np.maximum(one + np.where((p == 1) & (q < 1), np.inf, other), 0))


def tv_mean_from_clause(drift_limit: npt.ArrayLike, exceed_share: npt.ArrayLike) -> Array:
    """E_c[TV] <= (1 - eta) tanh(D*/4) + eta where P(D > D*) <= eta over contexts, in [0, 1].

    A supremum over all contexts cannot be certified by sampling; a share can. Attained when the
    exceeding share is disjoint and the others attain tanh.
    """
    eta = share(exceed_share, "the share eta")
    return (1 - eta) * tv_from_drift(drift_limit) + eta


def exceedance_upper(n: npt.ArrayLike, alpha: float) -> Array:
    """P(D > M) <= 1 - alpha^(1/n) at confidence 1 - alpha: M the largest of n independent drifts.

    n: prompts, not tokens. 299 prompts certify 1% at 95%, 2995 certify 0.1%. Exact for continuous
    drifts.
    """
    if not 0 < alpha < 1:
        raise InputError(f"alpha must lie in (0, 1), got {alpha}")
    return np.asarray(-np.expm1(np.log(alpha) / between(n, "the number of prompts", 1.0)))
