"""A request in two parts: the engine's until a token that it may not give, then the reference's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mismatch_audit.routing.proxy.backends import Backend
from mismatch_audit.routing.proxy.forward import Exchange, next_block
from mismatch_audit.routing.proxy.handover import Handover, Unclear
from mismatch_audit.routing.proxy.refusal import ClientGone
from mismatch_audit.routing.proxy.sse import DONE, ERROR, EventStream, broken
from mismatch_audit.routing.proxy.stall import Stall
from mismatch_audit.routing.proxy.upstream import Died, response_headers
from mismatch_audit.routing.table import REFERENCE

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger("mismatch_audit.router")

_NOT_UNDERSTOOD = (ValueError, AttributeError, TypeError, KeyError, Unclear)


class TwoParts(Exchange):
    """Where the engine gives no account that the rules can be held against, the reference answers
    from the start; where it dies in the middle, the reference goes on from what the client has."""

    def __init__(self, handover: Handover, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.handover = handover

    async def run(self, target: str) -> None:
        """target: the engine. Raises Refusal (503) when nobody answers."""
        for backend in self.proxy.pool.candidates(target):
            if backend.target == REFERENCE:
                break
            try:
                if await self._engine_part(backend):
                    return
                break
            except Died as died:
                self.proxy.metrics.retries.labels(backend.name, died.reason).inc()
        await super().run(REFERENCE)

    async def _engine_part(self, backend: Backend) -> bool:
        """False when nothing of the engine's answer may be passed on; nothing was sent then."""
        handover = self.handover
        with backend.request():
            response = None
            try:
                response = await self._open(backend, handover.engine_body())
                if response.status != 200 or response.content_type != "text/event-stream":
                    raise Died("status")
                stream = EventStream(response.content.readany, self.proxy.limits.event)
                block = await self._first(stream)
                if ERROR in block:
                    raise Died("error_event")
                backend.breaker.succeeded()
                try:
                    text = handover.engine_events(block)
                except _NOT_UNDERSTOOD:
                    self._count(backend, "no account")
                    return False
                if not text:
                    self._count(backend, handover.slice)
                    return False
                await self._start(backend, response)
                why = await self._engine_rest(stream, text)
            except Died as died:
                if died.reason != "busy":
                    backend.breaker.failed(fatal=died.fatal)
                raise
            finally:
                if response is not None:
                    response.close()
            if why == "broken off":
                backend.breaker.failed()
        if why and handover.finished:  # only the end of the stream is missing
            end = {"type": "http.response.body", "body": DONE + b"\n\n", "more_body": True}
            await self._finish(end)
        elif why:
            self._count(backend, why)
            await self._reference_part()
        await self._finish({"type": "http.response.body", "body": b""})
        return True

    def _count(self, backend: Backend, why: str) -> None:
        self.proxy.metrics.handovers.labels(backend.target, why).inc()

    async def _start(self, backend: Backend, response: aiohttp.ClientResponse) -> None:
        self._began(backend, 200)
        headers = response_headers(response.raw_headers)
        headers.append((b"x-audit-backend", backend.target.encode()))
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _engine_rest(self, stream: EventStream, text: bytes) -> str:
        """Why the engine's part ended before the answer did; "" when it did not."""
        handover = self.handover
        try:
            await self._pass(stream, text, handover.engine_events, lambda: bool(handover.slice))
        except (Died, *_NOT_UNDERSTOOD) as error:
            log.warning("an engine's part broke off (%s)", type(error).__name__)
            return "broken off"
        return handover.slice

    async def _reference_part(self) -> None:
        body = self.handover.reference_body()
        for backend in self.proxy.pool.candidates(REFERENCE):
            with backend.request():
                response = None
                begun = False
                try:
                    response = await self._open(backend, body)
                    if response.status != 200 or response.content_type != "text/event-stream":
                        raise Died("status")
                    stream = EventStream(response.content.readany, self.proxy.limits.event)
                    text = self.handover.reference_events(await self._first(stream))
                    backend.breaker.succeeded()
                    begun = True
                    await self._pass(stream, text, self.handover.reference_events, lambda: False)
                    return
                except (Died, *_NOT_UNDERSTOOD) as error:
                    fatal = isinstance(error, Died) and error.fatal
                    backend.breaker.failed(fatal=fatal)
                    if begun:
                        self.proxy.metrics.broken.labels(backend.name).inc()
                        break
                finally:
                    if response is not None:
                        response.close()
        rest = broken("the answer broke off; ask again")
        await self._finish({"type": "http.response.body", "body": rest, "more_body": True})

    async def _pass(
        self,
        stream: EventStream,
        text: bytes,
        edit: Callable[[bytes], bytes],
        over: Callable[[], bool],
    ) -> None:
        """Edited blocks until the end, or until ``over``. Raises Died when they break off."""
        limits, stall = self.proxy.limits, Stall()
        try:
            async with stall:
                while True:
                    stall.wait("client", limits.client)
                    await self._send(
                        {"type": "http.response.body", "body": text, "more_body": True}
                    )
                    if over():
                        return
                    stall.wait("backend", limits.idle)
                    block = await next_block(stream)
                    if not block:
                        break
                    if ERROR in block:
                        raise Died("error_event")
                    text = edit(block)
        except TimeoutError:
            if stall.side == "client":
                raise ClientGone from None
            raise Died("timeout") from None
        if not stream.done:
            raise Died("broken")
