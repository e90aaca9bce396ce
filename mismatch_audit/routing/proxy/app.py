"""The proxy as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mismatch_audit.routing.proxy.endpoint import Endpoint
from mismatch_audit.routing.proxy.forward import Proxy
from mismatch_audit.routing.proxy.metrics import CONTENT_TYPE
from mismatch_audit.routing.proxy.refusal import Receive, Send, error_body
from mismatch_audit.routing.proxy.upstream import (
    Died,
    client_session,
    open_response,
    read_whole,
    request_headers,
    response_headers,
)
from mismatch_audit.routing.table import REFERENCE

_JSON = "application/json"


Application = Callable[[Any, Receive, Send], Awaitable[None]]


def application(proxy: Proxy) -> Application:
    """``/v1/completions``, ``/v1/chat/completions``, ``/v1/models``, ``/health``, ``/metrics``.

    The first two bypass Starlette, whose middleware wraps every piece of a stream twice.
    """
    direct = {
        "/v1/completions": Endpoint(proxy, "completion"),
        "/v1/chat/completions": Endpoint(proxy, "chat"),
    }
    others = _others(proxy)

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in direct:
            await direct[scope["path"]](scope, receive, send)
        else:
            await others(scope, receive, send)

    return app


def _others(proxy: Proxy) -> Starlette:

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        proxy.session = client_session(proxy.limits)
        # What is there now stays: a full collection would walk its 54,000 objects, 54 ms of CPU
        # time in the middle of some request; frozen, they cost nothing.
        gc.collect()
        gc.freeze()
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            # Not in a thread that is not the main one, as in a test.
            loop.add_signal_handler(signal.SIGHUP, proxy.live.reload)
        tasks = [
            asyncio.create_task(proxy.pool.watch(proxy.session)),
            asyncio.create_task(proxy.live.watch()),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if proxy.shadow is not None:
                await proxy.shadow.close()
            await proxy.session.close()
            if proxy.mirror is not None:
                await asyncio.to_thread(proxy.mirror.close)

    async def models(request: Request) -> Response:
        return await _models(proxy, request)

    async def health(_: Request) -> Response:
        return _health(proxy)

    async def metrics(_: Request) -> Response:
        return Response(proxy.metrics.text(), media_type=CONTENT_TYPE)

    return Starlette(
        routes=[
            Route("/v1/models", models, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
            Route("/metrics", metrics, methods=["GET"]),
        ],
        lifespan=lifespan,
        exception_handlers={404: _unknown, 405: _unknown},
    )


async def _unknown(request: Request, error: Exception) -> Response:
    status = int(getattr(error, "status_code", 404))
    message = "only /v1/completions, /v1/chat/completions and /v1/models are served"
    return Response(error_body(status, "not_served", message), status, media_type=_JSON)


async def _models(proxy: Proxy, request: Request) -> Response:
    """The models of the first backend that answers, the reference's before an engine's."""
    headers = request_headers(request.headers.raw)
    wait = proxy.limits.health_wait
    targets = [REFERENCE, *(t for t in proxy.pool.targets if t != REFERENCE)]
    for backend in (b for t in targets for b in proxy.pool.targets[t]):
        if proxy.session is None or not backend.breaker.admits():
            continue
        try:
            response = await open_response(
                proxy.session, "GET", backend.url + "/v1/models", headers, None,
                idle=wait, connect=proxy.limits.connect,
            )  # fmt: skip
            body = await read_whole(response, 1 << 20)
        except Died:
            continue
        found = Response(body, response.status)
        found.raw_headers += response_headers(response.raw_headers)
        return found
    return Response(error_body(503, "no_backend", "no backend answered"), 503, media_type=_JSON)


def _health(proxy: Proxy) -> Response:
    """200 while the reference can answer (it may answer everything), 503 otherwise."""
    live, pool = proxy.live, proxy.pool
    state: dict[str, Any] = {
        "status": "ok" if pool.alive(REFERENCE) else "no reference",
        "table": live.digest,
        "table_error": live.error or None,
        "backends": {b.name: b.breaker.state for b in pool.backends},
    }
    if live.error:
        state["status"] += ", a new table was refused"
    return Response(json.dumps(state), 200 if pool.alive(REFERENCE) else 503, media_type=_JSON)
