"""The body of a request, bounded in size and time."""

from __future__ import annotations

import asyncio

from mismatch_audit.routing.proxy.refusal import ClientGone, Headers, Receive, Refusal
from mismatch_audit.routing.proxy.settings import Limits


async def read_body(headers: Headers, receive: Receive, limits: Limits) -> bytes:
    """The whole body. Raises Refusal: 413 beyond the limit (by its declared length already), 408
    when it does not come, 415 when it is compressed; ClientGone when the client leaves."""
    for name, value in headers:
        if name == b"content-length" and _length(value) > limits.body:
            raise _too_large(limits.body)
        if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
            raise Refusal(415, "encoded", "compressed bodies are not read")
    try:
        async with asyncio.timeout(limits.body_wait):
            return await _read(receive, limits.body)
    except TimeoutError:
        raise Refusal(
            408, "slow_body", f"the body did not come within {limits.body_wait:g} s"
        ) from None


async def _read(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        if part:
            parts.append(part)
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _length(value: bytes) -> int:
    return int(value) if value.isdigit() else 0


def _too_large(limit: int) -> Refusal:
    return Refusal(413, "too_large", f"the body is larger than {limit} bytes")
