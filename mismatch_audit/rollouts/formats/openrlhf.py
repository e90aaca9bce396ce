"""OpenRLHF's Experience, dumped by a hook: it has no dump of its own.

Wrap ``PolicyLoss.forward`` or subclass the PPO trainer, and save what it holds::

    torch.save({name: value for name, value in vars(experience).items()
                if isinstance(value, torch.Tensor)}, f"experience_step{step}_rank{rank}.pt")

An .npz of the same arrays, a list of such dicts, or JSON lines with one sequence each are read as
well. Arrays of log-probs are one shorter than the ids: element i describes token i + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mismatch_audit.rollouts.formats.base import Detection, ReadOptions, Source
from mismatch_audit.rollouts.formats.files import jsonl_source, matching
from mismatch_audit.rollouts.formats.lines import first_object
from mismatch_audit.rollouts.formats.objects import head, mapping, object_source
from mismatch_audit.rollouts.formats.padded import Layout, rows
from mismatch_audit.rollouts.formats.tidy import GROUP_NOTE, number_in
from mismatch_audit.rollouts.schema import Header

FORMAT = "openrlhf"

_GLOBS = tuple(f"experience_*.{end}" for end in ("pt", "npz", "pkl", "jsonl"))
_MARKS = {"sequences", "action_mask", "rollout_log_probs", "action_log_probs"}
LAYOUT = Layout(
    ids=("sequences",),
    sampled=("action_mask",),
    columns={
        "sampler_logprob": ("rollout_log_probs",),
        "trainer_logprob": ("action_log_probs",),
        "ref_logprob": ("base_action_log_probs",),
        "advantage": ("advantages",),
    },
    scalars={"reward": ("rewards", "reward"), "step": ("step",)},
    wide="next",
)

Floats = list[float | None]


class _Line(msgspec.Struct):
    sequences: list[int]
    action_mask: list[int | bool]
    rollout_log_probs: Floats | None = None
    action_log_probs: Floats | None = None
    base_action_log_probs: Floats | None = None
    attention_mask: list[int | bool] | None = None
    advantages: Floats | None = None
    rewards: float | None = None
    step: int | None = None


def files(path: Path) -> list[Path]:
    return matching(path, *_GLOBS)


def detect(path: Path) -> Detection | None:
    if path.is_dir():
        found = files(path)
        return Detection(FORMAT, 0.8, f"{len(found)} dumped experiences") if found else None
    if ".jsonl" in path.suffixes:
        keys = first_object(path)
        fits = keys is not None and keys.keys() >= _MARKS - {"action_log_probs"}
    else:
        content = head(path) if path.suffix in (".pt", ".pth", ".npz", ".pkl") else b""
        fits = all(mark.encode() in content for mark in _MARKS)
    return Detection(FORMAT, 0.85, "arrays sequences, action_mask, *_log_probs") if fits else None


def read(path: Path, options: ReadOptions) -> Source:
    header = Header(
        framework="openrlhf",
        format=FORMAT,
        notes=[
            "arrays of log-probs moved one on: OpenRLHF's element i describes token i + 1",
            "padding cut by attention_mask; values of 0.0 outside action_mask read as null",
            GROUP_NOTE,
        ],
        lacks={
            "weights_version_min": "an Experience has no weights version; have the hook save it",
            "entropy": "an Experience has no entropy",
            "applied_weight": "computed inside PolicyLoss and not kept",
        },
    )
    chosen = files(path) if path.is_dir() else [path]
    lines = [file for file in chosen if ".jsonl" in file.suffixes]
    if lines and len(lines) == len(chosen):
        return jsonl_source(path, lines, _Line, _line_converter, header, options)
    objects = [file for file in chosen if file not in lines]
    return object_source(path, objects, _convert, header, options)


def _convert(file: Path, loaded: Any) -> Iterator[dict[str, Any]]:
    step = number_in(file.name, r"step_?(\d+)")
    batches = loaded if isinstance(loaded, list | tuple) else [loaded]
    for number, batch in enumerate(batches):
        constants = {"framework": "openrlhf", "step": step}
        yield from rows(mapping(batch), LAYOUT, constants, f"{file.stem}/{number}/")


def _line_converter(file: Path) -> Callable[[_Line, int], dict[str, Any]]:
    step = number_in(file.name, r"step_?(\d+)")

    def convert(line: _Line, number: int) -> dict[str, Any]:
        arrays = {
            name: np.array(value, dtype=float if "log" in name or name == "advantages" else int)
            for name in _Line.__struct_fields__
            if isinstance(value := getattr(line, name), list)
        }
        constants = {"framework": "openrlhf", "step": line.step if line.step is not None else step}
        made = list(rows(arrays, LAYOUT, constants, f"{file.stem}/{number}/"))
        if not made:
            raise ValueError("holds padding only")
        return {**made[0], "reward": line.rewards}

    return convert
