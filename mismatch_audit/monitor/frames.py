"""Scored requests -> the token table and the prompt table that slices and clauses read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from kernel_contracts.contract import Contract
from kernel_contracts.expressions import columns as columns_of
from kernel_contracts.predicates import parse
from kernel_contracts.vocabulary import COMPUTED_COLUMNS, TOKEN_COLUMNS

Numbers = npt.NDArray[np.float64]
Scalar = str | int | float


@dataclass(frozen=True)
class ScoredRow:
    """One response with the log-probs of both sides.

    unit: the prompt that it counts for; responses of one prompt are not independent.
    engine_logprob: ``[T]`` nats.  reference: columns of the token table, each ``[T]``, with
    ``reference_logprob`` at least.  position: ``[T]`` index in the response.
    """

    unit: str
    request_id: str
    token_ids: tuple[int, ...]
    prompt_length: int
    engine_logprob: Numbers
    reference: Mapping[str, Numbers]
    metadata: Mapping[str, Scalar] = field(default_factory=dict)
    n_cached_tokens: int | None = None
    weights_version: int | None = None
    position: npt.NDArray[np.int64] | None = None

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)


def metadata_columns(contract: Contract) -> list[str]:
    """Columns that the contract's slices name and that no token table has: metadata."""
    named: dict[str, None] = {}
    for definition in contract.slices.values():
        if definition.where is not None:
            named.update(dict.fromkeys(columns_of(parse(definition.where))))
        named.update(dict.fromkeys(definition.grouping))
    return [c for c in named if c not in TOKEN_COLUMNS and c not in COMPUTED_COLUMNS]


def tables(contract: Contract, rows: Sequence[ScoredRow]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(token table, prompt table) of the rows.

    Every column of the token table is there, null where traffic does not tell it; so is every
    metadata column that the contract names. A slice on such a column is then empty, and what it
    was to show UNOBSERVED, instead of an error in the middle of the traffic.
    """
    lengths = [row.n_tokens for row in rows]
    given: dict[str, Any] = {
        "prompt_id": np.repeat(np.array([r.unit for r in rows], dtype=object), lengths),
        "sequence_id": np.repeat(np.array([r.request_id for r in rows], dtype=object), lengths),
        "position": _joined(
            [np.arange(r.n_tokens) if r.position is None else r.position for r in rows], np.int64
        ),
        "token_id": _joined([np.array(r.token_ids, dtype=np.int64) for r in rows], np.int64),
        "path": np.full(sum(lengths), "decode", dtype=object),
        "engine_logprob": _joined([r.engine_logprob for r in rows], np.float64),
        "weights_version": np.repeat([_number(r.weights_version) for r in rows], lengths),
        "n_cached_tokens": np.repeat([_number(r.n_cached_tokens) for r in rows], lengths),
    }
    given["context_length"] = given["position"] + np.repeat(
        np.array([r.prompt_length for r in rows], dtype=np.int64), lengths
    )
    for name in dict.fromkeys(c for r in rows for c in r.reference):
        given[name] = _joined(
            [r.reference.get(name, np.full(r.n_tokens, np.nan)) for r in rows], np.float64
        )
    tokens = pd.DataFrame(given)
    for name, kind in TOKEN_COLUMNS.items():
        if name not in tokens:
            tokens[name] = pd.Series(
                [np.nan if kind == "number" else None] * len(tokens),
                dtype="float64" if kind == "number" else "object",
            )
    tokens = with_metadata(contract, tokens, {r.request_id: r.metadata for r in rows})
    return tokens, pd.DataFrame({"prompt_id": list(dict.fromkeys(r.unit for r in rows))})


def with_metadata(
    contract: Contract, tokens: pd.DataFrame, metadata: Mapping[str, Mapping[str, Any]]
) -> pd.DataFrame:
    """The token table with the metadata columns that the contract names, joined by response:
    two responses to one prompt may differ in them. metadata: sequence id -> its."""
    place = {name: at for at, name in enumerate(metadata)}
    rows = tokens["sequence_id"].map(place).to_numpy(dtype=np.int64)
    columns = {
        name: pd.Series(_one_kind([m.get(name) for m in metadata.values()])).take(rows).to_numpy()
        for name in metadata_columns(contract)
    }
    return tokens.assign(**columns)


def _one_kind(values: list[Scalar | None]) -> list[Any]:
    """A column of texts and numbers is one of texts: its writers did not agree."""
    if any(isinstance(v, str) for v in values):
        return [None if v is None else str(v) for v in values]
    return [np.nan if v is None else float(v) for v in values]


def _number(value: int | None) -> float:
    return np.nan if value is None else float(value)


def _joined(parts: list[Any], dtype: Any) -> Any:
    return np.concatenate([np.empty(0, dtype=dtype), *(np.asarray(p, dtype=dtype) for p in parts)])
