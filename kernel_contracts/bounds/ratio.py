"""One token: from a limit on the importance ratio, or from a KL divergence, to the others.

rho: a number with |w - 1| <= rho for every token, w = p/q. Notation: ``bounds.token``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernel_contracts.bounds._domain import Array, nonnegative

__all__ = [
    "chi2_from_ratio",
    "kl_engine_reference_from_ratio",
    "kl_reference_engine_from_ratio",
    "tv_from_bretagnolle_huber",
    "tv_from_kl",
    "tv_from_pinsker",
    "tv_from_ratio",
]


def tv_from_ratio(ratio_error: npt.ArrayLike) -> Array:
    """TV <= rho/2 where |w - 1| <= rho; rho/(1 + rho) for rho > 1, in [0, 1].

    Attained by w = 1 +- rho, each on half of q; for rho > 1 by w in {0, 1 + rho}, since w >= 0.
    """
    rho = nonnegative(ratio_error, "the ratio error rho")
    return np.where(rho > 1, 1 - 1 / (1 + rho), rho / 2)


def chi2_from_ratio(ratio_error: npt.ArrayLike) -> Array:
    """chi2(p||q) <= rho^2 where |w - 1| <= rho; rho for rho > 1. Attained as ``tv_from_ratio``."""
    rho = nonnegative(ratio_error, "the ratio error rho")
    return np.where(rho > 1, rho, rho**2)


def kl_engine_reference_from_ratio(ratio_error: npt.ArrayLike) -> Array:
    """KL(q||p) = E_q[-ln w] <= -ln(1 - rho^2)/2 where |w - 1| <= rho < 1, nats.

    Infinite from rho = 1 on: the reference may then exclude a token. Attained as ``tv_from_ratio``.
    """
    rho = nonnegative(ratio_error, "the ratio error rho")
    with np.errstate(divide="ignore"):
        return np.asarray(-np.log1p(-(np.minimum(rho, 1.0) ** 2)) / 2)


def kl_reference_engine_from_ratio(ratio_error: npt.ArrayLike) -> Array:
    """KL(p||q) = E_q[w ln w] <= [(1+rho) ln(1+rho) + (1-rho) ln(1-rho)]/2, nats.

    For rho > 1: ln(1 + rho). Attained as ``tv_from_ratio``.
    """
    rho = nonnegative(ratio_error, "the ratio error rho")
    r = np.minimum(rho, 1.0)
    inner = np.where(r < 1, r, 0.5)
    # The same in a form whose two terms do not cancel: -r^2 + 2 r^2 at small r.
    value = np.log1p(-(inner**2)) / 2 + inner * np.arctanh(inner)
    return np.where(np.isnan(rho), np.nan, np.where(r < 1, value, np.log1p(rho)))


def tv_from_pinsker(kl: npt.ArrayLike) -> Array:
    """TV <= sqrt(KL/2), either direction; exceeds 1 (and says nothing) from KL = 2 nats on.

    Approached by two halves that move by little.
    """
    return np.sqrt(nonnegative(kl, "KL") / 2)


def tv_from_bretagnolle_huber(kl: npt.ArrayLike) -> Array:
    """TV <= sqrt(1 - e^-KL), either direction; below Pinsker's once KL > 1.594 nats.

    Approached for large KL by q a point mass on a token with p = e^-KL.
    """
    return np.asarray(np.sqrt(-np.expm1(-nonnegative(kl, "KL"))))


def tv_from_kl(kl: npt.ArrayLike) -> Array:
    """TV <= min(sqrt(KL/2), sqrt(1 - e^-KL)), either direction, in [0, 1].

    Concave in KL, so it also bounds a mean of TVs by the mean of KLs (Jensen).
    """
    return np.minimum(tv_from_pinsker(kl), tv_from_bretagnolle_huber(kl))
