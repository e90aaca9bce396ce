"""``audit push`` to a server over HTTP: the whole path but vLLM itself (tests/test_gate_live.py has
that). The server answers as vLLM's development mode does, from a folder engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gate_fixtures as fixtures
import pytest
from gate_engine import FolderEngine, put
from safetensors import safe_open

from mismatch_audit.gate.keys import new_key
from mismatch_audit.gate.targets import Weights

ROOT = Path(__file__).resolve().parent.parent
DIES = """\
import os, signal
from mismatch_audit.cli.app import main
from mismatch_audit.gate.journal import Journal

write = Journal.append

def append(self, push, event, **data):
    if event == os.environ["DIES_BEFORE"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, push, event, **data)

Journal.append = append
main()
"""


@dataclass
class Server:
    """State of the engine, and what it does wrong. stale: one layer never arrives."""

    folder: Path
    url: str = ""
    version: str = "default"
    stale: bool = False
    facts: dict[str, Any] = field(default_factory=fixtures.facts)

    @property
    def engine(self) -> FolderEngine:
        return FolderEngine(self.folder / "engine")

    @property
    def serves(self) -> str:
        held = (self.engine.slot / "model.safetensors").read_bytes()
        for name in ("old", "new"):
            if (self.folder / name / "model.safetensors").read_bytes() == held:
                return name
        return "other"

    def rpc(self, method: str, args: list[Any]) -> dict[str, Any]:
        if method == "audit_weights_facts":
            return {**self.facts, "config": fixtures.TINY}
        if method == "audit_weights_push":
            source = Path(args[0])
            faulty = self.stale and source.name == "new"
            put(self.folder / "engine", Weights(source, 0, ""), "serving", faulty)
            with safe_open(source / "model.safetensors", "pt") as tensors:
                count = len(list(tensors.keys()))
            return {"tensors": count, "bytes": 1, "seconds": 0.0, "not_loaded": []}
        if method == "audit_weights_read":
            shutil.copy(self.engine.slot / "model.safetensors", args[0])
            return {"unread": [], "off_scale": [], "saturating": []}
        raise AssertionError(method)

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/models":
            return {"data": [{"id": "tiny"}]}
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return {}
        if path == "/reset_prefix_cache":
            return {"success": True}
        if path == "/collective_rpc":
            return {"results": [self.rpc(body["method"], body["args"])]}
        if path == "/v1/completions":
            ids = body["prompt"]
            row = self.engine.logprobs([ids])[0]
            rows = [{str(t): {"logprob": v}} for t, v in zip(ids[1:], row, strict=True)]
            return {"choices": [{"prompt_token_ids": ids, "prompt_logprobs": [None, *rows]}]}
        return {"vllm_config": {}}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of version "old"; new weights, their audit and a key beside it."""
    state = Server(tmp_path)

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size) or b"{}")
            data = json.dumps(state.answer(self.path.partition("?")[0], body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _reply

        def log_message(self, *_: object) -> None:
            pass

    fixtures.checkpoint(tmp_path / "old", seed=1)
    fixtures.checkpoint(tmp_path / "new", seed=2)
    fixtures.run(tmp_path / "run", tmp_path / "new", fixtures.contract(tmp_path))
    new_key(tmp_path / "keys")
    (tmp_path / "engine").mkdir()
    put(tmp_path / "engine", Weights(tmp_path / "old", 0, ""), "serving")
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    state.url = f"http://127.0.0.1:{httpd.server_port}"
    yield state
    httpd.shutdown()
    httpd.server_close()


def push(server: Server, *words: str, dies_before: str = "") -> subprocess.CompletedProcess[str]:
    folder = server.folder
    how = ["-c", DIES] if dies_before else ["-m", "mismatch_audit.cli.app"]
    return subprocess.run(
        [
            sys.executable, *how, "push", "--source", str(folder / "new"), "--version", "2",
            "--contract", str(folder / "contract.yaml"), "--key", str(folder / "keys/audit.key"),
            "--run", str(folder / "run"), "--target", server.url, "--store",
            str(folder / "store"), "--previous", str(folder / "old"), "--previous-version", "1",
            "--json", *words,
        ],
        check=False, capture_output=True, text=True, timeout=120, cwd=ROOT,
        env={**os.environ, "DIES_BEFORE": dies_before},
    )  # fmt: skip


def test_push_over_http_killed_and_repeated(server: Server):
    """Killed after the hand-over: the server serves weights that nobody checked, and serving.json
    does not name them. The same command again checks them and keeps them."""
    assert push(server, dies_before="handed_over").returncode == -signal.SIGKILL
    assert (server.serves, server.version) == ("new", "2")
    assert json.loads((server.folder / "store/serving.json").read_text())["version"] == 1
    done = push(server)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert {c["check"]: c["ok"] for c in result["checks"]} == {
        "version": True, "agreement": True, "movement": True, "read_back": True,
    }  # fmt: skip
    assert (server.serves, server.version) == ("new", "2")
    assert json.loads((server.folder / "store/serving.json").read_text())["version"] == 2


def test_stale_layer_over_http_goes_back(server: Server):
    """Seen on the live server, rolled back there, and checked there again; also when the process
    dies on its way back and the command is repeated."""
    server.stale = True
    assert push(server, dies_before="rolled_back").returncode == -signal.SIGKILL
    done = push(server)
    assert done.returncode == 1, done.stdout + done.stderr
    assert json.loads(done.stdout)["status"] == "rolled_back"
    assert (server.serves, server.version) == ("old", "1")
    again = push(server)
    result = json.loads(again.stdout)
    assert (again.returncode, result["status"]) == (1, "rolled_back")
    assert any("down_proj" in reason for reason in result["reasons"])
    assert (server.serves, server.version) == ("old", "1")


def test_server_with_another_cache_is_never_touched(server: Server):
    """The facts come from the live server: another KV cache dtype is denied before the push."""
    server.facts["kv_cache_dtype"] = ["fp8_e4m3"]
    done = push(server)
    assert done.returncode == 1
    assert "engine_fact_differs: kv_cache_dtype" in json.loads(done.stdout)["reasons"][0]
    assert (server.serves, server.version) == ("old", "default")
