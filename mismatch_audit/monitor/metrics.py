"""A watch's numbers for Prometheus. Names are documented in docs/watch.md and used by the sample
dashboard; a number that is not known gives no sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kernel_contracts.errors import InputError
from mismatch_audit.monitor.watch import JUDGED, LATE, REPEATED, View

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

PREFIX = "mismatch_audit_watch"
_VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE", "UNOBSERVED")

GAUGES = {
    "estimate": "Mean over prompts, in the metric's unit, clipped at the clause's ceiling.",
    "limit": "What the contract allows.",
    "p_fail": "Anytime-valid p-value of the promise being kept, corrected over slices.",
    "log_e": "Natural log of the alarm's current wealth.",
    "prompts": "Prompts judged.",
    "clipped_prompts": "Prompts above the clause's ceiling.",
}
"""Per clause and slice."""


@dataclass(eq=False)  # hashed by prometheus_client
class Exporter:
    """Serves the latest view on a loopback port. Raises InputError where the port is taken."""

    latest: Callable[[], View]
    failed_actions: Callable[[], dict[str, int]]
    port: int
    address: str = "127.0.0.1"

    def start(self) -> Callable[[], None]:
        """Start serving; gives the function that stops it."""
        from prometheus_client import start_http_server

        try:
            server, thread = start_http_server(
                self.port, addr=self.address, registry=self.registry()
            )
        except OSError as error:
            raise InputError(
                f"cannot listen on {self.address}:{self.port}: {error.strerror}",
                where="--metrics-port",
                fix="give a free port",
            ) from None
        self.port = server.server_port

        def stop() -> None:
            server.shutdown()
            thread.join()
            server.server_close()

        return stop

    def registry(self) -> CollectorRegistry:
        """A registry with this watch's metrics alone."""
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry()
        registry.register(self)
        return registry

    def collect(self) -> Iterator[Metric]:
        """As Prometheus asks."""
        yield from families(self.latest(), self.failed_actions())


def families(view: View, actions: dict[str, int]) -> Iterator[Metric]:
    """The metric families of a view. actions: deliveries by status."""
    from prometheus_client.core import GaugeMetricFamily

    info = GaugeMetricFamily(
        f"{PREFIX}_info", "What is watched; always 1.",
        labels=["contract", "contract_digest", "source"],
    )  # fmt: skip
    info.add_metric([view.contract, view.contract_digest, view.source], 1.0)
    yield info
    labels = ["clause", "slice", "metric"]
    for name, text in GAUGES.items():
        family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=labels)
        for s in view.standings:
            value = {"prompts": s.n, "clipped_prompts": s.clipped}.get(name, getattr(s, name, None))
            if value is not None:
                family.add_metric([s.clause, s.slice, s.metric], float(value))
        yield family
    verdict = GaugeMetricFamily(
        f"{PREFIX}_verdict", "1 for the verdict of a clause on a slice, 0 for the others.",
        labels=[*labels, "verdict"],
    )  # fmt: skip
    for s in view.standings:
        for word in _VERDICTS:
            verdict.add_metric([s.clause, s.slice, s.metric, word], float(word == s.verdict))
    yield verdict
    yield from _totals(view, actions)


def _totals(view: View, actions: dict[str, int]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    requests = CounterMetricFamily(
        f"{PREFIX}_requests", "Requests met, by outcome.", labels=["outcome"]
    )
    rest: dict[str, int] = {}
    for name, count in view.counters.items():
        if name in (JUDGED, REPEATED, LATE) or name.startswith("unusable: "):
            requests.add_metric([name], float(count))
        elif name not in ("prompts", "tokens"):
            rest[name] = count
    yield requests
    for name, text in (("prompts", "Prompts judged."), ("tokens", "Response tokens judged.")):
        yield CounterMetricFamily(f"{PREFIX}_judged_{name}", text, value=float(view.counters[name]))
    notes = CounterMetricFamily(
        f"{PREFIX}_source_notes", "Things that happened to the source.", labels=["note"]
    )
    for name, count in rest.items():
        notes.add_metric([name], float(count))
    yield notes
    yield CounterMetricFamily(f"{PREFIX}_alarms", "Alarms raised.", value=float(len(view.alarms)))
    deliveries = GaugeMetricFamily(
        f"{PREFIX}_actions", "Actions about alarms, by status.", labels=["status"]
    )
    for status in ("pending", "done", "failed"):
        deliveries.add_metric([status], float(actions.get(status, 0)))
    yield deliveries
    yield GaugeMetricFamily(
        f"{PREFIX}_backlog", "Bytes (of a log or dumps) or prompts (of a store) that wait.",
        value=float(view.backlog),
    )  # fmt: skip
    if view.last_row:
        yield GaugeMetricFamily(
            f"{PREFIX}_last_request_timestamp_seconds", "Time of the newest judged request.",
            value=_time(view.last_row),
        )  # fmt: skip


def _time(text: str) -> Any:
    return datetime.fromisoformat(text).timestamp()
