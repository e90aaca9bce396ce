"""The table in force, read again when the file changes; a bad new one leaves the old in force."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from pathlib import Path

from kernel_contracts.errors import AuditError, InputError
from mismatch_audit.routing.decide import Decisions
from mismatch_audit.routing.proxy.metrics import Metrics
from mismatch_audit.routing.table import RoutingTable, load_routes, table_digest

log = logging.getLogger("mismatch_audit.router")


class LiveTable:
    """path: of the table.  known: names that the proxy has backends for.  error: why the file as it
    is now was not taken; empty while it is in force.

    Raises InputError for a table that cannot be read at the start, or that knows none of the
    engines.
    """

    def __init__(self, path: Path, known: Collection[str], metrics: Metrics) -> None:
        self.path, self.known, self.metrics = path, frozenset(known), metrics
        self.error = ""
        self._stamp = self._stat()
        self._take(self._checked())

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _checked(self) -> RoutingTable:
        table = load_routes(self.path)
        named = {engine.name for engine in table.engines}
        if not named & self.known:
            raise InputError(
                f"the table speaks of {', '.join(sorted(named))}, and the proxy has "
                f"{', '.join(sorted(self.known)) or 'no engine'}",
                where=str(self.path),
                fix="give --engine NAME=URL with the names of the table",
            )
        return table

    def _take(self, table: RoutingTable) -> None:
        # Engines without a backend here are left out: their requests go on to the next.
        engines = [e for e in table.engines if e.name in self.known]
        self.table = table.model_copy(update={"engines": engines})
        self.decisions = Decisions.of_table(self.table)
        self.digest = table_digest(table)
        self.metrics.table.clear()
        self.metrics.table.labels(self.digest).set(1)
        self.metrics.loaded.set(time.time())

    def reload(self) -> bool:
        """Read the file again. False where it was refused."""
        self._stamp = self._stat()
        try:
            self._take(self._checked())
        except AuditError as error:
            self.error = str(error)
            self.metrics.reloads.labels("refused").inc()
            log.error("the new table is refused, the old one stays: %s", error)
            return False
        self.error = ""
        self.metrics.reloads.labels("taken").inc()
        log.warning("table %s is in force", self.digest[:12])
        return True

    async def watch(self, interval: float = 1.0) -> None:
        """Reload when the file has changed, for ever. A file that is gone changes nothing."""
        while True:
            await asyncio.sleep(interval)
            stamp = self._stat()
            if stamp is not None and stamp != self._stamp:
                self.reload()
