"""A run that is interrupted loses nothing: the engine may die, the auditor may be killed.

Resumed, the run must give the same verdict section, byte for byte, as one that was never stopped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import NO_PROBES, ROOT, SAMPLES, audit, write_settings
from live_models import master, tokenizer, write
from weights_live_matrix import ARGS

pytestmark = pytest.mark.engine


def start(settings: Path, folder: Path, *extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mismatch_audit.cli.app", "run", str(settings), "--out", str(folder),
         *extra],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def wait_for_parts(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    for _ in range(3000):
        if len(list((folder / "tokens").glob("part-*.parquet"))) >= count:
            return
        if process.poll() is not None:
            raise AssertionError(f"ended early: {process.communicate()}")
        time.sleep(0.1)
    raise AssertionError("no part was written")


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def verdicts(folder: Path) -> str:
    record = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    kept = ("verdict", "exit_code", "contract", "counts", "measurements", "chain", "views")
    return json.dumps({k: record[k] for k in kept}, indent=1)


def test_an_interrupted_run_resumes_to_the_same_verdicts(tmp_path: Path) -> None:
    """Kill the engine, then the auditor, then finish; compare with an unbroken run. A tiny model:
    four engines are started, and what they compute is not the matter here."""
    model = write(tmp_path / "model", master())
    tokenizer(model)
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "token_ids": [5 + i, 60 + i, 7, 300 - i]} for i in range(48)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    settings = write_settings(
        tmp_path / "run.yaml", chunk=2, probes={**NO_PROBES, "prefill_prompts": None},
        model=str(model), prompts=str(prompts), sampling={"max_tokens": 16},
        contract=str(SAMPLES / "contracts" / "fp32-exact.yaml"),
        engine={"program": "vllm", "dtype": "float32", "args": ARGS},
    )  # fmt: skip
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    unbroken = audit("run", settings, "--out", whole)
    assert unbroken.code == 3, unbroken.err  # 48 prompts certify nothing, and that is said

    process = start(settings, broken)
    wait_for_parts(broken, 1, process)
    engine = children(process.pid)
    assert len(engine) == 1
    os.kill(engine[0], signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "the engine's process ended" in said
    assert "--resume" in said
    kept = len(list((broken / "tokens").glob("part-*.parquet")))
    assert kept >= 1

    again = audit("run", settings, "--out", broken)
    assert again.code == 2
    assert "--resume" in again.err
    other = audit("run", settings, "--limit", "20", "--out", broken, "--resume")
    assert other.code == 2
    assert "settings.limit" in other.err

    process = start(settings, broken, "--resume")
    wait_for_parts(broken, kept + 1, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()

    finished = audit("run", settings, "--out", broken, "--resume")
    assert finished.code == 3, finished.err
    assert verdicts(broken) == verdicts(whole)
