"""What most readers undo: sentinels that stand for "no value", and who put a token there."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_audit.rollouts.batch import Array
from mismatch_audit.rollouts.formats.table import vector
from mismatch_audit.rollouts.schema import Origin


def origins(sampled: Array, prompt_len: int) -> Array:
    """``[n]`` int8 Origin from a mask of the model's own tokens: what lies before ``prompt_len`` is
    prompt, the gaps behind it are an environment's (tool results, later user turns)."""
    origin = np.where(sampled, Origin.SAMPLED, Origin.ENVIRONMENT).astype(np.int8)
    origin[:prompt_len] = Origin.PROMPT
    return origin


def first_true(mask: Array) -> int:
    """Index of the first True; the length where there is none."""
    return int(np.argmax(mask)) if mask.any() else len(mask)


def logprobs(values: Any, outside: Array, clamped: float | None = None) -> Array | None:
    """float32 with NaN where there is no value: null, exactly 0.0 outside the model's own tokens
    (padding of a prompt or a tool result), and the trainer's ``clamped`` sentinel anywhere.

    A 0.0 on a sampled token stays: it is either probability 1 or a finding. Raises ValueError
    where the values are no numbers.
    """
    if values is None:
        return None
    array = vector("sampler_logprob", values).copy()
    if array.shape != outside.shape:
        return array  # the table says which column has the wrong length
    array[outside & (array == 0.0)] = np.nan
    if clamped is not None:
        array[array == np.float32(clamped)] = np.nan
    return array


def number_in(path: Path | str, pattern: str) -> int | None:
    """The integer that ``pattern``'s first group finds in a name."""
    found = re.search(pattern, str(path))
    return int(found.group(1)) if found else None


def natural(path: Path) -> list[Any]:
    """Sort key: step_2 before step_10."""
    parts = re.split(r"(\d+)", str(path))
    return [int(part) if part.isdigit() else part for part in parts]


GROUP_NOTE = "group_id is a digest of the prompt's tokens: the source does not name its groups"


def prompt_group(token_ids: Any, prompt_len: int) -> str:
    """A group id for sources that name none: sequences with the same prompt are one group."""
    ids = np.asarray(token_ids[:prompt_len], dtype=np.int64)
    return hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()
