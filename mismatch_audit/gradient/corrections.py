"""Importance-weight corrections: from the log-ratios of a response to the weights of its tokens.

delta_t = log p - log q of the sampled token (p reference, q engine), w_t = e^delta_t, W their
product over the response. The estimator with weights c is the mean over the engine's responses of
A sum_t c_t s_t. Full sequence weights W are the truth to which every other one is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kernel_contracts.errors import InputError

Array = npt.NDArray[np.float64]
Level = Literal["token", "sequence"]

__all__ = [
    "NONE",
    "SEQUENCE_WEIGHTS",
    "TOKEN_WEIGHTS",
    "Correction",
    "clip",
    "mask",
    "standard_corrections",
    "truncate",
]


@dataclass(frozen=True)
class Correction:
    """An estimator: its name in reports and its weights as a function of ratios.

    level: ``token`` applies ``weigh`` to each w_t; ``sequence`` applies it to W and gives the
    result to every token.  weigh: ratios ``[k]`` -> weights ``[k]``, elementwise.
    """

    name: str
    level: Level
    weigh: Callable[[Array], Array]

    def weights(self, delta: npt.ArrayLike) -> Array:
        """``[T]`` log-ratios of one response -> ``[T]`` weights.

        Raises InputError where a ratio overflows (a sum of log-ratios over 700 nats).
        """
        d = np.asarray(delta, dtype=np.float64)
        logs = d if self.level == "token" else np.full_like(d, d.sum())
        with np.errstate(over="ignore"):
            weights = np.asarray(self.weigh(np.exp(logs)), dtype=np.float64)
        if not np.isfinite(weights).all():
            raise InputError(
                f"{self.name}: a weight of e^{float(logs.max(initial=0)):.0f} is not a number",
                fix="the two programs do not evaluate the same policy; see the other clauses first",
            )
        return weights


def _plain(ratios: Array) -> Array:
    return ratios


def truncate(level: Level, most: float) -> Correction:
    """min(w, C): truncated importance sampling (TIS). A no-op where no weight is above C."""
    _positive(most, "the threshold C")
    return Correction(f"{level} TIS {most:g}", level, lambda w: np.minimum(w, most))


def mask(level: Level, least: float, most: float) -> Correction:
    """w where least <= w <= most, else 0: the term is dropped."""
    _ordered(least, most)
    return Correction(
        f"{level} mask [{least:g}, {most:g}]",
        level,
        lambda w: np.where((w >= least) & (w <= most), w, 0.0),
    )


def clip(level: Level, least: float, most: float) -> Correction:
    """w moved into [least, most]. least = most = 1 is the estimator without weights."""
    _ordered(least, most)
    return Correction(
        f"{level} clip [{least:g}, {most:g}]", level, lambda w: np.clip(w, least, most)
    )


NONE = Correction("none", "sequence", np.ones_like)
"""No weights: the engine's responses taken as the reference's own."""
TOKEN_WEIGHTS = Correction("token weights", "token", _plain)
"""w_t on each token: the action's own shift put right, prefix and continuation left as they are."""
SEQUENCE_WEIGHTS = Correction("sequence weights", "sequence", _plain)
"""W on the whole response: no bias where q > 0 wherever p > 0."""


def standard_corrections() -> tuple[Correction, ...]:
    """The estimators of a report, with the thresholds that trainers ship as defaults."""
    return (
        NONE,
        TOKEN_WEIGHTS,
        truncate("token", 2.0),
        mask("token", 0.5, 2.0),
        clip("token", 0.8, 1.2),
        truncate("sequence", 2.0),
        mask("sequence", 0.5, 2.0),
        clip("sequence", 0.8, 1.2),
    )


def _positive(value: float, name: str) -> None:
    if not value > 0:
        raise InputError(f"{name} must be positive, got {value:g}")


def _ordered(least: float, most: float) -> None:
    if not 0 <= least <= most or not most > 0:
        raise InputError(f"a range of weights needs 0 <= least <= most, got [{least:g}, {most:g}]")
