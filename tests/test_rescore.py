"""A missing side is filled in with the program's own log-probs of exactly the recorded tokens, at
the recorded temperature; and never where it would be a guess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernel_contracts.errors import InputError
from mismatch_audit.rollouts.checks.view import view
from mismatch_audit.rollouts.formats import ReadOptions, drain, open_sources
from mismatch_audit.rollouts.formats.base import ReadOptions as Options
from mismatch_audit.rollouts.formats.table import batches
from mismatch_audit.rollouts.rescore import Rescorer, rescore
from mismatch_audit.rollouts.rescoring import EngineRescorer
from mismatch_audit.rollouts.schema import Header

VOCABULARY = 97


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def row(name: str, ids: list[int], prompt_len: int, **columns: Any) -> dict[str, Any]:
    return {"sample_id": name, "token_ids": ids, "prompt_len": prompt_len, **columns}


def make(*rows: dict[str, Any]) -> list[Any]:
    return list(batches("made", ((f"row {i}", r) for i, r in enumerate(rows)), Options()))


def truth(folder: Path, ids: list[int], temperature: float = 1.0) -> np.ndarray:
    """``[n]`` log-probs of token i given those before it, by the model's own forward."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float() / temperature
    scored = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return np.concatenate([[np.nan], scored.numpy()])


def test_the_missing_side_is_the_models_own_forward(tiny: Path) -> None:
    """Sequences of different lengths share micro-batches; padding must not show in the numbers."""
    random = np.random.default_rng(1)
    rows = [
        row(str(i), random.integers(0, VOCABULARY, int(random.integers(3, 20))).tolist(), 2)
        for i in range(9)
    ]
    (scored,) = rescore(make(*rows), str(tiny), device="cpu", dtype="float32")
    for made, done in zip(rows, scored.records.to_pylist(), strict=True):
        found = np.array([np.nan if v is None else v for v in done["trainer_logprob"]])
        assert np.isnan(found[:2]).all()
        np.testing.assert_allclose(found[2:], truth(tiny, made["token_ids"])[2:], atol=2e-5)
        assert done["token_ids"] == made["token_ids"]


@pytest.mark.parametrize(
    ("columns", "temperature"),
    [
        ({"temperature": 2.0}, 2.0),
        ({"temperature": 0.6, "logprobs_mode": "processed_logprobs"}, 0.6),
        ({"temperature": 0.6, "logprobs_mode": "raw_logprobs"}, 1.0),
        ({"temperature": 0.0}, 1.0),
        ({}, 1.5),
        ({"token_temperature": [None, 0.7, 0.7, 0.7, 0.7]}, 0.7),
    ],
)
def test_the_logged_temperature_divides_the_logits(
    columns: dict[str, Any], temperature: float, tiny: Path
) -> None:
    """Both sides at one temperature: else the temperature itself reads as a mismatch. Raw log-probs
    and greedy ones are reported at 1; 1.5 is what the caller gives for rollouts that log none."""
    ids = [3, 14, 15, 92, 65]
    done = rescore(make(row("a", ids, 1, **columns)), str(tiny), device="cpu", temperature=1.5)
    found = next(done).tokens("trainer_logprob")
    np.testing.assert_allclose(found[1:], truth(tiny, ids, temperature)[1:], atol=2e-5)


def test_only_what_is_missing_is_filled(tiny: Path) -> None:
    """A recorded value stays; tokens of the prompt and of the environment stay null; a sequence
    without a prompt keeps a null first token, which nothing precedes."""
    kept = row("kept", [1, 2, 3], 1, trainer_logprob=[None, -7.0, None])
    tool = row("tool", [1, 2, 3, 4], 1, origin=[0, 1, 2, 1])
    bare = row("bare", [5, 6, 7], 0)
    rescorer = Rescorer(str(tiny), device="cpu")
    rows = rescorer.score(make(kept, tool, bare)[0]).records.to_pylist()
    assert rows[0]["trainer_logprob"] == [None, -7.0, None]
    assert [v is None for v in rows[1]["trainer_logprob"]] == [True, False, True, False]
    assert [v is None for v in rows[2]["trainer_logprob"]] == [True, False, False]
    assert rescorer.scored == 4


def test_a_batch_that_lacks_nothing_loads_no_model() -> None:
    full = make(row("a", [1, 2], 1, trainer_logprob=[None, -1.0]))
    assert next(rescore(full, "/nowhere/at/all")) is full[0]


def test_another_program_fills_the_samplers_side(tiny: Path) -> None:
    """Given a program (an engine), its rows and its head are used, for the column asked for."""
    from mismatch_audit.programs.reference import TransformersReference
    from mismatch_audit.settings import ReferenceSettings

    engine = TransformersReference(str(tiny), ReferenceSettings(device="cpu", padding="left"))
    ids = [9, 8, 7, 6]
    done = next(rescore(make(row("a", ids, 2)), "engine", side="sampler_logprob", program=engine))
    np.testing.assert_allclose(done.tokens("sampler_logprob")[2:], truth(tiny, ids)[2:], atol=2e-5)
    assert not done.has("trainer_logprob")


def test_another_models_rollouts_are_refused_by_row(tiny: Path) -> None:
    """Ids outside the vocabulary, and more tokens than positions, are no crash inside torch."""
    with pytest.raises(InputError, match=r"sequence 'b': token 97 is outside the vocabulary of 97"):
        next(rescore(make(row("a", [1, 2], 1), row("b", [1, 97], 1)), str(tiny), device="cpu"))
    with pytest.raises(InputError, match="65 tokens, but the model has 64 positions"):
        next(rescore(make(row("a", [1] * 65, 1)), str(tiny), device="cpu"))
    with pytest.raises(InputError, match="cannot be scored again"):
        Rescorer(str(tiny), side="entropy")


def test_a_source_goes_on_after_a_damaged_file(tiny: Path, tmp_path: Path) -> None:
    """Scoring keeps the reader's promise: one damaged file does not hide the next one."""
    text = {
        "input_ids": [1, 2, 3],
        "labels": [-100, 2, 3],
        "logprobs": [-1.0, -2.0],
        "group_id": "g",
    }
    for i, bad in enumerate((False, True, False)):
        folder = tmp_path / f"streams/actor/{i}/0"
        folder.mkdir(parents=True)
        content = json.dumps(text) + "\n" + ('{"input_ids": 1}\n' if bad else "")
        (folder / "0.jsonl").write_text(content)
    sources, problems = open_sources([tmp_path])
    source = Rescorer(str(tiny), device="cpu").source(sources[0])
    done = list(drain(source, problems.append))
    assert sum(batch.n_sequences for batch in done) == 3
    assert all(view(batch).both.sum() == 2 for batch in done)
    assert len(problems) == 1
    assert "trainer_logprob" not in source.header.lacks
    assert any("scored again by transformers" in note for note in source.header.notes)


@pytest.mark.model
def test_a_text_dump_is_tokenised_and_scored_with_the_sample_model(tmp_path: Path) -> None:
    """From text alone: the tokens come from the model's tokenizer, the header says that they need
    not be the sampled ones, and a likely answer scores above an unlikely one."""
    from mismatch_audit.sample_model import resolve_model

    model = resolve_model("sample")
    prompt = "The capital of France is"
    lines = [
        {"input": prompt, "output": answer, "score": 1.0, "step": 3}
        for answer in (" Paris.", " a banana boat.")
    ]
    path = tmp_path / "3.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sources, problems = open_sources([path], options=ReadOptions(tokenizer=Path(model)))
    assert not problems
    source = Rescorer(model, device="cpu").source(sources[0])
    (batch,) = source.batches
    assert any("need not be the sampled ones" in note for note in source.header.notes)
    logprob, of = batch.tokens("trainer_logprob"), batch.sequence_of
    first = [logprob[(of == s) & (batch.position == 0)][0] for s in (0, 1)]
    assert first[0] > first[1] + 2
    assert np.isnan(logprob[batch.position < 0]).all()
    assert np.isfinite(logprob[batch.position >= 0]).all()


# ------------------------------------------------------------------------- both sides by programs
def test_an_engine_gives_the_samplers_side_where_there_is_none_and_a_second_opinion_elsewhere(
    tiny: Path, tmp_path: Path
) -> None:
    from mismatch_audit.programs.reference import TransformersReference
    from mismatch_audit.settings import ReferenceSettings

    engine = TransformersReference(str(tiny), ReferenceSettings(device="cpu"))
    scorer = EngineRescorer(str(tiny), dtype="float32", log=tmp_path / "log", program=engine)
    drawn = [np.nan, np.nan, -1.0, -2.0]
    bare, recorded = (
        make(row("a", [9, 8, 7, 6], 2, **columns))[0]
        for columns in ({}, {"sampler_logprob": drawn})
    )
    for batch, filled, kept in (
        (bare, "sampler_logprob", None),
        (recorded, "rescore_logprob", drawn),
    ):
        done = scorer.score(batch)
        np.testing.assert_allclose(
            done.tokens(filled)[2:], truth(tiny, [9, 8, 7, 6])[2:], atol=2e-5
        )
        if kept is not None:
            np.testing.assert_array_equal(done.tokens("sampler_logprob"), np.float32(kept))
    lacking = Header(framework="f", format="f", lacks={"sampler_logprob": "text only"})
    assert scorer.header(lacking).engine_dtype == "float32"
    assert "sampler_logprob" not in scorer.header(lacking).lacks
    assert scorer.header(Header(framework="f", format="f")).engine_dtype is None


@pytest.mark.engine
def test_a_log_of_token_ids_alone_is_audited_through_both_programs(tmp_path: Path) -> None:
    """`--rescore` and `--rescore-engine` on real transformers and real vLLM, in float32: both sides
    are there, and they agree as two float32 programs do."""
    from live_models import master, tokenizer, write
    from typer.testing import CliRunner

    from mismatch_audit.cli.app import app
    from mismatch_audit.reports.record import load_record

    model = write(tmp_path / "model", master())
    tokenizer(model)
    random = np.random.default_rng(0)
    rows = [row(f"s{i}", random.integers(2, 500, 12).tolist(), 4) for i in range(80)]
    dump = tmp_path / "ids.jsonl"
    dump.write_text("".join(json.dumps(r) + "\n" for r in rows))
    arguments = ["--rescore", model, "--rescore-engine", model, "--engine-dtype", "float32"]
    command = ["rollouts", dump, "--out", tmp_path / "out", *arguments]
    done = CliRunner().invoke(app, [str(a) for a in command])
    assert done.exit_code == 0, done.output
    record = load_record(tmp_path / "out")
    assert record.rollouts is not None
    assert record.rollouts.statistics["tokens"] == 80 * 8
    assert 0 < record.rollouts.statistics["abs_dlp"] < 1e-4
    assert record.identities.engine["dtype"] == "float32"
