"""The body of a request, bounded in size and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from mismatch_audit.routing.proxy.refusal import ClientGone, Headers, Receive, Refusal
from mismatch_audit.routing.proxy.settings import Limits


async def read_body(headers: Headers, receive: Receive, limits: Limits) -> bytes:
    """The whole body. Raises Refusal: 413 beyond the limit, 408 when it does not come, 415 when it
    is compressed; ClientGone when the client leaves."""
    for name, value in headers:
        if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
            raise Refusal(415, "encoded", "compressed bodies are not read")
    try:
        async with asyncio.timeout(limits.body_wait):
            return await _read(receive, limits.body)
    except TimeoutError:
        raise Refusal(
            408,
            "slow_body",
            f"the body did not come within {limits.body_wait:g} s",
            [(b"connection", b"close")],
        ) from None


async def _read(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in _parts(receive):
        size += len(part)
        if size <= limit:
            parts.append(part)
            continue
        # Nothing more is kept, but some is read: most clients look for an answer only when they
        # have sent everything, and would meet a closed connection in its place.
        parts.clear()
        if size > DISCARDED * limit:
            raise Refusal(413, "too_large", _text(limit), [(b"connection", b"close")])
    if size > limit:
        raise Refusal(413, "too_large", _text(limit))
    return parts[0] if len(parts) == 1 else b"".join(parts)


DISCARDED = 16
"""Times the limit of a body that are read to say that it is too large."""


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        if part := message.get("body", b""):
            yield part
        more = message.get("more_body", False)


def _text(limit: int) -> str:
    return f"the body is larger than {limit} bytes"
