"""Copies of requests that the reference answered, put to the engine that may not: its answers go to
the traffic log and to nobody else.

Without them a slice that was sent away would never be seen on the engine again, and could not earn
its way back.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

from mismatch_audit.routing.proxy.backends import Backend, Pool
from mismatch_audit.routing.proxy.facts import Asked
from mismatch_audit.routing.proxy.metrics import Metrics
from mismatch_audit.routing.proxy.mirror import Mirror, representable
from mismatch_audit.routing.proxy.settings import Limits
from mismatch_audit.routing.proxy.upstream import Died, open_response, read_whole

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger("mismatch_audit.router")


class Shadow:
    """share: of the requests that a rule kept from the engine.  most: copies in work at once; more
    are left out and counted, so that the engine's own clients keep their places."""

    def __init__(
        self, share: float, most: int, pool: Pool, mirror: Mirror, limits: Limits, metrics: Metrics
    ) -> None:
        self.share, self.most = share, most
        self.pool, self.mirror, self.limits, self.metrics = pool, mirror, limits, metrics
        self.tasks: set[asyncio.Task[None]] = set()
        self._random = random.Random()

    def maybe(
        self, session: aiohttp.ClientSession, engine: str, asked: Asked,
        headers: list[tuple[str, str]],
    ) -> None:  # fmt: skip
        """Begin a copy, or do not. Returns at once."""
        if self._random.random() >= self.share or not representable(asked):
            return
        backend = next((b for b in self.pool.targets.get(engine, ()) if b.breaker.admits()), None)
        if backend is None or len(self.tasks) >= self.most:
            self.metrics.mirrored.labels("shadow_left_out").inc()
            return
        task = asyncio.create_task(self._copy(session, backend, asked, headers))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _copy(
        self, session: aiohttp.ClientSession, backend: Backend, asked: Asked,
        headers: list[tuple[str, str]],
    ) -> None:  # fmt: skip
        capture = self.mirror.begin(asked, backend.target, "shadow")
        with backend.request():
            try:
                async with asyncio.timeout(self.limits.response):
                    response = await open_response(
                        session, "POST", backend.url + asked.path, headers,
                        capture.body(stream=False), idle=self.limits.response,
                        connect=self.limits.connect,
                    )  # fmt: skip
                    try:
                        body = await read_whole(response, self.limits.answer)
                    finally:
                        response.close()
                if response.status == 200:
                    capture.answer(body)
            except (Died, TimeoutError, ValueError, AttributeError, TypeError) as error:
                log.warning("backend %s: no answer for the log (%s)", backend.name,
                            type(error).__name__)  # fmt: skip
        self.mirror.finish(capture)

    async def close(self) -> None:
        """Give up what is in work."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
