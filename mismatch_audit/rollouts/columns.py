"""Columns that a contract's slices may name, on a batch of recorded rollouts.

A column has one value a sequence or one a token. Slices of the first kind cost nothing per token,
so a column that some sources keep both ways (``advantage``) is read the cheap way where it can be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from mismatch_audit.rollouts.batch import Array, TokenBatch
from mismatch_audit.rollouts.schema import LISTS, SCALARS

ALIASES = {
    "engine_logprob": "sampler_logprob",
    "reference_logprob": "trainer_logprob",
    "prompt_id": "group_id",
    "sequence_id": "sample_id",
    "token_id": "token_ids",
    "turn": "turn_index",
    "n_cached_tokens": "num_cached_tokens",
    "batch_rows": "microbatch_rows",
    "weights_version": "weights_version_max",
    "prompt_length": "prompt_len",
}
"""The live audit's names (its token table) -> the sequence table's."""


@dataclass(frozen=True)
class Values:
    """One column. values: ``[S]`` or ``[N]`` (``per_token``), numbers, booleans, or codes into
    ``labels``.  null: same shape, true where there is no value (``values`` means nothing there)."""

    per_token: bool
    values: Array
    null: npt.NDArray[np.bool_]
    labels: tuple[str, ...] | None = None

    def series(self, batch: TokenBatch, per_token: bool) -> pd.Series:
        """As pandas sees it, spread to tokens if asked for; nulls are NaN or None."""
        values, null = self.values, self.null
        if per_token and not self.per_token:
            values, null = batch.spread(values), batch.spread(null)
        if self.labels is not None:
            text = np.array([*self.labels, None], dtype=object)
            return pd.Series(text[np.where(null, len(self.labels), values)])
        if values.dtype == bool:
            return pd.Series(values).astype(object).mask(null) if null.any() else pd.Series(values)
        return pd.Series(np.where(null, np.nan, values.astype(np.float64)))


def column(batch: TokenBatch, name: str) -> Values | None:
    """The column of that name, or None where the batch has no value of it."""
    name = ALIASES.get(name, name)
    if name in COMPUTED:
        return COMPUTED[name](batch)
    if name in SCALARS and batch.has(name):
        return _scalar(batch, name)
    if name in LISTS and batch.has(name):
        return Values(True, batch.tokens(name), ~batch.present(name))
    return None


def known(name: str) -> bool:
    """Whether any source could have the column."""
    name = ALIASES.get(name, name)
    return name in COMPUTED or name in SCALARS or name in LISTS


def sources_of(name: str) -> tuple[str, ...]:
    """Columns of the sequence table that a column is made of, for messages."""
    name = ALIASES.get(name, name)
    return _MADE_OF.get(name, (name,))


def _scalar(batch: TokenBatch, name: str) -> Values:
    values = batch.scalar(name)
    if SCALARS[name] == "string":
        codes, labels = pd.factorize(values, sort=True)
        return Values(False, codes, codes < 0, tuple(map(str, labels)))
    if values.dtype.kind == "f":
        return Values(False, values, np.isnan(values))
    null = batch.records.column(name).is_null().to_numpy(zero_copy_only=False)
    return Values(False, values, null)


def _position(batch: TokenBatch) -> Values:
    return Values(True, batch.position, _never(batch.n_tokens))


def _context_length(batch: TokenBatch) -> Values:
    return Values(True, batch.index_in_sequence, _never(batch.n_tokens))


def _length(batch: TokenBatch) -> Values:
    prompt = batch.scalar("prompt_len")
    return Values(False, batch.lengths - prompt, _never(batch.n_sequences))


def _probability(name: str) -> Callable[[TokenBatch], Values | None]:
    def probability(batch: TokenBatch) -> Values | None:
        if not batch.has(name):
            return None
        logprob = batch.tokens(name)
        # A log-prob of +1e-9 is rounding: clipped, its token stays in a last bin closed at 1.
        return Values(True, np.exp(np.minimum(logprob, 0.0)), np.isnan(logprob))

    return probability


def _gap(absolute: bool) -> Callable[[TokenBatch], Values | None]:
    def gap(batch: TokenBatch) -> Values | None:
        if not (batch.has("sampler_logprob") and batch.has("trainer_logprob")):
            return None
        d = np.abs(batch.log_ratio) if absolute else batch.log_ratio
        return Values(True, d, np.isnan(d))

    return gap


def _advantage(batch: TokenBatch) -> Values | None:
    if batch.has("sequence_advantage"):
        return _scalar(batch, "sequence_advantage")
    if batch.has("advantage"):
        return Values(True, batch.tokens("advantage"), ~batch.present("advantage"))
    return None


def _advantage_sign(batch: TokenBatch) -> Values | None:
    found = _advantage(batch)
    if found is None:
        return None
    sign = (found.values > 0).astype(np.int8) - (found.values < 0) + 1
    return Values(found.per_token, sign, found.null, ("negative", "zero", "positive"))


def _weights_lag(batch: TokenBatch) -> Values | None:
    """Versions by which the trainer is ahead of the weights that drew the token."""
    if not batch.has("trainer_version"):
        return None
    trainer = _scalar(batch, "trainer_version")
    if batch.has("token_version"):
        version = batch.tokens("token_version")
        null = ~batch.present("token_version") | batch.spread(trainer.null)
        return Values(True, batch.spread(trainer.values) - version, null)
    if not batch.has("weights_version_min"):
        return None
    sampler = _scalar(batch, "weights_version_min")
    return Values(False, trainer.values - sampler.values, sampler.null | trainer.null)


def _never(n: int) -> npt.NDArray[np.bool_]:
    return np.zeros(n, dtype=bool)


COMPUTED: dict[str, Callable[[TokenBatch], Values | None]] = {
    "position": _position,
    "context_length": _context_length,
    "response_length": _length,
    "engine_prob": _probability("sampler_logprob"),
    "reference_prob": _probability("trainer_logprob"),
    "dlp": _gap(absolute=False),
    "abs_dlp": _gap(absolute=True),
    "advantage": _advantage,
    "advantage_sign": _advantage_sign,
    "weights_lag": _weights_lag,
}
"""Columns that are made from others. position: in the response, environment tokens included."""

_MADE_OF = {
    "engine_prob": ("sampler_logprob",),
    "reference_prob": ("trainer_logprob",),
    "dlp": ("sampler_logprob", "trainer_logprob"),
    "abs_dlp": ("sampler_logprob", "trainer_logprob"),
    "advantage": ("advantage",),
    "advantage_sign": ("advantage",),
    "weights_lag": ("trainer_version", "weights_version_min"),
    "position": ("prompt_len",),
    "context_length": ("token_ids",),
    "response_length": ("prompt_len",),
}
