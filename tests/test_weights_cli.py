"""The commands' contract with scripts: exit codes, JSON, and errors without tracebacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from click.testing import Result
from typer.testing import CliRunner
from weights_zoo import cast, fused, llama_weights, step, write

from kernel_contracts.errors import AuditError
from mismatch_audit.cli.weights import register

MASTER = llama_weights()
Q = "model.layers.1.self_attn.q_proj.weight"

app = typer.Typer()
register(app)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    write(root / "master", MASTER)
    write(root / "served", fused(cast(MASTER)))
    write(root / "stale", {**cast(MASTER), Q: cast(step(MASTER))[Q]})
    write(root / "other", {"x.weight": torch.ones(3)}, None)
    write(root / "next", step(MASTER, 1e-6))
    return root


def test_equal_is_zero_and_says_so(folders: Path) -> None:
    done = call("weights", folders / "master", folders / "served")
    assert done.exit_code == 0
    assert "30 of 30 tensors equal" in done.output


def test_a_fault_is_one_and_names_the_tensor_and_the_remedy(folders: Path) -> None:
    done = call("weights", folders / "master", folders / "stale")
    assert done.exit_code == 1
    assert "W201" in done.output
    assert "fix: " in done.output
    assert call("weights", folders / "master", folders / "stale", "--exit-zero").exit_code == 0


def test_json_is_the_report(folders: Path) -> None:
    done = call("weights", "compare", folders / "master", folders / "stale", "--json")
    document = json.loads(done.output)
    assert document["exit_code"] == 1
    assert document["findings"][0]["code"] == "W201"
    assert document["findings"][0]["tensors"] == [Q]
    assert {t["name"] for t in document["tensors"] if t["fault"] != "equal"} == {Q}


def test_options_before_the_paths(folders: Path) -> None:
    done = call("weights", "--cast", "bf16", "--all", folders / "master", folders / "served")
    assert done.exit_code == 0
    assert "model.norm.weight" in done.output


def test_nothing_to_compare_is_three(folders: Path) -> None:
    assert call("weights", folders / "master", folders / "other").exit_code == 3


def test_bad_input_is_an_audit_error_of_two(folders: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    for arguments in (
        (folders / "master", folders / "gone"),
        (folders / "master", broken),
        (folders / "master", folders / "served", "--cast", "bf17"),
        (folders / "master", folders / "served", "--quantiser", "mxfp9"),
    ):
        done = call("weights", *arguments)
        assert isinstance(done.exception, AuditError)
        assert done.exception.exit_code == 2
    assert call("weights", folders / "master").exit_code == 2


def test_manifests_stand_in_for_either_side(folders: Path, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    done = call("weights", "manifest", folders / "master", "--cast", "bf16", "-o", ours)
    assert done.exit_code == 0
    assert json.loads(ours.read_text())["digest"] in done.output
    assert call("weights", "manifest", folders / "served", "-o", theirs).exit_code == 0
    for left in (ours, folders / "master"):
        if left.is_dir():
            assert call("weights", left, folders / "served").exit_code == 0
        else:
            assert call("weights", left, theirs).exit_code == 0
            assert call("weights", left, folders / "served").exit_code == 0
            assert call("weights", left, folders / "stale").exit_code == 1


def test_previous_proves_staleness(folders: Path, tmp_path: Path) -> None:
    old = write(tmp_path / "old", step(MASTER))
    done = call("weights", folders / "master", folders / "stale", "--previous", old, "--json")
    finding = json.loads(done.output)["findings"][0]
    assert "bit for bit" in finding["evidence"]["equals"]


def test_visibility_reports_and_lists(folders: Path) -> None:
    arguments = ("visibility", "--before", folders / "master", "--after", folders / "next")
    done = call(*arguments, "--pushes", 2, "--json")
    assert done.exit_code == 0
    document = json.loads(done.output)
    assert document["invisible_updates_are"] == "delayed"
    assert set(document["overall"]["exports"]) == {"nearest", "stochastic", "dither", "feedback"}
    shown = call(*arguments, "--pushes", 2, "--tensors", "--origin", folders / "master")
    assert shown.exit_code == 0
    assert "dither" in shown.output
    assert "lm_head.weight" in shown.output
    assert isinstance(call(*arguments, "--cast", "fp3").exception, AuditError)


def test_export_writes_what_compares_as_equal(folders: Path, tmp_path: Path) -> None:
    done = call("export", folders / "master", tmp_path / "out", "--json")
    assert done.exit_code == 0
    assert json.loads(done.output)["cast"] == 30
    assert call("weights", folders / "master", tmp_path / "out").exit_code == 0
    assert isinstance(call("export", folders / "master", tmp_path / "out").exception, AuditError)
    dithered = call("export", folders / "master", tmp_path / "d", "--rounding", "dither")
    assert "dither" in dithered.output
    assert call("weights", folders / "master", tmp_path / "d").exit_code == 1


def test_names_from_files_cannot_style_the_terminal(tmp_path: Path) -> None:
    """Markup in a tensor's name is shown, not obeyed."""
    left = write(tmp_path / "a", {"[red]x.weight": torch.ones(2, 2)}, None)
    right = write(tmp_path / "b", {"[red]x.weight": torch.zeros(2, 2)}, None)
    assert "[red]x.weight" in call("weights", left, right).output
