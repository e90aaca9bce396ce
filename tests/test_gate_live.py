"""Train, export, audit, bless, push to a running vLLM, gate, serve; and what must be refused.

Two starts of vLLM on a tiny Llama: one for the audit, and a server that outlives every push to it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
from live_models import CONFIG, master, tokenizer, write
from safetensors.torch import load_file
from weights_live_matrix import UNTIED, with_head

from mismatch_audit.audit import run_audit
from mismatch_audit.gate import Served, SyncLimits, guarded_sync
from mismatch_audit.gate.bless import bless_run
from mismatch_audit.gate.checks import check_agreement
from mismatch_audit.gate.decide import Request, decide
from mismatch_audit.gate.facts import EngineFacts, facts_of, pinned, write_facts
from mismatch_audit.gate.keys import load_private, new_key
from mismatch_audit.gate.live_checks import EngineProber
from mismatch_audit.gate.push import PushPlan, run_push
from mismatch_audit.gate.targets import EngineTarget
from mismatch_audit.programs.vllm_engine import launch_env
from mismatch_audit.settings import parse_settings
from mismatch_audit.weights.export import ExportOptions, export_checkpoint
from mismatch_audit.weights.live.base import LiveEngine, open_engine
from mismatch_audit.weights.live.process import EXTENSION

pytestmark = pytest.mark.engine

ARGS = {
    "block_size": 32, "max_model_len": 256, "max_num_batched_tokens": 512, "max_num_seqs": 16,
}  # fmt: skip
STALE = "model.layers.1.mlp.down_proj.weight"
CONTRACT = """\
schema: kernel-contracts/v1
name: live-gate
pair:
  reference: {dtype: float32}
  engine: {dtype: bfloat16, kv_cache_dtype: auto}
statistical:
  - {id: S1, metric: kl_engine_reference, limit: 2.0e-2, ceiling: 8.0e-2, tail: 0.2}
observability:
  - {id: O1, min_prompts: 24}
"""


@dataclass(frozen=True)
class World:
    """A trained step, its audit, and a live engine that serves the weights before it."""

    folder: Path
    run: Path
    engine: LiveEngine
    url: str

    @property
    def contract(self) -> Path:
        return self.folder / "contract.yaml"

    def plan(self, **changes: Any) -> PushPlan:
        def opened() -> Any:
            return nullcontext(self.engine)

        key = self.folder / "keys" / "audit.key"
        plan = PushPlan(
            source=self.folder / "served-1",
            version=1,
            contract=self.contract,
            audit=lambda: self.run,
            key=load_private(key),
            trusted=key.with_suffix(".pub"),
            target=EngineTarget(opened),
            prober=EngineProber(opened, SyncLimits(kl=2e-2)),
            previous=(self.folder / "served-0", 0),
        )
        return replace(plan, **changes)

    def answers(self) -> list[list[float]]:
        return self.engine.logprobs(CANARIES)


CANARIES = [[3 + i, 50 + 7 * i, 9, 200 + i, 17, 4 + i] for i in range(8)]


def train_step(folder: Path, rate: float = 0.5) -> None:
    """One step of gradient descent on ``folder/master-0`` gives ``master-1``."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder / "master-0", dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(2, CONFIG["vocab_size"], (8, 24), generator=generator)
    model(input_ids=tokens, labels=tokens).loss.backward()
    with torch.no_grad():
        for value in model.parameters():
            value -= rate * value.grad
    names = load_file(folder / "master-0" / "model.safetensors")
    trained = {n: v for n, v in model.state_dict().items() if n in names}
    write(folder / "master-1", trained, UNTIED)


def audited(folder: Path) -> Path:
    """An audit of the new weights as they will be served."""
    prompts = folder / "prompts.jsonl"
    rows = [{"id": f"p{i}", "token_ids": [5 + i, 60 + i, 7, 300 - i]} for i in range(32)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    settings = parse_settings(
        {
            "model": str(folder / "served-1"), "prompts": str(prompts),
            "contract": str(folder / "contract.yaml"),
            "engine": {"dtype": "bfloat16", "args": ARGS},
            "sampling": {"max_tokens": 8},
            "probes": {"lone_prompts": 0, "repeat_prompts": 0},
        },
        "test",
    )  # fmt: skip
    record = run_audit(settings, folder / "run", resume=False, progress=lambda *_: None)
    assert record.verdict == "PASS", record.measurements
    return folder / "run"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("live-gate")
    # Untied, because vLLM on a CPU leaves a tied head behind at a push (docs/weights.md).
    write(folder / "master-0", with_head(master(), seed=1), UNTIED)
    train_step(folder)
    for step in (0, 1):
        tokenizer(folder / f"master-{step}")
        export_checkpoint(folder / f"master-{step}", folder / f"served-{step}", ExportOptions())
    (folder / "contract.yaml").write_text(CONTRACT)
    new_key(folder / "keys")
    run = audited(folder)
    with served(folder) as url, open_engine(url) as engine:
        yield World(folder, run, engine, url)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A vLLM server of ``served-0``, as docs/engines.md starts one; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    words = [w for k, v in ARGS.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(folder / "served-0"), "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "bfloat16", "--enforce-eager", "--worker-extension-cls", EXTENSION, *words,
    ]  # fmt: skip
    env = launch_env(
        {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}, cuda=False
    )
    log = folder / "server.log"
    with log.open("wb") as out:
        child = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while True:
            try:
                with urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                    break
            except (URLError, OSError):
                assert child.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < deadline, log.read_text()[-2000:]
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


DIES = """\
import os, signal
from mismatch_audit.cli.app import main
from mismatch_audit.gate.journal import Journal

write = Journal.append

def append(self, push, event, **data):
    if event == "handed_over":
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, push, event, **data)

Journal.append = append
main()
"""


class Stale(EngineTarget):
    """Hands over all layers but one, which stays as it was; the engine cannot know."""

    def hand_over(self, weights: Any) -> None:
        if weights.version == 1:
            folder = weights.checkpoint.parent
            tensors = load_file(weights.checkpoint / "model.safetensors")
            tensors[STALE] = load_file(folder / "served-0" / "model.safetensors")[STALE]
            config = json.loads((weights.checkpoint / "config.json").read_text())
            weights = replace(weights, checkpoint=write(folder / "stale", tensors, config))
        super().hand_over(weights)


def test_train_export_audit_push_gate_serve(world: World) -> None:
    """The order of a real release: every refusal first, the old weights answering bit for bit
    after each; then the push that stands, the gate that allows, and the new weights served."""
    store, before = world.folder / "store", world.answers()

    def refused(plan: PushPlan, reason: str, status: str = "aborted") -> None:
        result = run_push(plan, store)
        assert (result.status, result.served) == (status, 0)
        assert any(reason in line for line in result.reasons), result.reasons
        assert result.exit_code != 0
        assert world.answers() == before

    swapped = world.folder / "swapped.yaml"
    swapped.write_text(CONTRACT.replace("2.0e-2", "3.0e-2"))
    refused(world.plan(contract=swapped), "contract_differs")

    facts = pinned(world.engine.facts())
    fp8 = EngineFacts(facts | {"kv_cache_dtype": ["fp8_e4m3"]}, "engine", "")

    class Fp8(EngineProber):
        def facts(self) -> EngineFacts:
            return fp8

    opened = world.plan().prober.open_engine  # type: ignore[attr-defined]
    refused(world.plan(prober=Fp8(opened, SyncLimits())), "engine_fact_differs: kv_cache_dtype")

    refused(world.plan(target=Stale(opened)), "read_back", "rolled_back")

    command = [
        "push", "--source", str(world.folder / "served-1"), "--version", "1",
        "--contract", str(world.contract), "--key", str(world.folder / "keys" / "audit.key"),
        "--run", str(world.run), "--target", world.url, "--store", str(store), "--json",
    ]  # fmt: skip
    died = subprocess.run([sys.executable, "-c", DIES, *command], check=False, timeout=120)
    assert died.returncode == -signal.SIGKILL
    assert world.engine.weight_version() == "1"  # handed over, and nobody checked it
    assert json.loads((store / "serving.json").read_text())["version"] == 0
    again = subprocess.run(
        [sys.executable, "-m", "mismatch_audit.cli.app", *command],
        check=False, timeout=120, capture_output=True, text=True,
    )  # fmt: skip
    assert again.returncode == 0, again.stdout + again.stderr
    result = json.loads(again.stdout)
    assert result["status"] == "committed"
    assert {c["check"]: c["ok"] for c in result["checks"]} == {
        "version": True, "agreement": True, "movement": True, "read_back": True,
    }  # fmt: skip
    assert json.loads((store / "serving.json").read_text())["version"] == 1
    after = world.answers()
    assert after != before
    assert world.engine.weight_version() == "1"

    blessing = store / "blessings" / "version-1.dsse.json"
    write_facts(
        EngineFacts(pinned(world.engine.facts()), "engine", ""), world.folder / "facts.json"
    )
    request = Request(
        world.folder / "served-1", world.folder / "facts.json", world.contract, blessing,
        world.plan().trusted,
    )  # fmt: skip
    assert decide(request).allow, decide(request).reasons
    late = datetime.now(UTC) + timedelta(days=8)
    for changed, code in (
        (replace(request, now=late), "expired"),
        (replace(request, contract=swapped), "contract_differs"),
        (replace(request, engine=fp8), "engine_fact_differs"),
        (replace(request, weights=world.folder / "served-0"), "weights_differ"),
    ):
        assert code in {reason.code for reason in decide(changed).reasons}
        assert not decide(changed).allow
    assert world.answers() == after
    row = world.engine.next_tokens([CANARIES[0][:3]], use_cache=False)[0]
    assert row.top


def test_facts_of_the_run_and_of_the_live_engine_agree(world: World) -> None:
    """The audit's engine and the served one are two starts of one build: no fact tells them apart,
    so that a blessing of the one holds for the other."""
    assert facts_of(str(world.run)).facts == pinned(world.engine.facts())


def test_blessing_of_a_real_run_holds_no_path_and_no_key(world: World) -> None:
    """What is signed may be published."""
    import base64

    key = world.folder / "keys" / "audit.key"
    path = bless_run(world.run, load_private(key), out=world.folder / "b.json").path
    payload = base64.b64decode(json.loads(path.read_text())["payload"]).decode()
    assert str(world.folder) not in payload
    assert os.path.expanduser("~") not in payload
    assert key.read_text().splitlines()[1] not in payload + path.read_text()


class Trainer:
    """The trainer's side of a sync: its own program, float32."""

    def __init__(self, folder: Path, step: int, drop: bool = False) -> None:
        from transformers import LlamaForCausalLM

        self.master, self.drop = folder / f"master-{step}", drop
        self.model = LlamaForCausalLM.from_pretrained(self.master, dtype=torch.float32)

    def export(self, folder: Path) -> Path:
        export_checkpoint(self.master, folder / "served", ExportOptions())
        if self.drop:
            tensors = load_file(folder / "served" / "model.safetensors")
            keep = dict(list(tensors.items())[:2])
            config = json.loads((folder / "served" / "config.json").read_text())
            return write(folder / "cut", keep, config)
        return folder / "served"

    @torch.no_grad()
    def logprobs(self, sequences: Any) -> list[list[float]]:
        found = []
        for ids in sequences:
            rows = self.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            found.append([float(rows[i - 1, ids[i]]) for i in range(1, len(ids))])
        return found


def test_guarded_sync_on_the_live_engine(world: World) -> None:
    """The library call around a trainer's sync, whatever is served now: weights that mostly did not
    arrive go back, seen by log-probs alone; whole ones stay."""
    limits = SyncLimits(kl=2e-2)
    start = Trainer(world.folder, 1)
    world.engine.push(world.folder / "served-1", 10)
    served = Served(world.folder / "served-1", 10, start.logprobs(CANARIES))
    before = world.answers()
    pushes = world.folder / "pushes"
    back = Trainer(world.folder, 0, drop=True)
    outcome = guarded_sync(
        back, world.engine, version=11, previous=served, sequences=CANARIES, folder=pushes,
        limits=limits,
    )  # fmt: skip
    assert not outcome.ok
    assert outcome.rolled_back
    assert outcome.served is served
    assert {c.check for c in outcome.checks if c.ok is False} & {"agreement", "movement"}
    assert world.answers() == before
    outcome = guarded_sync(
        Trainer(world.folder, 0), world.engine, version=12, previous=served, sequences=CANARIES,
        folder=pushes, limits=limits, read_back=True,
    )  # fmt: skip
    assert outcome.ok, outcome.reasons
    assert all(check.ok for check in outcome.checks), outcome.checks
    assert world.engine.weight_version() == "12"
    expected = Trainer(world.folder, 0).logprobs(CANARIES)
    assert check_agreement(expected, world.answers(), limits).ok
