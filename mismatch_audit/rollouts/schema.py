"""The sequence table of recorded rollouts: one row per training sequence, list columns per token.

All per-token lists have the length of ``token_ids`` and are *unshifted*: element i describes token
i given the tokens before it. Null means unknown or not applicable; it is never written as 0.0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1

HEADER_KEY = b"mismatch_audit"
"""Key of the Parquet file metadata that holds a ``Header`` as JSON."""


class Origin(IntEnum):
    """Who put a token there."""

    PROMPT = 0
    SAMPLED = 1
    ENVIRONMENT = 2
    """A tool's or an environment's answer inside the response."""
    FORCED = 3
    """Appended by the program and not drawn from the policy (a forced EOS, a prefix)."""


REQUIRED = ("sample_id", "token_ids", "prompt_len")
"""A row without these is no rollout; everything else may be null."""

SCALARS: dict[str, str] = {
    "run_id": "string",
    "framework": "string",
    "engine": "string",
    "step": "int32",
    "sample_id": "string",
    "group_id": "string",
    "environment": "string",
    "weights_version_min": "int64",
    "weights_version_max": "int64",
    "trainer_version": "int64",
    "prompt_len": "int32",
    "n_left_pad": "int32",
    "microbatch_rows": "int32",
    "num_cached_tokens": "int32",
    "temperature": "float32",
    "top_p": "float32",
    "top_k": "int32",
    "min_p": "float32",
    "repetition_penalty": "float32",
    "logprobs_mode": "string",
    "finish_reason": "string",
    "reward": "float32",
    "sequence_advantage": "float32",
    "modality": "string",
    "engine_age": "int64",
}
"""Per sequence. group_id: the prompt, the unit of statistics (sample_id where null). step: the
trainer's step that consumes the row. weights_version_*: of the sampler, over a rollout that was
resumed; trainer_version: weights of ``trainer_logprob``. sequence_advantage: where the trainer
keeps one number a sequence. engine_age: weight updates since the engine started."""

LISTS: dict[str, str] = {
    "token_ids": "int32",
    "origin": "int8",
    "loss_mask": "bool",
    "turn_index": "int16",
    "token_version": "int32",
    "sampler_logprob": "float32",
    "trainer_logprob": "float32",
    "current_logprob": "float32",
    "rescore_logprob": "float32",
    "ref_logprob": "float32",
    "entropy": "float32",
    "advantage": "float32",
    "applied_weight": "float32",
    "kept_mask": "bool",
    "kept_mass": "float32",
    "position_ids": "int32",
    "routing_changed": "bool",
    "token_temperature": "float32",
}
"""Per token. sampler_logprob: what the engine drew the token with; trainer_logprob: the trainer's
own (the old policy, before the update); current_logprob: in the loss; rescore_logprob: the engine's
prefill of the same tokens, at the trainer's version; loss_mask: before any rejection, kept_mask:
after it; applied_weight: importance weight that multiplied the loss; kept_mass: probability of the
top-p/top-k support; routing_changed: an expert choice differed between sampler and trainer."""


def sequence_schema() -> pa.Schema:
    """Arrow schema of the sequence table, every column nullable but ``REQUIRED``."""
    import pyarrow as pa

    fields = [
        pa.field(name, pa.type_for_alias(kind), nullable=name not in REQUIRED)
        for name, kind in SCALARS.items()
    ]
    fields += [
        pa.field(name, pa.list_(pa.type_for_alias(kind)), nullable=name not in REQUIRED)
        for name, kind in LISTS.items()
    ]
    return pa.schema(fields)


@dataclass
class Header:
    """What holds for a whole source, as far as it says. None: the source does not say.

    lacks: column -> why this source cannot have it; the checks that need it are UNOBSERVED.
    notes: what the reader undid or assumed (shifts, padding, sentinels), one line each.
    """

    framework: str = "unknown"
    format: str = ""
    model: str | None = None
    tokenizer_digest: str | None = None
    eos_ids: tuple[int, ...] | None = None
    pad_id: int | None = None
    vocab_size: int | None = None
    tied_head: bool | None = None
    position_type: str | None = None
    trainer_dtype: str | None = None
    engine_dtype: str | None = None
    engine_version: str | None = None
    correction: dict[str, Any] = field(default_factory=dict)
    lacks: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
