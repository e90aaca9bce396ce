"""The router gives every request to a program that may answer it, and every client an answer.

Together: (1) the table decides, on metadata of the header or the body, and is read again when it
changes; (2) whatever a backend does before its first token, another one is asked and the client
sees nothing of it, and afterwards the client is told; a slice that must not use the engine never
does, not even when the reference is down; (3) requests are bounded in size, number and time;
(4) headers and bytes pass unchanged, secrets are not kept; (5) the log's rows are whole and the
client gets nothing that it did not ask for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from router_fakes import (
    LAW,
    QUICK,
    WORDS,
    Fake,
    rig,
    serving,
    stream_text,
    table_document,
    whole,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from typer.testing import CliRunner

from kernel_contracts.errors import InputError
from mismatch_audit.cli.app import app as cli
from mismatch_audit.monitor.traffic import read_traffic
from mismatch_audit.routing.proxy.backends import checked_url
from mismatch_audit.routing.proxy.breaker import Breaker
from mismatch_audit.routing.proxy.facts import parse
from mismatch_audit.routing.proxy.handover import Handover
from mismatch_audit.routing.proxy.mirror import MirrorSettings
from mismatch_audit.routing.proxy.refusal import Refusal
from mismatch_audit.routing.proxy.serve import Options, build_proxy, read_engines
from mismatch_audit.routing.proxy.sse import EventStream

ALL = MirrorSettings(share=1.0)


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 30))


def served(answer: httpx.Response) -> str:
    return answer.headers["x-audit-backend"]


# (1) The table decides --------------------------------------------------------------------------
def test_requests_go_where_the_table_says(tmp_path: Path) -> None:
    """By metadata of the body or the header (which wins); what is not shown goes to the
    reference."""
    table = table_document(
        [*LAW, ("late", "context_length >= 50", "reference"), ("hard", "level >= 3", "slow")],
        slow=[("domains", 'domain in ["art", "law"]', "reference")],
    )  # fmt: skip
    cases: list[tuple[dict[str, Any], str]] = [
        ({"level": 1}, "engine"),
        ({"level": 3}, "slow"),
        ({"level": 3, "domain": "art"}, "reference"),
        ({"domain": "law"}, "reference"),
        ({"prompt": list(range(44))}, "engine"),
        ({"prompt": list(range(45))}, "slow"),
        ({"prompt": "x" * 60}, "slow"),
        ({"header": {"domain": "law"}}, "reference"),
        ({"domain": None}, "reference"),
    ]

    async def body() -> None:
        async with rig(tmp_path, Fake("engine"), Fake("slow"), table=table) as r:
            for case, target in cases:
                metadata = {"domain": "code", "level": 1}
                metadata |= {k: v for k, v in case.items() if k in ("domain", "level")}
                headers = (
                    {"x-audit-metadata": json.dumps(case["header"])} if "header" in case else {}
                )
                prompt = case.get("prompt", "x")
                got = await r.ask(metadata=metadata, headers=headers, prompt=prompt)
                assert served(got) == target, case
            assert r.count("routed_total", target="reference", slice="domain=law") == 3
            assert all("x-audit-metadata" not in h for _, h, _ in r.fakes["reference"].seen)

    run(body)


def test_only_the_gateways_metadata_count_where_it_is_told_so(tmp_path: Path) -> None:
    async def body() -> None:
        async with rig(tmp_path, Fake("engine"), source="header") as r:
            assert served(await r.ask()) == "reference"
            said = {"x-audit-metadata": '{"domain": "code"}'}
            assert served(await r.ask(headers=said)) == "engine"
            assert served(await r.ask(headers=said, metadata={"domain": "law"})) == "engine"

    run(body)


def test_a_slice_known_in_decode_only_goes_to_the_reference(tmp_path: Path) -> None:
    table = table_document([("undecided", 'engine_margin <= 1 and domain == "math"', "reference")])

    async def body() -> None:
        async with rig(tmp_path, Fake("engine"), table=table) as r:
            assert served(await r.ask(metadata={"domain": "math"})) == "reference"
            assert served(await r.ask(metadata={"domain": "code"})) == "engine"

    run(body)


def test_a_new_table_is_taken_and_a_bad_one_is_not(tmp_path: Path) -> None:
    """The file is read again when it changes; a broken one leaves the old in force and says so in
    the health report and the metrics, until a good one comes."""

    async def body() -> None:
        async with rig(tmp_path, Fake("engine")) as r:
            assert served(await r.ask()) == "engine"
            new = table_document([("domain=code", 'domain == "code"', "reference")])
            r.path.write_text(json.dumps(new))
            await r.until(lambda: r.count("reloads_total", result="taken") == 1)
            assert served(await r.ask()) == "reference"
            for bad in ("{", json.dumps(table_document(other=[])), json.dumps(new) + " x"):
                before = r.count("reloads_total", result="refused")
                r.path.write_text(bad)
                await r.until(lambda n=before: r.count("reloads_total", result="refused") > n)  # type: ignore[misc]
                assert served(await r.ask()) == "reference"
                assert (await r.client.get("/health")).json()["table_error"]
            r.path.unlink()
            await asyncio.sleep(1.2)
            assert served(await r.ask()) == "reference"
            r.path.write_text(json.dumps(table_document(LAW)))
            await r.until(lambda: r.count("reloads_total", result="taken") == 2)
            assert served(await r.ask()) == "engine"
            assert (await r.client.get("/health")).json()["table_error"] is None
            assert r.count("table_info") == 1

    run(body)


# (2) Failures -----------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [("hang up", "broken"), ("refuse", "connect"), ("500", "status"), ("503", "status"),
     ("429", "busy"), ("early", "broken"), ("error_first", "error_event"), ("silent", "timeout")],
)  # fmt: skip
def test_dead_before_the_first_token_another_is_asked(
    tmp_path: Path, fault: str, reason: str, stream: bool
) -> None:
    """The client gets the whole answer of the next backend and nothing of the first."""
    if not stream and fault in ("early", "error_first"):
        pytest.skip("a fault of streams")
    limits = replace(QUICK, first_token=0.3, response=0.3, idle=0.3)

    async def body() -> None:
        async with rig(tmp_path, Fake("engine", fault), limits=limits) as r:
            got = await r.ask(stream=stream)
            assert (got.status_code, served(got)) == (200, "reference")
            if stream:
                assert got.content == stream_text()
            # Where nobody listens, the health check may have found out before the request did.
            retries = r.count("retries_total", backend="engine", reason=reason)
            assert retries >= (reason != "connect")
            assert r.count("fallbacks_total", target="engine") == 1
            assert r.count("requests_total", status="200") == 1

    run(body)


def test_replicas_come_before_the_reference(tmp_path: Path) -> None:
    async def body() -> None:
        async with rig(tmp_path, Fake("engine", "refuse"), Fake("engine-1")) as r:
            answers = [await r.ask() for _ in range(4)]
            assert {served(a) for a in answers} == {"engine"}
            assert len(r.fakes["engine-1"].seen) == 4
            assert not r.fakes["reference"].seen

    run(body)


def test_what_must_not_use_the_engine_never_does(tmp_path: Path) -> None:
    """The reference down: a request that it must answer is refused, with a status to retry on, and
    the engine is not asked; others go on. One that all backends fail gets a backend's answer."""

    async def body() -> None:
        async with rig(tmp_path, Fake("engine"), Fake("reference", "refuse")) as r:
            got = await r.ask(metadata={"domain": "law"})
            assert got.status_code == 503
            assert got.headers["retry-after"] == "1"
            assert got.json()["error"]["type"] == "no_backend"
            assert not r.fakes["engine"].seen
            assert served(await r.ask()) == "engine"
            await r.until(lambda: not r.proxy.pool.alive("reference"))
            assert (await r.client.get("/health")).status_code == 503
        async with rig(tmp_path, Fake("engine", "500"), Fake("reference", "429")) as r:
            got = await r.ask()
            assert (got.status_code, got.headers["retry-after"]) == (429, "7")
        async with rig(
            tmp_path, Fake("engine", "error_first"), Fake("reference", "error_first")
        ) as r:
            got = await r.ask(stream=True)
            assert (got.status_code, got.json()["error"]["message"]) == (502, "engine dead")

    run(body)


@pytest.mark.parametrize("fault", ["middle", "no_done", "stall", "huge"])
def test_dead_in_the_middle_the_client_is_told(tmp_path: Path, fault: str) -> None:
    """What came is passed on in whole events, then an error event ends the stream without
    ``[DONE]``; it is counted."""
    limits = replace(QUICK, idle=0.3, event=1 << 20)

    async def body() -> None:
        async with rig(tmp_path, Fake("engine", fault), limits=limits) as r:
            got = await r.ask(stream=True)
            events = got.content.split(b"\n\n")
            assert events[-1] == b""
            assert json.loads(events[-2].removeprefix(b"data: "))["error"]["code"] == 502
            before = stream_text().split(b"\n\n")
            assert events[:-2] == before[: len(events) - 2]
            assert len(events) > 3
            assert b"[DONE]" not in got.content
            assert r.count("broken_streams_total", backend="engine") == 1
            assert not r.fakes["reference"].seen

    run(body)


def test_an_error_event_in_the_middle_is_passed_on_and_counted(tmp_path: Path) -> None:
    async def body() -> None:
        async with rig(tmp_path, Fake("engine", "error_middle")) as r:
            got = await r.ask(stream=True)
            assert b"engine dead" in got.content
            assert r.count("broken_streams_total", backend="engine") == 1

    run(body)


def test_the_breaker_opens_and_closes_again(tmp_path: Path) -> None:
    """After failures the engine is not asked; it is again once its health check and one request
    succeed."""

    async def body() -> None:
        engine = Fake("engine", "500")
        # A cooldown that six requests do not outlast, however busy the machine is.
        patient = replace(QUICK, cooldown=2.0, longest_cooldown=2.0)
        async with rig(tmp_path, engine, limits=patient) as r:
            for _ in range(6):
                assert served(await r.ask()) == "reference"
            assert len(engine.seen) < 6
            assert r.count("backend_up", backend="engine") == 0
            engine.fault = ""
            await r.until(lambda: r.count("backend_up", backend="engine") == 1)
            assert served(await r.ask()) == "engine"
            engine.healthy = False
            await r.until(lambda: r.count("backend_up", backend="engine") == 0)
            assert served(await r.ask()) == "reference"

    run(body)


def test_the_breakers_states() -> None:
    """Three failures open, or a refused connection; half-open lets one request through; its failure
    doubles the cooldown, up to the longest; a client that leaves decides nothing."""
    now = 0.0
    breaker = Breaker(3, 1.0, 3.0, clock=lambda: now)
    breaker.failed()
    breaker.failed()
    breaker.succeeded()
    breaker.failed()
    breaker.failed()
    assert breaker.admits()
    breaker.failed()
    assert not breaker.admits()
    for wait in (1.0, 2.0, 3.0, 3.0):
        now += wait - 0.1
        breaker.healthy()
        assert breaker.state == "open"
        now += 0.1
        breaker.healthy()
        assert breaker.admits()
        breaker.begin()
        assert not breaker.admits()
        breaker.abandoned()
        assert breaker.admits()
        breaker.begin()
        breaker.failed()
        assert breaker.state == "open"
    now += 3.0
    breaker.healthy()
    breaker.begin()
    breaker.succeeded()
    assert breaker.state == "closed"
    breaker.failed(fatal=True)
    assert not breaker.admits()


def test_fifty_streams_while_the_engine_dies(tmp_path: Path) -> None:
    """Fifty streams at once through an engine whose half break off before their first token: none
    is lost, none is mixed with another."""

    async def body() -> None:
        engine = Fake("engine", "split", pace=0.002)
        async with rig(tmp_path, engine, Fake("reference", pace=0.002)) as r:

            async def one(i: int) -> None:
                if i == 25:
                    engine.fault = "early"
                got = await r.ask(stream=True, prompt=f"{i}")
                assert got.content == stream_text()

            await asyncio.gather(*(one(i) for i in range(50)))
            asked = {body["prompt"] for f in r.fakes.values() for _, _, body in f.seen}
            assert asked == {str(i) for i in range(50)}
            assert r.count("requests_total", status="200") == 50
            assert r.count("backend_requests") == 0
            assert r.count("active_requests") == 0

    run(body)


# (3) Bounds -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("content", "headers", "status", "said"),
    [
        (b"{", {}, 400, "not JSON"),
        (b"[1]", {}, 400, "not a JSON object"),
        (b"", {}, 400, "not JSON"),
        (b"\xff\xfe", {}, 400, "not JSON"),
        (b"[" * 100_000, {}, 400, "not JSON"),
        (b"{}", {"x-audit-metadata": "law"}, 400, "x-audit-metadata"),
        (b"{}", {"x-audit-metadata": "[]"}, 400, "x-audit-metadata"),
        (b"{}", {"x-audit-metadata": json.dumps({"a": "b" * 9000})}, 400, "longer"),
        (b"{}", {"content-encoding": "gzip"}, 415, "compressed"),
        (b" " * (1 << 20), {}, 413, "larger"),
    ],
)
def test_what_is_malformed_or_too_large_is_refused(
    tmp_path: Path, content: bytes, headers: dict[str, str], status: int, said: str
) -> None:
    """With an error in OpenAI's shape, and without asking any backend."""

    async def body() -> None:
        async with rig(tmp_path, Fake("engine"), limits=replace(QUICK, body=200_000)) as r:
            got = await r.client.post("/v1/completions", content=content, headers=headers)
            assert got.status_code == status
            assert said in got.json()["error"]["message"]
            assert not r.fakes["engine"].seen
            assert not r.fakes["reference"].seen
            assert r.count("refused_total") == 1

    run(body)


def test_a_body_of_no_declared_length_is_bounded_too(tmp_path: Path) -> None:
    async def endless() -> Any:
        for _ in range(100):
            yield b" " * 10_000

    async def slow() -> Any:
        yield b"{"
        await asyncio.sleep(5)
        yield b"}"

    async def body() -> None:
        limits = replace(QUICK, body=200_000, body_wait=0.3)
        async with rig(tmp_path, Fake("engine"), limits=limits) as r:
            got = await r.client.post("/v1/completions", content=endless())
            assert got.status_code == 413
            with contextlib.suppress(httpx.HTTPError):  # it may see its connection closed
                await r.client.post("/v1/completions", content=slow())
            assert r.count("refused_total", reason="slow_body") == 1
            assert served(await r.ask()) == "engine"

    run(body)


def test_an_answer_beyond_bounds_is_not_kept_in_memory(tmp_path: Path) -> None:
    async def body() -> None:
        async with rig(tmp_path, Fake("engine"), limits=replace(QUICK, answer=10)) as r:
            assert (await r.ask()).status_code == 503

    run(body)


def test_requests_wait_for_a_place_and_then_are_refused(tmp_path: Path) -> None:
    """Two at once, two that wait in order, the fifth is refused at once, a waiting one after its
    time; all places are free afterwards."""

    async def body() -> None:
        engine = Fake("engine", hold=1)
        limits = replace(QUICK, concurrent=2, queue=2, queue_wait=0.5)
        async with rig(tmp_path, engine, limits=limits) as r:
            first = [asyncio.create_task(r.ask(stream=True)) for _ in range(2)]
            await r.until(lambda: engine.active == 2)
            waiting = [asyncio.create_task(r.ask(stream=True)) for _ in range(2)]
            await r.until(lambda: r.proxy.admission.waiting == 2)
            refused = await r.ask(stream=True)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            for late in await asyncio.gather(*waiting):
                assert late.status_code == 429
            third = asyncio.create_task(r.ask(stream=True))
            await r.until(lambda: r.proxy.admission.waiting == 1)
            engine.gate.set()
            done = await asyncio.gather(*first, third)
            assert [d.content for d in done] == [stream_text()] * 3
            assert engine.most == 2
            assert (r.proxy.admission.active, r.proxy.admission.waiting) == (0, 0)

    run(body)


def test_a_client_that_leaves_stops_the_engine(tmp_path: Path) -> None:
    """In the middle of a stream, before it began, and while it waits for a place."""

    async def body() -> None:
        engine = Fake("engine", hold=2)
        limits = replace(QUICK, concurrent=1)
        async with rig(tmp_path, engine, limits=limits) as r:
            asked = {"prompt": "x", "stream": True, "metadata": {"domain": "code"}}
            async with r.client.stream("POST", "/v1/completions", json=asked) as got:
                pieces = got.aiter_raw()
                await anext(pieces)
                waiting = asyncio.create_task(r.ask())
                await r.until(lambda: r.proxy.admission.waiting == 1)
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await waiting
            await r.until(lambda: engine.cancelled == 1)
            engine.hold = 0
            task = asyncio.create_task(r.ask(stream=True))
            await r.until(lambda: engine.active == 1)
            task.cancel()
            await r.until(lambda: engine.cancelled == 2)
            await r.until(lambda: r.proxy.admission.active == 0)
            assert r.count("client_gone_total") >= 2
            assert r.count("backend_requests") == 0
            assert r.count("broken_streams_total") == 0
            assert r.proxy.pool.backends[0].breaker.state == "closed"

    run(body)


def test_a_client_that_does_not_read_is_left(tmp_path: Path) -> None:
    """A client that takes nothing for too long loses its connection, and the engine its work."""

    async def body() -> None:
        engine = Fake("engine", "huge")
        limits = replace(QUICK, client=0.5, event=64 << 20, idle=30.0)
        async with rig(tmp_path, engine, limits=limits) as r:
            host, port = r.url.removeprefix("http://").split(":")
            slow = socket.socket()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            await asyncio.get_running_loop().sock_connect(slow, (host, int(port)))
            content = json.dumps({"prompt": "x", "stream": True, "metadata": {"domain": "code"}})
            length = f"content-length: {len(content)}"
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{length}\r\n\r\n"
            await asyncio.get_running_loop().sock_sendall(slow, (head + content).encode())
            await r.until(lambda: r.count("client_gone_total") == 1)
            await r.until(lambda: r.count("active_requests") == 0)
            slow.close()

    run(body)


# (4) Headers and bytes --------------------------------------------------------------------------
async def echo(request: Request) -> Response:
    body = await request.body()
    raw = [(k.decode(), v.decode()) for k, v in request.headers.raw]
    return JSONResponse({"headers": raw, "body": body.decode("latin-1")})


def test_headers_of_one_connection_stay_there(tmp_path: Path) -> None:
    """Authorization and unknown headers pass; hop-by-hop ones and those that Connection lists do
    not, either way; the body passes byte for byte; cookies of one answer do not reach another."""

    async def body() -> None:
        async with rig(tmp_path, Fake("engine")) as r:
            sent = {
                "authorization": "Bearer secret-token", "x-request-id": "7", "te": "trailers",
                "connection": "keep-alive, x-hop", "x-hop": "1", "proxy-authorization": "p",
                "upgrade": "h2c", "accept-encoding": "gzip", "x-audit-metadata": '{"a": 1}',
            }  # fmt: skip
            got = await r.ask(headers=sent)
            _, seen, _ = r.fakes["engine"].seen[0]
            assert seen["authorization"] == "Bearer secret-token"
            assert seen["x-request-id"] == "7"
            for name in ("te", "x-hop", "proxy-authorization", "upgrade", "x-audit-metadata"):
                assert name not in seen, name
            assert "accept-encoding" not in seen
            assert got.headers["x-public"] == "2"
            assert "x-private" not in got.headers
            assert "keep-alive" not in got.headers
            r.client.cookies.clear()
            await r.ask()
            assert "cookie" not in r.fakes["engine"].seen[1][1]
        odd = b'{ "prompt" : "\\u00e9\\ud83d", "metadata":{"domain":"code"} , "x":1e2,"x":[ ]}'
        app = Starlette(routes=[Route("/v1/completions", echo, methods=["POST"])])
        async with serving(app) as (url, _), rig(tmp_path, Fake("engine")) as r:
            r.proxy.pool.targets["engine"][0].url = url
            got = await r.client.post("/v1/completions", content=odd)
            assert got.json()["body"].encode("latin-1") == odd

    run(body)


def test_streams_pass_byte_for_byte(tmp_path: Path) -> None:
    """Events cut anywhere by the network arrive as they were sent, for both kinds of request."""

    async def body() -> None:
        async with rig(tmp_path, Fake("engine", "split")) as r:
            got = await r.ask(stream=True)
            assert got.content == stream_text()
            assert got.headers["content-type"].startswith("text/event-stream")
            got = await r.ask("/v1/chat/completions", stream=True, messages=[])
            assert got.content == stream_text(chat=True)
            got = await r.ask()
            assert got.json() == whole(False, {})

    run(body)


def test_events_are_cut_between_lines_only() -> None:
    """Blocks are whole events, with either line end, however the bytes come."""
    for end in (b"\n\n", b"\r\n\r\n"):
        text = b"".join(b"data: %d" % i + end for i in range(20)) + b"data: [DONE]" + end
        for size in (1, 2, 3, 5, 7, 64, 1000):
            parts = [text[i : i + size] for i in range(0, len(text), size)] + [b""]

            async def read(parts: list[bytes] = parts) -> bytes:
                return parts.pop(0)

            async def collect(read: Any = read, end: bytes = end) -> bytes:
                stream, out = EventStream(read, 1 << 20), b""
                while block := await stream.block():
                    assert block.endswith(end)
                    out += block
                assert stream.done
                return out

            assert asyncio.run(collect()) == text


def test_other_paths_and_methods(tmp_path: Path) -> None:
    """Models come from the reference, or an engine when it is down; metrics are text; nothing else
    is served, and no documentation of the service either."""

    async def body() -> None:
        async with rig(tmp_path, Fake("engine")) as r:
            assert (await r.client.get("/v1/models")).json()["data"][0]["id"] == "reference"
            text = (await r.client.get("/metrics")).text
            assert 'audit_router_backend_up{backend="engine"} 1.0' in text
            assert r.url not in text
            health = (await r.client.get("/health")).json()
            assert health["status"] == "ok"
            assert "127.0.0.1" not in json.dumps(health)
            for path in ("/", "/docs", "/v1/embeddings", "/v1/completions/", "/openapi.json"):
                assert (await r.client.post(path, json={})).status_code in (404, 405, 307), path
            assert (await r.client.get("/v1/completions")).status_code == 404
        async with rig(tmp_path, Fake("engine"), Fake("reference", "refuse")) as r:
            assert (await r.client.get("/v1/models")).json()["data"][0]["id"] == "engine"

    run(body)


def test_secrets_are_not_logged(tmp_path: Path, caplog: Any) -> None:
    """Neither the token nor the text of a request that fails in every way is in the log."""

    async def body() -> None:
        for fault in ("500", "middle", "garbage"):
            fakes = (Fake("engine", fault), Fake("reference", "refuse"))
            mirror = {"mirror": tmp_path / "log", "mirror_settings": ALL}
            async with rig(tmp_path, *fakes, **mirror) as r:
                with contextlib.suppress(httpx.HTTPError):
                    await r.ask(
                        stream=fault == "middle", prompt="private-text",
                        headers={"authorization": "Bearer secret-token"},
                    )  # fmt: skip

    with caplog.at_level(logging.DEBUG, logger="mismatch_audit.router"):
        run(body)
    assert "secret-token" not in caplog.text
    assert "private-text" not in caplog.text


# (5) The mirror ---------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("asks", ["nothing", "logprobs", "ids", "both"])
def test_mirrored_answers_are_as_asked_for(
    tmp_path: Path, stream: bool, chat: bool, asks: str
) -> None:
    """The client's answer equals the one to its own request, and the log's row is whole."""
    wanted: dict[str, Any] = {}
    if asks in ("logprobs", "both"):
        wanted |= {"logprobs": True if chat else 2}
    if asks in ("ids", "both"):
        wanted |= {"return_token_ids": True}
    request = {"stream": stream, "temperature": 0.7, "top_k": 20, **wanted}
    if chat:
        request["messages"] = [{"role": "user", "content": "x"}]
    path = "/v1/chat/completions" if chat else "/v1/completions"
    log = tmp_path / "traffic.jsonl"
    settings = replace(ALL, weights_version="step-7", top_p=0.9)

    async def body() -> None:
        async with rig(tmp_path, Fake("engine"), mirror=log, mirror_settings=settings) as r:
            got = await r.ask(path, **request)
            if stream:
                assert got.content == stream_text(chat, **wanted)
            else:
                assert got.json() == whole(chat, wanted)
            law = await r.ask(path, **request, metadata={"domain": "law"})
            assert served(law) == "reference"
            assert (
                "return_token_ids" not in r.fakes["reference"].seen[0][2]
                or "ids" in asks
                or (asks == "both")
            )

    run(body)
    (row,) = read_traffic(log)
    assert row.prompt_token_ids == (7, 8, 9)
    assert row.response_token_ids == tuple(range(100, 106))
    assert row.engine_logprobs == pytest.approx([-0.5, -0.6, -0.7, -0.8, -0.9, -1.0])
    assert (row.temperature, row.top_p, row.top_k) == (0.7, 0.9, 20)
    assert (row.engine_build, row.stage, row.weights_version) == ("engine", "canary", "step-7")
    assert row.metadata == {"domain": "code"}
    assert row.finish_reason == "length"


def test_only_whole_and_representable_answers_are_logged(tmp_path: Path) -> None:
    """A broken stream, an answer that is none, a request whose sampling no row can state: counted,
    not logged; the client is served all the same."""
    log = tmp_path / "traffic.jsonl"
    options = {"mirror": log, "mirror_settings": ALL}

    async def body() -> None:
        for fault in ("middle", "no_done", "error_middle"):
            async with rig(tmp_path, Fake("engine", fault), **options) as r:
                await r.ask(stream=True)
                assert r.count("mirrored_total", result="incomplete") == 1
        async with rig(tmp_path, Fake("engine", "garbage"), **options) as r:
            assert (await r.ask()).content == b"\x00\xff not json"
            assert r.count("mirrored_total", result="incomplete") == 1
        odd: list[dict[str, Any]] = [
            {"n": 2}, {"min_p": 0.1}, {"logit_bias": {"5": 1}}, {"echo": True},
            {"prompt": ["a", "b"]}, {"repetition_penalty": 1.1},
            {"structured_outputs": {"regex": "x"}},
        ]  # fmt: skip
        async with rig(tmp_path, Fake("engine"), **options) as r:
            for one in odd:
                assert (await r.ask(**one)).status_code == 200
            assert r.count("mirrored_total", result="skipped") == len(odd)

    run(body)
    assert not log.exists() or not list(read_traffic(log))


def test_a_backend_that_does_not_know_the_extra_fields_is_asked_without(tmp_path: Path) -> None:
    async def body() -> None:
        options = {"mirror": tmp_path / "log", "mirror_settings": ALL}
        async with rig(tmp_path, Fake("engine", "strict"), **options) as r:
            got = await r.ask(stream=True)
            assert (got.content, served(got)) == (stream_text(), "engine")
            assert r.count("mirrored_total", result="not_understood") == 1

    run(body)


def test_fifty_mirrored_streams_give_fifty_rows(tmp_path: Path) -> None:
    """Complete, valid, each with its own metadata, however they interleave; none for a share of
    0."""
    log = tmp_path / "traffic.jsonl"

    async def body() -> None:
        fakes = [Fake("engine", "split", pace=0.002)]
        async with rig(tmp_path, *fakes, mirror=log, mirror_settings=ALL) as r:
            await asyncio.gather(
                *(r.ask(stream=True, metadata={"domain": "code", "i": i}) for i in range(50))
            )
        none = replace(ALL, share=0.0)
        async with rig(tmp_path, *fakes, mirror=tmp_path / "none", mirror_settings=none) as r:
            await r.ask(stream=True)
            assert "return_token_ids" not in fakes[0].seen[-1][2]

    run(body)
    rows = list(read_traffic(log))
    assert sorted(int(row.metadata["i"]) for row in rows) == list(range(50))
    assert {len(row.response_token_ids) for row in rows} == {len(WORDS)}
    assert len({row.request_id for row in rows}) == 50
    assert not (tmp_path / "none").exists() or not list(read_traffic(tmp_path / "none"))


def test_the_shadow_shows_the_engine_what_it_may_not_answer(tmp_path: Path) -> None:
    """The client gets the reference's answer, the log the engine's, as stage shadow; a dead or a
    busy engine costs the client nothing and gives no row."""
    log = tmp_path / "traffic.jsonl"
    options = {"mirror": log, "mirror_settings": replace(ALL, share=0.0), "shadow_share": 1.0}
    law = {"domain": "law"}

    async def body() -> None:
        engine = Fake("engine")
        async with rig(tmp_path, engine, **options) as r:
            for stream in (True, False):
                got = await r.ask(stream=stream, metadata=law, stream_options={})
                assert served(got) == "reference"
                assert not stream or got.content == stream_text()
            await r.ask()
            await r.until(lambda: r.count("mirrored_total", result="written") == 2)
            assert [b["stream"] for _, _, b in engine.seen if "stream" in b][:1] == [False]
            engine.fault = "silent"
            limits_hit = [await r.ask(metadata=law) for _ in range(10)]
            assert {served(a) for a in limits_hit} == {"reference"}
            assert r.count("mirrored_total", result="shadow_left_out") == 2
        async with rig(tmp_path, Fake("engine", "500"), **options) as r:
            assert served(await r.ask(metadata=law)) == "reference"
            await r.until(lambda: r.count("mirrored_total", result="incomplete") == 1)

    run(body)
    rows = list(read_traffic(log))
    assert [(r.stage, r.engine_build, r.metadata) for r in rows] == [("shadow", "engine", law)] * 2
    path = tmp_path / "routes.json"
    with pytest.raises(InputError, match="shadow"):
        build_proxy(
            Options(path, {"engine": ["http://h:1"]}, ["http://h:2"], shadow_share=0.5)
        )  # fmt: skip


# (6) Rules known in decode ----------------------------------------------------------------------
UNDECIDED = [*LAW, ("undecided", "engine_margin <= 1", "reference")]


@pytest.mark.parametrize("at", [0, 1, 3, 5, None])
@pytest.mark.parametrize("fault", ["", "split"])
def test_the_reference_takes_over_at_the_first_undecided_token(
    tmp_path: Path, at: int | None, fault: str
) -> None:
    """One stream for the client, wherever the seam: the engine's tokens before it, the reference's
    from there on, asked for as a continuation of the ids so far. Nothing after the seam is the
    engine's, and its work is stopped."""
    margins = [3.0 if at is None or i < at else 0.5 for i in range(6)]

    async def body() -> None:
        engine = Fake("engine", fault, pace=0.01)
        async with rig(tmp_path, engine, table=table_document(UNDECIDED), handover=True) as r:
            got = await r.ask(stream=True, margins=margins, prompt=[7, 8, 9])
            assert got.content == stream_text()
            assert engine.seen[0][2]["logprobs"] == 2
            asked = [b for _, _, b in r.fakes["reference"].seen]
            if at is None:
                assert asked == []
                return
            assert r.count("handovers_total", slice="undecided") == 1
            assert asked[0]["prompt"] == [7, 8, 9, *range(100, 100 + at)]
            assert asked[0]["max_tokens"] == 6 - at
            assert "logprobs" not in asked[0]
            assert served(got) == ("engine" if at else "reference")
            await r.until(lambda: engine.active == 0)
            assert r.count("backend_requests") == 0

    run(body)


def test_ids_and_usage_at_a_seam(tmp_path: Path) -> None:
    """A client that asked for ids gets its own prompt's, once, and one count of tokens."""

    async def body() -> None:
        options = {"table": table_document(UNDECIDED), "handover": True}
        async with rig(tmp_path, Fake("engine"), **options) as r:
            margins = [3.0, 3.0, 0.0, 3.0, 3.0, 3.0]
            got = await r.ask(stream=True, prompt=[7, 8, 9], margins=margins, return_token_ids=True)
            assert got.content == stream_text(return_token_ids=True)
            handover = Handover(None, None, settled=2)  # type: ignore[arg-type]
            handover.asked = parse("/", "completion", b'{"prompt": [1]}', None)
            event = b'data: {"usage": {"prompt_tokens": 5, "completion_tokens": 4}}\n\n'
            said = json.loads(handover.reference_events(event).removeprefix(b"data: "))
            assert said["usage"] == {"prompt_tokens": 3, "completion_tokens": 6}

    run(body)


def test_an_engine_that_dies_in_its_part_is_gone_on_from(tmp_path: Path) -> None:
    """The reference takes over from what the client has: no break, no token twice. Where it dies in
    its own part the client is told; where the engine gives no account it answers from the start."""

    async def body() -> None:
        for fault in ("middle", "no_done", "error_middle", "stall"):
            fakes = [Fake("engine", fault)]
            limits = replace(QUICK, idle=0.3)
            options = {"table": table_document(UNDECIDED), "handover": True, "limits": limits}
            async with rig(tmp_path, *fakes, **options) as r:
                got = await r.ask(stream=True, prompt=[7, 8, 9])
                assert got.content == stream_text(), fault
                if fault == "no_done":  # without its end only, all tokens had come
                    assert not r.fakes["reference"].seen
        options = {"table": table_document(UNDECIDED), "handover": True}
        async with rig(tmp_path, Fake("engine", "refuse"), **options) as r:
            got = await r.ask(stream=True)
            assert (got.content, served(got)) == (stream_text(), "reference")
        async with rig(tmp_path, Fake("engine", "strict"), **options) as r:
            got = await r.ask(stream=True)
            assert (got.content, served(got)) == (stream_text(), "reference")
        fakes = [Fake("engine"), Fake("reference", "middle")]
        async with rig(tmp_path, *fakes, **options) as r:
            got = await r.ask(stream=True, prompt=[7, 8, 9], margins=[3, 0, 3, 3, 3, 3])
            assert b"upstream_error" in got.content
            assert b"[DONE]" not in got.content

    run(body)


def test_what_no_seam_can_serve_goes_whole(tmp_path: Path) -> None:
    """Chats, whole answers, log-probs of the client's own, stop texts, and requests that a rule
    known before concerns, go to the reference as without handing over."""
    cases: list[dict[str, Any]] = [
        {"stream": False}, {"stream": True, "logprobs": 1}, {"stream": True, "stop": ["x"]},
        {"stream": True, "metadata": {"domain": "law"}}, {"stream": True, "n": 2},
        {"stream": True, "metadata": {}},
    ]  # fmt: skip

    async def body() -> None:
        options = {"table": table_document(UNDECIDED), "handover": True}
        async with rig(tmp_path, Fake("engine"), **options) as r:
            for case in cases:
                assert served(await r.ask(**case)) == "reference", case
            chat = await r.ask("/v1/chat/completions", stream=True, messages=[])
            assert served(chat) == "reference"
            assert not r.fakes["engine"].seen

    run(body)


# The command's options --------------------------------------------------------------------------
@pytest.mark.parametrize(
    "url", ["ftp://x", "localhost:8000", "http://", "http://u:p@h", "http://h/?q=1", ""]
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(InputError):
        checked_url(url, "--reference")
    with pytest.raises(InputError):
        read_engines([f"engine={url}"])


def test_options(tmp_path: Path) -> None:
    """URLs lose a trailing ``/v1``; names repeat for replicas; names that the table does not know,
    a table that is none, and words that are none are refused."""
    assert checked_url("http://h:1/v1/", "") == "http://h:1"
    assert read_engines(["a=http://h:1", "a=http://h:2"]) == {"a": ["http://h:1", "http://h:2"]}
    for bad in ("http://h:1", "=http://h:1", "reference=http://h:1"):
        with pytest.raises(InputError):
            read_engines([bad])
    path = tmp_path / "routes.json"
    path.write_text(json.dumps(table_document(LAW)))
    with pytest.raises(InputError, match="the table speaks of engine"):
        build_proxy(Options(path, {"other": ["http://h:1"]}, ["http://h:2"]))
    arguments = ["serve-router", "--routes", str(path), "--reference", "http://h:1"]
    for extra in (["--metadata", "x"], ["--stage", "x"], ["--engine", "x"], []):
        done = CliRunner().invoke(cli, [*arguments, *extra])
        assert isinstance(done.exception, InputError), extra


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    import importlib.util

    there = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "aiohttp" else there(name)
    )
    done = CliRunner().invoke(cli, ["serve-router", "--routes", "x", "--reference", "http://h"])
    assert isinstance(done.exception, InputError)
    assert "pip install" in str(done.exception)


def test_the_command_says_when_its_port_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "routes.json"
    path.write_text(json.dumps(table_document(LAW)))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(
            cli,
            ["serve-router", "--routes", str(path), "--reference", "http://127.0.0.1:1",
             "--engine", "engine=http://127.0.0.1:1", "--port", port],
        )  # fmt: skip
    assert isinstance(done.exception, InputError)
    assert "--port" in str(done.exception)


@pytest.mark.parametrize(
    ("kind", "document", "span"),
    [
        ("completion", {"prompt": [1, 2, 3], "max_tokens": 4}, (3, 6)),
        ("completion", {"prompt": [1, 2, 3]}, (3, 18)),
        ("completion", {"prompt": "é", "max_tokens": 1}, (1, 10)),
        ("completion", {"prompt": [[1], [1, 2]], "max_tokens": 1}, (1, 2)),
        ("completion", {"max_tokens": 1}, (1, float("inf"))),
        ("chat", {"messages": [], "max_tokens": 1}, (1, float("inf"))),
    ],
)
def test_context_lengths_that_a_request_may_reach(
    kind: Any, document: dict[str, Any], span: tuple[float, float]
) -> None:
    asked = parse("/", kind, json.dumps(document).encode(), None)
    assert asked.facts.spans["context_length"] == span


def test_metadata_of_odd_kinds_are_not_shown() -> None:
    """Nested values and nulls are as if absent; what is no object holds none."""
    body = {"metadata": {"a": "x", "b": None, "c": [1], "d": {"e": 1}, "f": True, "g": 1.5}}
    asked = parse("/", "completion", json.dumps(body).encode(), b'{"g": 2}')
    assert asked.facts.metadata == {"a": "x", "f": True, "g": 2}
    for odd in ([1], "x", 3, None):
        assert parse("/", "chat", json.dumps({"metadata": odd}).encode(), None).facts.metadata == {}
    with pytest.raises(Refusal):
        parse("/", "chat", b"1", None)


def test_a_hangup_signal_reads_the_table_again(tmp_path: Path) -> None:
    """The command itself, in a process: SIGHUP takes a new table at once, SIGTERM ends it."""
    import signal
    import subprocess
    import sys
    import time

    path = tmp_path / "routes.json"
    path.write_text(json.dumps(table_document(LAW)))
    command = [
        sys.executable, "-m", "mismatch_audit.cli.app", "serve-router", "--routes", str(path),
        "--engine", "engine=http://127.0.0.1:9", "--reference", "http://127.0.0.1:9",
        "--port", "0",
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "127.0.0.1" in line, line
        url = line.split(" on ")[1].strip()
        before = httpx.get(f"{url}/health").json()
        stamp = path.stat()
        path.write_text(json.dumps(table_document([])))
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 5
        while httpx.get(f"{url}/health").json()["table"] == before["table"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.terminate()
        assert process.wait(timeout=10) in (0, -signal.SIGTERM)
