"""Fill in a side that recorded rollouts lack: score their tokens again with a program.

The reference (transformers, teacher-forced) gives ``trainer_logprob``; an engine given as
``program`` gives ``sampler_logprob`` or ``rescore_logprob`` from its prefill, which is not the path
that drew the tokens. The log-prob of token i is that of softmax(logits_i / T) with the temperature
that the rollout logged: a side scored at another temperature is no comparison at all (T = 0.6
against 1 reads as a mismatch of a nat a token).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kernel_contracts.errors import InputError
from mismatch_audit.programs.base import Sequence_
from mismatch_audit.rollouts.batch import Array, TokenBatch
from mismatch_audit.rollouts.schema import LISTS, SCALARS, Header, Origin

if TYPE_CHECKING:
    import torch

    from mismatch_audit.compare.heads import Head
    from mismatch_audit.programs.base import Program, ScoredSequence
    from mismatch_audit.rollouts.formats.base import Source

SIDES = ("trainer_logprob", "sampler_logprob", "rescore_logprob", "current_logprob", "ref_logprob")

# Elements of one block of logits: 256 MiB in float32.
_BLOCK = 64 << 20
# Tokens that a program is given at once.
_CALL = 1 << 16
# Below this an engine is greedy and reports log-probs at temperature 1.
_GREEDY = 1e-5


class Rescorer:
    """A program that scores batches; loaded when the first batch needs it.

    model: a checkpoint's folder, a hub id or ``sample``.  side: the column to fill.  temperature:
    for rollouts that log none.  token_budget: padded tokens a micro-batch.  program: scores instead
    of the reference.
    Raises InputError for an unknown side or a model that cannot be loaded.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str = "auto",
        dtype: str = "float32",
        side: str = "trainer_logprob",
        temperature: float = 1.0,
        token_budget: int = 2048,
        program: Program | None = None,
    ) -> None:
        if side not in SIDES:
            raise InputError(
                f"{side!r} cannot be scored again", fix=f"choose of {', '.join(SIDES)}"
            )
        if not temperature > 0:
            raise InputError(f"temperature {temperature} is not above 0")
        self.model, self.device, self.dtype, self.side = model, device, dtype, side
        self.temperature, self.token_budget = temperature, token_budget
        self._program: Any = program
        self._by = "transformers, " + dtype if program is None else "the program given"
        self.scored = 0
        """Tokens filled in so far."""

    @property
    def program(self) -> Any:
        if self._program is None:
            from mismatch_audit.programs.reference import TransformersReference
            from mismatch_audit.sample_model import resolve_model
            from mismatch_audit.settings import ReferenceSettings

            settings = ReferenceSettings(
                dtype=self.dtype, device=self.device, token_budget=self.token_budget
            )
            self._program = TransformersReference(resolve_model(self.model), settings)
        return self._program

    @cached_property
    def head(self) -> Head:
        """Read once: an engine's comes through a file."""
        head: Head = self.program.head()
        return head

    def score(self, batch: TokenBatch) -> TokenBatch:
        """The batch with ``side`` filled in on sampled tokens of every sequence that has no value
        there; other sequences stay as they are.

        Raises InputError, row named, for tokens outside the vocabulary and for a sequence that is
        longer than the model's positions.
        """
        present, needed = batch.present(self.side), _own_tokens(batch)
        has = np.add.reduceat(np.append(present, False), batch.offsets[:-1]) > 0
        has &= batch.lengths > 0
        rows = [
            int(s)
            for s in np.flatnonzero(~has)
            if needed[batch.offsets[s] :][: batch.lengths[s]].any()
        ]
        if not rows:
            return batch
        values = batch.tokens(self.side).astype(np.float32).copy()
        sequences = [self._sequence(batch, s) for s in rows]
        temperatures = _temperatures(batch, self.temperature)
        for scored in self._scored(sequences):
            s = int(scored.sequence_id)
            end = int(batch.offsets[s + 1])
            at = slice(end - len(scored.hidden), end)
            ids = batch.tokens("token_ids")[at]
            found = _logprobs(self.head, scored.hidden, ids, temperatures[at])
            values[at] = np.where(needed[at], found, np.nan)
        self.scored += int((~np.isnan(values) & ~present).sum())
        return _with_column(batch, self.side, values)

    def _scored(self, sequences: list[Sequence_]) -> Iterator[ScoredSequence]:
        """In calls of bounded size: an engine passes the rows of a call through one file."""
        call: list[Sequence_] = []
        size = 0
        for sequence in sequences:
            if call and size + len(sequence.token_ids) > _CALL:
                yield from self.program.score(call)
                call, size = [], 0
            call.append(sequence)
            size += len(sequence.token_ids)
        yield from self.program.score(call)

    def _sequence(self, batch: TokenBatch, s: int) -> Sequence_:
        ids = batch.tokens("token_ids")[batch.offsets[s] : batch.offsets[s + 1]]
        where = f"{batch.source}, sequence {batch.scalar('sample_id')[s]!r}"
        vocabulary = self.head.vocab_size
        if int(ids.max()) >= vocabulary:
            raise InputError(
                f"token {int(ids.max())} is outside the vocabulary of {vocabulary}",
                where=where,
                fix=f"{self.model} is not the model that these rollouts were drawn from",
            )
        config = getattr(getattr(self.program, "model", None), "config", None)
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and len(ids) > longest:
            raise InputError(
                f"{len(ids)} tokens, but the model has {longest} positions", where=where
            )
        # Token 0 has no context, so nothing can score it.
        start = max(1, int(batch.scalar("prompt_len")[s]))
        return Sequence_(str(s), tuple(ids.tolist()), start)

    def header(self, header: Header) -> Header:
        """The source's header once its batches are scored: what was filled in, and by what."""
        notes = [
            *header.notes,
            f"{self.side} scored again by {self._by}, with the weights of {self.model}: of another "
            "step than the rollout's they read as a mismatch",
            f"scored at the logged temperature; at {self.temperature:g} where none was logged, at "
            "1 where the engine reports raw log-probs",
        ]
        lacks = {column: why for column, why in header.lacks.items() if column != self.side}
        changed = replace(header, notes=notes, lacks=lacks, model=header.model or self.model)
        if self.side == "trainer_logprob":
            changed.trainer_dtype = self.dtype
        return changed

    def source(self, source: Source) -> Source:
        """The source with its batches scored; after an InputError the next batch may be asked
        for."""
        batches = _Scored(iter(source.batches), self)
        return replace(source, header=self.header(source.header), batches=batches)

    def close(self) -> None:
        """Free the weights."""
        if self._program is not None:
            self._program.close()


def rescore(
    batches: Iterable[TokenBatch],
    model: str,
    *,
    device: str = "auto",
    dtype: str = "float32",
    **options: Any,
) -> Iterator[TokenBatch]:
    """Batches with the missing side filled in; see ``Rescorer`` for the options and errors."""
    return _Scored(iter(batches), Rescorer(model, device=device, dtype=dtype, **options))


class _Scored:
    def __init__(self, batches: Iterator[TokenBatch], rescorer: Rescorer) -> None:
        self._batches, self._rescorer = batches, rescorer

    def __iter__(self) -> _Scored:
        return self

    def __next__(self) -> TokenBatch:
        return self._rescorer.score(next(self._batches))


def _own_tokens(batch: TokenBatch) -> Array:
    """``[N]`` bool: drawn by the engine, trained on or not, and with a context to score it in."""
    own = np.asarray(batch.position >= 0)
    if batch.has("origin"):
        origin = batch.tokens("origin")
        own = (origin == Origin.SAMPLED) | (own & ~batch.present("origin"))
    return np.asarray(own & (batch.index_in_sequence > 0))


def _temperatures(batch: TokenBatch, default: float) -> Array:
    """``[N]`` float32: what the logits are divided by."""
    each = batch.scalar("temperature").astype(np.float32)
    modes = batch.scalar("logprobs_mode")
    raw = np.array([isinstance(mode, str) and mode.startswith("raw") for mode in modes], dtype=bool)
    per_token = batch.spread(each)
    if batch.has("token_temperature"):
        own = batch.tokens("token_temperature")
        per_token = np.where(np.isnan(own), per_token, own)
    per_token = np.where(np.isnan(per_token), np.float32(default), per_token)
    one = batch.spread(raw) | (per_token < _GREEDY)
    return np.where(one, np.float32(1.0), per_token).astype(np.float32)


def _logprobs(head: Any, hidden: torch.Tensor, ids: Array, temperatures: Array) -> Array:
    """``[T]`` log softmax(logits / T)[id] in float32, in blocks of rows."""
    import torch

    rows = max(1, _BLOCK // head.vocab_size)
    wanted = torch.as_tensor(ids.astype(np.int64), device=hidden.device)
    divisors = torch.as_tensor(temperatures, device=hidden.device)
    found = []
    with torch.no_grad():
        for at in range(0, len(hidden), rows):
            part = slice(at, at + rows)
            logits = head.logits(hidden[part]).float() / divisors[part, None]
            chosen = logits.gather(1, wanted[part, None].to(logits.device))[:, 0]
            found.append((chosen - logits.logsumexp(-1)).cpu())
    return np.asarray(torch.cat(found).numpy())


def _with_column(batch: TokenBatch, name: str, values: Array) -> TokenBatch:
    import pyarrow as pa

    kind = pa.type_for_alias(LISTS[name])
    inner = pa.array(values, type=kind, mask=np.isnan(values))
    column = pa.ListArray.from_arrays(pa.array(batch.offsets, pa.int32()), inner)
    arrays = {field: batch.records.column(field) for field in batch.records.schema.names}
    arrays[name] = column
    ordered = [n for n in (*SCALARS, *LISTS) if n in arrays]
    records = pa.RecordBatch.from_arrays([arrays[n] for n in ordered], names=ordered)
    return TokenBatch(records, batch.source, batch.first_row)
