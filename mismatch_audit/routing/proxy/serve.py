"""From the command's options to a running server."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kernel_contracts.errors import InputError
from mismatch_audit.routing.proxy.admission import Admission
from mismatch_audit.routing.proxy.backends import Pool, checked_url
from mismatch_audit.routing.proxy.facts import Source
from mismatch_audit.routing.proxy.forward import Proxy
from mismatch_audit.routing.proxy.live import LiveTable
from mismatch_audit.routing.proxy.metrics import Metrics
from mismatch_audit.routing.proxy.mirror import Mirror, MirrorSettings
from mismatch_audit.routing.proxy.settings import Limits
from mismatch_audit.routing.proxy.shadow import Shadow
from mismatch_audit.routing.table import REFERENCE


@dataclass(frozen=True)
class Options:
    """What ``audit serve-router`` was told. engines: name -> URLs of its replicas."""

    routes: Path
    engines: dict[str, list[str]]
    references: list[str]
    limits: Limits = field(default_factory=Limits)
    source: Source = "both"
    mirror: Path | None = None
    mirror_settings: MirrorSettings = field(default_factory=MirrorSettings)
    shadow_share: float = 0.0
    shadow_most: int = 8
    handover: bool = False


def read_engines(given: Iterable[str]) -> dict[str, list[str]]:
    """``NAME=URL`` options; a name given again is another replica. Raises InputError."""
    found: dict[str, list[str]] = {}
    for text in given:
        name, separator, url = text.partition("=")
        if not separator or not name or name == REFERENCE:
            raise InputError(
                f"not NAME=URL: {text!r}", where="--engine",
                fix="--engine engine=http://127.0.0.1:8000, and --reference URL for the reference",
            )  # fmt: skip
        found.setdefault(name, []).append(checked_url(url, "--engine"))
    return found


def build_proxy(options: Options) -> Proxy:
    """Everything read and checked; nothing listens yet. Raises InputError."""
    metrics = Metrics()
    live = LiveTable(options.routes, options.engines, metrics)
    pool = Pool({**options.engines, REFERENCE: options.references}, options.limits)
    limits = options.limits
    admission = Admission(limits.concurrent, limits.queue, limits.queue_wait)
    metrics.watch(pool.backends, lambda: admission.active, lambda: admission.waiting)
    mirror = None
    if options.mirror is not None:
        from mismatch_audit.monitor.traffic import TrafficWriter

        mirror = Mirror(TrafficWriter(options.mirror), options.mirror_settings, metrics)
    shadow = None
    if options.shadow_share > 0:
        if mirror is None:
            raise InputError(
                "a shadow without a log", where="--shadow-share", fix="add --mirror LOG"
            )
        shadow = Shadow(
            options.shadow_share, options.shadow_most, pool, mirror, limits, metrics
        )  # fmt: skip
    return Proxy(
        limits, pool, live, metrics, admission, options.source, mirror, shadow, options.handover
    )


def serve(options: Options, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT. Raises InputError when the address is taken."""
    import socket

    import uvicorn

    from mismatch_audit.routing.proxy.app import application

    proxy = build_proxy(options)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)  # from here on a client waits and is not refused
    except OSError as error:
        raise InputError(
            f"cannot listen on {host}:{port}: {error.strerror}", fix="give another --port"
        ) from error
    at = listener.getsockname()[:2]
    _say(f"routing by {options.routes} ({proxy.live.digest[:12]}) on http://{at[0]}:{at[1]}")
    for warning in warnings(proxy, host):
        _say(f"note: {warning}")
    config = uvicorn.Config(
        application(proxy), access_log=False, log_level="warning", server_header=False,
        date_header=False, proxy_headers=False, timeout_graceful_shutdown=30, backlog=2048,
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=[listener])


def warnings(proxy: Proxy, host: str) -> Sequence[str]:
    """What an operator should know at the start."""
    found = []
    if host not in ("127.0.0.1", "::1", "localhost"):
        found.append(f"{host} is reachable from elsewhere; clients are not authenticated here")
    table = proxy.live.table
    unused = [name for name in proxy.pool.targets if name != REFERENCE and not table.engine(name)]
    if unused:
        found.append(f"not in the table, so never asked: {', '.join(unused)}")
    for engine in table.engines:
        if engine.rerouted.lower == 1.0:
            found.append(f"{engine.name} may answer nothing")
        late = [r.slice for r in engine.rules if r.level == "decode"]
        if late and not proxy.handover:
            found.append(
                f"{', '.join(late)} is known in decode only: requests that it could hold go to "
                "the reference whole; with --handover it takes over at the first such token"
            )
    return found


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
