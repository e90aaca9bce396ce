"""The GitHub Action: what it hands to a shell, and what a job sees of each outcome."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from report_fixtures import record
from typer.testing import CliRunner

from mismatch_audit.cli.app import app
from mismatch_audit.reports.record import save_record

ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]


def test_no_input_is_pasted_into_a_shell() -> None:
    """An input such as `; curl ...` must reach the script as a variable, never as its text."""
    for step in STEPS:
        assert "${{" not in step.get("run", ""), step.get("name")
        if "run" in step:
            assert step["shell"] == "bash"


def test_the_steps_run_in_an_order_that_keeps_the_report() -> None:
    """Upload and comment come before the step that fails the job, and run whatever happened."""
    names = [step.get("name", step.get("uses")) for step in STEPS]
    assert names.index("Audit") < names.index("Upload the report") < names.index("Comment")
    assert names[-1] == "Verdict"
    for name in ("Upload the report", "Comment", "Verdict"):
        assert "always()" in STEPS[names.index(name)]["if"]


def test_every_script_and_variable_of_the_steps_exists() -> None:
    for step in STEPS:
        for script in re.findall(r"\$ACTION/(ci/\w+\.sh)", step.get("run", "")):
            text = (ROOT / script).read_text(encoding="utf-8")
            used = set(re.findall(r"\$\{?([A-Z]+)\b", text)) - {"GITHUB_OUTPUT", "GH_TOKEN"}
            assert used <= set(step["env"]), (script, used)


def test_the_commands_of_the_scripts_are_those_of_the_program() -> None:
    """Options that the scripts pass exist."""
    for command in ("run", "report"):
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
        text = (ROOT / "ci" / "audit.sh").read_text(encoding="utf-8")
        for line in text.splitlines():
            if f"audit {command} " in line:
                for option in re.findall(r"(--[a-z-]+)", line):
                    assert option in shown, option


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """An `audit` that records its arguments, leaves the report it is told to and exits so."""
    program = tmp_path / "bin" / "audit"
    program.parent.mkdir()
    program.write_text(
        "#!/usr/bin/env bash\n"
        'printf "%s\\n" "$@" >>"$LOG"\n'
        '[ "$1" = run ] || exit 0\n'
        '[ -n "$REPORT" ] && mkdir -p "$OUT" && cp "$REPORT" "$OUT/report.json"\n'
        'exit "$STUB_CODE"\n',
        encoding="utf-8",
    )
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    return program


def run_script(stub: Path, tmp_path: Path, **env: str) -> tuple[int, dict[str, str], list[str]]:
    output, log = tmp_path / "output", tmp_path / "log"
    done = subprocess.run(
        ["bash", str(ROOT / "ci" / "audit.sh")],
        env={
            "PATH": f"{stub.parent}:{os.environ['PATH']}",
            "GITHUB_OUTPUT": str(output),
            "LOG": str(log),
            "OUT": str(tmp_path / "out"),
            "SETTINGS": "audit.yaml",
            "REPORT": "",
            **env,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    pairs = dict(line.split("=", 1) for line in output.read_text(encoding="utf-8").splitlines())
    return done.returncode, pairs, log.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(("verdict", "code"), [("PASS", "0"), ("FAIL", "1"), ("UNOBSERVED", "3")])
def test_the_script_passes_verdict_and_code_on(
    stub: Path, tmp_path: Path, verdict: str, code: str
) -> None:
    """The job's last step exits with that code; the script itself never stops the upload."""
    save_record(record(verdict), tmp_path / "report.json")
    status, pairs, _ = run_script(
        stub, tmp_path, STUB_CODE=code, REPORT=str(tmp_path / "report.json")
    )
    assert status == 0
    assert pairs == {"exit-code": code, "verdict": verdict}


def test_a_crash_is_an_error_and_never_a_pass(stub: Path, tmp_path: Path) -> None:
    status, pairs, _ = run_script(stub, tmp_path, STUB_CODE="2")
    assert status == 0
    assert pairs == {"exit-code": "2", "verdict": "ERROR"}


def test_arguments_stay_whole(stub: Path, tmp_path: Path) -> None:
    """One line is one argument: spaces, quotes and dollars reach the program as they are."""
    hostile = "--engine-arg\nhf_overrides={a: '$(touch x)'; b}\n"
    _, _, log = run_script(stub, tmp_path, STUB_CODE="0", ARGUMENTS=hostile, BASELINE="last run")
    assert "hf_overrides={a: '$(touch x)'; b}" in log
    assert log[log.index("--baseline") + 1] == "last run"
    assert not (tmp_path / "x").exists()
