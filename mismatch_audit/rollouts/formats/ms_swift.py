"""ms-swift: ``{output_dir}/completions.jsonl``, one line of text columns a logging step."""

from __future__ import annotations

from pathlib import Path

from mismatch_audit.rollouts.formats.base import Detection, ReadOptions, Source
from mismatch_audit.rollouts.formats.files import matching
from mismatch_audit.rollouts.formats.lines import first_object
from mismatch_audit.rollouts.formats.text import Fields, has_fields, text_source
from mismatch_audit.rollouts.schema import Header

FORMAT = "ms-swift"

TEXT = Fields(
    prompt=("prompt",), completion=("completion",), step=("step", "gen_step"),
    advantage=("advantages",),
)  # fmt: skip


def files(path: Path) -> list[Path]:
    return matching(path, "completions.jsonl")


def detect(path: Path) -> Detection | None:
    found = files(path) if path.is_dir() else [path] if path.is_file() else []
    if not found or not has_fields(first_object(found[0]), "prompt", "completion", "advantages"):
        return None
    return Detection(FORMAT, 0.85, "columns prompt, completion and advantages")


def read(path: Path, options: ReadOptions) -> Source:
    """Raises InputError without a tokenizer: the dump is text only."""
    record = (
        "give rollout_per_token_logps and old_per_token_logps to Monitor.observe in the trainer's "
        "loss (docs/trainers.md, your own trainer)"
    )
    header = Header(framework="ms-swift", format=FORMAT)
    header.lacks = {
        "sampler_logprob": record,
        "trainer_logprob": record,
        "weights_version_min": "not in completions.jsonl",
        "entropy": "completions.jsonl has one mean entropy a sequence, not one a token",
    }
    return text_source(path, files(path) or [path], TEXT, header, options)
