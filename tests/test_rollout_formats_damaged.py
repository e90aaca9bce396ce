"""Dumps that are well-formed files with the wrong content: each is one clear error with the file
and the sequence in it, and never a traceback or a silently shorter table."""

from __future__ import annotations

import json
import pickle
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SAMPLES
from sample_dumps import make

from mismatch_audit.rollouts.formats import drain, open_sources


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample dumps with six sequences a step."""
    folder = tmp_path_factory.mktemp("dumps")
    for name in ("openrlhf", "slime", "prime-rl"):
        make.WRITERS[name](folder / name, make.sequences())
    return folder


def read(path: Path) -> tuple[int, list[str]]:
    sources, problems = open_sources([path])
    n = sum(batch.n_sequences for source in sources for batch in drain(source, problems.append))
    return n, [str(problem.error) for problem in problems]


def changed(source: Path, target: Path, change: Callable[[Any], Any]) -> Path:
    """A copy of a torch dump with its content changed in place or replaced."""
    content = torch.load(source, weights_only=True)
    content = change(content) or content
    torch.save(content, target)
    return target


def put(**values: Any) -> Callable[[Any], Any]:
    def change(content: Any) -> None:
        content.update(values)

    return change


EXPERIENCE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "wider log-probs": (put(rollout_log_probs=torch.zeros(6, 40)), "rollout_log_probs is 40 wide"),
    "fewer rows": (put(action_log_probs=torch.zeros(5, 9)), "5 rows for 6 sequences"),
    "ids of floats": (lambda c: put(sequences=c["sequences"].float())(c), "should hold integers"),
    "negative ids": (lambda c: put(sequences=-c["sequences"] - 1)(c), "below 0"),
    "no mask": (put(action_mask=None), "has no action_mask"),
    "no tokens": (put(sequences=None), "has no sequences"),
    "three dimensions": (put(action_mask=torch.zeros(2, 3, 4)), "3 dimensions"),
    "another attention": (put(attention_mask=torch.ones(6, 3)), "attention_mask has shape (6, 3)"),
    "text": (put(rollout_log_probs="nothing"), "a str where an array is expected"),
    "a list of text": (put(rollout_log_probs=["a", "b"]), "6 sequences"),
    "complex numbers": (put(advantages=torch.zeros(6, 5, dtype=torch.complex64)), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERIENCE)
def test_arrays_that_do_not_fit_are_named(name: str, dumps: Path, tmp_path: Path) -> None:
    """The other file of the folder is read all the same."""
    change, says = EXPERIENCE[name]
    shutil.copy(dumps / "openrlhf/experience_step2_rank0.pt", tmp_path)
    source = dumps / "openrlhf/experience_step1_rank0.pt"
    changed(source, tmp_path / "experience_step1_rank0.pt", change)
    n, problems = read(tmp_path)
    assert n == 6
    assert len(problems) == 1
    assert "experience_step1_rank0.pt" in problems[0]
    assert says in problems[0]


def sample(**values: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        content["samples"][2].update(values)

    return change


ROLLOUT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "response longer than the tokens": (sample(response_length=99), "response_length 99"),
    "a negative response": (sample(response_length=-1), "response_length -1"),
    "a response of text": (sample(response_length="4"), "response_length 4"),
    "short log-probs": (sample(rollout_log_probs=[0.5]), "rollout_log_probs has 1 values"),
    "log-probs of text": (sample(rollout_log_probs=["a"] * 4), "rollout_log_probs"),
    "nested tokens": (sample(tokens=[[1], [2]]), "flat list of integers"),
    "no tokens": (sample(tokens=None), "has no tokens"),
    "no samples": (lambda content: content.pop("samples") and None, "has no 'samples'"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROLLOUT)
def test_a_wrong_sample_of_slime_is_named(name: str, dumps: Path, tmp_path: Path) -> None:
    change, says = ROLLOUT[name]
    (tmp_path / "rollout_data").mkdir()
    changed(dumps / "slime/rollout_data/1.pt", tmp_path / "rollout_data/1.pt", change)
    shutil.copy(dumps / "slime/rollout_data/2.pt", tmp_path / "rollout_data/2.pt")
    n, problems = read(tmp_path)
    assert n == (6 if name == "no samples" else 8)
    assert len(problems) == 1
    assert "1.pt, sample" in problems[0]
    assert says in problems[0]


@pytest.mark.parametrize(
    ("blob", "says"),
    [
        ({"data": b"1234", "dtype": "float32", "shape": (6, 9)}, "cannot reshape"),
        ({"data": b"1234", "dtype": "object", "shape": (1,)}, "type object is not read"),
        ({"data": b"123", "dtype": "float32", "shape": (1,)}, "buffer size"),
        ({"data": b"PK\x03\x04", "format": "torch"}, ""),
    ],
)
def test_a_wrong_tensor_of_skyrl_is_named(blob: Any, says: str, tmp_path: Path) -> None:
    path = tmp_path / "global_step_1_training_input.pkl"
    path.write_bytes(pickle.dumps({"batch_dict": {"sequences": blob}}))
    n, problems = read(path)
    assert n == 0
    assert "global_step_1_training_input.pkl, sequence 0" in problems[0]
    assert says in problems[0]


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("UPDATE sequences SET record_json = '{}' WHERE rowid = 3", "sequence 3"),
        ("UPDATE sequences SET record_json = 'no' WHERE rowid = 3", "sequence 3"),
        ("DELETE FROM llm_revisions", "is not in the record"),
        ("UPDATE scores SET record_json = replace(record_json, 'f32:', 'f99:')", "no float's bits"),
        ("DROP TABLE scores", "in no known format"),
    ],
)
def test_a_damaged_token_record_is_named(statement: str, says: str, tmp_path: Path) -> None:
    shutil.copy(SAMPLES / "rollouts/martingale/tokens.db", tmp_path)
    with sqlite3.connect(tmp_path / "tokens.db") as database:
        database.execute(statement)
    database.close()
    _, problems = read(tmp_path / "tokens.db")
    assert len(problems) == 1
    assert "tokens.db" in problems[0]
    assert says in problems[0]


def test_a_token_record_is_not_written_to(tmp_path: Path) -> None:
    """A record may be the evidence of something; reading leaves its bytes and no side files."""
    shutil.copy(SAMPLES / "rollouts/martingale/tokens.db", tmp_path)
    before = (tmp_path / "tokens.db").read_bytes()
    assert read(tmp_path) == (12, [])
    assert (tmp_path / "tokens.db").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["tokens.db"]


def test_a_stream_whose_log_probs_do_not_match_its_targets_is_refused(tmp_path: Path) -> None:
    """Spread over the wrong tokens they would read as a shift."""
    text = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "logprobs": [-1.0], "group_id": "g"}
    (tmp_path / "0.jsonl").write_text(json.dumps([text]) + "\n")
    n, problems = read(tmp_path / "0.jsonl")
    assert n == 0
    assert "logprobs has 1 values for 2 target tokens" in problems[0]


def test_two_runs_in_one_folder_are_two_sources(dumps: Path, tmp_path: Path) -> None:
    """Their steps and ranks have the same numbers; as one source the ids would clash."""
    for run in ("a", "b"):
        shutil.copytree(dumps / "prime-rl", tmp_path / run)
    sources, _ = open_sources([tmp_path])
    assert len(sources) == 2
    assert read(tmp_path) == (24, [])


def test_a_batch_of_padding_only_is_no_sequence(tmp_path: Path) -> None:
    """Rows that fill up a batch are dropped; a file of nothing else is no evidence, and says so."""
    content = {
        "sequences": np.zeros((2, 3), dtype=np.int64), "attention_mask": np.zeros((2, 3)),
        "action_mask": np.zeros((2, 2)), "rollout_log_probs": np.zeros((2, 2)),
        "action_log_probs": np.zeros((2, 2)),
    }  # fmt: skip
    np.savez(tmp_path / "experience_1.npz", **content)
    n, problems = read(tmp_path)
    assert n == 0
    assert "experience_1.npz: holds no sequences" in problems[0]
