"""A circuit breaker: a backend that keeps failing gets no requests until it shows life again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "half-open"]


class Breaker:
    """closed: requests pass.  open: none do, for the cooldown and until a health check succeeds.
    half-open: one request at a time is tried; its success closes, its failure opens for twice the
    cooldown (up to ``longest``)."""

    def __init__(
        self,
        failures: int = 3,
        cooldown: float = 2.0,
        longest: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failures, self.cooldown, self.longest, self.clock = failures, cooldown, longest, clock
        self.state: State = "closed"
        self._count = 0
        self._wait = cooldown
        self._opened = 0.0
        self._trying = False

    def admits(self) -> bool:
        """A request may be sent now. Changes nothing."""
        return self.state == "closed" or (self.state == "half-open" and not self._trying)

    def begin(self) -> None:
        """A request is being sent."""
        self._trying = self.state == "half-open"

    def succeeded(self) -> None:
        """A request was answered."""
        if self.state == "half-open":
            self._wait = self.cooldown
        if self.state != "open":
            self.state = "closed"
            self._count = 0
        self._trying = False

    def failed(self, *, fatal: bool = False) -> None:
        """A request or a health check failed. fatal: there is nobody there (connection refused)."""
        self._count += 1
        if self.state == "half-open":
            self._wait = min(2 * self._wait, self.longest)
            self._open()
        elif self.state == "closed" and (fatal or self._count >= self.failures):
            self._open()

    def abandoned(self) -> None:
        """A request ended without telling anything, such as a client that left."""
        self._trying = False

    def healthy(self) -> None:
        """A health check succeeded: an open breaker whose cooldown is over lets one request try."""
        if self.state == "open" and self.clock() - self._opened >= self._wait:
            self.state = "half-open"
            self._trying = False

    def _open(self) -> None:
        self.state, self._opened, self._count, self._trying = "open", self.clock(), 0, False
