"""One request to the backends that may answer it: tried one after another, then relayed."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mismatch_audit.routing.proxy.admission import Admission
from mismatch_audit.routing.proxy.backends import Backend, Pool
from mismatch_audit.routing.proxy.facts import Asked, Source
from mismatch_audit.routing.proxy.live import LiveTable
from mismatch_audit.routing.proxy.metrics import Metrics
from mismatch_audit.routing.proxy.mirror import Capture, Mirror
from mismatch_audit.routing.proxy.refusal import (
    ClientGone,
    Message,
    Refusal,
    Send,
    send_whole,
)
from mismatch_audit.routing.proxy.settings import Limits
from mismatch_audit.routing.proxy.shadow import Shadow
from mismatch_audit.routing.proxy.sse import ERROR, EventStream, TooLong, broken, events, payload
from mismatch_audit.routing.proxy.stall import Stall
from mismatch_audit.routing.proxy.upstream import (
    Died,
    died_of,
    open_response,
    read_whole,
    response_headers,
)
from mismatch_audit.routing.table import REFERENCE

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger("mismatch_audit.router")

STALE = 0.25
"""Seconds in which a connection that the backend had closed shows it; later it died of the
request, which is then not put to the same backend again."""

_JSON = (b"content-type", b"application/json")


@dataclass
class Proxy:
    """What every request needs. session: set when the loop runs."""

    limits: Limits
    pool: Pool
    live: LiveTable
    metrics: Metrics
    admission: Admission
    source: Source = "both"
    mirror: Mirror | None = None
    shadow: Shadow | None = None
    handover: bool = False
    session: aiohttp.ClientSession | None = None


class Exchange:
    """A request in work: tries backends until one begins to answer, then relays."""

    def __init__(
        self, proxy: Proxy, asked: Asked, headers: list[tuple[str, str]], send: Send, start: float
    ) -> None:
        self.proxy, self.asked, self.headers = proxy, asked, headers
        self._send, self.start = send, start

    async def run(self, target: str) -> None:
        """Raises Refusal (503) when nobody answers."""
        metrics, last = self.proxy.metrics, None
        for backend in self.proxy.pool.candidates(target):
            for attempt in range(2):
                sent = time.perf_counter()
                try:
                    await self._attempt(backend)
                except Died as died:
                    metrics.retries.labels(backend.name, died.reason).inc()
                    last = died
                    if died.reason != "broken" or time.perf_counter() - sent > STALE or attempt:
                        break
                else:
                    if target != REFERENCE and backend.target == REFERENCE:
                        metrics.fallbacks.labels(target).inc()
                    return
        if last is not None and last.answer is not None:
            status, headers, body = last.answer
            metrics.refused.labels("upstream").inc()
            await send_whole(self._send, status, headers, body)
            return
        raise Refusal(
            503, "no_backend", "no backend answered that may serve this request",
            [(b"retry-after", b"1")],
        )  # fmt: skip

    async def _attempt(self, backend: Backend) -> None:
        """Ask one backend and relay its answer. Raises Died as long as nothing was sent."""
        mirror = self.proxy.mirror
        capture = None
        if mirror is not None and backend.target != REFERENCE and mirror.draw(self.asked):
            capture = mirror.begin(self.asked, backend.target)
        with backend.request():
            try:
                await self._relay(backend, capture)
            except Died as died:
                if died.reason != "busy":
                    backend.breaker.failed(fatal=died.fatal)
                raise
        if capture is not None and mirror is not None:
            mirror.finish(capture)

    async def _relay(self, backend: Backend, capture: Capture | None) -> None:
        response = await self._open(backend, self.asked.body if capture is None else capture.body())
        if capture is not None and response.status in (400, 422):
            # The backend may not know what it was asked for in addition.
            response.close()
            self.proxy.metrics.mirrored.labels("not_understood").inc()
            capture = None
            response = await self._open(backend, self.asked.body)
        try:
            if response.status == 200 and response.content_type == "text/event-stream":
                await self._stream(backend, response, capture)
            else:
                await self._whole(backend, response, capture)
        finally:
            # Read to its end, a response has given its connection back already; any other is cut
            # off, which tells the backend to stop generating.
            response.close()

    async def _open(self, backend: Backend, body: bytes) -> aiohttp.ClientResponse:
        limits = self.proxy.limits
        wait = max(limits.first_token, limits.idle) if self.asked.stream else limits.response
        session = self.proxy.session
        if session is None:
            raise Refusal(503, "starting", "the proxy is starting")
        return await open_response(
            session, "POST", backend.url + self.asked.path, self.headers, body,
            idle=wait, connect=limits.connect,
        )  # fmt: skip

    async def _whole(
        self, backend: Backend, response: aiohttp.ClientResponse, capture: Capture | None
    ) -> None:
        """An answer in one piece: read whole before anything is sent, so that all of it can still
        be asked for elsewhere."""
        body = await read_whole(response, self.proxy.limits.answer)
        headers = response_headers(response.raw_headers)
        if response.status == 429 or response.status >= 500:
            reason = "busy" if response.status == 429 else "status"
            raise Died(reason, answer=(response.status, headers, body))
        backend.breaker.succeeded()
        if capture is not None and response.status == 200:
            try:
                body = capture.answer(body)
            except (ValueError, AttributeError, TypeError):
                capture.spoil()
                log.warning("backend %s: the answer is not what was asked for", backend.name)
        self._began(backend, response.status)
        headers.append((b"x-audit-backend", backend.target.encode()))
        await send_whole(self._finish, response.status, headers, body)

    async def _stream(
        self, backend: Backend, response: aiohttp.ClientResponse, capture: Capture | None
    ) -> None:
        stream = EventStream(response.content.readany, self.proxy.limits.event)
        block = await self._first(stream)
        backend.breaker.succeeded()
        self._began(backend, 200)
        headers = response_headers(response.raw_headers)
        headers.append((b"x-audit-backend", backend.target.encode()))
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        failed = False
        try:
            failed = await self._pass_on(backend, stream, block, capture)
        except Died as died:
            failed = True
            log.warning("backend %s: a stream broke off (%s)", backend.name, died.reason)
            rest = broken("the engine's answer broke off; ask again")
            await self._finish({"type": "http.response.body", "body": rest, "more_body": True})
        if failed:
            self.proxy.metrics.broken.labels(backend.name).inc()
            backend.breaker.failed()
            if capture is not None:
                capture.spoil()
        await self._finish({"type": "http.response.body", "body": b""})

    async def _pass_on(
        self, backend: Backend, stream: EventStream, block: bytes, capture: Capture | None
    ) -> bool:
        """The first block and all others. True when the backend said that it failed; raises Died
        when it did not finish, ClientGone when the client takes nothing for too long."""
        limits, send, failed = self.proxy.limits, self._send, False
        stall = Stall()
        try:
            async with stall:
                while block:
                    failed = failed or ERROR in block
                    if capture is not None:
                        block = self._captured(backend, capture, block)
                    stall.wait("client", limits.client)
                    await send({"type": "http.response.body", "body": block, "more_body": True})
                    stall.wait("backend", limits.idle)
                    block = await next_block(stream)
        except TimeoutError:
            if stall.side == "client":
                raise ClientGone from None
            raise Died("timeout") from None
        if not stream.done:
            raise Died("broken")
        return failed

    async def _first(self, stream: EventStream) -> bytes:
        """The first events. Raises Died when there are none, or when they say that the engine
        failed: nothing was sent, so another may be asked."""
        try:
            async with asyncio.timeout(self.proxy.limits.first_token):
                block = await next_block(stream)
        except TimeoutError:
            raise Died("timeout") from None
        if not block:
            raise Died("broken")
        if block.startswith(ERROR):
            said = payload(events(block)[0]) or b""
            raise Died("error_event", answer=(502, [_JSON], said))
        return block

    async def _finish(self, message: Message) -> None:
        """Send what is not one of many pieces, unless the client takes nothing for too long."""
        try:
            async with asyncio.timeout(self.proxy.limits.client):
                await self._send(message)
        except TimeoutError:
            raise ClientGone from None

    def _captured(self, backend: Backend, capture: Capture, block: bytes) -> bytes:
        try:
            return capture.stream(block)
        except (ValueError, AttributeError, TypeError):
            capture.spoil()
            log.warning("backend %s: an event is not what was asked for", backend.name)
            return block

    def _began(self, backend: Backend, status: int) -> None:
        metrics = self.proxy.metrics
        metrics.first.labels(backend.name).observe(time.perf_counter() - self.start)
        metrics.requests.labels(backend.name, str(status)).inc()


async def next_block(stream: EventStream) -> bytes:
    """The next events. Raises Died."""
    import aiohttp

    try:
        return await stream.block()
    except TooLong:
        raise Died("broken") from None
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise died_of(error) from None
