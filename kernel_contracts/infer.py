"""Limits proposed from clean control runs: what a clean run does, never what a job can bear.

Per metric, over prompts (the largest value of each prompt over the runs):

* the ceiling is an upper tolerance bound, whatever the law: an order statistic that at least a
  share ``coverage`` of all prompts stays under, with the given confidence (Wilks, Annals of
  Mathematical Statistics 12, 1941). It comes from one half of the prompts;
* the limit of the mean is the betting upper bound from the *other* half, with values above that
  ceiling counted as the ceiling: the bound needs a ceiling that its own data did not choose;
* both are multiplied by a stated margin, since a run that is as good as the control would
  otherwise fail to pass half of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from kernel_contracts.clauses import (
    Clause,
    NumericalClause,
    ObservabilityClause,
    StatisticalClause,
)
from kernel_contracts.commented import commented
from kernel_contracts.confidence import mean_bounds, prompt_order, zero_failure_n
from kernel_contracts.confidence.laws import binomial_cdf, binomial_quantile
from kernel_contracts.contract import Contract
from kernel_contracts.definitions import EscalationRule, When
from kernel_contracts.errors import InputError
from kernel_contracts.metrics import METRICS, Array
from kernel_contracts.planning import clean_n
from kernel_contracts.vocabulary import METRIC_WORDS

__all__ = ["ControlRun", "Inferred", "Proposal", "infer_contract", "tolerance_n", "tolerance_rank"]

MEANS = ("kl_engine_reference", "abs_dlp", "mult_prob_error", "flip_rate")
"""Metrics that get a statistical clause."""

SMALLEST = 1e-9
"""Stands for a control value of exactly 0, of which no multiple is a limit."""


@dataclass(frozen=True)
class ControlRun:
    """One clean run. name: for people.  tokens: its token table."""

    name: str
    tokens: pd.DataFrame


@dataclass(frozen=True)
class Proposal:
    """One measured limit. observed: mean over prompts.  ceiling: of the clause; None where the
    metric's natural one is used.  method: how it was made."""

    clause: str
    metric: str
    limit: float
    ceiling: float | None
    observed: float
    n_prompts: int
    method: str

    def __str__(self) -> str:
        end = "" if self.ceiling is None else f", ceiling {self.ceiling:.10g}"
        return (
            f"{self.clause} {self.metric} <= {self.limit:.10g}{end}  "
            f"(control {self.observed:.3g} on {self.n_prompts} prompts; {self.method})"
        )


@dataclass(frozen=True)
class Inferred:
    """proposals: one a limit.  contract, text: filled from them, with comments."""

    proposals: tuple[Proposal, ...]
    contract: Contract
    text: str


def tolerance_rank(n: int, coverage: float, confidence: float) -> int | None:
    """Rank (1-based, ascending) of the order statistic that is an upper tolerance bound.

    The k-th smallest of n independent values is at least the ``coverage`` quantile with probability
    P(Binomial(n, coverage) <= k - 1), for every law. The smallest such k; None if n is too small.
    """
    _shares(coverage, confidence)
    if n < 1 or binomial_cdf(n - 1, n, coverage) < confidence:
        return None
    return binomial_quantile(confidence, n, coverage) + 1


def tolerance_n(coverage: float, confidence: float) -> int:
    """Fewest values whose largest is an upper tolerance bound: 29 for 0.9, 59 for 0.95, at 95 %."""
    _shares(coverage, confidence)
    return zero_failure_n(1 - coverage, 1 - confidence)


def infer_contract(
    runs: Sequence[ControlRun],
    *,
    coverage: float = 0.9,
    confidence: float = 0.95,
    margin: float = 2.0,
    name: str = "inferred",
) -> Inferred:
    """A contract whose limits were measured on clean runs, each marked as such.

    Raises InputError for no runs, non-finite values, missing columns, or too few prompts for the
    coverage (2 x ``tolerance_n``).
    """
    _shares(coverage, confidence)
    if not margin >= 1:
        raise InputError(f"the margin must be at least 1, got {margin:g}", where="--margin")
    if not runs:
        raise InputError("no control run", fix="name the folder of a clean run")
    for run in runs:
        _check_clean(run)
    proposals = [
        _mean(f"S{i + 1}", metric, runs, coverage, confidence, margin)
        for i, metric in enumerate(MEANS)
    ]
    exceeds = _exceeds("N2", runs, coverage, confidence, margin)
    names = ", ".join(run.name for run in runs)
    source = f"measured on {len(runs)} clean run{'s' if len(runs) > 1 else ''} ({names})"

    def describe(p: Proposal) -> str:
        return (
            f"{source}, {p.n_prompts} prompts, coverage {coverage:g} at confidence "
            f"{confidence:g}, margin {margin:g}; no budget"
        )

    tail = round(1 - coverage, 12)
    statistical = tuple(_clause(p, tail, describe(p)) for p in proposals)
    numerical = (
        NumericalClause(
            id="N1", metric="nonfinite", limit=0, description="Any non-finite logit is a fault."
        ),
        NumericalClause(
            id="N2", metric="abs_dlp", exceeds=exceeds.limit, share=tail,
            description=describe(exceeds),
        ),
    )  # fmt: skip
    alpha = round(1 - confidence, 12)
    clauses: list[Clause] = [*numerical, *statistical]
    needed = max(clean_n(c, alpha) for c in clauses)
    contract = Contract(
        schema="kernel-contracts/v1",
        name=name,
        description=f"Limits {source}. They say what a clean run does, not what can be borne.",
        numerical=numerical,
        statistical=statistical,
        observability=(
            ObservabilityClause(
                id="O1", min_prompts=needed,
                description="Fewer prompts cannot certify these limits.",
            ),
        ),
        escalation=(
            EscalationRule(when=When(verdict="FAIL"), action="block"),
            EscalationRule(when=When(verdict="INCONCLUSIVE"), action="sample_more"),
        ),
        alpha=alpha,
    )  # fmt: skip
    everything = (exceeds, *proposals)
    header = [
        f"Proposed from clean runs: {names}.",
        "These limits are measured, not derived: no budget stands behind them. `audit contract "
        "derive` gives limits that a job can bear.",
    ]
    comments = {p.clause: [f"control: {p.observed:.3g}; {p.method}"] for p in everything}
    return Inferred(everything, contract, commented(contract, header, comments))


def _clause(p: Proposal, tail: float, description: str) -> StatisticalClause:
    fields: dict[str, Any] = {"id": p.clause, "metric": p.metric, "limit": p.limit}
    if p.ceiling is not None:
        fields |= {"ceiling": p.ceiling, "tail": tail}
    return StatisticalClause.model_validate({**fields, "description": description})


def _check_clean(run: ControlRun) -> None:
    tokens = run.tokens
    if tokens.empty:
        raise InputError("the control run has no rows", where=run.name)
    absent = [c for c in ("prompt_id", "path", "nonfinite") if c not in tokens]
    absent += [c for m in MEANS for c in METRICS[m].columns if c not in tokens]
    if absent:
        raise InputError(f"no column {', '.join(dict.fromkeys(absent))}", where=run.name)
    if tokens["nonfinite"].isna().any() or int(tokens["nonfinite"].sum()) > 0:
        raise InputError(
            "holds non-finite logits, or did not count them: not a clean run", where=run.name
        )


def _per_prompt(runs: Sequence[ControlRun], metric: str, how: str) -> Array:
    """``[prompts]`` the largest over runs of each prompt's mean (or max), in prompt order."""
    parts = []
    for run in runs:
        frame = run.tokens[run.tokens["path"] == "decode"]
        if frame.empty:
            raise InputError("has no rows of the decode path", where=run.name)
        values = METRICS[metric].values(frame)
        if not np.isfinite(values).all():
            raise InputError(f"{metric} is missing or not finite in some rows", where=run.name)
        ids = frame["prompt_id"].astype(str).to_numpy()
        parts.append(pd.Series(values, index=ids).groupby(level=0).agg(how))
    largest = pd.concat(parts).groupby(level=0).max()
    ordered = largest.loc[prompt_order(list(largest.index))]
    return np.asarray(ordered, dtype=np.float64)


def _mean(
    clause: str,
    metric: str,
    runs: Sequence[ControlRun],
    coverage: float,
    confidence: float,
    margin: float,
) -> Proposal:
    word = METRIC_WORDS[metric]
    values = _per_prompt(runs, metric, "mean") - word.floor
    n, observed = len(values), float(values.mean()) + word.floor
    alpha = 1 - confidence
    if word.natural_ceiling is not None:
        upper = mean_bounds(values, ceiling=word.natural_ceiling, alpha=alpha).upper
        limit = _round_up(margin * upper)
        if limit >= word.natural_ceiling:
            raise _too_few(metric, n)
        method = f"{margin:g} x betting upper bound {upper:.3g}, natural ceiling"
        return Proposal(clause, metric, limit, None, observed, n, method)
    half = n // 2
    first, second = values[:half], values[half:]
    end = _tolerance(first, coverage, confidence, n)
    if end == 0:
        return Proposal(
            clause, metric, word.floor + SMALLEST, word.floor + 10 * SMALLEST, observed, n,
            "the control is exactly 0",
        )  # fmt: skip
    upper = mean_bounds(second, ceiling=end, alpha=alpha).upper
    limit, ceiling = _round_up(margin * upper), _round_up(margin * end)
    if not limit < ceiling:
        raise _too_few(metric, n)
    method = (
        f"{margin:g} x betting upper bound {upper:.3g} of {len(second)} prompts; ceiling "
        f"{margin:g} x {end:.3g}, over {coverage:.0%} of prompts by {half} others"
    )
    return Proposal(clause, metric, word.floor + limit, word.floor + ceiling, observed, n, method)


def _too_few(metric: str, n: int) -> InputError:
    return InputError(
        f"{n} prompts say nothing about the mean of {metric} beyond its ceiling",
        fix="run the control on more prompts, or lower --margin",
    )


def _exceeds(
    clause: str, runs: Sequence[ControlRun], coverage: float, confidence: float, margin: float
) -> Proposal:
    """A token threshold: at least ``coverage`` of prompts have no token beyond it, so at most
    1 - coverage of tokens (mean over prompts) are."""
    values = _per_prompt(runs, "abs_dlp", "max")
    end = _tolerance(values, coverage, confidence, len(values))
    method = f"{margin:g} x {end:.3g}, over the largest of {coverage:.0%} of prompts"
    limit = _round_up(margin * end) if end > 0 else SMALLEST
    return Proposal(clause, "abs_dlp", limit, None, float(values.mean()), len(values), method)


def _tolerance(values: Array, coverage: float, confidence: float, prompts: int) -> float:
    rank = tolerance_rank(len(values), coverage, confidence)
    if rank is None:
        raise InputError(
            f"{prompts} prompts cannot bound {coverage:.0%} of prompts at confidence "
            f"{confidence:g}",
            fix=f"run the control on at least {2 * tolerance_n(coverage, confidence)} prompts, "
            "or lower --coverage",
        )
    return float(np.sort(values)[rank - 1])


def _round_up(value: float) -> float:
    """Three significant digits, never below the value."""
    short = float(f"{value:.3g}")
    return short if short >= value else float(f"{value * 1.005:.3g}")


def _shares(coverage: float, confidence: float) -> None:
    for name, value in (("coverage", coverage), ("confidence", confidence)):
        if not 0.5 <= value < 1:
            raise InputError(f"must lie in [0.5, 1), got {value:g}", where=f"--{name}")
