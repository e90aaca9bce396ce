"""verl: ``rollout_data_dir/<step>.jsonl`` (text only) and pickled DataProto (save_to_disk).

The plugin of this project writes the sequence table itself, which the plain reader reads.
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
from mismatch_audit.rollouts.safe_pickle import as_array
from mismatch_audit.rollouts.schema import Header

FORMAT = "verl"

RECORD = (
    "pip install mismatch-audit beside verl and set VERL_USE_EXTERNAL_PLUGINS=auto: its plugin "
    "writes token ids and both log-probs"
)
TEXT = Fields(
    prompt=("input",), completion=("output",), reward=("score",), sample=("request_id",),
    group=("uid",),
)  # fmt: skip
LAYOUT = Layout(
    ids=("input_ids",),
    sampled=("response_mask", "loss_mask"),
    response=("responses",),
    columns={
        "sampler_logprob": ("rollout_log_probs",),
        "trainer_logprob": ("old_log_probs",),
        "ref_logprob": ("ref_log_prob",),
        "entropy": ("entropys",),
        "advantage": ("advantages",),
        "applied_weight": ("rollout_is_weights",),
        "position_ids": ("position_ids",),
    },
)


def files(path: Path) -> list[Path]:
    if path.is_dir():
        return [file for file in matching(path, "[0-9]*.jsonl") if _is_text(file)]
    return [path] if _is_text(path) else []


def _is_text(path: Path) -> bool:
    return ".jsonl" in path.suffixes and has_fields(first_object(path), "input", "output", "step")


def detect(path: Path) -> Detection | None:
    if found := files(path):
        return Detection(FORMAT, 0.9, f"{len(found)} file(s) with the texts input and output")
    content = b"" if path.is_dir() or path.suffix not in (".pkl", ".pt") else head(path)[:4096]
    if b"verl.protocol" in content and b"DataProto" in content:
        return Detection(FORMAT, 0.95, "a pickled DataProto of verl")
    return None


def read(path: Path, options: ReadOptions) -> Source:
    """Raises InputError for a text dump without a tokenizer."""
    lacks = {"weights_version_min": "verl keeps it in extra_fields, which this dump has not"}
    header = Header(framework="verl", format=FORMAT, lacks=lacks)
    if path.is_dir() or ".jsonl" in path.suffixes:
        lacks.update(dict.fromkeys(("sampler_logprob", "trainer_logprob"), RECORD))
        return text_source(path, files(path) or [path], TEXT, header, options)
    header.notes = [
        "padding cut by attention_mask; values of 0.0 outside response_mask read as null",
        "group_id is uid; where there is none, " + GROUP_NOTE,
    ]
    return object_source(path, [path], _convert, header, options)


def _convert(file: Path, loaded: Any) -> Iterator[dict[str, Any]]:
    columns = mapping(loaded)
    meta = mapping(columns.get("meta_info"))
    step = meta.get("global_steps", number_in(file.stem, r"(\d+)"))
    constants = {
        "framework": "verl",
        "step": step,
        "temperature": meta.get("temperature"),
    }
    uids = columns.get("uid")
    names = None if uids is None else list(as_array(uids))
    for number, row in enumerate(rows(columns, LAYOUT, constants, f"{step}/")):
        if names is not None and number < len(names):
            row["group_id"] = str(names[number])
        yield row
