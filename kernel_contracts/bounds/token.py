"""One token: logit drift to divergences.

Notation of the whole package. For a context: p the reference's next-token law, q the engine's;
d = z_reference - z_engine; x = log p - log q = d - log E_q[e^d]; w = p/q = e^x;
D = max d - min d = max x - min x, the *drift* (nats). "Two blocks" are laws that differ by one
factor on a token set S: p(S) = q(S) e^D / (1 + q(S)(e^D - 1)).

D is at most twice max |d|, and shifting all logits changes neither side, so bounds in D are never
looser than bounds in max |d|. All arguments broadcast; NaN in gives NaN out; InputError outside the
domain.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernel_contracts.bounds._domain import Array, between, nonnegative, share
from kernel_contracts.divergence import expm1_minus

__all__ = [
    "bhattacharyya_from_drift",
    "chi2_from_drift",
    "drift_at_temperature",
    "drift_from_sup_norm",
    "ess_from_chi2",
    "ess_from_drift",
    "hellinger2_from_drift",
    "hockey_stick_from_chi2",
    "hockey_stick_from_drift",
    "jeffreys_from_drift",
    "kl_from_drift",
    "kl_from_variance",
    "log_ratio_from_drift",
    "movement_from_drift",
    "probability_range_from_drift",
    "ratio_from_drift",
    "tv_from_drift",
]


def _drift(drift: npt.ArrayLike) -> Array:
    return nonnegative(drift, "the drift D")


def drift_from_sup_norm(sup_norm: npt.ArrayLike) -> Array:
    """D <= 2 max|d|, nats. Attained when the largest rise and fall are equally large."""
    return 2 * nonnegative(sup_norm, "max |d|")


def drift_at_temperature(drift: npt.ArrayLike, temperature: npt.ArrayLike) -> Array:
    """D / temperature: the drift of what is sampled at that temperature (> 0). An identity."""
    return _drift(drift) / between(temperature, "the temperature", 0.0, above=True)


def log_ratio_from_drift(drift: npt.ArrayLike) -> Array:
    """|log p - log q| <= D for every token, nats.

    log E_q[e^d] lies between min d and max d. Attained in the limit of q a point mass.
    """
    return _drift(drift)


def ratio_from_drift(drift: npt.ArrayLike) -> tuple[Array, Array]:
    """(lower, upper) of w - 1: [e^-D - 1, e^D - 1]. Attained as ``log_ratio_from_drift``."""
    d = _drift(drift)
    with np.errstate(over="ignore"):
        return np.expm1(-d), np.expm1(d)


def tv_from_drift(drift: npt.ArrayLike) -> Array:
    """TV <= tanh(D/4) <= D/4, in [0, 1].

    On S = {p > q} the odds of p are at most e^D times those of q, and the largest
    s e^D / (1 + s(e^D - 1)) - s over s = q(S) is at s = 1/(1 + e^(D/2)). Attained there by two
    blocks. (Hilbert's projective metric between p and q is D: Cohen and Fausti, arXiv 2309.02413.)
    """
    return np.tanh(_drift(drift) / 4)


def kl_from_drift(drift: npt.ArrayLike) -> Array:
    """Either KL <= K(D) = ln((e^D - 1)/D) - 1 + D/(e^D - 1) <= min(D^2/8, D), nats.

    KL(q||p) = log E_q[e^d] - E_q[d]; at a given mean of d a law on the two ends of its range is
    worst (convexity of exp), and the mass of the high end that maximises it is 1/D - 1/(e^D - 1).
    Attained there by two blocks. D^2/8 is Hoeffding's lemma.
    """
    d = _drift(drift)
    # K loses all digits to cancellation at small D; its Taylor series there is exact to 1e-15.
    s = np.minimum(d, 0.1) ** 2
    near = s / 8 * (1 - s / 72 * (1 - s / 45 * (1 - s * 1080 / 44800)))
    far = np.where((d > 0.1) & (d < np.inf), d, 1.0)
    shrink = -np.expm1(-far)
    k = far + np.log(shrink) - np.log(far) - 1 + far * np.exp(-far) / shrink
    return np.where(d == np.inf, np.inf, np.where(d > 0.1, k, near))


def jeffreys_from_drift(drift: npt.ArrayLike) -> Array:
    """KL(p||q) + KL(q||p) = sum (p - q) x <= D TV <= D tanh(D/4), nats. Attained as TV."""
    d = _drift(drift)
    return np.asarray(d * np.tanh(d / 4))


def chi2_from_drift(drift: npt.ArrayLike) -> Array:
    """Either chi2 = E[(ratio - 1)^2] <= sinh^2(D/2), no unit.

    w lies in [e^(b-D), e^b] and E_q[w] = 1, so Bhatia-Davis gives (e^b - 1)(1 - e^(b-D)), largest
    at e^b = (e^D + 1)/2. Attained there by two blocks, half each under the
    first argument.
    """
    with np.errstate(over="ignore"):
        return np.sinh(_drift(drift) / 2) ** 2


def bhattacharyya_from_drift(drift: npt.ArrayLike) -> Array:
    """Bhattacharyya coefficient sum sqrt(p q) >= sech(D/4) (a *lower* bound). Attained as TV."""
    with np.errstate(over="ignore"):
        return 1 / np.cosh(_drift(drift) / 4)


def hellinger2_from_drift(drift: npt.ArrayLike) -> Array:
    """Squared Hellinger distance 1 - sum sqrt(p q) <= 1 - sech(D/4). Attained as TV."""
    y = _drift(drift) / 8
    with np.errstate(over="ignore", invalid="ignore"):
        value = 2 * np.sinh(y) ** 2 / np.cosh(2 * y)  # 1 - sech(2y) without cancellation
    return np.where(y > 100, 1.0, value)


def ess_from_chi2(chi2: npt.ArrayLike) -> Array:
    """Effective share of an importance-weighted sample, in the limit: 1/(1 + chi2(p||q))."""
    return 1 / (1 + nonnegative(chi2, "chi2"))


def ess_from_drift(drift: npt.ArrayLike) -> Array:
    """Effective sample share per token >= sech^2(D/2) (a *lower* bound). Attained as chi2."""
    with np.errstate(over="ignore"):
        return 1 / np.cosh(_drift(drift) / 2) ** 2


def hockey_stick_from_drift(drift: npt.ArrayLike, threshold: npt.ArrayLike) -> Array:
    """E_q(w - C)_+ <= (e^(D/2) - sqrt C)^2 / (e^D - 1) for 1 <= C < e^D; 0 for C >= e^D.

    The mass that truncation of weights at C removes. C = 1 is TV and gives tanh(D/4). Attained by
    two blocks with 1 + s(e^D - 1) = sqrt(e^D / C), s the mass of the high one under q.
    """
    d = _drift(drift)
    c = between(threshold, "the threshold C", 1.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = np.expm1((np.log(c) - d) / 2) ** 2 / -np.expm1(-d)
    unknown = np.isnan(d) | np.isnan(c)
    return np.where(unknown, np.nan, np.where(np.log(c) >= d, 0.0, value))


def hockey_stick_from_chi2(chi2: npt.ArrayLike, threshold: npt.ArrayLike) -> Array:
    """E_q(w - C)_+ <= chi2(p||q) / (4 (C - 1)) for C > 1; never more than 1.

    (u - k)_+ <= u^2/(4k), u = w - 1, k = C - 1. Approached by w = 2C - 1 on a vanishing mass and
    w just under 1 elsewhere.
    """
    c = between(threshold, "the threshold C", 1.0, above=True)
    return np.minimum(nonnegative(chi2, "chi2") / (4 * (c - 1)), 1.0)


def kl_from_variance(variance: npt.ArrayLike, drift: npt.ArrayLike) -> Array:
    """KL(q||p) <= Var_q(d) phi(D), phi(y) = (e^y - 1 - y)/y^2 -> 1/2 as D -> 0, nats.

    Bennett: log E_q e^(d - E_q d) <= E_q[(d - E_q d)^2 phi(d - E_q d)] and phi increases. For
    KL(p||q) use Var_p(d). This is what the mean divergence follows: about half the mean square of
    the log-ratio, where a bound in D alone can be a hundred times larger. Approached, at any D, by
    two blocks as the mass of the high one vanishes, and by every pair as D -> 0.
    """
    d = _drift(drift)
    safe = np.where(d > 0, d, 1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        phi = np.where(d > 0, expm1_minus(safe) / safe**2, 0.5)
        phi = np.where(np.isnan(d), np.nan, np.where(safe > 700, np.inf, phi))
    var = nonnegative(variance, "the variance of d")
    with np.errstate(invalid="ignore"):
        return np.where((var == 0) & ~np.isnan(d), 0.0, var * phi)


def probability_range_from_drift(
    engine_probability: npt.ArrayLike, drift: npt.ArrayLike
) -> tuple[Array, Array]:
    """(lower, upper) of p(v), given q(v): q e^-+D / (1 + q (e^-+D - 1)).

    Odds move by at most e^D. Attained when all other tokens move together.
    """
    q, d = share(engine_probability, "the probability q"), _drift(drift)
    fall = np.exp(-d)
    with np.errstate(invalid="ignore"):  # 0/0 at q = 0 or 1 under infinite drift
        lower = np.where(q == 1, 1.0, q * fall / (1 - q + q * fall))
        upper = np.where(q == 0, 0.0, q / (q + (1 - q) * fall))
    return lower, upper


def movement_from_drift(engine_probability: npt.ArrayLike, drift: npt.ArrayLike) -> Array:
    """|p(v) - q(v)| <= q(1-q)(e^D - 1) / (1 + min(q, 1-q)(e^D - 1)).

    Largest, tanh(D/4), at q = 1/(1 + e^(+-D/2)); confident tokens barely move. Attained when all
    other tokens move together. (With q instead of min(q, 1-q) below the line it holds for rises
    only: a token at q > 1/2 can fall further than it can rise.)
    """
    q = share(engine_probability, "the probability q")
    small = np.minimum(q, 1 - q)
    fall = -np.expm1(-_drift(drift))  # (e^D - 1)/e^D
    below = (1 - fall) + small * fall
    return np.asarray(q * (1 - q) * fall / np.where(below == 0, 1.0, below))
