"""What a clause can measure: per row of the token table, a number and the columns it needs.

p is the reference, q the engine; rollouts are drawn from q. ``w = p/q`` of the sampled token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from kernel_contracts.estimators import k3

Array = npt.NDArray[np.float64]

Kind = Literal["mean", "rate", "count", "ess"]


@dataclass(frozen=True)
class Metric:
    """One measurable quantity.

    columns: needed in the token table; a missing one gives UNOBSERVED.  values: frame -> [rows].
    kind: ``mean`` (per-prompt mean, needs a ceiling), ``rate`` (in [0, 1]), ``count`` (a sum over
    the slice, exact), ``ess`` (effective sample size over n, from the mean of w^2).
    """

    name: str
    columns: tuple[str, ...]
    values: Callable[[pd.DataFrame], Array]
    kind: Kind
    unit: str
    meaning: str


_BOTH = ("engine_logprob", "reference_logprob")


def _column(name: str) -> Callable[[pd.DataFrame], Array]:
    return lambda frame: frame[name].to_numpy(dtype=np.float64)


def _dlp(frame: pd.DataFrame) -> Array:
    reference = frame["reference_logprob"].to_numpy(dtype=np.float64)
    return np.asarray(reference - frame["engine_logprob"].to_numpy(dtype=np.float64))


def _k3(frame: pd.DataFrame) -> Array:
    return np.asarray(k3(_dlp(frame)))


def _dp(frame: pd.DataFrame) -> Array:
    p, q = (np.exp(frame[name].to_numpy(dtype=np.float64)) for name in reversed(_BOTH))
    return np.asarray(np.abs(p - q))


def _flip(frame: pd.DataFrame) -> Array:
    """1.0, 0.0, or NaN where either side had non-finite logits (its top-1 means nothing)."""
    flip = frame["flip"].to_numpy(dtype=np.float64)
    if "nonfinite" in frame:
        flip = np.where(frame["nonfinite"].to_numpy(dtype=np.float64) > 0, np.nan, flip)
    return flip


METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric(
            "kl_engine_reference",
            ("kl_engine_reference",),
            _column("kl_engine_reference"),
            "mean",
            "nats",
            "KL(q || p), engine against reference, full vocabulary",
        ),
        Metric(
            "kl_reference_engine",
            ("kl_reference_engine",),
            _column("kl_reference_engine"),
            "mean",
            "nats",
            "KL(p || q)",
        ),
        Metric("tv", ("tv",), _column("tv"), "rate", "", "total variation distance"),
        Metric("chi2", ("chi2",), _column("chi2"), "mean", "", "chi-square of p against q"),
        Metric(
            "drift",
            ("drift",),
            _column("drift"),
            "mean",
            "nats",
            "oscillation of log p - log q on the nucleus",
        ),
        Metric(
            "abs_dlp",
            _BOTH,
            lambda f: np.abs(_dlp(f)),
            "mean",
            "nats",
            "|log p - log q| of the sampled token",
        ),
        Metric("k3", _BOTH, _k3, "mean", "nats", "w - 1 - ln w: KL(q || p) from sampled tokens"),
        Metric(
            "mult_prob_error",
            _BOTH,
            lambda f: np.exp(np.abs(_dlp(f))),
            "mean",
            "x",
            "exp |log p - log q| of the sampled token",
        ),
        Metric(
            "abs_dp",
            _BOTH,
            _dp,
            "rate",
            "",
            "|p - q| of the sampled token",
        ),
        Metric("flip_rate", ("flip",), _flip, "rate", "", "greedy token differs"),
        Metric(
            "tail_mass",
            ("tail_mass",),
            _column("tail_mass"),
            "rate",
            "",
            "mass outside the nucleus",
        ),
        Metric(
            "nonfinite",
            ("nonfinite",),
            _column("nonfinite"),
            "count",
            "values",
            "non-finite logits on either side",
        ),
        Metric(
            "ess_ratio",
            _BOTH,
            lambda f: np.exp(2 * _dlp(f)),
            "ess",
            "",
            "effective sample size over n under weights p/q",
        ),
    )
}
