"""Text dumps hold no tokens: they are refused with the way out, or tokenised with a warning that
stays with the data. The tokenizer here maps each word to one token, so every count is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sample_dumps import make

from mismatch_audit.rollouts.formats import ReadOptions, drain, open_sources
from mismatch_audit.rollouts.formats.base import Problem

FORMATS = {
    "areal-text": "areal", "verl-text": "verl", "roll-text": "roll", "ms-swift": "ms-swift",
    "trl": "trl",
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A word a token; a start token before a prompt, none before a completion."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = sorted(
        {w for prompt, answers in make.TEXTS for t in (prompt, *answers) for w in t.split()}
    )
    vocabulary = {"<unk>": 0, "<s>": 1, **{word: i + 2 for i, word in enumerate(words)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>").save_pretrained(folder)
    return folder


def rows_of(path: Path, **options: Any) -> tuple[list[dict[str, Any]], list[Problem], list[Any]]:
    sources, problems = open_sources([path], options=ReadOptions(**options))
    rows = [
        row
        for source in sources
        for batch in drain(source, problems.append)
        for row in batch.records.to_pylist()
    ]
    return rows, problems, sources


@pytest.mark.parametrize("name", FORMATS)
def test_text_is_tokenised_and_says_so(name: str, tmp_path: Path, tokenizer: Path) -> None:
    """Prompt and completion are tokenised apart, so that the border between them is exact; neither
    side has log-probs, and the header says why and how to record them."""
    make.WRITERS[name](tmp_path, [])
    rows, problems, sources = rows_of(tmp_path, tokenizer=tokenizer)
    assert not problems
    (source,) = sources
    assert source.header.format == FORMATS[name]
    assert any("need not be the sampled ones" in note for note in source.header.notes)
    assert {"sampler_logprob", "trainer_logprob"} <= source.header.lacks.keys()
    texts = [(prompt, answer) for prompt, answers in make.TEXTS for answer in answers]
    assert len(rows) == len(texts)
    for row, (prompt, answer) in zip(rows, texts, strict=True):
        assert row["prompt_len"] == 1 + len(prompt.split())
        assert len(row["token_ids"]) == row["prompt_len"] + len(answer.split())
        assert 0 not in row["token_ids"]
        assert "sampler_logprob" not in row
    assert len({row["group_id"] for row in rows}) == len(make.TEXTS)
    assert len({row["sample_id"] for row in rows}) == len(rows)


@pytest.mark.parametrize("name", FORMATS)
def test_text_without_a_tokenizer_is_refused_with_both_ways_out(name: str, tmp_path: Path) -> None:
    """No silence: score the text anew, or record tokens, and how in this trainer."""
    make.WRITERS[name](tmp_path, [])
    rows, problems, _ = rows_of(tmp_path)
    assert rows == []
    assert "--rescore MODEL" in str(problems[0].error)
    assert "record tokens: " in str(problems[0].error)


def test_a_field_that_is_no_text_is_named_by_line(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "3.jsonl"
    lines = [{"input": "a", "output": "b", "step": 3}, {"input": "a", "output": None, "step": 3}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows, problems, _ = rows_of(path, tokenizer=tokenizer)
    assert len(rows) == 1
    assert "3.jsonl:2: output should be text, but is missing" in str(problems[0].error)


def test_columns_of_different_lengths_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    """A line of columns whose lists do not match cannot be taken apart into sequences."""
    columns = {"prompt": ["a", "b"], "completion": ["c"], "advantages": [0.1, 0.2]}
    path = tmp_path / "completions.jsonl"
    path.write_text(json.dumps(columns) + "\n")
    rows, problems, _ = rows_of(path, tokenizer=tokenizer)
    assert rows == []
    assert "column 'completion' has 1 values, others 2" in str(problems[0].error)


def test_a_tokenizer_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    make.verl_text(tmp_path, [])
    rows, problems, _ = rows_of(tmp_path, tokenizer=tmp_path / "gone")
    assert rows == []
    assert "cannot load the tokenizer" in str(problems[0].error)


def test_a_damaged_completions_table_is_a_problem(tmp_path: Path, tokenizer: Path) -> None:
    make.trl(tmp_path, [])
    path = next(tmp_path.rglob("*.parquet"))
    path.write_bytes(path.read_bytes()[:-30])
    rows, problems, _ = rows_of(tmp_path, tokenizer=tokenizer)
    assert rows == []
    assert path.name in str(problems[0].error)
