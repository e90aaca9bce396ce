"""ROLL: ``rollout_dump_data.step_<N>.jsonl`` (one line of text columns a step) and the DataProto
pickles of its RolloutMock (``dump_dir/<mode>/step_<N>.pkl``), whose log-probs are shifted by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mismatch_audit.rollouts.formats.base import Detection, ReadOptions, Source
from mismatch_audit.rollouts.formats.files import matching
from mismatch_audit.rollouts.formats.lines import first_object
from mismatch_audit.rollouts.formats.objects import head, mapping, object_source
from mismatch_audit.rollouts.formats.padded import Layout, rows
from mismatch_audit.rollouts.formats.text import Fields, has_fields, text_source
from mismatch_audit.rollouts.formats.tidy import GROUP_NOTE, number_in
from mismatch_audit.rollouts.schema import Header

FORMAT = "roll"

_TEXTS = ("rollout_dump_data.step_*.jsonl",)
_PICKLES = ("step_*.pkl",)
TEXT = Fields(
    prompt=("prompt",), completion=("responses", "response"), step=("global_step",),
    reward=("scores",),
)  # fmt: skip
LAYOUT = Layout(
    ids=("input_ids",),
    sampled=("response_mask",),
    columns={
        "sampler_logprob": ("infer_logprobs",),
        "trainer_logprob": ("old_log_probs",),
        "ref_logprob": ("ref_log_probs",),
        "advantage": ("advantages",),
        "applied_weight": ("train_infer_is_weight",),
    },
    scalars={"reward": ("scores", "response_level_rewards")},
)


def _pickles(path: Path) -> list[Path]:
    return [file for file in matching(path, *_PICKLES) if _is_pickle(file)]


def _is_pickle(path: Path) -> bool:
    content = head(path)[:4096] if path.suffix == ".pkl" else b""
    return b"roll." in content and b"DataProto" in content


def files(path: Path) -> list[Path]:
    return matching(path, *_TEXTS) or _pickles(path)


def detect(path: Path) -> Detection | None:
    texts = matching(path, *_TEXTS) if path.is_dir() else [path] if path.is_file() else []
    if texts and has_fields(first_object(texts[0]), "prompt", "responses", "scores"):
        return Detection(FORMAT, 0.9, f"{len(texts)} file(s) with columns prompt and responses")
    if found := (_pickles(path) if path.is_dir() else [path] if _is_pickle(path) else []):
        return Detection(FORMAT, 0.95, f"{len(found)} pickled DataProto of ROLL")
    return None


def read(path: Path, options: ReadOptions) -> Source:
    """Raises InputError for a text dump without a tokenizer."""
    record = "mock the rollouts (RolloutMock's dump_dir pickles the batch) or dump the DataProto"
    lacks = {"weights_version_min": "not in ROLL's dumps", "entropy": "not in ROLL's dumps"}
    header = Header(framework="roll", format=FORMAT, lacks=lacks)
    texts = matching(path, *_TEXTS) if path.is_dir() else [path] * (".jsonl" in path.suffixes)
    if texts:
        lacks.update(dict.fromkeys(("sampler_logprob", "trainer_logprob"), record))
        return text_source(path, texts, TEXT, header, options)
    header.notes = [
        "log-probs moved one on: ROLL's element i describes token i + 1",
        "padding cut by attention_mask; values of 0.0 outside response_mask read as null",
        "a batch without infer_logprobs has no sampler side (ROLL itself would take old_log_probs)",
        GROUP_NOTE,
    ]
    chosen = _pickles(path) if path.is_dir() else [path]
    return object_source(path, chosen, _convert, header, options)


def _convert(file: Path, loaded: Any) -> Iterator[dict[str, Any]]:
    columns = mapping(loaded)
    step = mapping(columns.get("meta_info")).get("global_step", number_in(file.stem, r"step_(\d+)"))
    constants = {"framework": "roll", "step": step}
    yield from rows(columns, LAYOUT, constants, f"{file.parent.name}/{step}/")
