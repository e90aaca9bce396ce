"""One step's sampled tokens as the token table that contracts speak of."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from kernel_contracts.contract import Contract
from kernel_contracts.expressions import columns
from kernel_contracts.predicates import parse
from kernel_contracts.vocabulary import COMPUTED_COLUMNS
from mismatch_audit.rollouts.batch import TokenBatch


def columns_of(contract: Contract) -> tuple[str, ...]:
    """Every column that the contract's slices and observability clauses name."""
    names: list[str] = []
    for definition in contract.slices.values():
        if definition.where is not None:
            names += columns(parse(definition.where))
        names += definition.grouping
    names += [name for clause in contract.observability for name in clause.require]
    return tuple(dict.fromkeys(names))


def token_frame(batch: TokenBatch, names: Iterable[str] = ()) -> pd.DataFrame:
    """One row a sampled token of the loss; log-probs null where unknown.

    prompt_id numbers the groups of this batch (the samples where there is no group), the unit of
    statistics: numbers, as texts take most of the time at a million tokens. sequence: index in the
    batch. names: further columns. Those that the batch lacks are left out, so that a clause on them
    is UNOBSERVED and not about nulls. nonfinite counts a token's infinite log-probs; a NaN is a
    missing one.
    """
    from mismatch_audit.rollouts.columns import column

    rows = batch.sampled
    sequence = batch.sequence_of[rows]
    sample = batch.scalar("sample_id")
    group = batch.scalar("group_id") if batch.has("group_id") else sample
    group = np.where(pd.isna(group), sample, group)
    data: dict[str, object] = {
        "prompt_id": pd.factorize(group)[0][sequence],
        "sequence": sequence,
        "position": batch.position[rows],
    }
    sides = {"engine_logprob": "sampler_logprob", "reference_logprob": "trainer_logprob"}
    sides = {ours: theirs for ours, theirs in sides.items() if batch.has(theirs)}
    for ours, theirs in sides.items():
        data[ours] = batch.tokens(theirs)[rows].astype(np.float64)
    if len(sides) == 2:
        data["nonfinite"] = sum(np.isinf(data[side]).astype(np.int64) for side in sides)  # type: ignore[call-overload]
    for name in names:
        if name in data or name in COMPUTED_COLUMNS:
            continue
        if name == "path":  # rollouts are decoded
            data[name] = np.full(len(sequence), "decode", dtype=object)
            continue
        values = column(batch, name)
        if values is not None:
            data[name] = values.series(batch, True).to_numpy()[rows]
    return pd.DataFrame(data)
