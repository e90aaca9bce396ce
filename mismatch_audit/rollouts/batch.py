"""A record batch of sequences as flat arrays: what the statistics and the checks work on."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mismatch_audit.rollouts.schema import LISTS, SCALARS, Origin

if TYPE_CHECKING:
    import pyarrow as pa

Array = npt.NDArray[Any]

_MISSING: dict[str, Any] = {"bool": False, "int8": -1, "int16": -1, "int32": -1, "int64": -1}


class TokenBatch:
    """S sequences with N tokens in all. Arrays are views where Arrow allows, so read-only.

    records: rows in the schema of ``sequence_schema``; columns may be absent.  source, first_row:
    file and row of the first sequence, for messages.
    Nulls: NaN in float columns; -1 in integer columns (False in bool ones): ask ``present``.
    """

    def __init__(self, records: pa.RecordBatch, source: str = "", first_row: int = 0) -> None:
        self.records, self.source, self.first_row = records, source, first_row
        self._has: dict[str, bool] = {}
        self._flat: dict[str, Array] = {}
        self._valid: dict[str, Array | None] = {}

    @property
    def n_sequences(self) -> int:
        return int(self.records.num_rows)

    @property
    def n_tokens(self) -> int:
        return int(self.offsets[-1])

    @cached_property
    def offsets(self) -> Array:
        """``[S + 1]`` int64: sequence s owns tokens ``offsets[s]:offsets[s + 1]``."""
        column = self.records.column("token_ids")
        raw = column.offsets.to_numpy().astype(np.int64)
        return np.asarray(raw - raw[0])

    @cached_property
    def lengths(self) -> Array:
        """``[S]`` int64 tokens a sequence."""
        return np.diff(self.offsets)

    @cached_property
    def sequence_of(self) -> Array:
        """``[N]`` int32: which sequence a token belongs to."""
        return np.repeat(np.arange(self.n_sequences, dtype=np.int32), self.lengths)

    @cached_property
    def index_in_sequence(self) -> Array:
        """``[N]`` int32: position in the sequence, prompt included."""
        return self._places(np.zeros(self.n_sequences, dtype=np.int32))

    @cached_property
    def position(self) -> Array:
        """``[N]`` int32: position in the response; negative in the prompt."""
        return self._places(self.scalar("prompt_len"))

    def _places(self, starts: Array) -> Array:
        from mismatch_audit.rollouts.kernels import positions

        out = np.empty(self.n_tokens, dtype=np.int32)
        positions(self.offsets, starts, out)
        return out

    def has(self, name: str) -> bool:
        """Whether the column is there and holds at least one value."""
        if name not in self._has:
            self._has[name] = self._holds(name)
        return self._has[name]

    def _holds(self, name: str) -> bool:
        if name not in self.records.schema.names:
            return False
        column = self.records.column(name)
        if column.null_count == len(column):
            return False
        return name not in LISTS or bool(self.present(name).any())

    def spread(self, per_sequence: Array) -> Array:
        """``[S]`` -> ``[N]``: each token gets its sequence's value."""
        return np.repeat(per_sequence, self.lengths)

    def scalar(self, name: str) -> Array:
        """``[S]`` of a per-sequence column; strings as an object array with None."""
        kind = SCALARS[name]
        if name not in self.records.schema.names:
            return _absent(kind, self.n_sequences)
        column = self.records.column(name)
        if kind == "string":
            return np.asarray(column.to_numpy(zero_copy_only=False), dtype=object)
        return _filled(column, kind)

    def tokens(self, name: str) -> Array:
        """``[N]`` of a per-token column; a null list counts as nulls."""
        if name not in self._flat:
            # In this order: another thread that finds the values looks for their validity next.
            values, self._valid[name] = self._flatten(name)
            self._flat[name] = values
        return self._flat[name]

    def present(self, name: str) -> Array:
        """``[N]`` bool: the token has a value (NaN counts as none)."""
        flat = self.tokens(name)
        if (valid := self._valid[name]) is None:
            floating = LISTS[name].startswith("float")
            valid = ~np.isnan(flat) if floating else np.ones(self.n_tokens, dtype=bool)
            self._valid[name] = valid
        return valid

    @cached_property
    def sampled(self) -> Array:
        """``[N]`` bool: tokens drawn from the policy and trained on: origin SAMPLED (the whole
        response where the source does not say) and in the loss mask."""
        if self.has("origin"):
            mask = np.asarray(self.tokens("origin") == Origin.SAMPLED)
        else:
            mask = np.asarray(self.position >= 0)
        return np.asarray(mask & self.tokens("loss_mask")) if self.has("loss_mask") else mask

    @cached_property
    def n_sampled(self) -> int:
        """Tokens in ``sampled``."""
        return int(np.count_nonzero(self.sampled))

    @cached_property
    def log_ratio(self) -> Array:
        """``[N]`` float64: log p - log q (trainer less sampler) of the token; NaN where unknown."""
        sampler = self.tokens("sampler_logprob").astype(np.float64)
        return np.asarray(self.tokens("trainer_logprob").astype(np.float64) - sampler)

    def _flatten(self, name: str) -> tuple[Array, Array | None]:
        """Values, and which are there: None where the values tell (NaN) or all are."""
        kind, n = LISTS[name], self.n_tokens
        floating = kind.startswith("float")
        if name not in self.records.schema.names:
            return _absent(kind, n), None if floating else np.zeros(n, dtype=bool)
        column = self.records.column(name)
        if column.null_count == 0:
            inner = column.flatten()
            return _filled(inner, kind), None if floating else _validity(inner)
        values, valid = _absent(kind, n), np.zeros(n, dtype=bool)
        rows = np.repeat(column.is_valid().to_numpy(zero_copy_only=False), self.lengths)
        inner = column.drop_null().flatten()
        values[rows] = _filled(inner, kind)
        if floating:
            return values, None
        valid[rows] = inner.is_valid().to_numpy(zero_copy_only=False)
        return values, valid


def _absent(kind: str, n: int) -> Array:
    if kind == "string":
        return np.full(n, None, dtype=object)
    if kind.startswith("float"):
        return np.full(n, np.nan, dtype=kind)
    return np.full(n, _MISSING[kind], dtype=kind)


def _validity(column: pa.Array) -> Array | None:
    if not column.null_count:
        return None
    return np.asarray(column.is_valid().to_numpy(zero_copy_only=False))


def _filled(column: pa.Array, kind: str) -> Array:
    if kind.startswith("float"):
        if column.null_count and column.type == kind:
            return _with_nan(column, kind)
        return np.asarray(column.to_numpy(zero_copy_only=False), dtype=kind)
    if column.null_count:
        column = column.fill_null(_MISSING[kind])
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=kind)


def _with_nan(column: pa.Array, kind: str) -> Array:
    """NaN for null: a third of the time that Arrow's own conversion takes."""
    from mismatch_audit.rollouts.kernels import nan_for_null

    bits, data = column.buffers()
    values = np.frombuffer(data, dtype=kind)[column.offset : column.offset + len(column)]
    out = np.empty(len(column), dtype=kind)
    nan_for_null(values, np.frombuffer(bits, dtype=np.uint8), column.offset, out)
    return out
