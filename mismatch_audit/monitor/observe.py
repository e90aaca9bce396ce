"""One value a prompt, clause and slice: what the sequential tests are fed with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernel_contracts.clauses import NumericalClause, StatisticalClause
from kernel_contracts.confidence import by_prompt
from kernel_contracts.contract import Contract
from kernel_contracts.errors import InputError
from kernel_contracts.metrics import METRICS
from kernel_contracts.promotion import SAMPLED_METRICS
from kernel_contracts.slices import resolve
from mismatch_audit.monitor.frames import ScoredRow, tables

Observations = dict[str, dict[str, tuple[float, int]]]
"""clause -> slice -> (the prompt's mean above the metric's floor, its number of rows)."""

LARGEST = 1e30
"""Stands for an infinite value (the reference excludes a sampled token): JSON has no infinity, and
the tests clip at the ceiling anyway."""


@dataclass(frozen=True)
class BoundedClause:
    """A clause as a test of a mean of values in [0, ceiling], counted from ``floor``.

    limit: what the mean must not exceed.  tail: limit on the share of prompts above the ceiling.
    weighted: prompts count by their rows.  exceeds: the value is the share of tokens above it.
    inverted: ess_ratio, told as 1 / mean.
    """

    id: str
    metric: str
    slices: tuple[str, ...]
    limit: float
    ceiling: float
    floor: float = 0.0
    tail: float | None = None
    weighted: bool = False
    exceeds: float | None = None
    inverted: bool = False
    warn: float | None = None


def observable_clauses(
    contract: Contract, names: Sequence[str] | None = None
) -> list[BoundedClause]:
    """The clauses that sampled tokens can show, in the contract's order.

    names: only those. Raises InputError when there are none, or for a name that cannot be shown.
    """
    found = [b for c in contract.clauses() if (b := _bounded(c)) is not None]
    known = {b.id for b in found}
    if wrong := [n for n in names or () if n not in known]:
        raise InputError(
            f"clause {wrong[0]} cannot be judged on sampled tokens",
            where=f"contract {contract.name}",
            fix=f"clauses that can: {', '.join(sorted(known)) or 'none'}",
        )
    found = [b for b in found if names is None or b.id in names]
    if not found:
        raise InputError(
            "no clause can be judged on sampled tokens",
            where=f"contract {contract.name}",
            fix=f"add a statistical clause on {', '.join(sorted(SAMPLED_METRICS))}",
        )
    return found


def _bounded(clause: object) -> BoundedClause | None:
    if not isinstance(clause, NumericalClause | StatisticalClause):
        return None
    if clause.metric not in SAMPLED_METRICS or clause.path == "prefill":
        return None
    if isinstance(clause, NumericalClause):
        return BoundedClause(
            clause.id, clause.metric, clause.slices, clause.share or 0.0, 1.0,
            exceeds=clause.exceeds,
        )  # fmt: skip
    return BoundedClause(
        clause.id,
        clause.metric,
        clause.slices,
        (clause.target or 0.0) - clause.floor,
        clause.upper_end - clause.floor,
        floor=clause.floor,
        tail=clause.tail if clause.needs_tail else None,
        weighted=clause.weight == "token",
        inverted=clause.at_least is not None,
        warn=clause.warn,
    )


def observe(
    contract: Contract, clauses: Sequence[BoundedClause], rows: Sequence[ScoredRow]
) -> dict[str, Observations]:
    """unit -> what it shows. A unit's numbers depend on its own rows alone, whatever comes with it.

    Rows must be usable: finite engine log-probs, no NaN of the reference. Raises ContractError
    where a slice cannot be made of these tables.
    """
    found: dict[str, Observations] = {row.unit: {} for row in rows}
    if not any(row.n_tokens for row in rows):
        return found
    tokens, prompts = tables(contract, rows)
    slices = [s for s in resolve(contract, tokens, prompts) if s.rows]
    for clause in clauses:
        with np.errstate(over="ignore"):
            values = METRICS[clause.metric].values(tokens)
        if clause.exceeds is not None:
            values = (values > clause.exceeds).astype(np.float64)
        values = np.minimum(values - clause.floor, LARGEST)
        for one in slices:
            if any(one.answers_to(name) for name in clause.slices):
                sums = by_prompt(values[one.mask], tokens["prompt_id"].to_numpy()[one.mask])
                for unit, mean, count in zip(sums.prompt_ids, sums.mean, sums.count, strict=True):
                    found[unit].setdefault(clause.id, {})[one.name] = (float(mean), int(count))
    return found


def fixed_slices(contract: Contract, clause: BoundedClause) -> tuple[list[str], dict[str, str]]:
    """(slices that the clause has whatever the traffic holds, definition -> how the names of the
    slices begin that traffic can bring)."""
    fixed = {n: d for n, d in contract.slices.items() if n in clause.slices and not d.by}
    named = resolve(contract, *tables(contract, []), names=list(fixed))
    growing = {
        name: f"{name}:" if definition.where is not None else f"{definition.by[0]}="
        for name, definition in contract.slices.items()
        if name in clause.slices and definition.by
    }
    return [s.name for s in named], growing
