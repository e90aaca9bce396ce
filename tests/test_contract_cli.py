"""``audit contract``: what is printed, where, and with which exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from contract_examples import EXAMPLE
from typer.testing import CliRunner

from kernel_contracts.errors import AuditError
from kernel_contracts.loading import parse_contract
from mismatch_audit.cli.contract import contract_app

RUNNER = CliRunner()


@pytest.fixture
def good(tmp_path: Path) -> str:
    path = tmp_path / "good.yaml"
    path.write_text(EXAMPLE.replace("share: 0.01", "share: 0.05").replace(
        "slices: [undecided]", "slices: [undecided, confidence]"))  # fmt: skip
    return str(path)


@pytest.fixture
def bad(tmp_path: Path) -> str:
    path = tmp_path / "bad.yaml"
    path.write_text(EXAMPLE.replace("limit: 0.10", "limt: 0.10").replace("[all, domain]", "[al]"))
    return str(path)


def test_lint_says_ok_and_what_the_contract_holds(good: str) -> None:
    """Clean: exit 0 and one line."""
    result = RUNNER.invoke(contract_app, ["lint", good])
    assert result.exit_code == 0
    assert result.output.startswith(f"{good}: ok: smollm2-bf16-serving: clauses: 2 numerical, ")
    assert "at least 60 prompts a slice" in result.output


def test_lint_prints_every_mistake_of_every_file_and_exits_2(
    good: str, bad: str, tmp_path: Path
) -> None:
    """One bad file does not hide the others, nor does a missing one."""
    missing = str(tmp_path / "missing.yaml")
    result = RUNNER.invoke(contract_app, ["lint", bad, missing, good])
    assert result.exit_code == 2
    assert f"{bad}:15:statistical[0].slices[0]: no slice 'al' (did you mean all?)" in result.output
    assert (
        f"{bad}:16:statistical[1].limt: unknown key 'limt' (did you mean limit?)" in result.output
    )
    assert f"{missing}:1: cannot read the contract" in result.output
    assert f"{good}: ok" in result.output
    assert "3 mistakes" in result.output


def test_warnings_alone_leave_exit_0(good: str) -> None:
    """A doubt is said, and the file can still be used."""
    result = RUNNER.invoke(contract_app, ["lint", good, "--prompts", "30"])
    assert result.exit_code == 0
    assert "warning: N1 needs at least 59 prompts" in result.output


def test_lint_as_json_is_for_scripts(bad: str) -> None:
    """The same problems as data; the exit status is the same."""
    result = RUNNER.invoke(contract_app, ["lint", bad, "--json"])
    assert result.exit_code == 2
    problems = json.loads(result.output)
    assert [(p["line"], p["field"], p["severity"]) for p in problems] == [
        (15, "statistical[0].slices[0]", "error"),
        (16, "statistical[1].limt", "error"),
    ]


def test_schema_prints_and_writes_the_same_schema(tmp_path: Path) -> None:
    """Valid draft 2020-12, on the terminal or in a file."""
    printed = RUNNER.invoke(contract_app, ["schema"])
    assert printed.exit_code == 0
    schema = json.loads(printed.output)
    jsonschema.Draft202012Validator.check_schema(schema)
    out = tmp_path / "schema.json"
    assert RUNNER.invoke(contract_app, ["schema", "--out", str(out)]).exit_code == 0
    assert json.loads(out.read_text()) == schema
    refused = RUNNER.invoke(contract_app, ["schema", "--out", str(tmp_path / "no" / "x.json")])
    assert isinstance(refused.exception, AuditError)


def test_show_prints_each_promise_in_words(good: str) -> None:
    """Every clause and slice appears, with the prompts it needs, in 100 columns."""
    result = RUNNER.invoke(contract_app, ["show", good], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    words = " ".join(result.output.split())
    for text in (
        "drift > 1 on at most 5.00% of tokens",
        "mean kl_engine_reference <= 0.002 (warn",
        "undecided reference_margin <= 0.5",
        "FAIL of S2 -> route undecided to reference",
        ">= 59",
    ):
        assert text in words
    assert max(map(len, result.output.splitlines())) <= 100


def test_show_resolved_is_a_contract_with_every_default(good: str) -> None:
    """What is printed loads, and means the same."""
    result = RUNNER.invoke(contract_app, ["show", good, "--resolved"])
    assert "alpha: 0.05" in result.output
    resolved = parse_contract(result.output)
    assert resolved.document() == parse_contract(Path(good).read_text()).document()


def test_diff_classes_changes_and_exits_0(good: str, tmp_path: Path) -> None:
    """A difference is no failure; it is for people and scripts to judge."""
    other = tmp_path / "other.yaml"
    other.write_text(Path(good).read_text().replace("limit: 0.10", "limit: 0.08"))
    assert "no difference" in RUNNER.invoke(contract_app, ["diff", good, good]).output
    shown = RUNNER.invoke(contract_app, ["diff", good, str(other)], env={"COLUMNS": "100"})
    assert shown.exit_code == 0
    assert "tighter S2.limit 0.1 0.08" in " ".join(shown.output.split())
    data = RUNNER.invoke(contract_app, ["diff", good, str(other), "--json"])
    assert json.loads(data.output) == [
        {"field": "S2.limit", "direction": "tighter", "before": 0.1, "after": 0.08, "note": ""}
    ]


@pytest.mark.parametrize("command", [["show"], ["diff"]])
def test_a_broken_contract_is_an_error_with_exit_2(command: list[str], bad: str) -> None:
    """The caller prints it without a traceback; the status travels with it."""
    result = RUNNER.invoke(contract_app, [*command, bad, *([bad] if command == ["diff"] else [])])
    assert isinstance(result.exception, AuditError)
    assert result.exception.exit_code == 2
    assert "2 mistakes" in str(result.exception)


def test_the_module_starts_without_its_heavy_imports() -> None:
    """`audit --help` must answer at once: nothing heavy is imported until a command runs."""
    code = (
        "import sys; import mismatch_audit.cli.contract; "
        "print([m for m in ('pydantic','pandas','numpy','yaml','torch','kernel_contracts.contract')"
        " if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
