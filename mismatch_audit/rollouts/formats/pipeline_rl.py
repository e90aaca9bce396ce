"""PipelineRL's file streams: ``streams/<topic>/<instance>/<partition>/0.jsonl``, sampler side only.

A line is a group of training texts (a list) or one. ``logprobs`` covers the target tokens alone:
those whose label is not -100.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kernel_contracts.errors import InputError
from mismatch_audit.rollouts.batch import Array, TokenBatch
from mismatch_audit.rollouts.formats.base import Detection, ReadOptions, Source
from mismatch_audit.rollouts.formats.files import Files, matching, size_of
from mismatch_audit.rollouts.formats.lines import decoder, first_object, read_lines
from mismatch_audit.rollouts.formats.table import Row, batches
from mismatch_audit.rollouts.formats.tidy import first_true, origins
from mismatch_audit.rollouts.schema import Header

FORMAT = "pipeline-rl"

_GLOBS = ("streams/actor*/*/*/*.jsonl", "actor*/*/*/*.jsonl")
_IGNORED = -100


class _Text(msgspec.Struct):
    input_ids: list[int]
    labels: list[int]
    logprobs: list[float | None] = []
    ref_logprobs: list[float | None] = []
    reward: float | None = None
    group_id: str | int | None = None
    finished: bool | None = None
    metadata: dict[str, Any] = {}


def files(path: Path) -> list[Path]:
    return matching(path, *_GLOBS) if path.is_dir() else [path] if detect(path) else []


def detect(path: Path) -> Detection | None:
    found = matching(path, *_GLOBS) if path.is_dir() else [path] if path.is_file() else []
    for file in found[:1]:
        keys = first_object(file)
        if keys is not None and keys.keys() >= {"input_ids", "labels", "logprobs", "group_id"}:
            return Detection(FORMAT, 0.9, f"{len(found)} stream(s) of training texts")
    return None


def read(path: Path, options: ReadOptions) -> Source:
    """Raises InputError where there is no stream."""
    chosen = matching(path, *_GLOBS) if path.is_dir() else [path]
    if not chosen:
        raise InputError("holds no streams/actor/*/*/0.jsonl", where=str(path))
    header = Header(
        framework="pipeline-rl",
        format=FORMAT,
        notes=["logprobs of target tokens put on the tokens whose label is not -100"],
        lacks={
            "trainer_logprob": "the streams hold the sampler's side only: add --rescore MODEL with "
            "the checkpoint of the weights version, or save the trainer's rl batch",
            "entropy": "not in the streams",
            "advantage": "computed by the trainer, not in the actor's stream",
        },
    )
    decode, seen = decoder(_Text | list[_Text]), set[str]()  # type: ignore[arg-type]

    def read_file(file: Path) -> Iterator[TokenBatch]:
        return batches(str(file), _rows(file, decode, options), options, seen)

    return Source(path, header, Files(chosen, read_file), size_of(chosen))


def _rows(file: Path, decode: Any, options: ReadOptions) -> Iterator[Row]:
    place = "/".join(file.parts[-4:-1])
    for number, item in read_lines(file, decode, options.max_line):
        for i, text in enumerate(item if isinstance(item, list) else [item]):
            where = f"{file}:{number}, text {i}"
            try:
                yield where, _row(text, f"{place}/{number}/{i}")
            except ValueError as error:
                raise InputError(str(error), where=where) from None


def _row(text: _Text, sample: str) -> dict[str, Any]:
    if len(text.labels) != len(text.input_ids):
        raise ValueError(f"labels has {len(text.labels)} values for {len(text.input_ids)} tokens")
    sampled = np.array(text.labels) != _IGNORED
    prompt = first_true(sampled)
    version = text.metadata.get("model_version")
    return {
        "framework": "pipeline-rl",
        "sample_id": sample,
        "group_id": text.group_id,
        "weights_version_min": version if isinstance(version, int) else None,
        "weights_version_max": version if isinstance(version, int) else None,
        "token_ids": text.input_ids,
        "prompt_len": prompt,
        "origin": origins(sampled, prompt),
        "loss_mask": sampled,
        "sampler_logprob": _spread(text.logprobs, sampled, "logprobs"),
        "ref_logprob": _spread(text.ref_logprobs, sampled, "ref_logprobs"),
        "reward": text.reward,
        "finish_reason": None if text.finished is None else "stop" if text.finished else "length",
    }


def _spread(values: list[float | None], sampled: Array, name: str) -> Array | None:
    if not values:
        return None
    if len(values) != int(sampled.sum()):
        raise ValueError(f"{name} has {len(values)} values for {int(sampled.sum())} target tokens")
    full = np.full(len(sampled), np.nan, dtype=np.float32)
    full[sampled] = np.array(values, dtype=np.float32)
    return full
