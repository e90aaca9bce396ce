"""The contract's slices on a stream: which group of each definition a token belongs to.

The values of ``by`` show up as data comes, so groups get their number when first seen. A row with
a null in a column that decides is in no group and is counted, as in ``kernel_contracts.slices``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from kernel_contracts.contract import Contract, SliceDefinition
from kernel_contracts.definitions import MAX_SLICES
from kernel_contracts.errors import ContractError
from kernel_contracts.evaluation import evaluate
from kernel_contracts.expressions import Number, columns, to_text
from kernel_contracts.predicates import parse
from kernel_contracts.slices import value_label
from mismatch_audit.rollouts import kernels
from mismatch_audit.rollouts.batch import Array, TokenBatch
from mismatch_audit.rollouts.columns import Values, column, known, sources_of

NULL, OUTSIDE = -2, -1
MOST_SEEN = 100_000
"""Groups of one definition that are followed at all; whole numbers beyond 200 are merged into
ranges at the end, texts beyond 200 make the definition unusable."""


@dataclass
class Definition:
    """One slice definition and the groups seen so far.

    groups: value or bin index per grouping column -> number.  absent: columns that a source lacked,
    with the tokens that it gave.  nulls: tokens that a null keeps out.
    """

    name: str
    spec: SliceDefinition
    groups: dict[tuple[Any, ...], int] = field(default_factory=dict)
    absent: dict[str, int] = field(default_factory=dict)
    nulls: int = 0
    crowded: str = ""

    def __post_init__(self) -> None:
        self.condition = None if self.spec.where is None else parse(self.spec.where)
        named = columns(self.condition) if self.condition else ()
        self.columns = tuple(dict.fromkeys((*named, *self.spec.grouping)))
        for name in self.columns:
            if not known(name):
                raise ContractError(
                    f"no column {name!r} in recorded rollouts",
                    where=f"slices.{self.name}",
                    fix="docs/rollouts.md lists the columns that slices may name",
                )


@dataclass(frozen=True)
class Codes:
    """Groups of one batch. sequence: int32 [S, A] slots.  token: int16 [B, N], less ``base`` [B].
    ids: [slots] number of the slice that a slot adds to.  owners: definition per column of
    ``sequence``, then per row of ``token``."""

    sequence: Array
    token: Array
    base: Array
    ids: Array
    owners: list[Definition]


@dataclass(frozen=True)
class Found:
    """A slice of the log. ids: numbers that it adds up."""

    name: str
    definition: Definition
    ids: tuple[int, ...]


class SlicePlan:
    """All slices of a contract, batch by batch. Raises ContractError for a column that no recorded
    rollout has, or one of an unfit kind."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.definitions = [Definition(name, spec) for name, spec in contract.slices.items()]
        self._count = 0

    def codes(self, batch: TokenBatch) -> Codes:
        """The group of every token in every definition."""
        cache: dict[str, Values | None] = {}

        def read(name: str) -> Values | None:
            if name not in cache:
                cache[name] = column(batch, name)
            return cache[name]

        sequence, token, bases, ids = [], [], [], []
        owners: tuple[list[Definition], list[Definition]] = ([], [])
        slots = 0
        for one in self.definitions:
            lacking = [c for c in one.columns if read(c) is None]
            if lacking or one.crowded:
                for name in lacking:
                    one.absent[name] = one.absent.get(name, 0) + batch.n_sampled
                continue
            values = {c: read(c) for c in one.columns}
            per_token, codes, keys = _codes(one, batch, values)  # type: ignore[arg-type]
            numbers = [self._number(one, key) for key in keys]
            owners[per_token].append(one)
            if per_token:
                token.append(codes)
                bases.append(slots)
            else:
                sequence.append(np.where(codes >= 0, codes + slots, codes))
            slots += len(keys)
            ids += numbers
        return Codes(
            np.stack(sequence, axis=1).astype(np.int32)
            if sequence
            else np.empty((batch.n_sequences, 0), dtype=np.int32),
            np.stack(token) if token else np.empty((0, batch.n_tokens), dtype=np.int16),
            np.array(bases, dtype=np.int64),
            np.array(ids, dtype=np.int32),
            owners[0] + owners[1],
        )

    def _number(self, one: Definition, key: tuple[Any, ...]) -> int:
        if key not in one.groups:
            if len(one.groups) >= MOST_SEEN:
                one.crowded = f"{', '.join(one.spec.grouping)} has over {MOST_SEEN} values"
            one.groups[key] = self._count
            self._count += 1
        return one.groups[key]

    def found(self) -> list[Found]:
        """Every slice, in the contract's order, those without a row included."""
        return [one for definition in self.definitions for one in _found(definition)]


def _codes(
    one: Definition, batch: TokenBatch, values: Mapping[str, Values]
) -> tuple[bool, Array, list[tuple[Any, ...]]]:
    """(per token?, group per row or NULL or OUTSIDE, the groups' keys)."""
    per_token = any(v.per_token for v in values.values())
    rows = batch.n_tokens if per_token else batch.n_sequences
    parts: list[tuple[Array, list[Any]]] = []
    for name in one.spec.by or ():
        parts.append(_levels(values[name], batch, per_token))
    for name, edges in (one.spec.bins or {}).items():
        parts.append(_bins(values[name], batch, per_token, edges))
    dtype = np.int16 if per_token else np.int32
    keys: list[tuple[Any, ...]]
    if len(parts) == 1:
        codes, keys = parts[0][0], [(level,) for level in parts[0][1]]
    elif parts:
        codes, keys = _product(parts)
    else:
        codes, keys = np.zeros(rows, dtype=dtype), [()]
    if one.condition is not None:
        outcome = evaluate(one.condition, lambda name: values[name].series(batch, per_token), rows)
        codes = np.where(outcome.selected, codes, OUTSIDE)
        codes[outcome.unknown] = NULL
    return per_token, codes.astype(dtype, copy=False), keys


def _levels(values: Values, batch: TokenBatch, per_token: bool) -> tuple[Array, list[Any]]:
    """One group per value that the batch has."""
    if values.labels is not None:
        used = np.unique(values.values[~values.null])
        codes = np.where(values.null, NULL, np.searchsorted(used, values.values))
        levels: list[Any] = [values.labels[i] for i in used]
    elif values.values.dtype.kind in "biu":
        codes, levels = _small_integers(values)
    else:
        codes = np.full(len(values.values), NULL, dtype=np.int32)
        codes[~values.null], found = pd.factorize(values.values[~values.null], sort=True)
        levels = [float(v) for v in found]
    if per_token and not values.per_token:
        codes = batch.spread(codes)
    return codes, levels


def _small_integers(values: Values) -> tuple[Array, list[Any]]:
    numbers = values.values.view(np.int8) if values.values.dtype == bool else values.values
    seen = numbers[~values.null] if values.null.any() else numbers
    if not len(seen):
        return np.full(len(numbers), NULL), []
    low, high = int(seen.min()), int(seen.max())
    if high - low > 1 << 16:
        found, inverse = np.unique(seen, return_inverse=True)
        codes = np.full(len(numbers), NULL, dtype=np.int64)
        codes[~values.null] = inverse
        return codes, _python(found, values)
    count = np.zeros(high - low + 1, dtype=np.int64)
    kernels.count_levels(numbers, values.null, low, count)
    rank = np.cumsum(count > 0) - 1
    codes = np.empty(len(numbers), dtype=np.int16 if values.per_token else np.int32)
    kernels.level_codes(numbers, values.null, low, rank, codes)
    return codes, _python(np.flatnonzero(count) + low, values)


def _python(found: Array, values: Values) -> list[Any]:
    if values.values.dtype == bool:
        return [bool(v) for v in found]
    return [int(v) for v in found]


def _bins(
    values: Values, batch: TokenBatch, per_token: bool, edges: tuple[float, ...]
) -> tuple[Array, list[Any]]:
    """Every interval is a group, also one without rows."""
    if values.labels is not None or values.values.dtype == bool:
        raise ContractError("a column of texts or truths has no bins", fix="use `by`")
    codes = np.empty(len(values.values), dtype=np.int16)
    kernels.bin_codes(values.values, np.array(edges), codes, 0, len(codes))
    if values.values.dtype.kind in "iu" and values.null.any():
        codes[values.null] = NULL
    if per_token and not values.per_token:
        codes = batch.spread(codes)
    return codes, [_Bin(i) for i in range(len(edges) - 1)]


class _Bin(int):
    """Index of an interval (and no value)."""


def _product(parts: list[tuple[Array, list[Any]]]) -> tuple[Array, list[tuple[Any, ...]]]:
    sizes = [len(levels) for _, levels in parts]
    if not all(sizes):
        return np.full(len(parts[0][0]), NULL), []
    stack = np.stack([np.asarray(codes, dtype=np.int64) for codes, _ in parts])
    worst = stack.min(axis=0)
    joint = np.ravel_multi_index(list(np.maximum(stack, 0)), sizes)
    present, codes = np.unique(joint, return_inverse=True)
    codes[worst < 0] = worst[worst < 0]
    keys = [
        tuple(levels[int(i)] for (_, levels), i in zip(parts, where, strict=True))
        for where in zip(*np.unravel_index(present, sizes), strict=True)
    ]
    return codes, keys


def _found(one: Definition) -> list[Found]:
    spec = one.spec
    if not spec.grouping:
        return [Found(one.name, one, tuple(one.groups.values()))]
    groups = dict(one.groups)
    if spec.by is None:  # bins are there whether or not a row is in them
        for key in itertools.product(*(range(len(e) - 1) for e in (spec.bins or {}).values())):
            groups.setdefault(tuple(map(_Bin, key)), -1)
    if not groups:
        return [Found(one.name, one, ())]
    if len(groups) > MAX_SLICES:
        if len(spec.grouping) == 1 and all(isinstance(k[0], int) for k in groups):
            return _ranges(one, {int(k[0]): v for k, v in groups.items()})
        one.crowded = f"{', '.join(spec.grouping)} gives {len(groups)} slices; at most {MAX_SLICES}"
        return [Found(one.name, one, ())]
    prefix = f"{one.name}:" if spec.where is not None else ""
    return [
        Found(prefix + _label(spec, key), one, () if groups[key] < 0 else (groups[key],))
        for key in sorted(groups, key=lambda k: tuple((str(type(v)), v) for v in k))
    ]


def _ranges(one: Definition, numbers: dict[int, int], most: int = 32) -> list[Found]:
    """More values than slices may be (the steps of a long run): ranges of equal width."""
    low, high = min(numbers), max(numbers)
    width = 1 << max(0, ((high - low) // most).bit_length())
    ranges: dict[int, list[int]] = {}
    for value, number in numbers.items():
        ranges.setdefault((value - low) // width, []).append(number)
    name = one.spec.grouping[0]
    return [
        Found(f"{name}[{low + i * width},{low + (i + 1) * width})", one, tuple(ranges[i]))
        for i in sorted(ranges)
    ]


def _label(spec: SliceDefinition, key: tuple[Any, ...]) -> str:
    by = spec.by or ()
    labels = [f"{c}={value_label(_number(v))}" for c, v in zip(by, key[: len(by)], strict=True)]
    for (name, edges), index in zip((spec.bins or {}).items(), key[len(by) :], strict=True):
        low, high = (to_text(Number(e)) for e in edges[int(index) : int(index) + 2])
        labels.append(f"{name}[{low},{high}{']' if index == len(edges) - 2 else ')'}")
    return ",".join(labels)


def _number(value: Any) -> Any:
    """Whole numbers as a token table holds them, so that they are written alike."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if whole else value


def why_absent(one: Definition, lacks: Mapping[str, str]) -> str:
    """Why a definition has no row: the columns that the sources lack, and how to record them."""
    if one.crowded:
        return one.crowded
    parts = []
    for name in one.absent:
        made = sources_of(name)
        reasons = [lacks[c] for c in (name, *made) if c in lacks]
        said = name if name in made else f"{name} (from {', '.join(made)})"
        parts.append(reasons[0] if reasons else f"no {said}")
    return "; ".join(parts)
