"""Backends that fail on demand, and a router before them: real servers on ephemeral ports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mismatch_audit.routing.proxy.app import application
from mismatch_audit.routing.proxy.forward import Proxy
from mismatch_audit.routing.proxy.serve import Options, build_proxy
from mismatch_audit.routing.proxy.settings import Limits
from mismatch_audit.routing.table import SCHEMA

WORDS = (" a", " b", " é", " d", " 東", " f")
"""Tokens of every answer, with ids 100, 101, ... and log-probs -0.5, -0.6, ..."""


@dataclass
class Fake:
    """An engine with the answers of vLLM's server. fault: what it does wrong, by name.

    seen: (path, headers, body) of every request.  cancelled: streams that were cut off by the
    router.  gate: streams wait for it before the token ``hold``.
    """

    name: str
    fault: str = ""
    pace: float = 0.0
    healthy: bool = True
    hold: int = -1
    seen: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    cancelled: int = 0
    active: int = 0
    most: int = 0
    url: str = ""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    server: uvicorn.Server | None = None

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/completions", self.answer, methods=["POST"]),
                Route("/v1/chat/completions", self.answer, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/health", self.health),
            ]
        )

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self.name}]})

    async def health(self, _: Request) -> Response:
        return Response(status_code=200 if self.healthy else 503)

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append((request.url.path, dict(request.headers), body))
        chat = "chat" in request.url.path
        if self.fault.isdigit():
            headers = {"retry-after": "7"} if self.fault == "429" else {}
            return JSONResponse({"error": {"message": "no"}}, int(self.fault), headers)
        if self.fault == "strict" and ("return_token_ids" in body or "logprobs" in body):
            return JSONResponse({"error": {"message": "unknown field"}}, 400)
        if self.fault == "silent":
            await asyncio.sleep(60)
        if self.fault == "garbage":
            return Response(b"\x00\xff not json", media_type="application/json")
        headers = {
            "connection": "x-private", "x-private": "1", "x-public": "2", "set-cookie": "a=b",
            "keep-alive": "timeout=5",
        }  # fmt: skip
        if body.get("stream"):
            events = self.events(chat, body, request)
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        return JSONResponse(whole(chat, body), headers=headers)

    async def events(
        self, chat: bool, body: dict[str, Any], request: Request
    ) -> AsyncIterator[bytes]:
        self.active += 1
        self.most = max(self.most, self.active)
        try:
            if self.fault == "early":
                raise ConnectionAbortedError
            if self.fault == "error_first":
                yield b'data: {"error": {"message": "engine dead", "code": 500}}\n\n'
                yield b"data: [DONE]\n\n"
                return
            pieces = chunks(chat, body)
            for i, piece in enumerate(pieces):
                if self.fault == "middle" and i == 3:
                    yield b'data: {"id": "half'
                    raise ConnectionAbortedError
                if self.fault == "no_done" and i == len(pieces) - 1:
                    return
                if self.fault == "error_middle" and i == 3:
                    yield b'data: {"error": {"message": "engine dead", "code": 500}}\n\n'
                    yield b"data: [DONE]\n\n"
                    return
                if self.fault == "huge" and i == 2:
                    for _ in range(100):
                        yield b"x" * 100_000
                if self.fault == "stall" and i == 3:
                    await asyncio.sleep(60)
                while i == self.hold and not self.gate.is_set():
                    await asyncio.sleep(0.01)
                    if await request.is_disconnected():
                        raise asyncio.CancelledError
                if self.pace:
                    await asyncio.sleep(self.pace)
                if self.fault == "split":
                    yield piece[:7]
                    await asyncio.sleep(0.001)
                    piece = piece[7:]
                yield piece
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.active -= 1


def choice(chat: bool, body: dict[str, Any], tokens: slice, *, stream: bool) -> dict[str, Any]:
    """One choice with the parts that the request asked for; the others are null, as in vLLM."""
    words, ids = WORDS[tokens], list(range(100, 106))[tokens]
    values = [-0.5 - 0.1 * (i - 100) for i in ids]
    text = "".join(words)
    last = not stream or tokens.stop == len(WORDS)
    found: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
    given = body.get("logprobs")
    if chat:
        found["delta" if stream else "message"] = {"content": text}
        entries = [{"token": w, "logprob": v} for w, v in zip(words, values, strict=True)]
        found["logprobs"] = {"content": entries} if given else None
    else:
        found["text"] = text
        found["logprobs"] = None if given is None else {
            "token_logprobs": values, "tokens": list(words)
        }  # fmt: skip
        if given is not None and body.get("return_tokens_as_token_ids"):
            margins = body.get("margins", [3.0] * len(WORDS))[tokens]
            found["logprobs"]["top_logprobs"] = [
                {f"token_id:{i}": v, "token_id:1": v - m}
                for i, v, m in zip(ids, values, margins, strict=True)
            ]
    found["token_ids"] = ids if body.get("return_token_ids") else None
    return found


def whole(chat: bool, body: dict[str, Any]) -> dict[str, Any]:
    one = choice(chat, body, slice(0, len(WORDS)), stream=False)
    prompt = [7, 8, 9] if body.get("return_token_ids") else None
    document: dict[str, Any] = {"id": "x", "choices": [one], "usage": {"prompt_tokens": 3}}
    (document if chat else one)["prompt_token_ids"] = prompt
    return document


def chunks(chat: bool, body: dict[str, Any]) -> list[bytes]:
    """Events of a stream. A prompt of ids that begins with an answer's is gone on with."""
    given = body.get("prompt")
    begin = max(0, len(given) - 3) if isinstance(given, list) else 0
    prompt = ([7, 8, 9] if not begin else given) if body.get("return_token_ids") else None
    documents: list[dict[str, Any]] = []
    if chat:
        start = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        documents.append({"id": "x", "choices": [start], "prompt_token_ids": prompt})
    for i in range(begin, len(WORDS)):
        one = choice(chat, body, slice(i, i + 1), stream=True)
        if not chat:
            one["prompt_token_ids"] = prompt if i == begin else None
        documents.append({"id": "x", "choices": [one]})
    lines = [json.dumps(d, ensure_ascii=False, separators=(",", ":")) for d in documents]
    return [f"data: {line}\n\n".encode() for line in lines] + [b"data: [DONE]\n\n"]


def stream_text(chat: bool = False, **body: Any) -> bytes:
    """The whole stream that a client gets which asks a backend itself."""
    return b"".join(chunks(chat, body))


def table_document(
    rules: list[tuple[str, str, str]] | None = None, **engines: list[tuple[str, str, str]]
) -> dict[str, Any]:
    """A table. rules: (slice, when, to) of the engine ``engine``; keywords: of others."""
    listed = {"engine": rules, **engines} if rules is not None else engines
    return {
        "schema": SCHEMA, "created": "-", "reference": {},
        "policy": {"passes_to_return": 3, "return_at": 0.8},
        "engines": [
            {
                "name": name, "identity": {}, "slices": [], "mixture": [], "notes": [],
                "report": {"digest": "0" * 64, "verdict": "FAIL", "finished": "-", "prompts": 1},
                "contract": {"name": "test", "digest": "0" * 64},
                "rerouted": {"lower": 0.0, "upper": 1.0, "basis": "slices"},
                "rules": [
                    {"slice": s, "when": when, "to": to, "mapping": "exact", "also": [],
                     "level": "decode" if "engine_margin" in when else "request"}
                    for s, when, to in found
                ],
            }
            for name, found in listed.items()
        ],
    }  # fmt: skip


LAW = [("domain=law", 'domain == "law"', "reference")]
"""The table of most tests: law goes to the reference, all else to the engine."""


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[tuple[str, uvicorn.Server]]:
    """An ASGI application on an ephemeral port of loopback."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(512)
    config = uvicorn.Config(app, log_level="critical", access_log=False, timeout_keep_alive=5)
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server._serve([listener]))
    try:
        while not server.started:
            await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
    finally:
        server.should_exit = server.force_exit = True
        await task
        listener.close()


@contextlib.asynccontextmanager
async def hanging_up(answers: bool) -> AsyncIterator[str]:
    """The URL of a server that closes every connection once it was asked something; with
    answers=False of a port where nobody listens."""

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.transport.abort()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    if not answers:
        server.close()
    try:
        yield url
    finally:
        server.close()


QUICK = Limits(
    connect=1.0, first_token=2.0, idle=2.0, response=3.0, client=5.0, body_wait=1.0,
    health_interval=0.1, health_wait=0.5, cooldown=0.2, longest_cooldown=0.4, queue_wait=1.0,
)  # fmt: skip


@dataclass
class Rig:
    """A router, its backends by name, and a client."""

    proxy: Proxy
    fakes: dict[str, Fake]
    client: httpx.AsyncClient
    url: str
    path: Path

    def count(self, name: str, **labels: str) -> float:
        """A metric's value, summed over the labels that are not given; 0 when it is not there."""
        total = 0.0
        for family in self.proxy.metrics.registry.collect():
            for sample in family.samples:
                fits = all(sample.labels.get(k) == v for k, v in labels.items())
                if sample.name == f"audit_router_{name}" and fits:
                    total += sample.value
        return total

    async def ask(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        headers = body.pop("headers", {})
        document = {"prompt": "x", "max_tokens": 6, "metadata": {"domain": "code"}} | body
        return await self.client.post(path, json=document, headers=headers)

    async def until(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def rig(
    tmp_path: Path,
    *fakes: Fake,
    table: dict[str, Any] | None = None,
    limits: Limits = QUICK,
    **options: Any,
) -> AsyncIterator[Rig]:
    """A router before fakes. A fake ``engine-1`` is a replica of ``engine``; ``reference`` is
    always there."""
    found = list(fakes)
    if not any(f.name.startswith("reference") for f in found):
        found.append(Fake("reference"))
    async with contextlib.AsyncExitStack() as stack:
        urls: dict[str, list[str]] = {}
        for fake in found:
            if fake.fault in ("hang up", "refuse"):
                answers = fake.fault == "hang up"
                fake.url = await stack.enter_async_context(hanging_up(answers))
            else:
                fake.url, fake.server = await stack.enter_async_context(serving(fake.app()))
            urls.setdefault(fake.name.split("-")[0], []).append(fake.url)
        path = tmp_path / "routes.json"
        path.write_text(json.dumps(table or table_document(LAW)))
        references = urls.pop("reference")
        proxy = build_proxy(Options(path, urls, references, limits, **options))
        url, router = await stack.enter_async_context(serving(application(proxy)))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20))
        try:
            yield Rig(proxy, {f.name: f for f in found}, client, url, path)
        finally:
            for server in (router, *(f.server for f in found)):
                if server is not None:  # all at once: each takes up to 0.1 s to look
                    server.should_exit = True
