"""Sampling cut to a kept set of tokens (top-k, top-p, min-p), renormalised on it.

A: tokens that the reference keeps, B: those that the engine keeps; p~ = p restricted to A, q~ = q
restricted to B, both renormalised. If A = B every bound of ``bounds.token`` holds with the drift on
A. Notation else: ``bounds.token``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernel_contracts.bounds._domain import Array, nonnegative, share
from kernel_contracts.bounds.token import tv_from_drift
from kernel_contracts.errors import InputError

__all__ = ["tv_between_kept_sets", "tv_from_truncation", "unsupported_mass"]

_ROUNDING = 1e-9


def _masses(
    mass_a: npt.ArrayLike, mass_b: npt.ArrayLike, mass_both: npt.ArrayLike
) -> tuple[Array, Array, Array]:
    a, b = share(mass_a, "the mass of A"), share(mass_b, "the mass of B")
    both = share(mass_both, "the mass of both kept sets")
    if bool((np.minimum(a, b) <= 0).any()):
        raise InputError("a kept set must have mass")
    if bool((both > np.minimum(a, b) + _ROUNDING).any()):
        raise InputError("the mass in both kept sets exceeds the mass of one of them")
    return a, b, np.minimum(both, np.minimum(a, b))


def tv_between_kept_sets(
    mass_a: npt.ArrayLike, mass_b: npt.ArrayLike, mass_both: npt.ArrayLike
) -> Array:
    """TV of one law cut to A and to B: exactly 1 - p(A and B) / max(p(A), p(B)), in [0, 1].

    The shared mass is p(v) / max(p(A), p(B)) on each token of both sets. All three masses are of
    the same law, before the cut.
    """
    a, b, both = _masses(mass_a, mass_b, mass_both)
    return np.asarray(1 - both / np.maximum(a, b))


def tv_from_truncation(
    engine_set_drift: npt.ArrayLike,
    mass_a: npt.ArrayLike,
    mass_b: npt.ArrayLike,
    mass_both: npt.ArrayLike,
) -> Array:
    """TV(p~, q~) <= tanh(D_B/4) + 1 - p(A and B)/max(p(A), p(B)), in [0, 1].

    D_B: drift on the *engine's* kept set B; masses under the *reference*. The path is p on A, p on
    B (exact, above), q on B (drift on B). With masses under the engine, use the drift on A. Mixing
    the two (drift on A with the reference's masses) is no bound: A may be one token, of drift 0.
    Attained when A = B, or when D_B = 0.
    """
    cut = tv_between_kept_sets(mass_a, mass_b, mass_both)
    return np.minimum(
        tv_from_drift(nonnegative(engine_set_drift, "the drift on the engine's set")) + cut, 1.0
    )


def unsupported_mass(mass_a: npt.ArrayLike, mass_both: npt.ArrayLike) -> Array:
    """Mass of p~ that the engine never samples: 1 - p(A and B)/p(A), in [0, 1].

    No importance weight can bring it back: fully weighted means of f are still off by
    up to sup|f| times this. Masses under the reference.
    """
    a, _, both = _masses(mass_a, 1.0, mass_both)
    return np.asarray(1 - both / a)
