"""One request to one backend: headers in and out, and what can go wrong as three words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from mismatch_audit.routing.proxy.facts import METADATA_HEADER
from mismatch_audit.routing.proxy.refusal import Headers
from mismatch_audit.routing.proxy.settings import Limits

if TYPE_CHECKING:
    import aiohttp

HOP_BY_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
     b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)  # fmt: skip
"""Headers of one connection, which are not passed on (RFC 9110, 7.6.1)."""

_OURS: Final = frozenset(
    {b"host", b"content-length", b"expect", b"accept-encoding", METADATA_HEADER}
)
_THEIRS: Final = frozenset({b"content-length", b"date", b"server"})

KEEP_ALIVE = 4.0
"""Seconds; below the 5 s after which uvicorn, and so vLLM, closes an idle connection."""


class Died(Exception):
    """A backend gave no answer. reason: connect, timeout, broken, status, busy or error_event.
    fatal: nobody listens there.  answer: what it sent in place of one, when it sent anything."""

    def __init__(
        self, reason: str, *, fatal: bool = False, answer: tuple[int, Headers, bytes] | None = None
    ) -> None:
        super().__init__(reason)
        self.reason, self.fatal, self.answer = reason, fatal, answer


def request_headers(received: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """End-to-end headers of a client's request. Authorization is among them; it is never logged."""
    received = list(received)
    listed = _listed(received)
    return [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in received
        if name not in HOP_BY_HOP and name not in _OURS and name not in listed
    ]


def response_headers(received: Iterable[tuple[bytes, bytes]]) -> Headers:
    """End-to-end headers of a backend's answer, names in lower case."""
    lower = [(name.lower(), value) for name, value in received]
    listed = _listed(lower)
    return [
        (name, value)
        for name, value in lower
        if name not in HOP_BY_HOP and name not in _THEIRS and name not in listed
    ]


def _listed(headers: Iterable[tuple[bytes, bytes]]) -> set[bytes]:
    """What a Connection header declares to be of this connection only."""
    return {
        token.strip().lower()
        for name, value in headers
        if name == b"connection"
        for token in value.split(b",")
    }


def client_session(limits: Limits) -> aiohttp.ClientSession:
    """No cookies, no environment proxies, no redirects to follow; connections without a bound of
    their own (admission bounds them)."""
    import aiohttp

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE, force_close=False),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect),
        max_line_size=64 << 10,
        max_field_size=64 << 10,
    )


async def open_response(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    headers: list[tuple[str, str]],
    body: bytes | None,
    *,
    idle: float,
    connect: float,
) -> aiohttp.ClientResponse:
    """The response's status and headers. Raises Died."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect, sock_read=idle)
    try:
        return await session.request(
            method, url, data=body, headers=headers, allow_redirects=False, timeout=timeout,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )  # fmt: skip
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise died_of(error) from None


def died_of(error: BaseException) -> Died:
    """The word for a failure of the connection."""
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorError):
        return Died("connect", fatal=True)
    if isinstance(error, TimeoutError):
        return Died("timeout")
    return Died("broken")


async def read_whole(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body, at most ``limit`` bytes. Raises Died."""
    import aiohttp

    parts, size = [], 0
    try:
        while part := await response.content.readany():
            parts.append(part)
            size += len(part)
            if size > limit:
                raise Died("broken")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise died_of(error) from None
    return b"".join(parts)
