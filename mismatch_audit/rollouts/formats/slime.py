"""slime and its fork miles: the files of --dump-details (or of its two single options).

``rollout_data/<id>.pt`` holds the sampler's samples (prompt and response ids, rollout_log_probs of
the response, weight_versions, prefix_cache_info); ``train_data/<id>.pt`` holds what was trained on
(log_probs, advantages, masks). They join on rollout_position. Either alone is read as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kernel_contracts.errors import InputError
from mismatch_audit.rollouts.batch import Array, TokenBatch
from mismatch_audit.rollouts.formats.base import Detection, ReadOptions, Source
from mismatch_audit.rollouts.formats.files import Files, matching, size_of
from mismatch_audit.rollouts.formats.objects import head, load_object, mapping
from mismatch_audit.rollouts.formats.table import Row, batches
from mismatch_audit.rollouts.formats.tidy import number_in, origins
from mismatch_audit.rollouts.safe_pickle import ERRORS, Inert, as_array
from mismatch_audit.rollouts.schema import Header

FORMAT = "slime"

_ROLLOUT, _TRAIN = "rollout_data/[0-9]*.pt", "train_data/[0-9]*.pt"
_FINISH = {"completed": "stop", "truncated": "length", "aborted": "abort"}
_RESPONSE = {
    "sampler_logprob": "rollout_log_probs",
    "trainer_logprob": "log_probs",
    "ref_logprob": "ref_log_probs",
    "entropy": "entropy",
    "advantage": "advantages",
}


def files(path: Path) -> list[Path]:
    return matching(path, _ROLLOUT, _TRAIN) if path.is_dir() else [path] if detect(path) else []


def detect(path: Path) -> Detection | None:
    if path.is_dir():
        found = [len(matching(path, glob)) for glob in (_ROLLOUT, _TRAIN)]
        if not any(found):
            return None
        why = f"{found[0]} file(s) in rollout_data/, {found[1]} in train_data/"
        return Detection(FORMAT, 0.95 if all(found) else 0.9, why)
    content = head(path) if path.suffix == ".pt" else b""
    if b"rollout_id" in content and (b"samples" in content or b"rollout_data" in content):
        return Detection(FORMAT, 0.9, "a torch file with rollout_id and samples")
    return None


def read(path: Path, options: ReadOptions) -> Source:
    """Raises InputError where there is no dump."""
    rollouts, trains = _by_id(path, _ROLLOUT), _by_id(path, _TRAIN)
    ids = sorted(rollouts.keys() | trains.keys())
    chosen = files(path) if path.is_dir() else [path]
    if not chosen:
        raise InputError(
            "holds neither rollout_data/<id>.pt nor train_data/<id>.pt",
            where=str(path),
            fix="run slime with --dump-details DIR",
        )
    header = Header(
        framework="slime",
        format=FORMAT,
        notes=[
            "lists of the response put behind nulls for the prompt",
            "weights_version_* from weight_versions where those are numbers",
        ],
        lacks={"temperature": "not in the dump; slime's --rollout-temperature"},
    )
    if path.is_dir() and not trains:
        header.lacks["trainer_logprob"] = "train_data/ is missing: use --dump-details, which sets "
        header.lacks["trainer_logprob"] += "--save-debug-train-data too, or add --rescore MODEL"
    if path.is_dir() and not rollouts:
        header.lacks["weights_version_min"] = "rollout_data/ is missing: use --dump-details"
    if rollouts and trains:
        header.notes.append("train_data joined to rollout_data on rollout_position")
    seen: set[str] = set()

    def read_step(key: int) -> Iterator[TokenBatch]:
        sides = rollouts.get(key, []), trains.get(key, [])
        name = str((sides[0] + sides[1])[0])
        return batches(name, _step_rows(key, *sides, header, name), options, seen)

    def read_file(file: Path) -> Iterator[TokenBatch]:
        return batches(str(file), _file_rows(file, header), options, seen)

    if path.is_dir():
        steps = [Path(str(key)) for key in ids]
        return Source(
            path, header, Files(steps, lambda step: read_step(int(step.name))), size_of(chosen)
        )
    return Source(path, header, Files(chosen, read_file), size_of(chosen))


def _by_id(path: Path, glob: str) -> dict[int, list[Path]]:
    found: dict[int, list[Path]] = {}
    for file in matching(path, glob) if path.is_dir() else []:
        key = number_in(file.name, r"^(\d+)(?:_\d+)?\.pt$")
        if key is not None:
            found.setdefault(key, []).append(file)
    return found


def _file_rows(file: Path, header: Header) -> Iterator[Row]:
    content = _load(file)
    key = content.get("rollout_id")
    step = key if isinstance(key, int) else number_in(file.stem, r"(\d+)") or 0
    trained = "rollout_data" in content or "format_version" in content
    sampled = [] if trained else [content]
    yield from _rows(step, sampled, [content] if trained else [], header, str(file))


def _step_rows(
    step: int, rollouts: list[Path], trains: list[Path], header: Header, name: str
) -> Iterator[Row]:
    sampled, trained = ([_load(file) for file in side] for side in (rollouts, trains))
    yield from _rows(step, sampled, trained, header, name)


def _load(file: Path) -> dict[str, Any]:
    content = mapping(load_object(file))
    if not content:
        raise InputError("holds no dictionary of samples", where=str(file))
    return content


def _rows(
    step: int,
    rollouts: list[dict[str, Any]],
    trains: list[dict[str, Any]],
    header: Header,
    name: str,
) -> Iterator[Row]:
    place = 0
    try:
        sampled = [mapping(sample) for content in rollouts for sample in content["samples"]]
        trained = [sample for content in trains for sample in _trained(content)]
        if not trains:
            for place, sample in enumerate(sampled):
                yield f"{name}, sample {place}", _row(step, place, sample, {})
            return
        used = set()
        for place, sample in enumerate(trained):
            position = _position(sample, sampled)
            mate = sampled[position] if position is not None else {}
            used.add(position)
            number = position if position is not None else place
            yield f"{name}, trained sample {place}", _row(step, number, mate, sample)
        if left := len(sampled) - len(used - {None}):
            header.notes.append(f"step {step}: {left} sample(s) not trained on left out")
    except (*ERRORS, KeyError) as error:
        reason = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(reason, where=f"{name}, sample {place}") from None


def _trained(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Samples of train_data: a list of them (format_version 2), or one list a field (before)."""
    if "samples" in content:
        return [mapping(sample) for sample in content["samples"]]
    fields = mapping(content["rollout_data"])
    n = len(fields["tokens"])
    columns = {k: v for k, v in fields.items() if isinstance(v, list | tuple) and len(v) == n}
    return [{name: column[i] for name, column in columns.items()} for i in range(n)]


def _position(sample: Mapping[str, Any], sampled: list[dict[str, Any]]) -> int | None:
    if not sampled:
        return None
    position = sample.get("rollout_position")
    if position is None:
        index = sample.get("sample_index", sample.get("sample_indices"))
        if index is None:
            return None
        found = [i for i, one in enumerate(sampled) if one.get("index") == index]
        return found[0] if len(found) == 1 else None
    if not isinstance(position, int) or not 0 <= position < len(sampled):
        raise ValueError(f"rollout_position {position} of {len(sampled)} samples")
    return position


def _row(
    step: int, number: int, sampled: dict[str, Any], trained: dict[str, Any]
) -> dict[str, Any]:
    ids = _ids(trained.get("tokens", sampled.get("tokens")))
    if sampled and trained and not np.array_equal(ids, _ids(sampled.get("tokens"))):
        raise ValueError("rollout_data and train_data hold different tokens for this sample")
    n = len(ids)
    length = trained.get("response_lengths", sampled.get("response_length"))
    if not isinstance(length, int) or not 0 <= length <= n:
        raise ValueError(f"response_length {length} is not between 0 and the {n} tokens")
    mask = trained.get("loss_masks", sampled.get("loss_mask"))
    own = np.zeros(n, dtype=bool)
    own[n - length :] = True if mask is None else _response(mask, length, "loss_mask") > 0
    origin = origins(own if own.any() else np.arange(n) >= n - length, n - length)
    row: dict[str, Any] = {
        "framework": "slime",
        "step": step,
        "sample_id": f"{step}/{sampled.get('index', number)}/{number}",
        "group_id": _text(sampled.get("group_index")),
        "token_ids": ids,
        "prompt_len": n - length,
        "origin": origin,
        "loss_mask": own,
        "finish_reason": _FINISH.get(_status(sampled.get("status"))),
        "reward": _number(sampled.get("reward")),
    }
    for ours, theirs in _RESPONSE.items():
        values = trained.get(theirs)
        values = sampled.get(theirs) if values is None else values
        if values is not None:
            full = np.full(n, np.nan, dtype=np.float32)
            full[n - length :] = _response(values, length, theirs)
            full[(full == 0.0) & (origin != 1)] = np.nan
            row[ours] = full
    versions = [int(v) for v in sampled.get("weight_versions") or () if str(v).isdigit()]
    if versions:
        row["weights_version_min"], row["weights_version_max"] = min(versions), max(versions)
    cache = mapping(sampled.get("prefix_cache_info"))
    row["num_cached_tokens"] = cache.get("cached_tokens")
    return row


def _ids(value: Any) -> Array:
    if value is None:
        raise ValueError("has no tokens")
    ids = np.asarray(as_array(value))
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError("tokens should be a flat list of integers")
    return ids


def _response(value: Any, length: int, name: str) -> Array:
    values = np.asarray(as_array(value))
    if values.dtype.kind == "O":
        values = np.array([np.nan if item is None else item for item in values.tolist()])
    if values.ndim != 1 or values.dtype.kind not in "biuf":
        raise ValueError(f"{name} should be a flat list of numbers")
    if len(values) != length:
        raise ValueError(f"{name} has {len(values)} values for a response of {length} tokens")
    return values.astype(np.float32)


def _status(value: Any) -> str:
    if isinstance(value, Inert):  # an Enum
        value = value.args[0] if value.args else ""
    return str(value)


def _number(value: Any) -> float | None:
    """A plain reward; a dictionary of rewards has no single number."""
    return float(value) if isinstance(value, int | float) else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
