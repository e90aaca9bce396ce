"""``audit watch``: sequential tests over a log, dumps or a store, for as long as they grow."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kernel_contracts.contract import Contract
    from mismatch_audit.monitor.alarms import Action
    from mismatch_audit.monitor.ingest import Scorer
    from mismatch_audit.monitor.observe import BoundedClause
    from mismatch_audit.monitor.watch import View, Watch
    from mismatch_audit.monitor.watch_source import Source
    from mismatch_audit.monitor.watch_state import WatchState

TARGET = typer.Argument(
    help="A traffic log, a folder of a trainer's dumps, or a promotion store's URL.",
    show_default=False,
)
ONCE_SECONDS = 60.0
"""How long --once goes on trying actions; the rest is left to the next run."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(watch)


def watch(
    target: Annotated[str, TARGET],
    contract: Annotated[Path, typer.Option(help="Contract (YAML).")],
    state: Annotated[
        Path | None, typer.Option(help="State file. Default: beside the target.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="For a traffic log: checkpoint folder, hub id or `sample`.")
    ] = None,
    reference_dtype: Annotated[str, typer.Option(help="The reference's dtype.")] = "float32",
    weights_version: Annotated[
        str | None,
        typer.Option(help="For a traffic log: version that the reference is of, or `any`."),
    ] = None,
    format: Annotated[str, typer.Option(help="Of dumps; auto detects it.")] = "auto",
    subject: Annotated[str | None, typer.Option(help="Of a store: build or key.")] = None,
    clause: Annotated[list[str] | None, typer.Option(help="Only these clauses.")] = None,
    once: Annotated[bool, typer.Option(help="Read what is there, act, and exit.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between looks.", min=0.05)] = 2.0,
    on_alarm: Annotated[
        list[str] | None, typer.Option(help="Command to run once an alarm; repeatable.")
    ] = None,
    webhook: Annotated[
        list[str] | None, typer.Option(help="URL to POST to once an alarm; repeatable.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve Prometheus metrics on this loopback port.", min=0)
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option(help="Skip lines that are no requests, and damaged dumps.")
    ] = False,
    stop_on_alarm: Annotated[bool, typer.Option(help="Exit 1 at the first alarm.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the view as JSON at the end.")] = (
        False
    ),
    exit_zero: Annotated[bool, typer.Option(help="Exit 0 whatever the verdict.")] = False,
) -> None:
    """Watch traffic or a training run against a contract; alarm when a promise breaks.

    Tests may be looked at all the time. Exits 1 after an alarm, 0 when every promise was shown to
    be kept, 3 while that is open.
    """
    from kernel_contracts.loading import load_contract
    from mismatch_audit.monitor import alarms
    from mismatch_audit.monitor.observe import observable_clauses
    from mismatch_audit.monitor.watch import Watch, watch_identity
    from mismatch_audit.monitor.watch_state import WatchState

    loaded = load_contract(contract)
    clauses = observable_clauses(loaded, clause)
    actions = alarms.named_once(
        [*map(alarms.command, on_alarm or []), *map(alarms.webhook, webhook or [])]
    )
    source = _source(
        target, loaded, clauses, reference=reference, dtype=reference_dtype, format=format,
        weights_version=weights_version, subject=subject, skip_bad=skip_bad,
    )  # fmt: skip
    identity = watch_identity(loaded, source) | {"clauses": ",".join(c.id for c in clauses)}
    opened = WatchState(state or _state_path(target), identity)
    try:
        watched = Watch(loaded, clauses, source, opened, list(actions))
        loop = _Loop(watched, opened, actions, loaded.alpha)
        with _serving(loop, metrics_port), _until_told() as stop:
            if once:
                loop.once()
            else:
                loop.forever(stop, interval, stop_on_alarm, show=not as_json)
        view = loop.view
    finally:
        opened.close()
        source.close()
    if as_json:
        typer.echo(json.dumps(view.to_dict(), indent=1))
    elif once:
        loop.print_once()
    raise typer.Exit(0 if exit_zero else view.exit_code)


def _source(
    target: str, contract: Contract, clauses: list[BoundedClause], *, reference: str | None,
    dtype: str, format: str, weights_version: str | None, subject: str | None, skip_bad: bool,
) -> Source:  # fmt: skip
    from kernel_contracts.errors import InputError

    path = Path(target)
    if "://" in target or path.suffix in (".db", ".sqlite", ".sqlite3"):
        from mismatch_audit.monitor.watch_store import StoreSource

        return StoreSource(target, contract, subject)
    if path.is_dir():
        from mismatch_audit.monitor.watch_dumps import DumpSource

        return DumpSource(path, contract, clauses, format=format, skip_bad=skip_bad)
    if not path.parent.is_dir():
        raise InputError("no such folder", where=str(path.parent))
    if reference is None:
        raise InputError(
            "a traffic log needs the reference that re-scores it",
            where=target,
            fix="--reference CHECKPOINT (or give a folder of dumps, or a store's URL)",
        )
    if weights_version is None and "weights" in contract.pair.same:
        raise InputError(
            "the contract binds the weights: say which version the reference is of",
            where=target,
            fix="--weights-version VERSION (or `any`, to take the log on trust)",
        )
    from mismatch_audit.monitor.watch_traffic import TrafficSource

    version: int | str | None = None if weights_version == "any" else weights_version
    if isinstance(version, str) and version.isdecimal():
        version = int(version)
    return TrafficSource(
        path, contract, clauses, lambda: _reference(reference, dtype, contract),
        weights_version=version, skip_bad=skip_bad,
    )  # fmt: skip


def _reference(model: str, dtype: str, contract: Contract) -> Scorer:
    from mismatch_audit.identity import check_facts
    from mismatch_audit.monitor.rescore import Rescorer
    from mismatch_audit.settings import ReferenceSettings

    loaded = Rescorer(model, ReferenceSettings(dtype=dtype))
    check_facts("reference", dict(contract.pair.reference), loaded.facts, contract.name)
    return loaded


def _state_path(target: str) -> Path:
    from kernel_contracts.errors import InputError

    if "://" in target:
        raise InputError("a store's watch needs a state file", fix="--state FILE")
    path = Path(target).resolve()
    return path.with_name(f"{path.name}.watch.db")


class _Loop:
    """Polls, delivers, shows."""

    def __init__(
        self, watched: Watch, state: WatchState, actions: dict[str, Action], alpha: float
    ) -> None:
        self.watch, self.state, self.actions, self.alpha = watched, state, actions, alpha
        self.view: View = watched.view()
        self.deliveries = state.deliveries()
        self._seen: deque[tuple[float, int]] = deque(maxlen=10)

    def once(self) -> None:
        """Everything that is there, and the actions about it."""
        from mismatch_audit.monitor import alarms

        self.watch.step(final=True)
        end = time.time() + ONCE_SECONDS
        alarms.deliver_due(self.state, self.actions)
        while (due := alarms.next_due(self.state, self.actions)) is not None and due < end:
            time.sleep(max(0.0, due - time.time()))
            alarms.deliver_due(self.state, self.actions)
        self._look()

    def forever(
        self, stop: threading.Event, interval: float, stop_on_alarm: bool, *, show: bool
    ) -> None:
        """Until told to stop."""
        from mismatch_audit.monitor import alarms

        with self._screen(show) as draw:
            while not stop.is_set():
                for chunk in self.watch.source.poll(self.watch.snapshot.cursor, final=False):
                    self.watch.apply(chunk)
                    alarms.deliver_due(self.state, self.actions)
                    self._look()
                    draw()
                    if stop.is_set():
                        break
                alarms.deliver_due(self.state, self.actions)
                self._look()
                draw()
                if stop_on_alarm and self.view.alarms:
                    return
                stop.wait(interval)

    def _look(self) -> None:
        from mismatch_audit.monitor.watch import JUDGED

        self.view = self.watch.view()
        self.deliveries = self.state.deliveries()
        self._seen.append((time.monotonic(), self.view.counters[JUDGED]))

    @property
    def rate(self) -> float:
        """Requests a second over the last looks."""
        if len(self._seen) < 2:
            return 0.0
        (t0, n0), (t1, n1) = self._seen[0], self._seen[-1]
        return (n1 - n0) / max(t1 - t0, 1e-9)

    def statuses(self) -> dict[str, int]:
        """Deliveries by status."""
        return Counter(d.status for d in self.deliveries)

    def frame(self, width: int) -> Any:
        from mismatch_audit.monitor.live import render

        return render(self.view, self.deliveries, self.alpha, self.rate, width)

    @contextlib.contextmanager
    def _screen(self, show: bool) -> Any:
        from rich.console import Console

        console = Console()
        if not show:
            yield lambda: None
        elif console.is_terminal:
            from rich.live import Live

            with Live(self.frame(console.width), console=console, auto_refresh=False) as live:
                yield lambda: live.update(self.frame(console.width), refresh=True)
        else:
            yield self._lines()

    def _lines(self) -> Callable[[], None]:
        """Where there is no terminal: a line when something changed."""
        from mismatch_audit.monitor.live import alarm_line
        from mismatch_audit.monitor.watch import JUDGED

        last: dict[str, Any] = {"judged": -1, "alarms": len(self.view.alarms)}

        def draw() -> None:
            judged = self.view.counters[JUDGED]
            if judged != last["judged"]:
                verdicts = Counter(s.verdict for s in self.view.standings)
                shown = ", ".join(f"{n} {v}" for v, n in sorted(verdicts.items()))
                typer.echo(f"{judged} requests judged; {shown}")
            for alarm in self.view.alarms[last["alarms"] :]:
                typer.echo(alarm_line(alarm.payload))
            last.update(judged=judged, alarms=len(self.view.alarms))

        return draw

    def print_once(self) -> None:
        """The last frame."""
        from rich.console import Console

        console = Console()
        console.print(self.frame(console.width))


@contextlib.contextmanager
def _serving(loop: _Loop, port: int | None) -> Any:
    if port is None:
        yield
        return
    from mismatch_audit.monitor.metrics import Exporter

    exporter = Exporter(lambda: loop.view, loop.statuses, port)
    stop = exporter.start()
    typer.echo(f"metrics: http://127.0.0.1:{exporter.port}/metrics", err=True)
    try:
        yield
    finally:
        stop()


@contextlib.contextmanager
def _until_told() -> Any:
    """An event that SIGINT and SIGTERM set, so that the last chunk is finished."""
    stop = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
