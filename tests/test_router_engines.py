"""The router before real vLLM servers: slices reach the right one, the log's rows are what the
engine computed, the client's answers are those of its own request, and a server that is killed
loses no request.

Two servers, once for the module. Their weights differ, so that an answer tells who gave it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_models import CONFIG, free_port, master, write
from router_fakes import LAW, table_document

from mismatch_audit.monitor.traffic import read_traffic
from mismatch_audit.programs.vllm_engine import launch_env

pytestmark = pytest.mark.engine

TOKENS = 240
SECONDS = 300
"""That the two servers may take to start. Each of their four processes imports vLLM: 87 seconds
were measured on two cores that others used too."""


MARGIN = 0.1
UNDECIDED = ("undecided", f'engine_margin <= {MARGIN} and domain == "math"', "reference")


@dataclass
class Site:
    """Two servers, the router before them, and its log."""

    engine: str
    reference: str
    router: str
    log: Path
    engine_process: subprocess.Popen[bytes]


def checkpoint(folder: Path, seed: int) -> Path:
    """A random Llama with a tokenizer of one word a token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    write(folder, master(seed))
    words = {f"w{i}": i for i in range(CONFIG["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w0", eos_token="w1", unk_token="w0"
    ).save_pretrained(folder)
    (folder / "template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    return folder


def launch(command: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)


def start_server(folder: Path, port: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
        "--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16",
        "--generation-config", "vllm", "--chat-template", str(folder / "template.jinja"),
    ]  # fmt: skip
    env = launch_env(
        {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
         "OMP_NUM_THREADS": "1"},
        cuda=False,
    )  # fmt: skip
    return launch(command, folder / "server.log", env)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.3)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    folders = {name: checkpoint(folder / name, i) for i, name in enumerate(("engine", "reference"))}
    ports = {name: free_port() for name in (*folders, "router")}
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    table, log = folder / "routes.json", folder / "traffic.jsonl"
    table.write_text(json.dumps(table_document([*LAW, UNDECIDED])))
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, one in folders.items():
            processes[name] = start_server(one, ports[name])
        for name, one in folders.items():
            wait_for(urls[name], processes[name], one / "server.log", SECONDS)
        processes["router"] = launch(
            [sys.executable, "-m", "mismatch_audit.cli.app", "serve-router", "--routes", str(table),
             "--engine", f"engine={urls['engine']}", "--reference", urls["reference"], "--port",
             str(ports["router"]), "--mirror", str(log), "--mirror-share", "1", "--handover"],
            folder / "router.log", dict(os.environ),
        )  # fmt: skip
        wait_for(urls["router"], processes["router"], folder / "router.log", 30)
        yield Site(**urls, log=log, engine_process=processes["engine"])
    finally:
        for process in processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


LOGPROBS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"logprobs": 2},
    "/v1/chat/completions": {"logprobs": True, "top_logprobs": 2},
}
"""How a client of its own accord asks for log-probs."""


def prompt(i: int) -> str:
    return " ".join(f"w{20 + (7 * i + k) % 300}" for k in range(8))


def request(i: int, domain: str, **changes: Any) -> dict[str, Any]:
    return {
        "model": "model", "prompt": prompt(i), "max_tokens": 12, "temperature": 0.0,
        "ignore_eos": True, "metadata": {"domain": domain, "i": i}, **changes,
    }  # fmt: skip


def plain(document: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs from request to request."""
    return {k: v for k, v in document.items() if k not in ("id", "created")}


def events(text: str) -> list[dict[str, Any]]:
    lines = [x.removeprefix("data: ") for x in text.split("\n\n") if x.startswith("data: {")]
    return [plain(json.loads(line)) for line in lines]


def joined(text: str) -> dict[str, Any]:
    """A stream's parts put together: vLLM cuts it anew each time, by what has queued up."""
    found: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                add(f"{prefix}.{key}", item)
        elif isinstance(value, list) and value and not isinstance(value[0], dict | type(None)):
            found[prefix] = found.get(prefix, []) + value
        elif isinstance(value, str) and prefix.endswith((".text", ".content")):
            found[prefix] = found.get(prefix, "") + value

    for event in events(text):
        for choice in event["choices"]:
            add("", choice)
    return {k: v for k, v in found.items() if not k.endswith("text_offset")}


def test_slices_reach_their_server_and_answers_are_unchanged(site: Site) -> None:
    """Greedy answers through the router equal those of the server that may answer, although every
    one of the engine's is mirrored: streamed and not, of both kinds, with and without log-probs of
    the client's own. The two servers answer differently, so this tells who was asked."""
    chat = {"messages": [{"role": "user", "content": prompt(3)}]}
    wholes: set[str] = set()
    for domain, url in (("code", site.engine), ("law", site.reference)):
        for path, extra in LOGPROBS.items():
            for more in ({}, extra, {"return_token_ids": True}):
                for stream in (False, True):
                    body = request(3, domain, stream=stream, **more)
                    if "chat" in path:
                        body = {k: v for k, v in body.items() if k != "prompt"} | chat
                    direct = httpx.post(url + path, json=body, timeout=60)
                    routed = httpx.post(site.router + path, json=body, timeout=60)
                    assert routed.status_code == direct.status_code == 200, routed.text
                    name = "engine" if domain == "code" else "reference"
                    assert routed.headers["x-audit-backend"] == name
                    if stream:
                        assert joined(routed.text) == joined(direct.text)
                        assert routed.text.endswith("data: [DONE]\n\n")
                    else:
                        assert plain(routed.json()) == plain(direct.json())
                        if "chat" not in path and not more:
                            wholes.add(direct.json()["choices"][0]["text"])
    assert len(wholes) == 2
    wrong = httpx.post(f"{site.router}/v1/completions", json={"metadata": {"domain": "code"}})
    assert wrong.status_code == 400


def test_rows_of_the_log_are_what_the_engine_computed(site: Site) -> None:
    """Token ids and raw log-probs of the log equal those that the engine gives for the same
    request, for 30 sampled requests at once; every one is there, whole."""

    def ask(i: int) -> dict[str, Any]:
        body = request(i, "code", temperature=1.0, seed=i, stream=i % 2 == 0, metadata={
            "domain": "code", "round": "rows", "i": i})  # fmt: skip
        httpx.post(f"{site.router}/v1/completions", json=body, timeout=60).raise_for_status()
        direct = {**body, "stream": False, "return_token_ids": True, "logprobs": 0}
        answer = httpx.post(f"{site.engine}/v1/completions", json=direct, timeout=60)
        found: dict[str, Any] = answer.json()["choices"][0]
        return found

    with ThreadPoolExecutor(10) as pool:
        wanted = list(pool.map(ask, range(30)))
    deadline = time.monotonic() + 10
    while True:
        rows = [r for r in read_traffic(site.log) if r.metadata.get("round") == "rows"]
        if len(rows) == 30 or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert sorted(int(r.metadata["i"]) for r in rows) == list(range(30))
    for row in rows:
        one = wanted[int(row.metadata["i"])]
        assert row.prompt_token_ids == tuple(one["prompt_token_ids"])
        assert row.response_token_ids == tuple(one["token_ids"])
        # The batch differs between the two requests; the log-probs by rounding.
        assert row.engine_logprobs == pytest.approx(one["logprobs"]["token_logprobs"], abs=1e-3)
        assert (row.temperature, row.finish_reason) == (1.0, "length")


def test_the_reference_takes_over_where_the_engine_is_undecided(site: Site) -> None:
    """Token for token: the engine's greedy tokens up to the first whose margin the rule names, then
    what the reference says to prompt and tokens so far. Seams lie at several places."""
    seams = set()
    for i in range(8):
        body = request(i, "math", max_tokens=24, return_token_ids=True)
        more = {"logprobs": 2, "return_tokens_as_token_ids": True}
        alone = httpx.post(f"{site.engine}/v1/completions", json=body | more, timeout=60).json()
        choice = alone["choices"][0]
        tops = [sorted(t.values(), reverse=True) for t in choice["logprobs"]["top_logprobs"]]
        seam = next((t for t, v in enumerate(tops) if v[0] - v[1] <= MARGIN), 24)
        seams.add(seam)
        wanted = choice["token_ids"][:seam]
        if seam < 24:
            rest = body | {"prompt": choice["prompt_token_ids"] + wanted, "max_tokens": 24 - seam}
            answer = httpx.post(f"{site.reference}/v1/completions", json=rest, timeout=60).json()
            wanted += answer["choices"][0]["token_ids"]
        routed = httpx.post(
            f"{site.router}/v1/completions", json=body | {"stream": True}, timeout=60
        )
        found = [t for e in events(routed.text) for t in e["choices"][0]["token_ids"]]
        assert found == wanted, (i, seam)
        assert routed.text.endswith("data: [DONE]\n\n")
    assert len(seams & set(range(1, 24))) >= 2, seams


def test_a_killed_engine_loses_no_request(site: Site) -> None:
    """SIGKILL while ten long requests run, five of them streams: streams that had begun end with an
    error event, all others are answered whole, and so are those that come later, by the
    reference. (Runs last: the engine stays dead.)"""
    begun: list[int] = []

    def stream(i: int) -> tuple[str, str]:
        body = request(i, "code", max_tokens=TOKENS, stream=True)
        text = ""
        with httpx.stream("POST", f"{site.router}/v1/completions", json=body, timeout=90) as got:
            assert got.status_code == 200
            for piece in got.iter_text():
                text += piece
                if i not in begun:
                    begun.append(i)
            return got.headers["x-audit-backend"], text

    def whole(i: int) -> tuple[str, str]:
        body = request(i, "code", max_tokens=TOKENS)
        got = httpx.post(f"{site.router}/v1/completions", json=body, timeout=90)
        assert got.status_code == 200, got.text
        return got.headers["x-audit-backend"], got.json()["choices"][0]["finish_reason"]

    with ThreadPoolExecutor(10) as pool:
        streams = [pool.submit(stream, i) for i in range(5)]
        wholes = [pool.submit(whole, 100 + i) for i in range(5)]
        deadline = time.monotonic() + 60
        while not begun:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(site.engine_process.pid, signal.SIGKILL)
        late = [pool.submit(stream, 200 + i) for i in range(5)]
        ended = [one.result() for one in streams]
        answered = [one.result() for one in wholes]
        later = [one.result() for one in late]
    assert [reason for _, reason in answered] == ["length"] * 5
    broken = [text for _, text in ended if "[DONE]" not in text]
    assert broken  # at least the one that had begun when the engine was killed
    for text in broken:
        assert "upstream_error" in events(text)[-1]["error"]["type"]
        assert len(events(text)) > 1
    assert {name for name, text in ended if text in broken} == {"engine"}
    for name, text in later:
        assert name == "reference"
        assert text.endswith("data: [DONE]\n\n")
        assert events(text)[-1]["choices"][0]["finish_reason"] == "length"
    metrics = httpx.get(f"{site.router}/metrics").text
    count = f'audit_router_broken_streams_total{{backend="engine"}} {len(broken)}.0'
    assert count in metrics
    assert 'audit_router_backend_up{backend="engine"} 0.0' in metrics
    assert httpx.get(f"{site.router}/health").json()["backends"]["engine"] == "open"
