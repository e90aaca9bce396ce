"""``audit show`` and ``audit report`` print a finished run again, in every format, exit 0 whatever
the verdict was, and turn a missing run or an unwritable file into one message and exit 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from report_fixtures import hostile, record
from typer.testing import CliRunner

from kernel_contracts.errors import InputError
from mismatch_audit.cli.report import ReportFormat, report
from mismatch_audit.cli.show import show
from mismatch_audit.reports import FORMATS, render
from mismatch_audit.reports.record import load_record, record_text, save_record

app = typer.Typer()
app.command()(show)
app.command()(report)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_record(record("FAIL"), tmp_path / "report.json")
    return tmp_path


def test_every_format_is_offered_and_no_other() -> None:
    assert {f.value for f in ReportFormat} == set(FORMATS)


def test_show_prints_the_report_of_a_folder_or_of_its_file(folder: Path) -> None:
    from_folder, from_file = run("show", str(folder)), run("show", str(folder / "report.json"))
    assert from_folder == from_file
    assert "✘ FAIL" in from_folder
    assert from_folder.rstrip().endswith("exit code 1")


def test_show_json_is_the_file_itself(folder: Path) -> None:
    text = run("show", str(folder), "--json")
    assert text == (folder / "report.json").read_text(encoding="utf-8")
    assert json.loads(text)["verdict"] == "FAIL"


@pytest.mark.parametrize("format", FORMATS)
def test_report_writes_what_the_projection_gives(folder: Path, format: str) -> None:
    """On the screen and into a file, byte for byte."""
    wanted = render(load_record(folder), format)
    assert run("report", str(folder), "--format", format) == wanted
    target = folder / "out.txt"
    assert run("report", str(folder), "-f", format, "--out", str(target)) == ""
    assert target.read_bytes() == wanted.encode()


def test_hostile_records_can_be_shown_and_written(tmp_path: Path) -> None:
    save_record(hostile(), tmp_path / "report.json")
    assert run("show", str(tmp_path), "--json") == record_text(hostile())
    for format in FORMATS:
        assert run("report", str(tmp_path), "--format", format)


def test_what_cannot_be_read_or_written_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no report here"):
        run("show", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="cannot write"):
        run("report", str(folder), "-f", "csv", "--out", str(tmp_path / "no" / "folder.csv"))
