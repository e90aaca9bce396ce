"""Shared set-up. Real programs are started as few times as can be: once per engine setting."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before torch is imported: see mismatch_audit.cli.app.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "samples"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Two long units of work come first: the files that share the main job's runs, so that each is
    made once, and the other files that start an engine or load the model. Then test by test."""
    from xdist.scheduler import LoadScopeScheduling

    unit: dict[str, str] = {}
    for file in (ROOT / "tests").glob("test_*.py"):
        text = file.read_text(encoding="utf-8")
        if "mark.engine" in text or "mark.model" in text:
            shared = "quickstart: CommandResult" in text or "exact: CommandResult" in text
            unit[f"tests/{file.name}"] = "runs" if shared else "engines"

    class EnginesTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit.get(nodeid.partition("::")[0], nodeid)

    return EnginesTogether(config, log)


def load_script(path: Path) -> Any:
    """A script of the repository (a benchmark, an example) as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class CommandResult:
    """A finished ``audit`` command and the folder that it wrote to."""

    code: int
    out: str
    err: str
    folder: Path


def audit(*arguments: str | Path, folder: Path | None = None) -> CommandResult:
    """Run the command line as a user does, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "mismatch_audit.cli.app", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
        check=False,
    )
    return CommandResult(done.returncode, done.stdout, done.stderr, folder or ROOT)


def write_settings(path: Path, **changes: object) -> Path:
    """The quickstart's settings with changes, as a run file. Nested keys are given whole."""
    document = yaml.safe_load((SAMPLES / "quickstart.yaml").read_text(encoding="utf-8"))
    document["prompts"] = str(SAMPLES / "prompts.jsonl")
    document["contract"] = str(SAMPLES / "contracts" / "bf16-serving.yaml")
    document.update(changes)
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


NO_PROBES = {"prefill_prompts": 0, "lone_prompts": 0, "repeat_prompts": 0}


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> CommandResult:
    """The main job, as ``make audit`` runs it: float32 transformers against bfloat16 vLLM."""
    folder = tmp_path_factory.mktemp("runs") / "quickstart"
    return audit("run", SAMPLES / "quickstart.yaml", "--out", folder, folder=folder)


@pytest.fixture(scope="session")
def exact(tmp_path_factory: pytest.TempPathFactory) -> CommandResult:
    """Both sides in float32 on 60 prompts."""
    folder = tmp_path_factory.mktemp("runs") / "fp32"
    return audit(
        "run", "--model", "sample", "--prompts", SAMPLES / "prompts.jsonl", "--limit", "60",
        "--contract", SAMPLES / "contracts" / "fp32-exact.yaml", "--engine-dtype", "float32",
        "--max-tokens", "16", "--out", folder, folder=folder,
    )  # fmt: skip
