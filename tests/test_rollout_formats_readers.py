"""Every reader gives back the sequences that were dumped: the same twelve, written by
``samples/rollouts/make.py`` as each trainer would write them (shifted, padded, with its sentinels),
must come out equal and unshifted. So an off-by-one, a kept filler or a lost token cannot hide."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SAMPLES
from sample_dumps import make

from mismatch_audit.rollouts.formats import (
    READERS,
    ReadOptions,
    drain,
    explain,
    open_sources,
    reader,
)
from mismatch_audit.rollouts.formats.base import Problem

TRUTH = make.sequences()
BOTH_SIDES = ("plain", "prime-rl", "nemo-rl", "skyrl", "openrlhf", "slime", "areal", "verl", "roll")
VERSIONED = ("plain", "slime", "areal", "pipeline-rl", "martingale")
REWARDED = ("plain", "nemo-rl", "openrlhf", "slime", "areal", "roll", "pipeline-rl", "martingale")
TEXTS = ("areal-text", "verl-text", "roll-text", "ms-swift", "trl")


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dumps")
    for name, write in make.WRITERS.items():
        if name != "martingale":
            write(folder / name, TRUTH)
    return folder


def read(path: Path, options: ReadOptions | None = None, format: str = "auto") -> list[Any]:
    """Rows of all sources of a path; any problem fails the test."""
    sources, problems = open_sources([path], format, options)
    assert [str(problem.error) for problem in problems] == []
    found: list[Problem] = []
    rows = [
        row
        for source in sources
        for batch in drain(source, found.append)
        for row in batch.records.to_pylist()
    ]
    assert [str(problem.error) for problem in found] == []
    return rows


def expected(side: list[float | None], prompt: list[int]) -> list[float]:
    return [np.nan] * len(prompt) + [np.nan if value is None else value for value in side]


def floats(values: list[float | None]) -> list[float]:
    return [np.nan if value is None else value for value in values]


@pytest.mark.parametrize("name", [*BOTH_SIDES, "pipeline-rl", "martingale"])
def test_a_dump_comes_back_as_it_was_sampled(name: str, dumps: Path, tmp_path: Path) -> None:
    """Tokens, prompt length, masks and both log-probs, whatever the trainer's alignment was."""
    path = dumps / name
    if name == "martingale":
        pytest.importorskip("martingale")
        make.martingale(tmp_path / name, TRUTH)
        path = tmp_path / name
    assert f"  {name} (" in explain(path) or f": {name}" in explain(path)
    rows = {tuple(row["token_ids"]): row for row in read(path)}
    assert len(rows) == len(TRUTH)
    for s in TRUTH:
        row = rows[tuple(s.ids)]
        assert row["prompt_len"] == len(s.prompt)
        sampler, trainer = expected(s.sampler, s.prompt), expected(s.trainer, s.prompt)
        if name == "martingale":  # its record has no mask: the tool's tokens carry 0.0
            sampler, trainer = ([0.0 if np.isnan(v) and i >= len(s.prompt) else v
                                 for i, v in enumerate(side)]
                                for side in (sampler, trainer))  # fmt: skip
        else:
            own = [False] * len(s.prompt) + s.sampled
            assert row["loss_mask"] == own
            assert [o == 1 for o in row["origin"]] == own
            assert row["origin"][: len(s.prompt)] == [0] * len(s.prompt)
        np.testing.assert_allclose(floats(row["sampler_logprob"]), sampler, rtol=1e-6)
        if name in BOTH_SIDES:
            found = np.array(floats(row["trainer_logprob"]))
            wanted = np.array(trainer)
            np.testing.assert_allclose(found[~np.isnan(wanted)], wanted[~np.isnan(wanted)], 1e-6)
            assert np.isnan(found[0])
        if name in REWARDED:
            assert row["reward"] == s.reward
        if name in VERSIONED:
            assert (row["weights_version_min"], row["weights_version_max"]) == (s.version,) * 2
        if name != "pipeline-rl":  # its stream names no step
            assert row["step"] == (s.step if name != "martingale" else s.version)
    groups = {row["group_id"] for row in rows.values()}
    assert len(groups) == 6
    assert len({row["sample_id"] for row in rows.values()}) == len(TRUTH)


@pytest.mark.parametrize("name", BOTH_SIDES)
def test_one_file_of_a_folder_is_read_alone(name: str, dumps: Path) -> None:
    """A file named itself gives its own sequences, and no more."""
    files = sorted(f for f in (dumps / name).rglob("*") if f.is_file() and f.name != "STABLE")
    assert len(read(files[0])) == (6 if len(files) > 1 else len(TRUTH))


def test_several_formats_in_one_folder_are_several_sources(dumps: Path) -> None:
    """A run folder with dumps of different trainers: each is found by its own reader; text dumps,
    which need a tokenizer, are told as problems and do not hide the rest."""
    sources, problems = open_sources([dumps])
    assert {source.header.format for source in sources} >= {*BOTH_SIDES, "pipeline-rl"}
    assert len(problems) == len(TEXTS)
    assert all("--rescore MODEL" in str(problem.error) for problem in problems)


@pytest.mark.parametrize("only", ["rollout_data", "train_data"])
def test_slime_with_one_folder_gone_says_what_is_missing(
    only: str, dumps: Path, tmp_path: Path
) -> None:
    """Either half is read alone: the sampler's has no trainer side and says how to get it."""
    shutil.copytree(dumps / "slime" / only, tmp_path / only)
    rows = read(tmp_path)
    assert len(rows) == len(TRUTH)
    sources, _ = open_sources([tmp_path])
    lacks = sources[0].header.lacks
    if only == "rollout_data":
        assert "trainer_logprob" not in rows[0]
        assert "--dump-details" in lacks["trainer_logprob"]
    else:
        assert "rollout_data/ is missing" in lacks["weights_version_min"]
        assert "weights_version_min" not in rows[0]


def test_every_format_is_named_alike_and_documented() -> None:
    """The registry, the reader, the samples and the page agree on what there is."""
    page = (SAMPLES.parent / "docs" / "rollout-formats.md").read_text(encoding="utf-8")
    for name in READERS:
        assert name == reader(name).FORMAT
        assert f"`{name}`" in page
        assert (SAMPLES / "rollouts" / name).is_dir()


def test_slime_halves_that_do_not_belong_together_are_refused(dumps: Path, tmp_path: Path) -> None:
    """Joining on the position alone would pair a sampler's log-probs with other tokens."""
    import torch

    shutil.copytree(dumps / "slime", tmp_path / "d")
    content = torch.load(tmp_path / "d/train_data/1.pt", weights_only=True)
    content["samples"][0]["tokens"] = content["samples"][0]["tokens"] + 1
    torch.save(content, tmp_path / "d/train_data/1.pt")
    sources, _ = open_sources([tmp_path / "d"])
    problems: list[Problem] = []
    rows = sum(batch.n_sequences for batch in drain(sources[0], problems.append))
    assert rows == 6  # the other step
    assert "different tokens" in str(problems[0].error)


def test_an_unrolled_areal_trajectory_is_left_as_it_is(dumps: Path, tmp_path: Path) -> None:
    """Saved from a workflow instead of inside the update, nothing is rolled: the versions tell."""
    import torch

    content = torch.load(dumps / "areal/areal_step1_batch.pt", weights_only=True)
    for name in ("loss_mask", "logprobs", "prox_logp"):
        content[name] = content[name].roll(1, -1)
    del content["prox_logp"]
    torch.save(content, tmp_path / "areal_step1_x.pt")
    rows = {tuple(row["token_ids"]): row for row in read(tmp_path)}
    for s in TRUTH[:6]:
        found = floats(rows[tuple(s.ids)]["sampler_logprob"])
        np.testing.assert_allclose(found, expected(s.sampler, s.prompt), rtol=1e-6)


def test_a_clamped_log_prob_of_skyrl_is_no_log_prob(dumps: Path, tmp_path: Path) -> None:
    """-9999.0 means that the engine gave none; taken as a number it would be a mismatch of 9999
    nats. The other element types that SkyRL writes are read as well."""
    import io
    import pickle

    import torch

    a = make.arrays(TRUTH[:6])
    sampler = a["sampler"].clone()
    sampler[0, 1] = -9999.0
    buffer = io.BytesIO()
    torch.save(a["trainer"].bfloat16(), buffer)

    def blob(value: Any) -> dict[str, Any]:
        value = value.numpy()
        return {"data": value.tobytes(), "dtype": str(value.dtype), "shape": value.shape}

    state = {
        "batch_dict": {
            "sequences": blob(a["ids"]), "attention_mask": blob(a["attention"]),
            "loss_mask": blob(a["sampled"]), "response_mask": blob(a["response"]),
            "rollout_logprobs": blob(sampler), "base_action_log_probs": None,
            "action_log_probs": {"format": "torch", "data": buffer.getvalue()},
        },
        "metadata": {"uids": [f"u{i // 2}" for i in range(6)]},
    }  # fmt: skip
    path = tmp_path / "global_step_3_training_input.pkl"
    path.write_bytes(pickle.dumps(state))
    rows = read(path)
    first = next(row for row in rows if row["token_ids"] == TRUTH[0].ids)
    at = len(TRUTH[0].prompt) + 1
    assert first["sampler_logprob"][at] is None
    assert first["trainer_logprob"][at] == pytest.approx(TRUTH[0].trainer[1], rel=2**-7)
    assert first["group_id"] == "u0"


def test_prime_rl_leaves_out_a_step_that_is_being_written(dumps: Path, tmp_path: Path) -> None:
    """Without its STABLE marker a step may end in the middle; it is left out and said so."""
    shutil.copytree(dumps / "prime-rl", tmp_path / "p")
    (tmp_path / "p/token_exports/step_2/STABLE").unlink()
    sources, problems = open_sources([tmp_path / "p"])
    assert not problems
    assert sum(batch.n_sequences for batch in sources[0].batches) == 6
    assert any("1 file(s) of steps without a STABLE marker" in n for n in sources[0].header.notes)


def test_nulls_and_nan_of_a_token_export_are_nulls(tmp_path: Path) -> None:
    """prime-rl writes null for a non-finite value, Python's json writes NaN: neither is a number,
    and 0.0 on a sampled token stays, for a check to find."""
    line = {
        "token_ids": [1, 2, 3, 4], "loss_mask": [False, True, True, True], "step": 1,
        "inference_logprobs": [0.0, None, float("nan"), 0.0],
        "trainer_logprobs": [-3.0, -0.5, float("-inf"), -0.25],
    }  # fmt: skip
    path = tmp_path / "rank_0.jsonl"
    path.write_text(json.dumps(line) + "\n")
    row = read(path)[0]
    assert row["sampler_logprob"] == [None, None, None, 0.0]
    assert row["trainer_logprob"] == [None, -0.5, None, -0.25]


def test_roll_without_the_sampler_side_has_none(dumps: Path, tmp_path: Path) -> None:
    """ROLL falls back to old_log_probs, which makes the mismatch exactly 0; the reader does not."""
    a = make.arrays(TRUTH[:6])
    before = a["ids"].shape[1] - a["responses"].shape[1]
    import torch

    def front(values: Any, n: int) -> Any:
        return torch.cat([torch.zeros(6, n, dtype=values.dtype), values], 1)

    tensors = {
        "input_ids": a["ids"], "attention_mask": a["attention"],
        "response_mask": front(a["sampled"], before),
        "old_log_probs": front(a["trainer"], before - 1),
    }  # fmt: skip
    module = "roll.distributed.scheduler.protocol"
    (tmp_path / "step_000001.pkl").write_bytes(make._data_proto(module, tensors, {}, {}))
    rows = read(tmp_path)
    assert len(rows) == 6
    assert "sampler_logprob" not in rows[0]


def test_a_consolidated_tensordict_is_read(tmp_path: Path) -> None:
    """verl consolidates before it pickles: all leaves in one storage, described beside it."""
    import torch

    from mismatch_audit.rollouts.formats.objects import mapping
    from mismatch_audit.rollouts.safe_pickle import Inert
    from mismatch_audit.rollouts.safe_torch import load_torch

    raw = torch.arange(6).view(torch.uint8)
    floats_ = torch.tensor([0.5, -1.5]).view(torch.uint8)
    torch.save(torch.cat([raw, floats_]), tmp_path / "s.pt")
    storage = load_torch(tmp_path / "s.pt")
    kind = type(
        "C", (Inert,), {"path": "tensordict._reductions._rebuild_tensordict_files_consolidated"}
    )
    made = kind({"leaves": {"ids": ("torch.int64", [2, 3], 0, 48, 0),
                            "w": ("torch.float32", [2], 48, 56, 0)}}, storage)  # fmt: skip
    found = mapping(made)
    assert found["ids"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["w"].tolist() == [0.5, -1.5]


def test_openrlhf_lines_and_npz_equal_the_torch_dump(dumps: Path, tmp_path: Path) -> None:
    """The three spellings of the documented hook give the same rows."""
    import torch

    content = torch.load(dumps / "openrlhf/experience_step1_rank0.pt", weights_only=True)
    np.savez(tmp_path / "experience_step1.npz", **{k: v.numpy() for k, v in content.items()})
    lines = [
        {name: value[i].tolist() for name, value in content.items()}
        for i in range(len(content["sequences"]))
    ]
    (tmp_path / "experience_step1.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    reference = read(dumps / "openrlhf/experience_step1_rank0.pt")
    for name in ("experience_step1.npz", "experience_step1.jsonl"):
        rows = read(tmp_path / name)
        for ours, theirs in zip(rows, reference, strict=True):
            same = {k: v for k, v in ours.items() if k not in ("sample_id", "n_left_pad")}
            assert same == {k: theirs[k] for k in same}
            assert ours["step"] == 1
