"""The journalled push: whatever dies wherever, the engine serves the old or the new weights."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gate_fixtures as fixtures
import pytest
from gate_engine import FolderEngine, Job, push_here, put

from kernel_contracts.errors import InputError
from mismatch_audit.gate.journal import Journal, locked
from mismatch_audit.gate.keys import new_key
from mismatch_audit.gate.push import recover, run_push
from mismatch_audit.gate.sync import RollbackError
from mismatch_audit.gate.targets import Command, EngineTarget, TargetError, Weights

MAX_STEPS = 120


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[[Job], int]]:
    """Runs a push in a process of its own; its exit status."""
    here = Path(__file__).parent
    server = subprocess.Popen(
        [sys.executable, str(here / "gate_engine.py")], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, cwd=here.parent,
        env={**os.environ, "PYTHONPATH": str(here.parent)},
    )  # fmt: skip
    assert server.stdin is not None
    assert server.stdout is not None

    def run(job: Job) -> int:
        server.stdin.write(json.dumps({**asdict(job), "folder": str(job.folder)}) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline())

    yield run
    server.stdin.close()
    server.wait(30)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Job]:
    """A fresh world each call: an engine that serves version 1, and an audit of version 2."""
    first = tmp_path_factory.mktemp("push") / "world"
    fixtures.checkpoint(first / "old", seed=1)
    fixtures.checkpoint(first / "new", seed=2)
    contract = fixtures.contract(first)
    fixtures.run(first / "run", first / "new", contract)
    new_key(first / "keys")
    (first / "engine").mkdir()
    put(first / "engine", Weights(first / "old", 1, ""), "serving")
    put(first / "engine", Weights(first / "old", 1, ""), "standby")
    count = [0]

    def make(two_phase: bool, **changes: Any) -> Job:
        count[0] += 1
        folder = first.parent / f"world-{count[0]}"
        shutil.copytree(first, folder, symlinks=True)
        return Job(folder, two_phase, **changes)

    return make


def served(job: Job) -> str:
    """old, new, or other: by the bytes that the engine serves."""
    held = _bytes((job.home / "serving").resolve(strict=True))
    known = {_bytes(job.folder / name): name for name in ("old", "new")}
    return known.get(held, "other")


def _bytes(checkpoint: Path) -> bytes:
    return (checkpoint / "model.safetensors").read_bytes()


def pointed(job: Job) -> str | None:
    """What serving.json names, which must be whole and true."""
    path = job.store / "serving.json"
    if not path.exists():
        return None
    document = json.loads(path.read_bytes())
    name = {1: "old", 2: "new"}[document["version"]]
    assert Path(document["checkpoint"]) == (job.folder / name).resolve()
    return name


def events(job: Job) -> list[str]:
    return [event.event for event in Journal(job.store).events]


@pytest.mark.parametrize("two_phase", [False, True])
def test_good_push_is_served(world: Callable[..., Job], two_phase: bool):
    """Every step in the journal, the new weights served, the pointer on them."""
    job = world(two_phase)
    result = run_push(job.plan(), job.store)
    assert (result.status, result.served, result.exit_code) == ("committed", 2, 0)
    assert {check.check for check in result.checks} >= {"version", "agreement", "read_back"}
    assert served(job) == pointed(job) == "new"
    order = ["begun", "audited", "blessed", "allowed", "handing_over", "handed_over", "checked"]
    assert events(job) == [*order, *(["activating"] if two_phase else []), "committed"]
    again = run_push(job.plan(), job.store)
    assert (again.status, again.reasons) == ("committed", ("it was served already",))
    assert events(job) == [*order, *(["activating"] if two_phase else []), "committed"]
    fixtures.checkpoint(job.folder / "new", seed=7)
    with pytest.raises(InputError, match="served already"):
        run_push(replace(job.plan(), previous=None), job.store)


@pytest.mark.parametrize("two_phase", [False, True])
def test_stale_layer_is_rolled_back(world: Callable[..., Job], two_phase: bool):
    """One layer that did not arrive: seen by log-probs and by the read-back, which names it."""
    job = world(two_phase, stale=True)
    result = run_push(job.plan(), job.store)
    assert (result.status, result.served, result.exit_code) == ("rolled_back", 1, 1)
    failed = {check.check: check.detail for check in result.checks if check.ok is False}
    assert {"agreement", "read_back"} <= set(failed)
    assert "down_proj" in failed["read_back"]
    assert served(job) == pointed(job) == "old"
    assert events(job)[-1] == "rolled_back"
    good = replace(job, stale=False)
    assert run_push(good.plan(), job.store).status == "committed"
    assert served(job) == "new"


def test_refused_before_anything_is_handed_over(world: Callable[..., Job]):
    """An audit that did not pass, an engine with another KV cache, a contract that was not judged,
    weights changed after the audit: the engine is never touched, and the journal says why."""
    job = world(False)
    plan = job.plan()
    for verdict, code in (("FAIL", 1), ("INCONCLUSIVE", 3)):
        run = fixtures.run(job.folder / verdict, job.folder / "new", plan.contract, verdict)
        result = run_push(replace(plan, audit=lambda run=run: run), job.store)
        assert (result.status, result.exit_code) == ("aborted", code)
    other = FolderEngine(job.home, kv_cache_dtype=["fp8_e4m3"])
    prober = replace(plan.prober, open_engine=lambda: nullcontext(other))
    result = run_push(replace(plan, prober=prober), job.store)
    assert "engine_fact_differs: kv_cache_dtype" in result.reasons[0]
    text = fixtures.CONTRACT.replace("gate-test", "another")
    another = fixtures.contract(job.folder / "c", text)
    result = run_push(replace(plan, contract=another), job.store)
    assert result.reasons[0].startswith("contract_differs")
    fixtures.checkpoint(job.folder / "new", seed=5)
    result = run_push(plan, job.store)
    assert "not the weights that this run audited" in result.reasons[0]
    assert served(job) == pointed(job) == "old"
    assert "handing_over" not in events(job)


def check_every_step(
    world: Callable[..., Job], push: Callable[[Job], int | None], two_phase: bool, fault: str
) -> None:
    """Cut a push short before its first, second, ... durable step, until none is left.

    At the cut: the pointer names old weights, or new ones that were checked; a two-phase engine
    serves nothing else either, and an in-place engine serves something whole. After the same
    command again: new when the push is good, old when it is not, and engine, pointer and journal
    agree. Every third second run is cut short as well.
    """
    flags = {fault: True} if fault else {}
    allowed = {"old"} if fault else {"old", "new"}
    holds = allowed if two_phase or not fault else {"old", "new", "other"}
    for die_at in range(1, MAX_STEPS):
        job = world(two_phase, **flags, die_at=die_at)
        code = push(job)
        assert pointed(job) in {None, *allowed}
        assert served(job) in holds
        if code is not None and code >= 0:
            break
        if die_at % 3 == 0:
            push(replace(job, die_at=1 + die_at // 3))
            assert pointed(job) in {None, *allowed}
        assert push(replace(job, die_at=0)) == (1 if fault else 0), die_at
        assert served(job) == pointed(job) == ("old" if fault else "new"), die_at
        assert events(job)[-1] == ("rolled_back" if fault else "committed"), die_at
        shutil.rmtree(job.folder)
    else:
        pytest.fail(f"more than {MAX_STEPS} steps")
    assert die_at > 12
    assert code == (1 if fault else 0)


@pytest.mark.parametrize(
    ("two_phase", "fault"),
    [(False, ""), (True, ""), (False, "stale"), (True, "stale"), (True, "refuses")],
)
def test_power_cut_at_every_step(world: Callable[..., Job], two_phase: bool, fault: str):
    """Good pushes, stale layers, and a switch that is stuck, in place and in two phases."""
    check_every_step(world, push_here, two_phase, fault)


@pytest.mark.parametrize(("two_phase", "fault"), [(True, ""), (False, "stale")])
def test_sigkill_at_every_step(
    world: Callable[..., Job], start: Callable[[Job], int], two_phase: bool, fault: str
):
    """The same with real processes and SIGKILL: nothing that Python runs on its way out helped."""
    check_every_step(world, start, two_phase, fault)


@pytest.mark.parametrize("two_phase", [False, True])
def test_going_back_after_a_cut(world: Callable[..., Job], two_phase: bool):
    """``recover`` after a cut at any step: the old weights are served, unless the push had been
    committed; another push then starts cleanly."""
    for die_at in range(2, MAX_STEPS):
        job = world(two_phase, die_at=die_at)
        if push_here(job) is not None:
            return
        push_here(replace(job, die_at=0, back=True))
        done = "committed" in events(job)
        assert served(job) == ("new" if done else "old"), die_at
        assert pointed(job) in ({"new"} if done else {"old", None})
    pytest.fail("never finished")


def test_another_push_first_goes_back_from_the_one_cut_short(world: Callable[..., Job]):
    """Version 2 was handed over when the process died; version 3 is pushed next. The rollback of 2
    is in the journal, and 1 is what 3 would go back to."""
    for die_at in range(8, MAX_STEPS):
        job = world(False, stale=True, die_at=die_at)
        assert push_here(job) is None
        if "handed_over" in events(job):
            break
    assert served(job) == "other"
    good = replace(job, die_at=0, stale=False)
    assert run_push(replace(good.plan(), version=3, previous=None), job.store).served == 3
    names = events(job)
    assert names.index("rolled_back") < names.index("begun", 1)
    assert Journal(job.store).of(2)[0].data["previous"]["version"] == 1


def test_lost_engine_is_said_loudly_and_tried_again(world: Callable[..., Job]):
    """The way back fails (the previous checkpoint was changed): exit 4, nothing new starts, and
    once it is mended the next command goes back."""
    job = world(False, stale=True)
    backup = job.folder / "backup"
    shutil.copytree(job.folder / "old", backup)
    target = job.plan().target

    class Losing:
        two_phase = False

        def hand_over(self, weights: Weights) -> None:
            fixtures.checkpoint(job.folder / "old", seed=9)
            target.hand_over(weights)

    with pytest.raises(RollbackError, match="previous checkpoint was changed") as caught:
        run_push(replace(job.plan(), target=Losing()), job.store)
    assert caught.value.exit_code == 4
    assert pointed_version(job) == 1
    with pytest.raises(RollbackError):
        run_push(replace(job.plan(), version=3, previous=None), job.store)
    shutil.rmtree(job.folder / "old")
    shutil.copytree(backup, job.folder / "old")
    plan = job.plan()
    result = recover(job.store, plan.target, plan.prober)
    assert result is not None
    assert result.status == "rolled_back"
    assert served(job) == "old"


def pointed_version(job: Job) -> int:
    return int(json.loads((job.store / "serving.json").read_bytes())["version"])


def test_journal_refuses_edits_and_forgets_a_torn_line(tmp_path: Path):
    """A torn last line was never acted on and is cut; any other change is refused."""
    journal = Journal(tmp_path)
    for event in ("begun", "audited", "blessed"):
        journal.append(1, event, note="x")
    path = tmp_path / "journal.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[0][:30])
    assert [e.event for e in Journal(tmp_path).events] == ["begun", "audited", "blessed"]
    assert path.read_bytes() == whole
    lines = whole.splitlines(keepends=True)
    changed = (
        lines[1] + lines[2],
        lines[0] + lines[2],
        whole.replace(b"audited", b"blessed"),
        lines[0] + b"{}\n",
        lines[0] + lines[0],
    )
    for raw in changed:
        path.write_bytes(raw)
        with pytest.raises(InputError, match="damaged"):
            Journal(tmp_path)


def test_one_push_at_a_time(tmp_path: Path):
    """A second process is told, and does not wait."""
    with locked(tmp_path), pytest.raises(InputError, match="under way"), locked(tmp_path):
        pass


def test_command_targets(tmp_path: Path):
    """Words are filled in without a shell; other fields, open quotes and failures are told; the
    passphrase of the key is not handed to commands."""
    out = tmp_path / "out"
    weights = Weights(tmp_path / "a b; touch x", 7, "")
    script = "import os,sys; open(sys.argv[1],'w').write(repr((sys.argv[2:], dict(os.environ))))"
    command = Command(("python3", "-c", script, str(out), "{checkpoint}", "v{version}"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUDIT_KEY_PASSPHRASE", "secret")
        command.run(weights)
    said = out.read_text()
    assert "a b; touch x" in said
    assert "v7" in said
    assert "secret" not in said
    assert Command.parse("load {checkpoint} --name 'x {version}'", "").words[-1] == "x {version}"
    for text in ("", "x '", "x {other}", "x {checkpoint.__class__}", "x {}", "x {version"):
        with pytest.raises(InputError):
            Command.parse(text, "--target")
    for words in (("false",), (str(tmp_path / "none"),)):
        with pytest.raises(TargetError):
            Command(words).run(weights)
    with pytest.raises(TargetError, match="no end"):
        Command(("sleep", "5"), timeout=0.05).run(weights)


def test_engine_that_admits_a_bad_push_is_believed(tmp_path: Path):
    """A receipt of parameters that were not loaded, or of a cache that was kept, is a failed
    hand-over; so is an engine's own error."""
    weights = Weights(tmp_path, 3, "")

    def target(answer: Any) -> EngineTarget:
        def push(checkpoint: Path, version: int) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return SimpleNamespace(**answer)

        return EngineTarget(lambda: nullcontext(SimpleNamespace(push=push)))

    target({"tensors": 9, "flushed": True, "not_loaded": ()}).hand_over(weights)
    for answer, said in (
        ({"tensors": 9, "flushed": False}, "prefix cache"),
        ({"tensors": 9, "not_loaded": ("a.weight",)}, "not loaded"),
        (InputError("no such folder"), "no such folder"),
    ):
        with pytest.raises(TargetError, match=said):
            target(answer).hand_over(weights)
