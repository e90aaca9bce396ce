"""Server-sent events in whole: a stream that breaks off never leaves half an event behind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from mismatch_audit.routing.proxy.refusal import error_event

DONE = b"data: [DONE]"
ERROR = b'data: {"error"'


class TooLong(Exception):
    """An event beyond the limit."""


class EventStream:
    """Blocks of one or more whole events from a reader of bytes.

    read: gives bytes, b"" at the end.  done: ``[DONE]`` was seen, so that the answer is whole.
    """

    def __init__(self, read: Callable[[], Awaitable[bytes]], limit: int) -> None:
        self._read, self._limit = read, limit
        self._rest = b""
        self.done = False

    async def block(self) -> bytes:
        """The next whole events, b"" at the end. Raises TooLong, and what ``read`` raises."""
        while True:
            data = await self._read()
            if not data:
                return b""
            if self._rest:
                data = self._rest + data
            end = _end(data)
            if not end:
                self._rest = data
                if len(data) > self._limit:
                    raise TooLong
                continue
            self._rest = data[end:]
            found = data[:end] if self._rest else data
            if DONE in found[-64:]:
                self.done = True
            return found


def _end(data: bytes) -> int:
    """Where the last whole event ends, 0 without one."""
    end = data.rfind(b"\n\n") + 2
    if b"\r" in data:  # JSON holds none: only other line ends do
        end = max(end, data.rfind(b"\r\n\r\n") + 4)
        return end if end > 3 or data.endswith(b"\n\n") else 0
    return end if end > 1 else 0


def events(block: bytes) -> list[bytes]:
    """The events of a block, each with its blank line."""
    normal = block.replace(b"\r\n", b"\n")
    return [part + b"\n\n" for part in normal.split(b"\n\n") if part.strip(b"\n")]


def payload(event: bytes) -> bytes | None:
    """The data of an event; None for a comment or ``[DONE]``."""
    lines = [line[5:].lstrip(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    data = b"\n".join(lines)
    return None if not data or data == b"[DONE]" else data


def broken(message: str) -> bytes:
    """What a client gets in place of the rest of a stream that broke off."""
    return error_event(502, "upstream_error", message)
