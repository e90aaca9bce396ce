"""An engine that serves from a folder, and pushes to it in processes that are killed.

``serving`` is a link to the slot whose weights are served, replaced in one step as an engine
replaces its weights; ``standby`` is the slot that takes no traffic. The engine outlives the
processes that push to it.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gate_fixtures as fixtures
from safetensors.torch import load_file, save_file

from kernel_contracts.errors import AuditError
from mismatch_audit.gate.checks import SyncLimits
from mismatch_audit.gate.journal import Journal
from mismatch_audit.gate.keys import load_private
from mismatch_audit.gate.live_checks import EngineProber
from mismatch_audit.gate.push import PushPlan, recover, run_push
from mismatch_audit.gate.targets import TargetError, Weights
from mismatch_audit.gate.weights import identify

# What a push imports as it goes: loaded once, before processes are forked.
for _module in (
    "cryptography.hazmat.primitives.asymmetric.ed25519",
    "cryptography.hazmat.primitives.serialization",
    "kernel_contracts.loading",
    "mismatch_audit.reports.record",
    "mismatch_audit.tokens",
    "mismatch_audit.weights.compare",
    "mismatch_audit.weights.digest",
    "mismatch_audit.weights.sides",
    "pyarrow.parquet",
):
    importlib.import_module(_module)

LAYER = "model.layers.0.mlp.down_proj.weight"


class FolderEngine:
    """As much of LiveEngine as a push needs. link: which slot it looks at."""

    def __init__(self, home: Path, link: str = "serving", **changes: Any) -> None:
        self.home, self.link, self.changes = home, link, changes

    @property
    def slot(self) -> Path:
        return (self.home / self.link).resolve(strict=True)

    spec = "a folder"

    def facts(self) -> dict[str, Any]:
        return fixtures.facts(**self.changes)

    def weight_version(self) -> str:
        return self.slot.name.removeprefix("slot-").partition(".")[0]

    def logprobs(self, sequences: Any) -> list[list[float]]:
        return fixtures.expected_logprobs(
            identify(self.slot).tensors, [list(ids) for ids in sequences]
        )

    def read_back(self, folder: Path) -> Path:
        return self.slot

    def push(self, checkpoint: Path, version: Any, **_: Any) -> None:
        put(self.home, Weights(checkpoint, int(version), ""), "serving")


def put(home: Path, weights: Weights, link: str, stale: bool = False) -> None:
    """Load weights into a slot of their own, then point the link at it. stale: one layer keeps
    what was served before."""
    shutil.rmtree(home / "loading", ignore_errors=True)
    shutil.copytree(weights.checkpoint, home / "loading")
    if stale:
        file = home / "loading" / "model.safetensors"
        old = load_file((home / "serving").resolve() / "model.safetensors")
        save_file({**load_file(file), LAYER: old[LAYER]}, file, metadata={"format": "pt"})
    slot = home / f"slot-{weights.version}.{len(list(home.glob('slot-*')))}"
    os.replace(home / "loading", slot)
    _point(home, link, slot)


def _point(home: Path, link: str, slot: Path) -> None:
    (home / "next").unlink(missing_ok=True)
    (home / "next").symlink_to(slot.name)
    os.replace(home / "next", home / link)


@dataclass(frozen=True)
class FolderTarget:
    """Pushes to the folder engine. stale: the fault. refuses: the switch fails."""

    home: Path
    two_phase: bool
    stale: bool = False
    refuses: bool = False

    def hand_over(self, weights: Weights) -> None:
        faulty = self.stale and weights.version != 1
        put(self.home, weights, "standby" if self.two_phase else "serving", faulty)

    def activate(self, weights: Weights) -> None:
        if not self.two_phase:
            return
        if self.refuses and weights.version != 1:
            raise TargetError("the switch is stuck")
        slots = sorted(self.home.glob(f"slot-{weights.version}.*"), key=lambda p: int(p.suffix[1:]))
        _point(self.home, "serving", slots[-1])


@dataclass(frozen=True)
class Job:
    """One push of version 2 over version 1 in ``folder``. die_at: the durable step (journal
    line, rename, copy) before which the process is killed; 0 is never."""

    folder: Path
    two_phase: bool
    stale: bool = False
    refuses: bool = False
    die_at: int = 0
    back: bool = False
    """Go back on demand instead of pushing."""

    @property
    def home(self) -> Path:
        return self.folder / "engine"

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def plan(self) -> PushPlan:
        link = "standby" if self.two_phase else "serving"
        key = self.folder / "keys" / "audit.key"
        return PushPlan(
            source=self.folder / "new",
            version=2,
            contract=self.folder / "contract.yaml",
            audit=lambda: self.folder / "run",
            key=load_private(key),
            trusted=key.with_suffix(".pub"),
            target=FolderTarget(self.home, self.two_phase, self.stale, self.refuses),
            prober=EngineProber(
                lambda: nullcontext(FolderEngine(self.home, link)), SyncLimits(kl=2e-3)
            ),
            previous=(self.folder / "old", 1),
        )


class PowerCut(BaseException):
    """The process is gone: raised at every step from then on, and caught by nobody."""


@contextmanager
def dying(at: int, die: Callable[[], None]) -> Iterator[None]:
    """Calls ``die`` before the at-th line of the journal, rename or copy, and before every later
    one: the engine's changes are renames and copies too. (A line is whole or torn, see the
    journal's own test.)"""
    left = [at]
    places = ((Journal, "append"), (os, "replace"), (shutil, "copytree"))
    real = [(place, name, getattr(place, name)) for place, name in places]

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] <= 0:
                die()
            return function(*args, **kwargs)

        return step

    for place, name, function in real:
        setattr(place, name, guarded(function))
    try:
        yield
    finally:
        for place, name, function in real:
            setattr(place, name, function)


def cut() -> None:
    raise PowerCut


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def push_once(job: Job) -> int:
    """Exit code of the push, or of going back."""
    plan = job.plan()
    try:
        if job.back:
            result = recover(job.store, plan.target, plan.prober)
            return 0 if result is None else result.exit_code
        return run_push(plan, job.store).exit_code
    except AuditError as error:
        return error.exit_code


def push_here(job: Job) -> int | None:
    """In this process; None when the power was cut."""
    if not job.die_at:
        return push_once(job)
    try:
        with dying(job.die_at, cut):
            return push_once(job)
    except PowerCut:
        return None


def push_in_process(job: Job) -> None:
    """Ends its process: with the exit code, or killed."""
    if not job.die_at:
        os._exit(push_once(job))
    with dying(job.die_at, kill):
        os._exit(push_once(job))


def main() -> None:
    """A job a line on stdin, its exit status a line on stdout; each in a fresh fork, because
    loading torch takes seconds and a push half of one. (multiprocessing's forkserver cannot
    preload a module of the test folder in Python 3.11.)"""
    for line in sys.stdin:
        fields = json.loads(line)
        job = Job(**{**fields, "folder": Path(fields["folder"])})
        child = os.fork()
        if child == 0:
            try:
                push_in_process(job)
            finally:
                traceback.print_exc()
                os._exit(70)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
