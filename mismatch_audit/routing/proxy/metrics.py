"""Prometheus metrics of the proxy, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from mismatch_audit.routing.proxy.backends import Backend

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Names start with ``audit_router_``. Labels come from the table and the command line, never
    from a request, so that clients cannot add series."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        one: dict[str, Any] = {"namespace": "audit_router", "registry": self.registry}
        self.requests = Counter(
            "requests", "Answers by backend and status.", ["backend", "status"], **one
        )  # fmt: skip
        self.routed = Counter(
            "routed", "Requests by where the table sent them, and the slice that decided.",
            ["target", "slice"], **one,
        )  # fmt: skip
        self.fallbacks = Counter(
            "fallbacks", "Requests for an engine that the reference answered: it was down.",
            ["target"], **one,
        )  # fmt: skip
        self.handovers = Counter(
            "handovers", "Answers that the reference took over, and the slice that decided.",
            ["target", "slice"], **one,
        )  # fmt: skip
        self.retries = Counter(
            "retries", "Attempts that died before anything was sent.", ["backend", "reason"], **one
        )  # fmt: skip
        self.broken = Counter(
            "broken_streams", "Answers that broke off after they had begun.", ["backend"], **one
        )
        self.refused = Counter("refused", "Requests that were not served.", ["reason"], **one)
        self.gone = Counter("client_gone", "Clients that left before the end.", **one)
        self.mirrored = Counter("mirrored", "Rows of the traffic log by result.", ["result"], **one)
        self.reloads = Counter("reloads", "Times the table was read again.", ["result"], **one)
        self.first = Histogram(
            "first_token_seconds", "From the request's arrival to the first piece sent.",
            ["backend"], buckets=_SECONDS, **one,
        )  # fmt: skip
        self.up = Gauge("backend_up", "1 while requests may be sent there.", ["backend"], **one)
        self.inflight = Gauge("backend_requests", "Requests in work.", ["backend"], **one)
        self.active = Gauge("active_requests", "Requests in work.", **one)
        self.waiting = Gauge("waiting_requests", "Requests that wait for a place.", **one)
        self.table = Gauge("table_info", "The table in force; always 1.", ["digest"], **one)
        self.loaded = Gauge("table_loaded_timestamp_seconds", "Unix time.", **one)

    def watch(
        self, backends: Iterable[Backend], active: Callable[[], int], waiting: Callable[[], int]
    ) -> None:
        """Gauges are read when they are asked for, and cost a request nothing."""
        for backend in backends:
            labels = backend.name
            self.up.labels(labels).set_function(
                lambda b=backend: float(b.breaker.state != "open")  # type: ignore[misc]
            )
            self.inflight.labels(labels).set_function(
                lambda b=backend: float(b.inflight)  # type: ignore[misc]
            )
        self.active.set_function(lambda: float(active()))
        self.waiting.set_function(lambda: float(waiting()))

    def text(self) -> bytes:
        return generate_latest(self.registry)
