"""prime-rl's token exports: ``token_exports/step_<N>/rank_<R>.jsonl`` (enable_token_export).

Unshifted lists of one length with both sides' log-probs. A step folder holds a file named STABLE
once the step is whole; a step without it, beside steps with it, is still being written and left
out.
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

FORMAT = "prime-rl"

_GLOBS = (
    "token_exports/step_*/rank_*.jsonl",
    "step_*/rank_*.jsonl",
    "rank_*.jsonl",
)
_MARKS = {"trainer_logprobs", "inference_logprobs", "token_ids", "loss_mask"}

Floats = list[float | None]


class _Line(msgspec.Struct):
    token_ids: list[int]
    loss_mask: list[bool]
    inference_logprobs: Floats
    trainer_logprobs: Floats
    schema_version: int = 1
    step: int | None = None
    export_step: int | None = None
    rank: int | None = None
    micro_step: int | None = None
    micro_sequence_idx: int | None = None
    export_sequence_idx: int | None = None
    env_name: str | None = None
    run_id: str | None = None
    sample_id: str | None = None
    position_ids: list[int] | None = None
    advantages: Floats | None = None
    entropy: Floats | None = None
    is_masked: list[bool | None] | None = None
    temperatures: Floats | None = None
    rewards: Floats | None = None


def files(path: Path) -> list[Path]:
    return matching(path, *_GLOBS)


def _whole(path: Path) -> list[Path]:
    """The export's files; of a folder, only those of steps that are whole."""
    found = matching(path, *_GLOBS)
    stable = [file for file in found if (file.parent / "STABLE").exists()]
    return stable or found


def detect(path: Path) -> Detection | None:
    found = matching(path, *_GLOBS) if path.is_dir() else [path] if path.is_file() else []
    if not found:
        return None
    keys = first_object(found[0])
    named = bool(matching(found[0], "rank_*.jsonl"))
    if keys is not None and keys.keys() >= _MARKS:
        why = f"{len(found)} file(s) with the lists trainer_logprobs and inference_logprobs"
        return Detection(FORMAT, 0.95, why)
    if named and keys is None and found[0].parent.name.startswith("step_"):
        return Detection(FORMAT, 0.5, "named step_<N>/rank_<R>.jsonl")
    return None


def read(path: Path, options: ReadOptions) -> Source:
    """Raises InputError where there is no export."""
    chosen = _whole(path) if path.is_dir() else [path]
    if not chosen:
        raise InputError(
            "holds no token_exports/step_<N>/rank_<R>.jsonl",
            where=str(path),
            fix="set trainer.enable_token_export = true and run the step again",
        )
    header = Header(framework="prime-rl", format=FORMAT, notes=_notes(path, chosen))
    header.lacks = {
        "weights_version_min": "a token export has no weights version; prime-rl's rollout files "
        "have it, or attach the auditor to the loss (a custom loss's import_path)",
        "applied_weight": "the export keeps importance_ratio before clipping, not the weight used",
        "logprobs_mode": "not exported; prime-rl asks its engine for processed log-probs",
    }
    return jsonl_source(path, chosen, _Line, _converter, header, options)


def _notes(path: Path, chosen: list[Path]) -> list[str]:
    notes = [
        "sampler_logprob 0.0 outside the loss mask is read as null, trainer_logprob of token 0 too",
        "prompt_len is the first token of the loss mask",
        GROUP_NOTE,
    ]
    everything = matching(path, *_GLOBS) if path.is_dir() else chosen
    if left_out := len(everything) - len(chosen):
        notes.append(f"{left_out} file(s) of steps without a STABLE marker left out")
    elif path.is_dir() and not any((f.parent / "STABLE").exists() for f in chosen):
        notes.append("no step has a STABLE marker: files may still have been written to")
    return notes


def _converter(file: Path) -> Callable[[_Line, int], dict[str, Any]]:
    step_of_folder = number_in(file.parent.name, r"^step_(\d+)$")

    def convert(line: _Line, number: int) -> dict[str, Any]:
        if line.schema_version != 1:
            raise ValueError(f"schema_version {line.schema_version} is not known (1 is)")
        mask = np.array(line.loss_mask, dtype=bool)
        prompt = first_true(mask)
        step = line.step if line.step is not None else step_of_folder
        place = [step, line.rank, line.micro_step, line.micro_sequence_idx]
        if line.micro_sequence_idx is None:
            place = [step, line.rank, line.export_sequence_idx, number]
        trainer = logprobs(line.trainer_logprobs, ~mask)
        if trainer is not None and len(trainer):
            trainer[0] = np.nan
        return {
            "framework": "prime-rl",
            "step": step,
            "run_id": line.run_id,
            "sample_id": line.sample_id or "/".join(str(part) for part in place),
            "group_id": prompt_group(line.token_ids, prompt),
            "environment": line.env_name,
            "prompt_len": prompt,
            "token_ids": line.token_ids,
            "loss_mask": mask,
            "origin": origins(mask, prompt),
            "sampler_logprob": logprobs(line.inference_logprobs, ~mask),
            "trainer_logprob": trainer,
            "entropy": line.entropy,
            "advantage": line.advantages,
            "kept_mask": _kept(line.is_masked),
            "position_ids": line.position_ids,
            "token_temperature": line.temperatures,
            "reward": _one(line.rewards),
        }

    return convert


def _kept(masked: list[bool | None] | None) -> list[bool] | None:
    return None if masked is None or None in masked else [not value for value in masked]


def _one(values: Floats | None) -> float | None:
    """The reward, where every token carries the same."""
    kept = {value for value in values or () if value is not None}
    return kept.pop() if len(kept) == 1 else None
