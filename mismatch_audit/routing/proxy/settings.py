"""Limits and timeouts of the proxy. Every queue and every wait has an end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes, times in seconds.

    concurrent: requests in work at once.  queue: requests that may wait for a place, and for how
    long.  first_token: until the first piece of a stream.  idle: between two pieces of a stream.
    response: until the end of an answer that is not streamed.  client: until a client has taken
    what was sent to it.
    """

    body: int = 4 << 20
    answer: int = 64 << 20
    event: int = 8 << 20
    concurrent: int = 256
    queue: int = 256
    queue_wait: float = 30.0
    body_wait: float = 30.0
    connect: float = 2.0
    first_token: float = 300.0
    idle: float = 120.0
    response: float = 600.0
    client: float = 60.0
    health_interval: float = 2.0
    health_wait: float = 5.0
    failures_to_open: int = 3
    cooldown: float = 2.0
    longest_cooldown: float = 30.0
