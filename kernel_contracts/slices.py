"""Slice definitions -> masks over a token table.

A definition gives one slice, or one per value of ``by`` and per bin. A row with a null in a column
that decides is in none of them; ``Slice.missing`` counts such rows, so that they can be told. A
slice without rows is kept: there is no evidence for it, and that is not a pass.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from kernel_contracts.contract import Contract
from kernel_contracts.definitions import MAX_SLICES, SliceDefinition
from kernel_contracts.errors import ContractError
from kernel_contracts.evaluation import Mask, evaluate, vector
from kernel_contracts.expressions import Number, to_text
from kernel_contracts.predicates import parse
from kernel_contracts.slice_table import SliceTable
from kernel_contracts.vocabulary import COMPUTED_COLUMNS

__all__ = ["Slice", "SliceTable", "resolve", "value_label"]

Codes = npt.NDArray[np.int64]
_BARE = re.compile(r'[^\s,"](?:[^,"\n\r\t]*[^\s,"])?\Z')
_READS_AS_OTHER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?\Z|(?:true|false|null)\Z")


@dataclass(frozen=True, eq=False)
class Slice:
    """A named subset of rows.

    name: ``undecided``, ``domain=code``, ``reference_prob[0.1,0.5)``; where the definition has a
    ``where`` beside its grouping, the definition's name and a colon come first.  definition: the
    name in the contract.  mask: ``[rows]``.  missing: rows that a null keeps out of every slice of
    the definition.
    """

    name: str
    definition: str
    mask: Mask
    missing: int = 0

    @property
    def rows(self) -> int:
        """Rows in the slice."""
        return int(self.mask.sum())

    def answers_to(self, name: str) -> bool:
        """A clause or rule that says ``name`` means this slice."""
        return name in (self.name, self.definition)


def resolve(
    contract: Contract,
    tokens: pd.DataFrame,
    prompts: pd.DataFrame | None = None,
    names: Collection[str] | None = None,
) -> list[Slice]:
    """The slices of a contract on a token table, in the contract's order.

    tokens: one row a scored token.  prompts: one row a prompt, ``prompt_id`` and metadata; a value
    of ``by`` that only prompts without tokens have still gives a slice, an empty one.  names: the
    definitions to resolve (default all).  Raises ContractError naming the slice for an unknown
    column, one of an unfit kind, or more than 200 slices; InputError for an unusable prompt table.
    """
    table = SliceTable(tokens, prompts)
    found: list[Slice] = []
    for name, definition in contract.slices.items():
        if names is None or name in names:
            try:
                found += _slices(name, definition, table)
            except ContractError as error:
                where = f"contract {contract.name}: slices.{name}"
                raise ContractError(error.what, where=where, fix=error.fix) from error
    return found


@dataclass(frozen=True)
class _Grouping:
    """codes: ``[rows]`` index of each row's group, -1 in none.  null: ``[rows]`` undecided.
    labels: one a group.  present: groups that rows or prompts have; None keeps all (bins)."""

    codes: Codes
    null: Mask
    labels: list[str]


def _slices(name: str, definition: SliceDefinition, table: SliceTable) -> Iterator[Slice]:
    selected = np.ones(len(table), dtype=bool)
    unknown = np.zeros(len(table), dtype=bool)
    if definition.where is not None:
        condition = parse(definition.where, table.names | set(COMPUTED_COLUMNS))
        outcome = evaluate(condition, table.column, len(table))
        selected, unknown = outcome.selected, outcome.unknown
    if not definition.grouping:
        yield Slice(name, name, selected, int(unknown.sum()))
        return
    groupings = [_by(definition.by, table)] if definition.by else []
    groupings += [_bins(c, edges, table) for c, edges in (definition.bins or {}).items()]
    count = int(np.prod([len(g.labels) for g in groupings], dtype=np.int64))
    _bound(", ".join(definition.grouping), count)
    null = np.logical_or.reduce([g.null for g in groupings])
    missing = int((unknown | (selected & null)).sum())
    if count == 0:
        yield Slice(name, name, np.zeros(len(table), dtype=bool), missing)
    prefix = f"{name}:" if definition.where is not None else ""
    for choice in itertools.product(*(range(len(g.labels)) for g in groupings)):
        pairs = list(zip(groupings, choice, strict=True))
        label = ",".join(g.labels[i] for g, i in pairs)
        mask = np.logical_and.reduce([selected, *(g.codes == i for g, i in pairs)])
        yield Slice(prefix + label, name, mask, missing)


def _by(columns: tuple[str, ...], table: SliceTable) -> _Grouping:
    """One group per value, or per combination of values, that a row or a prompt has."""
    factors = [_factor(column, table) for column in columns]
    sizes = [max(1, len(f.values)) for f in factors]
    null = np.logical_or.reduce([f.rows < 0 for f in factors])
    joint = np.ravel_multi_index([np.maximum(f.rows, 0) for f in factors], sizes)
    present = np.unique(joint[~null])
    if all(f.prompts is not None for f in factors):
        stack = np.stack([f.prompts for f in factors if f.prompts is not None])
        stack = stack[:, (stack >= 0).all(axis=0)]
        present = np.union1d(present, np.ravel_multi_index(list(stack), sizes))
    _bound(", ".join(columns), len(present))
    codes = np.full(len(table), -1, dtype=np.int64)
    codes[~null] = np.searchsorted(present, joint[~null])
    labels = [
        ",".join(
            f"{f.column}={value_label(f.values[i])}"
            for f, i in zip(factors, np.unravel_index(int(one), sizes), strict=True)
        )
        for one in present
    ]
    return _Grouping(codes, null, labels)


@dataclass(frozen=True)
class _Factor:
    """values: the column's sorted values.  rows, prompts: index of each row's and each prompt's
    value, -1 for null; prompts is None for a column that does not come with the prompts."""

    column: str
    values: list[Any]
    rows: Codes
    prompts: Codes | None


def _factor(column: str, table: SliceTable) -> _Factor:
    metadata = table.is_metadata(column)
    found = vector(table.prompts[column] if metadata else table.column(column), column)
    codes = np.full(len(found.null), -1, dtype=np.int64)
    codes[~found.null], values = pd.factorize(found.values[~found.null], sort=True)
    _bound(column, len(values))
    if metadata:
        return _Factor(column, values.tolist(), np.append(codes, -1)[table.prompt_rows], codes)
    return _Factor(column, values.tolist(), codes, None)


def _bound(columns: str, count: int) -> None:
    if count > MAX_SLICES:
        raise ContractError(
            f"{columns} gives {count} slices; at most {MAX_SLICES}",
            fix="group by a coarser column, or give bins",
        )


def _bins(column: str, edges: tuple[float, ...], table: SliceTable) -> _Grouping:
    """Intervals closed on the left, the last on both sides. All are kept, also without rows."""
    found = vector(table.column(column), column)
    if found.kind not in ("number", "nothing"):
        raise ContractError(f"{column} holds {found.kind} and has no bins", fix="use `by`")
    codes = np.searchsorted(np.asarray(edges), found.values, side="right").astype(np.int64) - 1
    codes[found.values == edges[-1]] = len(edges) - 2
    codes[found.null | (codes > len(edges) - 2)] = -1
    texts = [to_text(Number(e)) for e in edges]
    labels = [f"{column}[{a},{b})" for a, b in itertools.pairwise(texts)]
    labels[-1] = labels[-1][:-1] + "]"
    return _Grouping(codes, found.null, labels)


def value_label(value: object) -> str:
    """A value in a slice's name; quoted where it would read as something else."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return to_text(Number(value))
    text = str(value)
    if _BARE.match(text) and not _READS_AS_OTHER.match(text):
        return text
    return json.dumps(text, ensure_ascii=False)
