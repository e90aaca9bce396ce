"""One request through the proxy: admitted, read, decided, and left when its client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

from mismatch_audit.routing.proxy.body import read_body
from mismatch_audit.routing.proxy.facts import METADATA_HEADER, Kind, parse
from mismatch_audit.routing.proxy.forward import Exchange, Proxy
from mismatch_audit.routing.proxy.handover import Handover, eligible
from mismatch_audit.routing.proxy.refusal import ClientGone, Headers, Receive, Refusal, Send, refuse
from mismatch_audit.routing.proxy.two_parts import TwoParts
from mismatch_audit.routing.proxy.upstream import request_headers

T = TypeVar("T")


class Endpoint:
    """ASGI application of ``/v1/completions`` or ``/v1/chat/completions``."""

    def __init__(self, proxy: Proxy, kind: Kind) -> None:
        self.proxy, self.kind = proxy, kind

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        metrics = self.proxy.metrics
        try:
            async with self.proxy.admission.place():
                await self._serve(scope, receive, send)
        except Refusal as refusal:
            metrics.refused.labels(refusal.reason).inc()
            await refuse(send, refusal)
        except ClientGone:
            metrics.gone.inc()

    async def _serve(self, scope: Any, receive: Receive, send: Send) -> None:
        start = time.perf_counter()
        proxy = self.proxy
        received: Headers = scope["headers"]
        body = await read_body(received, receive, proxy.limits)
        metadata = next((v for k, v in received if k == METADATA_HEADER), None)
        asked = parse(scope["path"], self.kind, body, metadata, proxy.source)
        decision = proxy.live.decisions.decide(asked.facts)
        proxy.metrics.routed.labels(decision.target, decision.rule).inc()
        headers = request_headers(received)
        if decision.kept_from:
            decider = proxy.live.decisions.by_name[decision.kept_from]
            if proxy.handover and eligible(asked, decider):
                handover = Handover(asked, decider)
                both = TwoParts(handover, proxy, asked, headers, send, start)
                await until_gone(both.run(decider.name), receive)
                return
            if proxy.shadow is not None and proxy.session is not None:
                proxy.shadow.maybe(proxy.session, decider.name, asked, headers)
        exchange = Exchange(proxy, asked, headers, send, start)
        await until_gone(exchange.run(decision.target), receive)


async def until_gone(work: Awaitable[T], receive: Receive) -> T:
    """The work's result. Raises ClientGone, with the work cancelled, when the client leaves."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Refusal):
                await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
