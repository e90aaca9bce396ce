"""What a trainer is asked to do about a step, and which of its sequences are meant."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from kernel_contracts.clauses import NumericalClause, StatisticalClause
from kernel_contracts.contract import Contract
from kernel_contracts.escalation import Action, actions_of
from kernel_contracts.measurement import Measurement
from kernel_contracts.metrics import METRICS
from kernel_contracts.slices import Slice

ACTIONS = ("warn", "mask", "skip_step", "hold_push", "stop")
"""What a live trainer can do, gentlest first."""

_MEANS: dict[str, str] = {
    "log": "warn",
    "sample_more": "warn",
    "route": "warn",
    "rollback": "hold_push",
    "quarantine": "mask",
    "mask": "mask",
    "skip_step": "skip_step",
    "hold_push": "hold_push",
    "block": "hold_push",
    "stop": "stop",
}
"""A contract's actions, as far as a trainer can take them: routing and more samples are not its
business and become a warning; a blocked or rolled back promotion is a weight push that waits."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Decision:
    """actions: of ``ACTIONS``, gentlest first, empty when nothing is asked.  masked: ``[S]``
    sequences to leave out of the loss.  reasons: one line an action.  metrics: for the trainer's
    own log.  verdict: of the contract so far.  error: why the step was not observed, if so."""

    step: int
    actions: tuple[str, ...]
    masked: Mask
    reasons: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    verdict: str = "UNOBSERVED"
    error: str = ""

    def asks(self, action: str) -> bool:
        """Whether this action is asked for."""
        return action in self.actions


def decide(
    contract: Contract,
    measurements: Iterable[Measurement],
    frame: pd.DataFrame,
    slices: list[Slice],
    definitions: Mapping[str, str],
    n_sequences: int,
    allowed: Collection[str],
) -> tuple[tuple[str, ...], tuple[str, ...], Mask]:
    """(actions, reasons, masked sequences) of one step.

    A FAIL says that a promise was broken at some time. It asks a trainer to mask, to skip a step or
    to hold a push only while the step at hand is itself beyond the limit; to stop, always.
    """
    here = {one.name: one for one in slices}
    every = [Slice(n, d, np.zeros(0, dtype=bool)) for n, d in definitions.items()]
    asked: dict[str, list[str]] = {}
    masked = np.zeros(n_sequences, dtype=bool)
    for action in actions_of(contract, list(measurements), every):
        word = _MEANS[action.action]
        bad = _bad_sequences(contract, action, frame, here, n_sequences)
        if action.verdict == "FAIL" and word in ("mask", "skip_step", "hold_push"):
            if not _still(contract, action, frame, here):
                continue
            if word == "mask" and not bad.any():
                continue
        if word not in allowed:
            word = "warn"
        if word == "mask":
            masked |= bad
        why = action.description or f"{action.clause} on {action.slice} is {action.verdict}"
        asked.setdefault(word, []).append(f"{word}: {why}")
    order = [a for a in ACTIONS if a in asked]
    return tuple(order), tuple(r for a in order for r in asked[a]), masked


def _values(clause: Any, rows: pd.DataFrame) -> npt.NDArray[np.float64] | None:
    spec = METRICS.get(getattr(clause, "metric", ""))
    if spec is None or any(c not in rows.columns for c in spec.columns) or rows.empty:
        return None
    with np.errstate(over="ignore"):
        return spec.values(rows)


def _rows(action: Action, frame: pd.DataFrame, here: Mapping[str, Slice]) -> pd.DataFrame:
    masks = [
        s.mask for name, s in here.items() if s.answers_to(action.slice) or name == action.slice
    ]
    return frame[np.logical_or.reduce(masks)] if masks else frame[:0]


def _still(
    contract: Contract, action: Action, frame: pd.DataFrame, here: Mapping[str, Slice]
) -> bool:
    """The step's own tokens are beyond the clause's limit, or cannot be told to be within it."""
    clause, rows = contract.clause(action.clause), _rows(action, frame, here)
    if rows.empty:
        return False
    values = _values(clause, rows)
    if values is None:
        return True
    if isinstance(clause, NumericalClause):
        if clause.metric == "nonfinite":
            return bool(np.nansum(values) > (clause.limit or 0))
        return bool((values > (clause.exceeds or 0.0)).mean() > (clause.share or 0.0))
    if isinstance(clause, StatisticalClause):
        means = pd.Series(values).groupby(rows["prompt_id"].to_numpy()).mean()
        return not float(means.mean()) <= (clause.target or 0.0)
    return True


def _bad_sequences(
    contract: Contract,
    action: Action,
    frame: pd.DataFrame,
    here: Mapping[str, Slice],
    n_sequences: int,
) -> Mask:
    """Sequences of the action's rows that break the promise by themselves: their mean is beyond the
    limit, or a token is beyond the threshold, or a value is missing."""
    bad = np.zeros(n_sequences, dtype=bool)
    clause, rows = contract.clause(action.clause), _rows(action, frame, here)
    values = _values(clause, rows)
    if rows.empty:
        return bad
    owner = rows["sequence"].to_numpy()
    if values is None:
        bad[np.unique(owner)] = True
        return bad
    broken = ~np.isfinite(values)
    if isinstance(clause, NumericalClause):
        broken |= values > (clause.exceeds or 0.0)
        bad[np.unique(owner[broken])] = True
    elif isinstance(clause, StatisticalClause):
        sums = np.bincount(owner, weights=np.where(broken, 0.0, values), minlength=n_sequences)
        count = np.bincount(owner[~broken], minlength=n_sequences)
        with np.errstate(invalid="ignore", divide="ignore"):
            bad |= sums / count > (clause.target or 0.0)
        bad[np.unique(owner[broken])] = True
    return bad
