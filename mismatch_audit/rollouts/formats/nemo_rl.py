"""NeMo-RL's ``{log_dir}/train_data_step<N>.jsonl``: full-length, unshifted lists with both sides.

Each value of a line is a batch of one (``"token_ids": [[...]]``), element 0 of the log-prob lists
is a filler, lists are padded to the step's longest sequence, and ``idx`` is the line's number.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kernel_contracts.errors import InputError
from mismatch_audit.rollouts.formats.base import Detection, ReadOptions, Source
from mismatch_audit.rollouts.formats.files import jsonl_source, matching
from mismatch_audit.rollouts.formats.lines import first_object
from mismatch_audit.rollouts.formats.tidy import (
    GROUP_NOTE,
    first_true,
    logprobs,
    number_in,
    origins,
    prompt_group,
)
from mismatch_audit.rollouts.schema import Header

FORMAT = "nemo-rl"

_GLOBS = ("train_data_step*.jsonl",)
_MARKS = {"token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs"}

Numbers = list[float | list[float | None] | None]
"""A list, or a batch of one list."""


class _Line(msgspec.Struct):
    token_ids: list[int | list[int]]
    token_loss_mask: list[float | bool | list[float | bool]]
    input_lengths: int | list[int]
    generation_logprobs: Numbers
    prev_logprobs: Numbers
    advantages: float | Numbers | None = None
    rewards: float | Numbers | None = None
    sample_loss_mask: float | bool | Numbers | None = None


def files(path: Path) -> list[Path]:
    return matching(path, *_GLOBS)


def detect(path: Path) -> Detection | None:
    found = files(path) if path.is_dir() else [path] if path.is_file() else []
    if not found:
        return None
    keys = first_object(found[0])
    if keys is not None and keys.keys() >= _MARKS:
        why = f"{len(found)} file(s) with the lists generation_logprobs and prev_logprobs"
        return Detection(FORMAT, 0.95, why)
    if files(found[0]):
        return Detection(FORMAT, 0.6, "named train_data_step<N>.jsonl")
    return None


def read(path: Path, options: ReadOptions) -> Source:
    """Raises InputError where there is no log of training data."""
    chosen = files(path) if path.is_dir() else [path]
    if not chosen:
        raise InputError(
            "holds no train_data_step<N>.jsonl",
            where=str(path),
            fix="NeMo-RL writes them to its log_dir unless env.should_log_nemo_gym_responses is on",
        )
    header = Header(
        framework="nemo-rl",
        format=FORMAT,
        notes=[
            "padding beyond input_lengths cut, element 0 of the log-probs read as null",
            "log-probs of 0.0 outside token_loss_mask read as null",
            "prompt_len is the first token of token_loss_mask",
            "sequences with sample_loss_mask 0 have loss_mask false throughout",
            GROUP_NOTE,
        ],
        lacks={
            "weights_version_min": "NeMo-RL keeps weight versions in its replay buffer only, not "
            "in train_data_step<N>.jsonl",
            "entropy": "not in train_data_step<N>.jsonl",
            "temperature": "not in train_data_step<N>.jsonl",
            "applied_weight": "the importance weight is computed in the loss and not written",
        },
    )
    return jsonl_source(path, chosen, _Line, _converter, header, options)


def _converter(file: Path) -> Callable[[_Line, int], dict[str, Any]]:
    step = number_in(file.name, r"step(\d+)")

    def convert(line: _Line, number: int) -> dict[str, Any]:
        ids = _flat(line.token_ids)
        longest, length = len(ids), _one(line.input_lengths)
        if length is None or not 0 <= length <= longest:
            raise ValueError(f"input_lengths {length} is not between 0 and the {longest} tokens")
        lists = {}
        for name in ("token_loss_mask", "generation_logprobs", "prev_logprobs"):
            lists[name] = _flat(getattr(line, name))
            if len(lists[name]) != longest:
                raise ValueError(f"{name} has {len(lists[name])} values for {longest} tokens")
        ids, length = ids[:length], int(length)
        sampled = np.array(lists["token_loss_mask"][:length], dtype=np.float32) != 0
        prompt = first_true(sampled)
        trained = _one(line.sample_loss_mask)
        row: dict[str, Any] = {
            "framework": "nemo-rl",
            "step": step,
            "sample_id": f"{step}/{number - 1}",
            "group_id": prompt_group(ids, prompt),
            "prompt_len": prompt,
            "token_ids": ids,
            "origin": origins(sampled, prompt),
            "loss_mask": sampled if trained is None or trained else np.zeros(length, dtype=bool),
            "reward": _one(line.rewards),
            "sampler_logprob": _side(lists["generation_logprobs"][:length], ~sampled),
            "trainer_logprob": _side(lists["prev_logprobs"][:length], ~sampled),
        }
        advantages = line.advantages
        if isinstance(advantages, list) and len(per_token := _flat(advantages)) == longest > 1:
            row["advantage"] = per_token[:length]
        else:
            row["sequence_advantage"] = _one(advantages)
        return row

    return convert


def _side(values: list[Any], outside: Any) -> Any:
    found = logprobs(values, outside)
    if found is not None and len(found):
        found[0] = np.nan
    return found


def _flat(values: Any) -> list[Any]:
    """The list itself, or the only row of a batch of one."""
    if len(values) == 1 and isinstance(values[0], list):
        return list(values[0])
    if any(isinstance(value, list) for value in values):
        raise ValueError(f"a batch of {len(values)} sequences on one line; one is expected")
    return list(values)


def _one(value: Any) -> Any:
    """A number from ``x``, ``[x]``, ``[[x]]`` or a list that repeats it."""
    while isinstance(value, list):
        if not value:
            return None
        if len(value) > 1 and any(item != value[0] for item in value):
            return None
        value = value[0]
    return value
