"""Pushes to real, running vLLM engines under audit: each injected fault is found and named.

Three engines are started: fp32 and W8A8 int8 in processes of ours, and a server. The argument: a
clean push passes every check and leaves nothing to find; each fault, injected between a sound
trainer and a sound engine, fails at least one check and is named; and what the engine says of
itself is never taken as evidence.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
import typer
from click.testing import Result
from live_models import CONFIG, free_port, master, stepped, tokenizer, write
from typer.testing import CliRunner
from weights_fault_matrix import between
from weights_live_matrix import ARGS, DOCS, KINDS, LiveMatrix, faults_of, text

from kernel_contracts.errors import AuditError, InputError, NotComparableError
from mismatch_audit.cli.weights import register
from mismatch_audit.programs.process import EngineError
from mismatch_audit.programs.vllm_engine import launch_env
from mismatch_audit.weights.compare import compare_sides
from mismatch_audit.weights.findings import Fault
from mismatch_audit.weights.hooks import SyncAudit, read_served
from mismatch_audit.weights.live.audit import audit_sync
from mismatch_audit.weights.live.base import is_engine_spec, open_engine
from mismatch_audit.weights.live.faults import MENU
from mismatch_audit.weights.live.http import EXTENSION, HttpEngine
from mismatch_audit.weights.live.transit import LOADERS, Complaints
from mismatch_audit.weights.memory import memory_side
from mismatch_audit.weights.sides import open_side

CASES = [(kind, fault.flag) for kind in KINDS for fault in faults_of(kind)]
app = typer.Typer()
register(app)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveMatrix]:
    built = LiveMatrix(tmp_path_factory.mktemp("live"))
    yield built
    built.close()


@pytest.mark.engine
@pytest.mark.parametrize("kind", KINDS)
def test_a_clean_push_passes_every_check(matrix: LiveMatrix, kind: str) -> None:
    report = matrix.result(kind, "clean")
    assert report.failing == []
    assert report.unobserved == []
    assert report.exit_code == 0
    assert report.cause == ""
    assert [f for f in report.findings() if f["severity"] == "error"] == []
    assert report.receipt.flushed is True
    assert report.read_back is not None
    assert report.read_back.compared >= 31
    assert ("set_audit" in report.results) == (kind == "int8")


@pytest.mark.engine
@pytest.mark.parametrize(("kind", "flag"), CASES)
def test_each_fault_is_found_and_named(matrix: LiveMatrix, kind: str, flag: str) -> None:
    report = matrix.result(kind, flag)
    fault = next(f for f in MENU if f.flag == flag)
    assert report.failing, "not caught"
    assert report.exit_code == 1
    assert fault.is_named(report.cause), report.cause


@pytest.mark.engine
def test_what_each_check_alone_sees(matrix: LiveMatrix) -> None:
    """Log-probs and versions alone would pass most faults; the cache alone sees a stale cache."""
    assert matrix.result("fp32", "stale_cache").failing == ["prefix_cache"]
    assert "version" not in matrix.result("fp32", "version_only").failing
    assert "read_back" not in matrix.result("fp32", "echo").failing
    assert "canary_push" in matrix.result("fp32", "echo").failing
    assert matrix.result("fp32", "head_not_sent").failing == ["read_back"]


@pytest.mark.engine
def test_the_engines_own_checksums_are_caught_passing_falsely(matrix: LiveMatrix) -> None:
    """On a CPU vLLM packs linear weights away and digests the empty parameter that is left."""
    report = matrix.result("fp32", "clean")
    warning = next(f for f in report.findings() if f["code"] == "W690")
    assert warning["severity"] == "warning"
    assert "model.layers.0.mlp.down_proj.weight" in warning["tensors"]
    digests = matrix.engine("fp32").own_checksums()
    assert digests is not None
    empty = [n for n, digest in digests.items() if digest == hashlib.sha256().hexdigest()]
    assert (len(empty), len(digests)) == (12, 21)
    assert set(warning["tensors"]) == set(empty)


@pytest.mark.engine
@pytest.mark.parametrize("kind", KINDS)
def test_the_facts_are_read_from_the_engine(matrix: LiveMatrix, kind: str) -> None:
    facts = matrix.engine(kind).facts()
    assert facts["program"] == "vllm"
    assert facts["dtype"] == "float32"
    assert facts["logprobs_mode"] == "raw_logprobs"
    assert (facts["quantization"] == "compressed-tensors") == (kind == "int8")
    schemes = {layer.scheme for layer in matrix.engine(kind).names().values()}
    assert schemes == ({None} if kind == "fp32" else {None, "channel_int8"})


@pytest.mark.engine
def test_a_layer_is_read_through_its_kernel(matrix: LiveMatrix) -> None:
    """Fused q, k and v come back bit by bit in this order; the parameter itself is empty."""
    engine = matrix.engine("fp32")
    engine.push(matrix.old)
    layer = "model.layers.1.self_attn.qkv_proj"
    side = open_side(matrix.old)
    parts = [
        side.layout.tensors[f"model.layers.1.self_attn.{p}_proj.weight"][0].view() for p in "qkv"
    ]
    assert torch.equal(engine.effective_weight(layer), torch.cat(parts))
    assert engine.parameters()[f"{layer}.weight"][0] == (0,)


@pytest.mark.engine
def test_another_model_is_not_comparable(matrix: LiveMatrix, tmp_path: Path) -> None:
    other = write(tmp_path / "other", {"model.norm.weight": torch.ones(64)},
                  {**CONFIG, "hidden_size": 64})  # fmt: skip
    with pytest.raises(NotComparableError, match="hidden_size 64 against 128"):
        audit_sync(matrix.engine("fp32"), other)


@pytest.mark.engine
def test_the_trainer_hook_reads_a_live_engine(matrix: LiveMatrix) -> None:
    """Two steps, one sync: one step old before it, current after it."""
    engine = matrix.engine("fp32")
    engine.push(matrix.old)
    old = {n: s.tensor() for n, s in open_side(matrix.old).checkpoint.ranks[0].items()}
    new = {n: s.tensor() for n, s in open_side(matrix.new).checkpoint.ranks[0].items()}
    audit = SyncAudit(read_served(engine), dtype="float32", config=engine.facts()["config"])
    audit.record(old.items(), 0)
    withheld = audit.check(new.items(), 1)
    assert (withheld.ok, withheld.stale_after_step) == (False, 1)
    engine.push(matrix.new)
    arrived = audit.check(new.items(), 1)
    assert (arrived.ok, arrived.stale_after_step) == (True, 0)


@pytest.mark.engine
def test_the_table_in_the_docs_is_these_results(matrix: LiveMatrix) -> None:
    written = between(DOCS.read_text("utf-8"), "live-matrix")
    assert written == text(matrix), "run: python tests/weights_live_matrix.py --write"


# ----------------------------------------------------------------------------- a running server


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head is its embedding, before (``old``) and after (``new``) a step."""
    folder = tmp_path_factory.mktemp("tied")
    weights = master()
    tokenizer(write(folder / "old", weights))
    tokenizer(write(folder / "new", stepped(weights, seed=1)))
    return folder


@pytest.fixture(scope="module")
def server(tied: Path) -> Iterator[str]:
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tied / "old"),
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
        "--block-size", str(ARGS["block_size"]), "--max-model-len", str(ARGS["max_model_len"]),
        "--worker-extension-cls", EXTENSION,
    ]  # fmt: skip
    env = launch_env(
        {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "ERROR",  # as TRL has it: complaints must be heard
        },
        cuda=False,
    )
    log = tied / "server.log"
    with log.open("wb") as out:
        child = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 240
        while True:
            try:
                with urlopen(f"{url}/health", timeout=2):
                    break
            except (URLError, OSError):
                assert child.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < deadline, log.read_text()[-2000:]
                time.sleep(0.5)
        yield url
    finally:
        os.killpg(child.pid, 9)
        child.wait()


@pytest.mark.engine
def test_a_server_serves_its_checkpoint_and_not_another(server: str, tied: Path) -> None:
    same = call("weights", tied / "old", server)
    assert same.exit_code == 0, same.output
    other = call("weights", tied / "new", server, "--previous", tied / "old", "--json")
    assert other.exit_code == 1
    assert "nothing pushed" in json.loads(other.stdout)["findings"][0]["title"]


@pytest.mark.engine
def test_a_push_over_http_finds_the_tied_head_that_vllm_leaves_behind(
    server: str, tied: Path
) -> None:
    """No fault is injected. vLLM 0.32 on a CPU packs the tied head's own copy when it first loads,
    and an update of the embedding does not re-make it. transformers confirms it: with the old head
    the log-probs are the engine's, with the tied one they are not."""
    done = call("weights", "sync", tied / "new", "--engine", server, "--json")
    document = json.loads(done.stdout)
    checks = {check["check"]: check["ok"] for check in document["checks"]}
    assert [name for name, ok in checks.items() if ok is False] == ["read_back"], document["checks"]
    assert done.exit_code == 1
    assert document["cause"] == "lm_head.weight: untied head"
    assert document["receipt"]["version"] == "1"
    assert "ParallelLMHead: Failed to load weights" in document["receipt"]["not_loaded"]
    assert checks["prefix_cache"] is True  # hits were seen before the push, none after it

    from transformers import AutoModelForCausalLM

    ids = list(range(20, 60))
    with HttpEngine(server) as engine:
        served = torch.tensor(engine.logprobs([ids])[0])
    model = AutoModelForCausalLM.from_pretrained(tied / "new", dtype=torch.float32)
    old = open_side(tied / "old").layout.tensors["model.embed_tokens.weight"][0].view()
    with torch.inference_mode():
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0, :-1]
        target = torch.tensor(ids[1:])[:, None]

        def scored(head: torch.Tensor) -> torch.Tensor:
            return (hidden @ head.t()).log_softmax(-1).gather(1, target)[:, 0]

        as_served = float((scored(old) - served).abs().max())
        as_trained = float((scored(model.lm_head.weight) - served).abs().max())
    assert as_served < 1e-4
    assert as_trained > 1e-2


# ----------------------------------------------------------------- what needs no engine


def test_a_tied_head_that_is_stale_with_its_embedding_is_not_called_untied() -> None:
    """An engine's read-back always has a head; with nothing pushed it is the old embedding."""
    old, new = master(), stepped(master(), seed=1)
    read = {**old, "lm_head.weight": old["model.embed_tokens.weight"].clone()}
    trainer, served = memory_side("trainer", new, CONFIG), memory_side("served", read, CONFIG)
    report = compare_sides(trainer, served, memory_side("previous", old, CONFIG))
    assert [finding.fault for finding in report.findings] == [Fault.NOTHING_PUSHED]
    read["model.embed_tokens.weight"] = new["model.embed_tokens.weight"]
    served = memory_side("served", read, CONFIG)
    report = compare_sides(trainer, served, memory_side("previous", old, CONFIG))
    assert Fault.UNTIED in {finding.fault for finding in report.findings}


def test_a_loaders_complaints_are_heard_in_an_engine_that_was_asked_to_be_quiet() -> None:
    quiet, loader = logging.getLogger("vllm"), logging.getLogger(LOADERS[1])
    before = quiet.level, loader.level
    quiet.setLevel(logging.ERROR)
    try:
        with Complaints() as heard:
            loader.warning("%s: Failed to load weights", "ParallelLMHead")
            loader.warning("%s: Failed to load weights", "RotaryEmbedding")  # a computed table
            loader.warning("loaded in 3 s")
        loader.warning("%s: Failed to load weights", "afterwards")
    finally:
        quiet.setLevel(before[0])
    assert heard.lines == ["ParallelLMHead: Failed to load weights"]
    assert loader.level == before[1]


class _Plain(BaseHTTPRequestHandler):
    """A server that knows models and no development routes."""

    def do_GET(self) -> None:
        known = self.path == "/v1/models"
        body = b'{"data": [{"id": "m"}]}' if known else b"{}"
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def test_a_server_without_development_mode_is_told_how_to_start() -> None:
    with HTTPServer(("127.0.0.1", 0), _Plain) as plain:
        threading.Thread(target=plain.serve_forever, daemon=True).start()
        try:
            with pytest.raises(InputError, match="development mode") as caught:
                open_engine(f"http://127.0.0.1:{plain.server_port}")
        finally:
            plain.shutdown()
    assert "VLLM_SERVER_DEV_MODE=1" in str(caught.value)
    assert EXTENSION in str(caught.value)


def test_no_server_and_no_folder_are_errors_of_input(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="does not answer"):
        open_engine(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(InputError, match=r"config\.json"):
        open_engine(f"vllm:{tmp_path}")
    with pytest.raises(InputError, match="address"):
        open_engine("http:///nowhere")
    assert is_engine_spec("http://127.0.0.1:1")
    assert not is_engine_spec("checkpoints/step-1")


def test_options_that_cannot_apply_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", master())
    for arguments, words in (
        (("sync", folder, "--engine", "http://127.0.0.1:1", "--engine-dtype", "bfloat16"), "keeps"),
        (("sync", folder, "--engine", f"vllm:{folder}", "--inject", "gremlins"), "unknown fault"),
        (("sync", folder, "--engine", f"vllm:{folder}", "--engine-arg", "novalue"), "KEY=VALUE"),
        (("sync", tmp_path / "none", "--engine", f"vllm:{folder}"), "no such checkpoint"),
    ):
        result = call("weights", *arguments)
        assert isinstance(result.exception, AuditError), result.output
        assert words in str(result.exception)
        assert result.exception.exit_code == 2
