"""The backends behind each name, their health, and who is asked next."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kernel_contracts.errors import InputError
from mismatch_audit.routing.proxy.breaker import Breaker
from mismatch_audit.routing.proxy.settings import Limits
from mismatch_audit.routing.proxy.upstream import Died, open_response, read_whole
from mismatch_audit.routing.table import REFERENCE

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger("mismatch_audit.router")


class Backend:
    """One server. name: engine (or reference) and replica, for metrics; the URL is never shown."""

    def __init__(self, target: str, name: str, url: str, limits: Limits) -> None:
        self.target, self.name, self.url = target, name, url
        self.inflight = 0
        self.breaker = Breaker(limits.failures_to_open, limits.cooldown, limits.longest_cooldown)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request in work, from its sending to its end."""
        self.inflight += 1
        self.breaker.begin()
        try:
            yield
        finally:
            self.inflight -= 1
            self.breaker.abandoned()


class Pool:
    """All backends by target."""

    def __init__(self, urls: Mapping[str, Iterable[str]], limits: Limits) -> None:
        self.limits = limits
        self.targets: dict[str, list[Backend]] = {}
        for target, replicas in urls.items():
            found = list(replicas)
            self.targets[target] = [
                Backend(target, target if len(found) == 1 else f"{target}-{i}", url, limits)
                for i, url in enumerate(found)
            ]

    @property
    def backends(self) -> list[Backend]:
        return [b for replicas in self.targets.values() for b in replicas]

    def candidates(self, target: str) -> Iterator[Backend]:
        """Who may answer, best first: replicas of the target with the fewest requests, then those
        of the reference. An engine that was not chosen is never asked in place of another."""
        for name in dict.fromkeys((target, REFERENCE)):
            tried: list[Backend] = []
            while True:
                free = [
                    b for b in self.targets.get(name, ()) if b not in tried and b.breaker.admits()
                ]
                if not free:
                    break
                best = min(free, key=lambda b: b.inflight)
                tried.append(best)
                yield best

    def alive(self, target: str) -> bool:
        return any(b.breaker.state != "open" for b in self.targets.get(target, ()))

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Check every backend's /health for ever."""
        await asyncio.gather(*(self._watch_one(session, b) for b in self.backends))

    async def _watch_one(self, session: aiohttp.ClientSession, backend: Backend) -> None:
        while True:
            await self.check(session, backend)
            await asyncio.sleep(self.limits.health_interval)

    async def check(self, session: aiohttp.ClientSession, backend: Backend) -> None:
        """One health check."""
        before = backend.breaker.state
        try:
            async with asyncio.timeout(self.limits.health_wait):
                response = await open_response(
                    session, "GET", f"{backend.url}/health", [], None,
                    idle=self.limits.health_wait, connect=self.limits.connect,
                )  # fmt: skip
                try:
                    await read_whole(response, 1 << 20)
                finally:
                    response.release()
            if response.status == 200:
                backend.breaker.healthy()
            else:
                backend.breaker.failed()
        except Died as died:
            backend.breaker.failed(fatal=died.fatal)
        except TimeoutError:
            backend.breaker.failed()
        if backend.breaker.state != before:
            log.warning("backend %s: %s -> %s", backend.name, before, backend.breaker.state)


def checked_url(text: str, option: str) -> str:
    """A backend's base URL without a trailing slash or ``/v1``. Raises InputError."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise InputError(f"not an http(s) URL: {text!r}", where=option, fix="http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise InputError(
            "a URL with credentials", where=option,
            fix="let clients send Authorization; it is passed on",
        )  # fmt: skip
    return text.rstrip("/").removesuffix("/v1").rstrip("/")
