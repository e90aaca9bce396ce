"""The chain with slack: what a slice's drift and KL imply, beside what was measured.

Two routes side by side. rms: from the mean KL, the quantity that adds up along a response. sup:
from the largest drift seen on any row, a safety bound that a bf16 engine makes vacuous soon. The
sup of a sample is not the sup of the traffic: its rows hold for the rows seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kernel_contracts import bounds
from kernel_contracts.confidence import by_prompt
from kernel_contracts.contract import Contract
from kernel_contracts.measurement import Measurement
from kernel_contracts.slices import Slice

VACUOUS = 0.99
"""Share of the trivial bound from which on a bound is called vacuous: TV <= 0.995 says nothing."""


@dataclass(frozen=True)
class Link:
    """One row: measured (None where it cannot be), its upper confidence bound, the route's bound,
    slack = bound / measured, vacuous, and the horizon (tokens) up to which the bound is useful."""

    quantity: str
    measured: float | None
    upper: float | None
    bound: float | None
    slack: float | None
    vacuous: bool
    useful_horizon: float | None
    formula: str


def _link(
    quantity: str,
    formula: str,
    bound: float,
    *,
    measured: float | None = None,
    upper: float | None = None,
    trivial: float = math.inf,
    horizon: float | None = None,
) -> Link:
    slack = bound / measured if measured else None
    useful = None if horizon is None or not math.isfinite(horizon) else horizon
    return Link(
        quantity, measured, upper, bound, slack, bound >= VACUOUS * trivial, useful, formula
    )


def chain_of(
    contract: Contract,
    one: Slice,
    tokens: pd.DataFrame,
    measurements: Sequence[Measurement],
    horizon: int,
) -> dict[str, list[Link]]:
    """``{"rms": [...], "sup": [...]}`` for a slice's decode rows; empty without finite rows.

    horizon: response tokens T when the contract's budget names none.
    """
    frame = tokens[one.mask & (tokens["path"] == "decode").to_numpy()]
    frame = frame[np.isfinite(frame["kl_engine_reference"]) & np.isfinite(frame["drift"])]
    if frame.empty:
        return {}
    steps = contract.budget.horizon or horizon
    reward = contract.budget.reward_range or 1.0
    budget = (contract.budget.reward_drift or 0.1 * reward) / reward
    return {
        "rms": _rms(one, frame, measurements, steps, reward, budget),
        "sup": _sup(frame, steps, reward, budget),
    }


def _certified(one: Slice, measurements: Sequence[Measurement]) -> float | None:
    found = [
        m.upper
        for m in measurements
        if m.metric == "kl_engine_reference"
        and m.slice == one.name
        and m.section == "statistical"
        and not m.clipped  # else the bound is of the clipped mean
    ]
    return min((u for u in found if u is not None), default=None)


def _rms(
    one: Slice,
    frame: pd.DataFrame,
    measurements: Sequence[Measurement],
    steps: int,
    reward: float,
    budget: float,
) -> list[Link]:
    ids = frame["prompt_id"].to_numpy()
    kl = float(by_prompt(frame["kl_engine_reference"].to_numpy(), ids).mean.mean())
    tv = float(by_prompt(frame["tv"].to_numpy(), ids).mean.mean())
    upper = _certified(one, measurements)
    used = upper if upper is not None else kl
    source = "upper bound" if upper is not None else "estimate"
    tv_sequence = float(bounds.sequence_tv_from_mean_kl(used, steps))
    useful = float(bounds.horizon_from_mean_kl(used, budget))
    return [
        _link("KL(q||p) a token", f"measured; {source} used below", used, measured=kl, upper=upper),
        _link("TV a token", "sqrt(KL/2)", float(bounds.tv_from_kl(used)), measured=tv, trivial=1.0),
        _link(f"KL of {steps} tokens", "T KL", steps * used),
        _link(f"TV of {steps} tokens", "min(sqrt(T KL/2), sqrt(1-e^-T KL))", tv_sequence,
              trivial=1.0, horizon=useful),
        _link("reward drift", "range(R) TV_seq", float(bounds.reward_drift(tv_sequence, reward)),
              trivial=reward, horizon=useful),
        _link("gradient bias, in T F", "2 TV_seq",
              float(bounds.bias_none_trajectory(tv_sequence, steps)) / steps, trivial=1.0),
    ]  # fmt: skip


def _sup(frame: pd.DataFrame, steps: int, reward: float, budget: float) -> list[Link]:
    drift, tail = float(frame["drift"].max()), float(frame["tail_mass"].max())
    tv_sequence = float(bounds.sequence_tv_from_drift(drift, steps))
    chi2 = float(bounds.chi2_from_drift(drift))
    useful = float(bounds.horizon_from_drift(drift, budget))
    with np.errstate(over="ignore"):
        natural = float(bounds.natural_bias_from_drift(drift, steps))
    return [
        _link("largest drift on the nucleus", "measured", drift, measured=drift),
        _link("TV a token", "(1-tail) tanh(D/4) + tail",
              float(bounds.tv_from_nucleus(drift, tail)), measured=float(frame["tv"].max()),
              trivial=1.0),
        _link("KL a token", "K(D)", float(bounds.kl_from_drift(drift)),
              measured=float(frame["kl_engine_reference"].max())),
        _link("chi2 a token", "sinh^2(D/2)", chi2, measured=float(frame["chi2"].max())),
        _link(f"TV of {steps} tokens", "sqrt(1 - sech^2T(D/4))", tv_sequence, trivial=1.0,
              horizon=useful),
        _link("reward drift", "range(R) TV_seq", float(bounds.reward_drift(tv_sequence, reward)),
              trivial=reward, horizon=useful),
        _link("natural-gradient bias, in A_max", "sqrt(cosh^2T(D/2) - 1)", natural, trivial=1.0),
    ]  # fmt: skip
