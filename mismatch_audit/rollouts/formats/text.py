"""Dumps that hold text only: prompt and completion, neither token ids nor log-probs.

They can be audited only after re-scoring, and then only roughly: tokenising a decoded text need not
give the tokens that were sampled, and special tokens are gone from most of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kernel_contracts.errors import InputError
from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.formats.base import ReadOptions, Source
from mismatch_audit.rollouts.formats.files import Files, size_of
from mismatch_audit.rollouts.formats.lines import decoder, read_lines
from mismatch_audit.rollouts.formats.table import Row, batches
from mismatch_audit.rollouts.formats.tidy import prompt_group
from mismatch_audit.rollouts.schema import Header

NOTE = (
    "text only: tokens were made again with a tokenizer and need not be the sampled ones; special "
    "tokens that the trainer left out of the text (template marks, the final EOS) are missing"
)

_Encode = Callable[[str, bool], list[int]]


@dataclass(frozen=True)
class Fields:
    """Names of a text dump's fields, the first that is there counts. columnar: a line holds whole
    columns (one list a field) and not one sequence."""

    prompt: tuple[str, ...]
    completion: tuple[str, ...]
    step: tuple[str, ...] = ("step",)
    reward: tuple[str, ...] = ()
    advantage: tuple[str, ...] = ()
    sample: tuple[str, ...] = ()
    group: tuple[str, ...] = ()
    version_min: tuple[str, ...] = ()
    version_max: tuple[str, ...] = ()


def text_source(
    path: Path,
    files: Sequence[Path],
    fields: Fields,
    header: Header,
    options: ReadOptions,
    records: Callable[[Path, ReadOptions], Iterator[tuple[str, Mapping[str, Any]]]] | None = None,
) -> Source:
    """records: gives (place, record) of a file; JSON lines by default.

    Raises InputError where no tokenizer is named.
    """
    if options.tokenizer is None:
        raise InputError(
            f"a {header.format} dump of text: no token ids and no log-probs, so nothing to compare",
            where=str(path),
            fix="add --rescore MODEL to score the text anew (roughly: tokens are made again), or "
            f"record tokens: {header.lacks['sampler_logprob']}",
        )
    encode = _encoder(options.tokenizer)
    header.notes.append(NOTE)
    give = records or json_records
    seen: set[str] = set()

    def rows(file: Path) -> Iterator[Row]:
        for number, (where, record) in enumerate(give(file, options)):
            try:
                row = _row(record, fields, encode, f"{file.stem}/{number}")
            except ValueError as error:
                raise InputError(str(error), where=where) from None
            yield where, {"framework": header.framework, **row}

    def read(file: Path) -> Iterator[TokenBatch]:
        return batches(str(file), rows(file), options, seen)

    return Source(path, header, Files(files, read), size_of(files))


def json_records(file: Path, options: ReadOptions) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """One record a line, or a line of columns taken apart."""
    for number, item in read_lines(file, decoder(dict[str, Any]), options.max_line):
        lists = {name: value for name, value in item.items() if isinstance(value, list)}
        texts = [v for v in lists.values() if v and isinstance(v[0], str)]
        if len(texts) < 2:  # prompt and completion as columns
            yield f"{file}:{number}", item
            continue
        longest = max(len(value) for value in texts)
        for name, value in lists.items():
            if len(value) != longest:
                raise InputError(
                    f"column {name!r} has {len(value)} values, others {longest}",
                    where=f"{file}:{number}",
                )
        for i in range(longest):
            yield f"{file}:{number}, sequence {i}", {name: lists[name][i] for name in lists}


def _row(
    record: Mapping[str, Any], fields: Fields, encode: _Encode, fallback: str
) -> dict[str, Any]:
    texts = []
    for names in (fields.prompt, fields.completion):
        text = _get(record, names)
        if not isinstance(text, str):
            found = "missing" if text is None else f"a {type(text).__name__}"
            raise ValueError(f"{names[0]} should be text, but is {found}")
        texts.append(text)
    prompt, completion = encode(texts[0], True), encode(texts[1], False)
    step, sample = _get(record, fields.step), _get(record, fields.sample)
    try:
        step = None if step is None else int(step)
    except (TypeError, ValueError):
        raise ValueError(f"step should be a number, but is {str(step)[:40]!r}") from None
    return {
        "step": step,
        "sample_id": str(sample) if sample is not None else f"{step}/{fallback}",
        "group_id": _get(record, fields.group) or prompt_group(prompt, len(prompt)),
        "token_ids": prompt + completion,
        "prompt_len": len(prompt),
        "reward": _get(record, fields.reward),
        "sequence_advantage": _get(record, fields.advantage),
        "weights_version_min": _get(record, fields.version_min),
        "weights_version_max": _get(record, fields.version_max),
    }


def _get(record: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _encoder(folder: Path) -> _Encode:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise InputError(f"cannot load the tokenizer: {first}", where=str(folder)) from error

    def encode(text: str, special: bool) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids

    return encode


def has_fields(keys: Mapping[str, Any] | None, *names: str) -> bool:
    return keys is not None and all(name in keys for name in names)


def is_column(keys: Mapping[str, Any], name: str) -> bool:
    """Whether the first line's field is a list (a line of columns)."""
    value = keys.get(name)
    if not isinstance(value, bytes):
        return False
    try:
        return isinstance(msgspec.json.decode(value), list)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
