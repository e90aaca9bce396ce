"""Answers of the proxy's own: JSON errors in the shape that OpenAI clients read."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
Headers = list[tuple[bytes, bytes]]


class Refusal(Exception):
    """A request that is not served. reason: a word for the metrics."""

    def __init__(self, status: int, reason: str, message: str, headers: Headers | None = None):
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message
        self.headers: Headers = headers or []


class ClientGone(Exception):
    """The client closed its connection; there is no one to answer."""


def error_body(status: int, reason: str, message: str) -> bytes:
    """``{"error": {message, type, param, code}}``."""
    error = {"message": message, "type": reason, "param": None, "code": status}
    return json.dumps({"error": error}).encode()


def error_event(status: int, reason: str, message: str) -> bytes:
    """The same as an event of a stream. No ``[DONE]`` follows: the answer is not whole."""
    return b"data: " + error_body(status, reason, message) + b"\n\n"


async def send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """A whole answer. headers: without content-length."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, (b"content-length", str(len(body)).encode())],
        }
    )
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, refusal: Refusal) -> None:
    body = error_body(refusal.status, refusal.reason, refusal.message)
    headers = [(b"content-type", b"application/json"), *refusal.headers]
    await send_whole(send, refusal.status, headers, body)
