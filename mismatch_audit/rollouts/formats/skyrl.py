"""SkyRL's ``dumped_data/global_step_<N>_training_input.pkl`` (trainer.dump_data_batch).

A pickled TrainingInputBatch, read without SkyRL: ids of full width and response-wide log-probs at
the right, prompts padded on the left. -9999.0 stands for a log-prob that the engine did not give.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kernel_contracts.errors import InputError
from mismatch_audit.rollouts.formats.base import Detection, ReadOptions, Source
from mismatch_audit.rollouts.formats.files import matching
from mismatch_audit.rollouts.formats.objects import head, mapping, object_source, serialized
from mismatch_audit.rollouts.formats.padded import Layout, rows
from mismatch_audit.rollouts.formats.tidy import GROUP_NOTE, number_in
from mismatch_audit.rollouts.safe_pickle import Inert, as_array
from mismatch_audit.rollouts.schema import Header

FORMAT = "skyrl"

_GLOBS = (
    "global_step_*_training_input.pkl",
    "dumped_data/global_step_*_training_input.pkl",
)
LAYOUT = Layout(
    ids=("sequences",),
    sampled=("loss_mask", "response_mask"),
    response=("response_mask",),
    columns={
        "sampler_logprob": ("rollout_logprobs",),
        "trainer_logprob": ("action_log_probs",),
        "ref_logprob": ("base_action_log_probs",),
        "advantage": ("advantages",),
        "applied_weight": ("correction_weights",),
    },
    clamped=-9999.0,
)


def files(path: Path) -> list[Path]:
    return matching(path, *_GLOBS)


def detect(path: Path) -> Detection | None:
    if path.is_dir():
        found = files(path)
        return Detection(FORMAT, 0.9, f"{len(found)} dumped training inputs") if found else None
    if path.suffix == ".pkl" and b"skyrl" in head(path)[:4096]:
        return Detection(FORMAT, 0.95, "a pickle of a class of SkyRL")
    return Detection(FORMAT, 0.6, "named as SkyRL's dumps") if files(path) else None


def read(path: Path, options: ReadOptions) -> Source:
    """Raises InputError where there is no dump."""
    chosen = files(path) if path.is_dir() else [path]
    if not chosen:
        raise InputError(
            "holds no dumped_data/global_step_<N>_training_input.pkl",
            where=str(path),
            fix="set trainer.dump_data_batch=true and run the step again",
        )
    header = Header(
        framework="skyrl",
        format=FORMAT,
        notes=[
            "padding cut by attention_mask, response-wide arrays moved behind the prompt",
            "log-probs of -9999.0 (the engine gave none) read as null",
            "log-probs, advantages and weights of 0.0 outside the response mask read as null",
            GROUP_NOTE,
        ],
        lacks={
            "reward": "SkyRL drops the rewards before it dumps the batch",
            "weights_version_min": "not in the dump; MismatchAuditCallback records the step that a "
            "batch belongs to (docs/trainers.md)",
            "entropy": "not in the dump",
        },
    )
    return object_source(path, chosen, _convert, header, options)


def _convert(file: Path, loaded: Any) -> Iterator[dict[str, Any]]:
    state = loaded
    if isinstance(loaded, Inert) and loaded.path.endswith("_rebuild_tensor_batch"):
        state = loaded.args[1] if len(loaded.args) > 1 else {}
    content = mapping(state)
    inner = content.get("batch_dict")
    arrays = mapping(inner) if inner is not None else content
    arrays = {name: serialized(value) for name, value in arrays.items()}
    step = number_in(file.name, r"global_step_(\d+)")
    made = rows(arrays, LAYOUT, {"framework": "skyrl", "step": step}, f"{step}/")
    uids = mapping(content.get("metadata")).get("uids")
    names = None if uids is None else list(as_array(uids))
    for number, row in enumerate(made):
        if names is not None and number < len(names):
            row["group_id"] = str(names[number])
        yield row
