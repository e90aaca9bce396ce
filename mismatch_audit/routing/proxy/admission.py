"""How many requests are in work, and how many may wait for a place."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mismatch_audit.routing.proxy.refusal import Refusal


class Admission:
    """Places for requests, first come first served."""

    def __init__(self, concurrent: int, queue: int, wait: float) -> None:
        self.concurrent, self.queue, self.wait = concurrent, queue, wait
        self.active = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place for one request. Raises Refusal (429) when the queue is full or the wait too
        long."""
        if self.active >= self.concurrent:
            await self._queue()  # hands over a place that is counted already
        else:
            self.active += 1
        try:
            yield
        finally:
            self._leave()

    async def _queue(self) -> None:
        if len(self._waiting) >= self.queue:
            raise _busy(f"{self.active} requests in work and {self.waiting} waiting")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self.wait):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._leave()  # the place came in the very moment
            else:
                self._waiting.remove(turn) if turn in self._waiting else None
            if isinstance(error, TimeoutError):
                raise _busy(f"no place within {self.wait:g} s") from None
            raise

    def _leave(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.active -= 1


def _busy(message: str) -> Refusal:
    return Refusal(429, "busy", message, [(b"retry-after", b"1")])
