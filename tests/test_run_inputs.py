"""What a run is told, and where it writes: every mistake is one message, and runs never mix."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kernel_contracts.errors import InputError, NotComparableError
from mismatch_audit import identity
from mismatch_audit.cli.app import app
from mismatch_audit.programs.batching import pad_batch, token_budget_batches
from mismatch_audit.rundir import RunDirectory, remove_run
from mismatch_audit.settings import load_settings, parse_settings
from mismatch_audit.tokens import token_schema

ROOT = Path(__file__).resolve().parent.parent


def test_quickstart_settings_read_and_their_paths_count_from_the_file() -> None:
    """The shipped run file works from any folder."""
    settings = load_settings(ROOT / "samples" / "quickstart.yaml")
    assert Path(settings.prompts).is_file()
    assert Path(settings.contract).is_file()


def test_an_unknown_key_is_an_error_with_the_closest_one() -> None:
    """A misspelt setting must not be ignored."""
    with pytest.raises(InputError, match=r"engine\.dtpye: unknown key. did you mean 'dtype'"):
        parse_settings({"prompts": "p", "contract": "c", "engine": {"dtpye": "float32"}}, "x")


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1, 2]", "mapping"), ("a: [", "not valid YAML"), ("chunk: 0", "chunk")],
)
def test_a_bad_run_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    """File and mistake."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        load_settings(path)
    assert str(path) in str(caught.value)


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40), budget=st.integers(1, 200))
def test_batches_hold_everything_once_within_the_budget(lengths: list[int], budget: int) -> None:
    """Every sequence in one batch; padded size within the budget, or the batch is a single one."""
    batches = token_budget_batches(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = max(lengths[i] for i in batch) * len(batch)
        assert padded <= budget or len(batch) == 1


@pytest.mark.parametrize("padding", ["left", "right"])
def test_positions_count_real_tokens_under_padding(padding: str) -> None:
    """A model with absolute positions is wrong by the pad length otherwise."""
    ids, mask, positions = pad_batch([[5, 6, 7], [8]], 0, padding)  # type: ignore[arg-type]
    for row, tokens in enumerate(([5, 6, 7], [8])):
        real = mask[row].bool()
        assert ids[row][real].tolist() == tokens
        assert positions[row][real].tolist() == list(range(len(tokens)))


def part(rows: int = 2) -> tuple[pd.DataFrame, pd.DataFrame]:
    tokens = pd.DataFrame(
        {"prompt_id": ["a"] * rows, "sequence_id": ["a"] * rows, "path": "decode", "flip": False}
    )
    return tokens, pd.DataFrame({"prompt_id": ["a"], "sequence_id": ["a"], "token_ids": [[1, 2]]})


def test_two_runs_never_mix_in_one_folder(tmp_path: Path) -> None:
    """The same run needs --resume, another one another folder; a foreign folder is refused."""
    folder = tmp_path / "run"
    first = RunDirectory(folder, {"settings": {"limit": 1}}, resume=False)
    first.write_chunk(0, *part())
    with pytest.raises(InputError, match="already holds this run"):
        RunDirectory(folder, {"settings": {"limit": 1}}, resume=False)
    with pytest.raises(InputError, match=r"another run; different: settings\.limit"):
        RunDirectory(folder, {"settings": {"limit": 2}}, resume=True)
    again = RunDirectory(folder, {"settings": {"limit": 1}}, resume=True)
    assert again.has_chunk(0)
    assert not again.has_chunk(1)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="holds no run of ours"):
        RunDirectory(foreign, {}, resume=False)
    remove_run(foreign)
    assert (foreign / "thesis.txt").exists()


def test_a_part_is_whole_or_not_there(tmp_path: Path) -> None:
    """A half-written part must not count: it has another name until it is complete."""
    folder = RunDirectory(tmp_path / "run", {}, resume=False)
    tokens, sequences = part()
    (folder.path / "tokens" / "part-00000.tmp").write_bytes(b"half")
    assert not folder.has_chunk(0)
    folder.write_chunk(0, tokens, sequences)
    read, _ = folder.tables()
    assert list(read.columns) == token_schema().names
    assert read["kl_engine_reference"].isna().all()  # null when unknown, never 0.0


def test_a_full_disk_is_one_message_and_keeps_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer fails as a full disk does; earlier parts stay readable."""
    import pyarrow.parquet as pq

    folder = RunDirectory(tmp_path / "run", {}, resume=False)
    folder.write_chunk(0, *part())

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(InputError, match="No space left") as caught:
        folder.write_chunk(1, *part())
    assert "--resume" in str(caught.value)
    assert len(folder.tables()[0]) == 2


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    """File and remedy."""
    folder = RunDirectory(tmp_path / "run", {}, resume=False)
    folder.write_chunk(0, *part())
    (folder.path / "tokens" / "part-00000.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(InputError, match="damaged part"):
        folder.tables()


def test_facts_that_differ_make_the_pair_not_comparable() -> None:
    """A contract binds a pair; unknown facts are as bad as wrong ones."""
    identity.check_facts("engine", {"dtype": "float32"}, {"dtype": "torch.float32"}, "c.yaml")
    with pytest.raises(NotComparableError, match="dtype: the contract says 'float32'"):
        identity.check_facts("engine", {"dtype": "float32"}, {"dtype": "bfloat16"}, "c.yaml")
    with pytest.raises(NotComparableError, match="does not tell"):
        identity.check_facts("engine", {"logprobs_mode": "raw_logprobs"}, {}, "c.yaml")
    with pytest.raises(NotComparableError, match="weights"):
        identity.check_same(["weights"], {"weights": "a"}, {"weights": "b"}, "c.yaml")
    with pytest.raises(NotComparableError):
        identity.check_same(["weights"], {}, {}, "c.yaml")


def test_a_setting_that_changed_nothing_is_said() -> None:
    """Asked for fp8 caches, got none; asked for a quantisation, every layer is unquantised."""
    facts = {"kv_cache_dtype": ["auto"], "linear_methods": {"UnquantizedLinearMethod": 120}}
    assert identity.no_op_requests({}, facts) == []
    said = identity.no_op_requests({"kv_cache_dtype": "fp8", "quantization": "int8"}, facts)
    assert len(said) == 2
    fp8 = {**facts, "kv_cache_dtype": ["fp8"]}
    assert identity.no_op_requests({"kv_cache_dtype": "fp8"}, fp8) == []


def test_weights_that_the_dtype_cannot_hold_are_counted(tmp_path: Path) -> None:
    """One of four float32 weights needs more bits than bfloat16 has."""
    import torch
    from safetensors.torch import save_file

    save_file({"w": torch.tensor([1.0, 0.5, 2.0, 1.001])}, tmp_path / "model.safetensors")
    assert identity.unrepresentable_share(tmp_path, "bfloat16") == 0.25
    assert identity.unrepresentable_share(tmp_path, "float32") == 0.0


def run_cli(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        error = result.exception
        return getattr(error, "exit_code", -1), str(error)
    return result.exit_code, result.output


CONTRACT = str(ROOT / "samples" / "contracts" / "fp32-exact.yaml")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run"], 2, "needs a run file"),
        (["run", "--prompts", "no.jsonl", "--contract", CONTRACT, "--engine-dtype", "float32"], 2,
         "no.jsonl"),
        (["run", "--prompts", "no.jsonl", "--contract", "no.yaml"], 2, "no.yaml"),
        (["run", "--prompts", "p.jsonl", "--contract", CONTRACT], 4, "dtype"),
        (["run", "--prompts", "p", "--contract", CONTRACT, "--engine-arg", "x"], 2, "KEY=VALUE"),
        (["judge", "nowhere", "--contract", CONTRACT], 2, "no run of ours"),
        (["show", "nowhere"], 2, "nowhere"),
    ],
)  # fmt: skip
def test_a_users_mistake_is_one_message(arguments: list[str], code: int, message: str) -> None:
    """Exit code and message; an exception of another family would be a traceback, a bug."""
    got, text = run_cli(*arguments)
    assert got == code, text
    assert message in text


def test_bad_prompts_are_named_by_file_and_line_before_anything_loads(tmp_path: Path) -> None:
    """The third line is not JSON."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": \n')
    code, text = run_cli("run", "--prompts", str(prompts), "--contract", CONTRACT,
                         "--engine-dtype", "float32", "--out", str(tmp_path / "o"))  # fmt: skip
    assert code == 2
    assert f"{prompts}:3" in text
    assert not (tmp_path / "o").exists()


def test_the_engine_that_is_not_installed_prints_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is the fix."""
    from mismatch_audit.programs import vllm_engine
    from mismatch_audit.settings import EngineSettings

    monkeypatch.setattr(vllm_engine, "vllm_available", lambda: (False, "vllm is not installed"))
    with pytest.raises(InputError, match="pip install") as caught:
        vllm_engine.VllmEngine("m", EngineSettings(), workdir=tmp_path, log_path=tmp_path / "log")
    assert "not installed" in str(caught.value)


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    """The command line must answer at once: torch alone takes seconds."""
    import subprocess
    import sys

    code = (
        "import sys, mismatch_audit.cli.app; "
        "heavy = {'torch', 'vllm', 'transformers', 'pandas', 'scipy', 'pydantic', 'numpy'}; "
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_doctor_tells_versions_and_the_engine() -> None:
    """Machine-readable, and the main job's needs are all there in a tested environment."""
    code, text = run_cli("doctor", "--json")
    names = {check["name"]: check for check in json.loads(text)}
    assert code == 0, text
    assert names["engine vllm"]["ok"]
    assert names["torch"]["found"]
