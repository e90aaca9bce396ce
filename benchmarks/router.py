"""What the router adds to the time to first token, measured in one run.

Three processes on loopback: a backend that streams tokens at an engine's pace, the router as
`audit serve-router` runs it, and a client that keeps a number of streams open. Rounds alternate
between the backend directly and through the router, so that both meet the same machine. Where other
processes keep the cores busy, any proxy waits for its turn: the three are measured at real-time
priority first (where this is allowed), which shows the router, and then at the usual one.

    python benchmarks/router.py [--streams 50] [--rounds 3] [--write]

--write puts the tables into docs/routing.md, between its markers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "routing.md"
BEGIN, END = "<!-- router:begin -->\n", "<!-- router:end -->"
PROMISE = {"p50": 5.0, "p99": 15.0}
"""Milliseconds that the router may add."""

FIRST, PACE, TOKENS = 0.050, 0.020, 40
"""Of the backend: seconds to the first token and between tokens, tokens an answer: 50 streams are
then served 2,500 tokens a second, as one GPU does with a small model."""


# The backend -----------------------------------------------------------------------------------
class Engine(asyncio.Protocol):
    """As little of HTTP as streams take: its own cost is in both measurements."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.buffer) < end + 4 + length:
                return
            self.buffer = self.buffer[end + 4 + length :]
            if head.startswith(b"post"):
                self.left = TOKENS
                asyncio.get_running_loop().call_later(FIRST, self.first)
            else:
                self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    def first(self) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        self.token()

    def token(self) -> None:
        if self.transport.is_closing():
            return
        if self.left:
            self.left -= 1
            self.chunk(EVENT)
            asyncio.get_running_loop().call_later(PACE, self.token)
        else:
            self.chunk(b"data: [DONE]\n\n")
            self.transport.write(b"0\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


EVENT = b"data: " + json.dumps(
    {
        "id": "cmpl-9b1f0c0e8d7a4d1c8c1e5a6b7c8d9e0f", "object": "text_completion",
        "created": 1764460800, "model": "model",
        "choices": [{"index": 0, "text": " token", "logprobs": None, "finish_reason": None,
                     "stop_reason": None, "prompt_token_ids": None, "token_ids": None}],
    }
).encode() + b"\n\n"  # fmt: skip


async def engine() -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# The client ------------------------------------------------------------------------------------
@dataclass
class Times:
    """Milliseconds: to the first token, and to the end."""

    first: list[float]
    whole: list[float]


BODY = json.dumps(
    {
        "model": "model", "stream": True, "max_tokens": TOKENS, "temperature": 1.0,
        "prompt": "Explain how a proxy passes on a stream of events without changing it. " * 24,
        "metadata": {"domain": "code"},
    }
).encode()  # fmt: skip
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"authorization: Bearer x\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
)


async def stream(port: int, requests: int, times: Times, rng: random.Random) -> None:
    """Requests one after another on one connection, each after a short pause."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(requests):
        await asyncio.sleep(rng.uniform(0, 2 * PACE * 10))
        start = time.perf_counter()
        writer.write(REQUEST)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"unexpected answer: {head[:200]!r}")
        first, seen = 0.0, b""
        while True:
            size = int(await reader.readuntil(b"\r\n"), 16)
            data = (await reader.readexactly(size + 2))[:-2]
            first = first or time.perf_counter()
            if not size:
                break
            seen = data
        if not seen.endswith(b"[DONE]\n\n"):
            raise SystemExit("an answer was not whole")
        times.first.append(1e3 * (first - start))
        times.whole.append(1e3 * (time.perf_counter() - start))
    writer.close()


async def load(port: int, streams: int, requests: int, seed: int) -> Times:
    times, rng = Times([], []), random.Random(seed)
    await asyncio.gather(
        *(stream(port, requests, times, random.Random(rng.random())) for _ in range(streams))
    )
    return times


# Both ------------------------------------------------------------------------------------------
def table_file(folder: Path) -> Path:
    """A table as an audit of seven domains writes it, one of which failed."""
    domains = ["arithmetic", "code", "creative", "factual", "instruction", "long", "multilingual"]
    unseen = f"domain not in {json.dumps(domains)}"
    rules = [
        {"slice": name, "when": when, "also": [], "to": "reference", "level": "request",
         "mapping": "exact"}
        for name, when in (("domain=long", 'domain == "long"'), ("unseen domain", unseen),
                           ("late", "context_length >= 100000"))
    ]  # fmt: skip
    engine_routes = {
        "name": "engine", "identity": {}, "rules": rules, "slices": [], "mixture": [], "notes": [],
        "report": {"digest": "0" * 64, "verdict": "FAIL", "finished": "-", "prompts": 0},
        "contract": {"name": "benchmark", "digest": "0" * 64},
        "rerouted": {"lower": 0.0, "upper": 0.2, "basis": "slices"},
    }  # fmt: skip
    document = {
        "schema": "mismatch-audit/routes/v1", "created": "-", "reference": {},
        "policy": {"passes_to_return": 3, "return_at": 0.8}, "engines": [engine_routes],
    }  # fmt: skip
    path = folder / "routes.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def start(command: list[str], marker: str) -> tuple[subprocess.Popen[str], int]:
    """A process that says its port in a line with the marker."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    for line in process.stdout or ():
        if marker in line:
            return process, int(line.rstrip("\n").rpartition(":" if ":" in line else " ")[2])
    raise SystemExit(f"{command[0]} did not start")


def quantile(values: list[float], q: float) -> float:
    return statistics.quantiles(values, n=1000, method="inclusive")[int(q * 1000) - 1]


@dataclass
class Pass:
    """Rounds under one priority. cpu: the router's seconds.  others: cores that processes which are
    not of this benchmark kept busy."""

    name: str
    direct: Times
    routed: Times
    cpu: float
    others: float

    def added(self, q: float) -> float:
        return quantile(self.routed.first, q) - quantile(self.direct.first, q)

    def render(self) -> str:
        lines = [
            f"At {self.name}, beside other processes that kept {self.others:.1f} of "
            f"{os.cpu_count()} cores busy, {len(self.direct.first)} requests each way "
            f"({1e3 * self.cpu / len(self.routed.first):.1f} ms of the router's CPU time each):",
            "",
            "| time to first token | direct | routed | added | ratio |",
            "|---|---:|---:|---:|---:|",
        ]
        for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            a, b = quantile(self.direct.first, q), quantile(self.routed.first, q)
            lines.append(f"| {name} | {a:.2f} ms | {b:.2f} ms | {b - a:+.2f} ms | {b / a:.3f} |")
        a, b = quantile(self.direct.whole, 0.5), quantile(self.routed.whole, 0.5)
        lines.append(
            f"| whole answer, p50 | {a:.1f} ms | {b:.1f} ms | {b - a:+.1f} ms | {b / a:.3f} |"
        )
        return "\n".join(lines)


def priority(pids: list[int], *, realtime: bool) -> bool:
    """False where this user may not."""
    policy, level = (os.SCHED_RR, 1) if realtime else (os.SCHED_OTHER, 0)
    try:
        for pid in pids:
            os.sched_setscheduler(pid, policy, os.sched_param(level))
    except PermissionError:
        return False
    return True


def measure(name: str, ports: tuple[int, int], pids: list[int], args: argparse.Namespace) -> Pass:
    """pids: of all three processes, the router's last."""
    direct, routed, cpu = Times([], []), Times([], []), 0.0
    began, busy, own = time.perf_counter(), busy_seconds(), sum(map(cpu_seconds, pids))
    for i in range(args.rounds):
        for port, times in zip(ports, (direct, routed), strict=True):
            before = cpu_seconds(pids[-1])
            found = uvloop.run(load(port, args.streams, args.requests, i))
            times.first += found.first
            times.whole += found.whole
            if times is routed:
                cpu += cpu_seconds(pids[-1]) - before
    busy, own = busy_seconds() - busy, sum(map(cpu_seconds, pids)) - own
    return Pass(name, direct, routed, cpu, max(0.0, busy - own) / (time.perf_counter() - began))


async def client_cost(port: int, library: str, requests: int = 8, streams: int = 20) -> float:
    """CPU milliseconds of one streamed request, of the client alone."""
    import aiohttp
    import httpx

    from mismatch_audit.routing.proxy.settings import Limits
    from mismatch_audit.routing.proxy.upstream import client_session, open_response

    url = f"http://127.0.0.1:{port}/v1/completions"
    headers = [("content-type", "application/json"), ("authorization", "Bearer x")]

    async def through_httpx(client: httpx.AsyncClient) -> None:
        for _ in range(requests):
            async with client.stream("POST", url, content=BODY, headers=headers) as response:
                async for _ in response.aiter_raw():
                    pass

    async def through_aiohttp(session: aiohttp.ClientSession) -> None:
        for _ in range(requests):
            response = await open_response(
                session, "POST", url, headers, BODY, idle=60.0, connect=5.0
            )
            while await response.content.readany():
                pass

    if library == "httpx":
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(limits=unlimited, timeout=60) as client:
            before = cpu_seconds(os.getpid())
            await asyncio.gather(*(through_httpx(client) for _ in range(streams)))
    else:
        async with client_session(Limits()) as session:
            before = cpu_seconds(os.getpid())
            await asyncio.gather(*(through_aiohttp(session) for _ in range(streams)))
    return 1e3 * (cpu_seconds(os.getpid()) - before) / (requests * streams)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, to the nanosecond."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def busy_seconds() -> float:
    """CPU time of everything on this machine."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def write_page(body: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}{body}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=5, help="of each stream in a round")
    parser.add_argument("--write", action="store_true", help="into docs/routing.md")
    parser.add_argument("--serve-engine", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_engine:
        uvloop.run(engine())
        return
    children: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as name:
        try:
            passes, costs = run(args, Path(name), children)
        finally:
            for child in children:
                child.send_signal(signal.SIGTERM)
                child.wait(timeout=20)
    body = "\n\n".join(
        [
            f"{args.streams} concurrent streams, {TOKENS} tokens an answer at {1 / PACE:.0f} "
            f"tokens/s, the backend's first token after {1e3 * FIRST:.0f} ms. Promise: less than "
            f"{PROMISE['p50']:g} ms added at p50 and {PROMISE['p99']:g} ms at p99.",
            *(one.render() for one in passes),
            f"CPU time of the HTTP client for such a request: aiohttp {costs['aiohttp']:.1f} ms, "
            f"httpx {costs['httpx']:.1f} ms.",
        ]
    )
    print(body)
    if args.write:
        write_page(body)
    kept = all(passes[0].added(q) < PROMISE[n] for n, q in (("p50", 0.5), ("p99", 0.99)))
    sys.exit(0 if kept else 1)


def run(
    args: argparse.Namespace, folder: Path, children: list[subprocess.Popen[str]]
) -> tuple[list[Pass], dict[str, float]]:
    backend, port = start([sys.executable, __file__, "--serve-engine"], "")
    children.append(backend)
    url = f"http://127.0.0.1:{port}"
    router, routed_port = start(
        [sys.executable, "-m", "mismatch_audit.cli.app", "serve-router", "--port", "0", "--routes",
         str(table_file(folder)), "--engine", f"engine={url}", "--reference", url],
        "http://127.0.0.1:",
    )  # fmt: skip
    children.append(router)
    ports, pids = (port, routed_port), [os.getpid(), backend.pid, router.pid]
    for one in ports:  # warm-up
        uvloop.run(load(one, args.streams, 1, 0))
    passes = []
    if priority(pids, realtime=True):
        passes.append(measure("real-time priority", ports, pids, args))
        priority(pids, realtime=False)
    passes.append(measure("the usual priority", ports, pids, args))
    costs = {one: uvloop.run(client_cost(port, one)) for one in ("aiohttp", "httpx")}
    return passes, costs


if __name__ == "__main__":
    main()
