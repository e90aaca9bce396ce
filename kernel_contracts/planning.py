"""How many prompts a contract needs before anything runs, clause by clause and slice by slice.

The plan assumes a true value at ``effect`` times each limit and a spread between prompts (``cv``);
the verdict does not. Numbers are for one clause on one slice; that all pass at once is less likely.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log1p, sqrt

import numpy as np
import pandas as pd

from kernel_contracts.clauses import (
    Clause,
    NumericalClause,
    ObservabilityClause,
    RuntimeClause,
    StatisticalClause,
)
from kernel_contracts.confidence import betting_n, mean_bounds, power_n, zero_failure_n
from kernel_contracts.confidence.laws import normal_sf
from kernel_contracts.confidence.planning import Law
from kernel_contracts.contract import Contract
from kernel_contracts.definitions import SliceDefinition
from kernel_contracts.errors import InputError
from kernel_contracts.expressions import columns
from kernel_contracts.lint import fewest_prompts
from kernel_contracts.predicates import parse
from kernel_contracts.slices import resolve
from kernel_contracts.vocabulary import COMPUTED_COLUMNS, METRIC_WORDS, TOKEN_COLUMNS

__all__ = ["Need", "Plan", "clean_n", "plan_contract", "prompts_needed"]

MOST = 20_000
"""Prompts beyond which a clause is called out of reach."""


@dataclass(frozen=True)
class Need:
    """Prompts that a clause needs on a slice.

    needed: None where no realistic number does, or where it cannot be planned (``note`` says).
    least: without which it cannot pass however good the engine is.  available: in the prompts file;
    None without a file.  exact: False where rows decide, so that ``available`` is at most so many.
    """

    clause: str
    slice: str
    metric: str
    needed: int | None
    least: int
    available: int | None = None
    exact: bool = True
    note: str = ""

    @property
    def enough(self) -> bool | None:
        """Whether the file can certify it; None without a file or without a plan."""
        if self.available is None or (self.needed is None and not self.unreachable):
            return None
        return self.needed is not None and self.available >= self.needed

    @property
    def unreachable(self) -> bool:
        """No number of prompts up to 20,000 would do."""
        return self.needed is None and self.note.startswith("out of reach")


@dataclass(frozen=True)
class Plan:
    """What a contract needs, in its own order, given ``effect``, ``cv`` and ``power``."""

    contract: str
    effect: float
    cv: float
    power: float
    alpha: float
    prompts: int | None
    needs: tuple[Need, ...]

    @property
    def certifiable(self) -> bool:
        """False where the file has too few prompts for some clause, or a clause is out of reach."""
        return all(n.enough is not False and not n.unreachable for n in self.needs)

    @property
    def exit_code(self) -> int:
        return 0 if self.certifiable else 3


def plan_contract(
    contract: Contract,
    prompts: pd.DataFrame | None = None,
    *,
    effect: float = 0.5,
    cv: float = 1.0,
    power: float = 0.9,
) -> Plan:
    """The prompts that each clause needs on each slice, and what the file has.

    prompts: one row a prompt, ``prompt_id`` and metadata.  Raises InputError for an effect outside
    (0, 1) and ContractError for a slice that names a column which neither rows nor prompts have.
    """
    if not 0 < effect < 1:
        raise InputError(
            f"the effect is a true value in units of its limit, in (0, 1): got {effect:g}",
            where="--effect",
        )
    needs: list[Need] = []
    for clause in contract.clauses():
        needed, note = prompts_needed(clause, contract.alpha, effect=effect, cv=cv, power=power)
        least = clean_n(clause, contract.alpha)
        metric = getattr(clause, "metric", "")
        for name, available, exact in _slices(contract, clause, prompts):
            needs.append(Need(clause.id, name, metric, needed, least, available, exact, note))
    n = None if prompts is None else len(prompts)
    return Plan(contract.name, effect, cv, power, contract.alpha, n, tuple(needs))


def prompts_needed(
    clause: Clause, alpha: float, *, effect: float, cv: float, power: float = 0.9
) -> tuple[int | None, str]:
    """(prompts for a PASS with probability ``power``, note) on one slice.

    The true mean lies at ``effect`` of the way from the metric's floor to the limit; per-prompt
    values spread by ``cv`` around it (log-normal, for rates beta). A tail clause needs its own
    number, with the share of prompts above the ceiling that this law has.
    """
    if isinstance(clause, ObservabilityClause):
        return clause.min_prompts, ""
    if isinstance(clause, NumericalClause):
        if clause.share is None:
            return 1, "counted exactly"
        return _mean_n(effect * clause.share, cv, clause.share, 1.0, alpha, power, "beta"), ""
    word = METRIC_WORDS[clause.metric]
    if not word.bounded_mean or clause.target is None:
        return None, "cannot be planned: depends on the gradient's spread"
    floor = 1.0 if word.at_least else clause.floor  # a weight of mean 1 has a mean square >= 1
    limit, ceiling = clause.target - clause.floor, clause.upper_end - clause.floor
    start = floor - clause.floor
    mean = start + effect * (limit - start)
    law: Law = "beta" if word.natural_ceiling == 1.0 else "lognormal"
    spread = cv * (mean - start) / mean
    needed = _mean_n(mean, spread, limit, ceiling, alpha, power, law)
    note = _note(clause)
    if needed is None:
        return None, "out of reach: more than 20,000 prompts for the mean"
    if not clause.needs_tail:
        return needed, note
    above = 0.0 if law == "beta" else _share_above(mean, spread, ceiling)
    if above >= clause.tail:
        return None, (
            f"out of reach: {above:.1%} of prompts would lie above the ceiling, the tail allows "
            f"{clause.tail:.1%}"
        )
    tail = _tail_n(clause.tail, above, alpha, power)
    if tail is None:
        return None, "out of reach: more than a million prompts for the tail"
    return max(needed, tail), (note or "the tail decides") if tail > needed else note


def clean_n(clause: Clause, alpha: float) -> int:
    """Prompts from which the clause passes if every prompt shows the least value possible.

    Fewer cannot pass. By the bets that the verdict makes, so somewhat above
    ``lint.fewest_prompts``, which no method can undercut.
    """
    start = fewest_prompts(clause, alpha)
    if isinstance(clause, ObservabilityClause):
        return start
    if isinstance(clause, NumericalClause):
        if clause.share is None:
            return start
        share = clause.share
    elif METRIC_WORDS[clause.metric].bounded_mean and clause.target is not None:
        share = (clause.target - clause.floor) / (clause.upper_end - clause.floor)
    else:
        return start
    n = start
    while mean_bounds(np.zeros(n), ceiling=1.0, alpha=alpha).upper > share:
        n += 1
    return n


@lru_cache(maxsize=256)
def _mean_n(
    mean: float, cv: float, limit: float, ceiling: float, alpha: float, power: float, law: Law
) -> int | None:
    if law == "beta":  # a rate spreads at most as far as 0 and the ceiling: nearly there
        cv = min(cv, 0.95 * sqrt((ceiling - mean) / mean))
    return betting_n(
        mean=mean, cv=cv, limit=limit, ceiling=ceiling, alpha=alpha, power=power, law=law,
        most=MOST, simulations=200,
    )  # fmt: skip


def _share_above(mean: float, cv: float, ceiling: float) -> float:
    """P(X > ceiling) of a log-normal."""
    sigma = sqrt(log1p(cv * cv))
    return normal_sf(float(np.log(ceiling / mean)) / sigma + sigma / 2)


def _tail_n(tail: float, above: float, alpha: float, power: float) -> int | None:
    if above < 1e-4:
        return zero_failure_n(tail, alpha)
    planned = power_n(tail, above, alpha, power)
    return None if planned is None else planned[0]


def _note(clause: StatisticalClause | RuntimeClause) -> str:
    if isinstance(clause, RuntimeClause):
        return f"prompts that the probe {clause.probe} sees (settings: probes)"
    if clause.weight == "token":
        return "for responses of full length; shorter ones take more"
    return ""


def _slices(
    contract: Contract, clause: Clause, prompts: pd.DataFrame | None
) -> list[tuple[str, int | None, bool]]:
    """(slice, prompts in the file, whether that is exact) of every slice of a clause."""
    if isinstance(clause, RuntimeClause):
        return [(f"probe {clause.probe}", None if prompts is None else len(prompts), False)]
    found: list[tuple[str, int | None, bool]] = []
    for name in clause.slices:
        definition, _, _ = name.partition("=")
        known = contract.slices.get(name) or contract.slices.get(definition)
        if prompts is None or known is None:
            found.append((name, None, True))
        else:
            found += _counted(contract, name, known, prompts)
    return found


def _counted(
    contract: Contract, name: str, definition: SliceDefinition, prompts: pd.DataFrame
) -> list[tuple[str, int | None, bool]]:
    rows = (set(TOKEN_COLUMNS) | set(COMPUTED_COLUMNS)) - {"prompt_id"}
    where = set(columns(parse(definition.where))) if definition.where else set()
    by, bins = definition.by or (), definition.bins or {}
    kept = {
        "where": None if where & rows else definition.where,
        "by": tuple(c for c in by if c not in rows) or None,
        "bins": {c: e for c, e in bins.items() if c not in rows} or None,
    }
    exact = kept["where"] == definition.where and kept["by"] == definition.by
    exact = exact and kept["bins"] == definition.bins
    part = SliceDefinition.model_validate({k: v for k, v in kept.items() if v is not None})
    one = contract.model_copy(update={"slices": {name: part}})
    ids = pd.DataFrame({"prompt_id": prompts["prompt_id"].astype(str)})
    return [(s.name, s.rows, exact) for s in resolve(one, ids, prompts)]
