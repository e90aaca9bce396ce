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
    "set MISMATCH_AUDIT_CONTRACT and MISMATCH_AUDIT_RECORD, and this project's plugin of verl "
    "writes token ids and both log-probs (docs/trainers.md)"
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
    return _texts(path) or _pickles(path)


def _texts(path: Path) -> list[Path]:
    found = (
        matching(path, "[0-9]*.jsonl") if path.is_dir() else [path] * (".jsonl" in path.suffixes)
    )
    return [file for file in found if has_fields(first_object(file), "input", "output", "step")]


def _pickles(path: Path) -> list[Path]:
    found = matching(path, "*.pkl", "*.pt") if path.is_dir() else [path]
    return [file for file in found if file.suffix in (".pkl", ".pt") and _is_proto(head(file))]


def _is_proto(content: bytes) -> bool:
    return b"verl.protocol" in content[:4096] and b"DataProto" in content[:4096]


def detect(path: Path) -> Detection | None:
    if found := _texts(path):
        return Detection(FORMAT, 0.9, f"{len(found)} file(s) with the texts input and output")
    if found := _pickles(path):
        return Detection(FORMAT, 0.95, f"{len(found)} pickled DataProto of verl")
    return None


def read(path: Path, options: ReadOptions) -> Source:
    """Raises InputError for a text dump without a tokenizer."""
    lacks = {"weights_version_min": "verl keeps it in extra_fields, which this dump has not"}
    header = Header(framework="verl", format=FORMAT, lacks=lacks)
    if texts := _texts(path):
        lacks.update(dict.fromkeys(("sampler_logprob", "trainer_logprob"), RECORD))
        return text_source(path, texts, TEXT, header, options)
    header.notes = [
        "padding cut by attention_mask; values of 0.0 outside response_mask read as null",
        "group_id is uid; where there is none, " + GROUP_NOTE,
    ]
    chosen = _pickles(path) if path.is_dir() else [path]
    return object_source(path, chosen, _convert, header, options)


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
    for number, row in enumerate(rows(columns, LAYOUT, constants, f"{step}/{file.stem}/")):
        if names is not None and number < len(names):
            row["group_id"] = str(names[number])
        yield row
