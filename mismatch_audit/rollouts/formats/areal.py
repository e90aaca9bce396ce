"""AReaL: text records of ``dump_to_file``, and trajectories saved by a hook.

At the start of ``PPOActor._ppo_update`` (both sides), or at the end of a workflow's
``arun_episode`` (sampler side), call::

    torch.save(trajectory, f"areal_step{version}_{task_id}.pt")

A trajectory is unshifted as the workflow returns it. Inside the update ``logprobs`` and
``loss_mask`` are rolled by -1 (element i describes token i + 1), which shows in their not agreeing
with ``versions`` (never rolled; -1 where a token was not sampled), or in ``prox_logp``'s presence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_audit.rollouts.formats.base import Detection, ReadOptions, Source
from mismatch_audit.rollouts.formats.files import matching
from mismatch_audit.rollouts.formats.lines import first_object
from mismatch_audit.rollouts.formats.objects import head, mapping, object_source
from mismatch_audit.rollouts.formats.padded import Layout, rows
from mismatch_audit.rollouts.formats.text import Fields, has_fields, text_source
from mismatch_audit.rollouts.formats.tidy import GROUP_NOTE, number_in
from mismatch_audit.rollouts.safe_pickle import as_array
from mismatch_audit.rollouts.schema import Header

FORMAT = "areal"

_TEXT_KEYS = ("task_id", "sample_idx", "head_version", "tail_version", "prompt", "completion")
_MARKS = (b"input_ids", b"logprobs", b"loss_mask", b"versions")
TEXT = Fields(
    prompt=("prompt",), completion=("completion",), step=("tail_version",), reward=("reward",),
    group=("task_id",), version_min=("head_version",), version_max=("tail_version",),
)  # fmt: skip
LAYOUT = Layout(
    ids=("input_ids",),
    sampled=("loss_mask",),
    columns={
        "sampler_logprob": ("logprobs",),
        "trainer_logprob": ("prox_logp",),
        "advantage": ("advantages",),
    },
    scalars={"reward": ("rewards",)},
)


def _texts(path: Path) -> list[Path]:
    found = matching(path, "*.jsonl", "[0-9]*/*.jsonl") if path.is_dir() else [path]
    return [f for f in found if ".jsonl" in f.suffixes and has_fields(first_object(f), *_TEXT_KEYS)]


def _objects(path: Path) -> list[Path]:
    return matching(path, "areal_*.pt", "areal_*.npz", "areal_*.pkl")


def files(path: Path) -> list[Path]:
    return _texts(path) or _objects(path)


def detect(path: Path) -> Detection | None:
    if found := _texts(path):
        return Detection(FORMAT, 0.9, f"{len(found)} file(s) with head_version and tail_version")
    if path.is_dir():
        dumped = _objects(path)
        return Detection(FORMAT, 0.8, f"{len(dumped)} saved trajectories") if dumped else None
    content = head(path) if path.suffix in (".pt", ".pth", ".npz", ".pkl") else b""
    if content and all(mark in content for mark in _MARKS):
        return Detection(FORMAT, 0.85, "arrays input_ids, logprobs, loss_mask, versions")
    return None


def read(path: Path, options: ReadOptions) -> Source:
    """Raises InputError for a text dump without a tokenizer."""
    lacks: dict[str, str] = {"entropy": "not in a trajectory"}
    header = Header(framework="areal", format=FORMAT, lacks=lacks)
    if texts := _texts(path):
        record = "save trajectories from arun_episode or around PPOActor._ppo_update"
        lacks.update(dict.fromkeys(("sampler_logprob", "trainer_logprob"), record))
        return text_source(path, texts, TEXT, header, options)
    header.notes = [
        "logprobs and loss_mask are moved one on where they were saved inside the update",
        "versions of -1 and log-probs of 0.0 outside the loss mask read as null",
        "logprobs that equal prox_logp throughout were overwritten by AReaL (recompute_logprob "
        "without use_decoupled_loss): a mismatch cannot be seen in them",
        GROUP_NOTE,
    ]
    chosen = _objects(path) if path.is_dir() else [path]
    return object_source(path, chosen, _convert, header, options)


def _convert(file: Path, loaded: Any) -> Iterator[dict[str, Any]]:
    step = number_in(file.name, r"step_?(\d+)")
    batches = loaded if isinstance(loaded, list | tuple) else [loaded]
    for number, batch in enumerate(batches):
        arrays = mapping(batch)
        layout = replace(LAYOUT, wide="next" if _rolled(arrays) else "full")
        constants = {"framework": "areal", "step": step}
        versions = _versions(arrays)
        made = rows({**arrays, "versions": None}, layout, constants, f"{file.stem}/{number}/")
        for row in made:
            if versions is not None:
                _add_versions(row, versions[int(row["sample_id"].rsplit("/", 1)[-1])])
            yield row


def _versions(arrays: Mapping[str, Any]) -> Any:
    if arrays.get("versions") is None:
        return None
    versions = np.asarray(as_array(arrays["versions"]))
    versions = versions[None, :] if versions.ndim == 1 else versions
    if "attention_mask" not in arrays:
        return list(versions)
    real = np.asarray(as_array(arrays["attention_mask"]))
    real = real[None, :] if real.ndim == 1 else real
    if real.shape != versions.shape:
        raise ValueError(f"versions has shape {versions.shape}, attention_mask {real.shape}")
    return [row[mask != 0] for row, mask in zip(versions, real, strict=True)]


def _add_versions(row: dict[str, Any], versions: Any) -> None:
    row["token_version"] = versions
    known = versions[versions >= 0]
    if len(known):
        row["weights_version_min"] = int(known.min())
        row["weights_version_max"] = int(known.max())


def _rolled(arrays: Mapping[str, Any]) -> bool:
    """Whether loss_mask is rolled by -1 against the ids."""
    if arrays.get("versions") is None or arrays.get("loss_mask") is None:
        return arrays.get("prox_logp") is not None
    known = np.asarray(as_array(arrays["versions"])) >= 0
    mask = np.asarray(as_array(arrays["loss_mask"])) != 0
    if known.shape != mask.shape:
        raise ValueError(f"versions has shape {known.shape}, loss_mask {mask.shape}")
    as_is = int((mask & ~known).sum())
    moved = int((np.roll(mask, 1, axis=-1) & ~known).sum())
    return moved < as_is
