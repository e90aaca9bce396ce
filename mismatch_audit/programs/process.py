"""An engine in a process of its own, behind a line protocol: one JSON object a line, both ways."""

from __future__ import annotations

import json
import select
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_contracts.errors import AuditError


class EngineError(AuditError):
    """The engine's process failed: it could not load, refused a request, or died."""


class EngineProcess:
    """A child that answers ``{"op": ...}`` lines. What it prints goes to ``log_path``.

    Every ``send`` must be followed by its ``receive``; a second send before it is a bug of ours.
    Raises EngineError, with the last lines of the log, when the child fails or ends.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        self.log_path = log_path
        self._log = log_path.open("ab")
        self._child = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=dict(env),
            text=True,
        )
        if self._child.stdin is None or self._child.stdout is None:
            raise RuntimeError("the engine's process has no pipes")
        self._to, self._from = self._child.stdin, self._child.stdout
        self._pending: str | None = None

    def send(self, op: str, **fields: Any) -> None:
        """Start an operation."""
        if self._pending is not None:
            raise RuntimeError(f"operation {self._pending!r} was not awaited")
        self._pending = op
        try:
            self._to.write(json.dumps({"op": op, **fields}) + "\n")
            self._to.flush()
        except OSError:
            self._died()

    def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """The answer to what was sent. timeout: seconds to wait for it."""
        if timeout is not None and not select.select([self._from], [], [], timeout)[0]:
            self._child.kill()
            raise EngineError(
                f"the engine did not answer {self._pending!r} within {timeout:g} s\n{self._tail()}",
                where=f"engine log {self.log_path}",
                fix="raise engine.startup_timeout, or see the log for what it waits for",
            )
        line = self._from.readline()
        operation, self._pending = self._pending, None
        if not line:
            self._died()
        reply: dict[str, Any] = json.loads(line)
        if not reply.pop("ok"):
            raise EngineError(
                f"vLLM failed in {operation!r}: {reply['error']}\n{self._tail()}",
                where=f"engine log {self.log_path}",
                fix="the settings under `engine:` are passed to vLLM as they are; see the log",
            )
        return reply

    def close(self) -> None:
        """End the child, gently first."""
        if self._child.poll() is None:
            try:
                self._to.write('{"op": "close"}\n')
                self._to.close()
                self._child.wait(timeout=10)
            except (OSError, subprocess.TimeoutExpired):
                self._child.kill()
                self._child.wait()
        self._log.close()

    def _died(self) -> None:
        code = self._child.wait(timeout=30)
        raise EngineError(
            f"the engine's process ended (exit status {code})\n{self._tail()}",
            where=f"engine log {self.log_path}",
            fix="finished chunks are kept: run the same command again with --resume",
        )

    def _tail(self, lines: int = 12) -> str:
        text = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "  its last log lines:\n" + "\n".join("    " + line[:300] for line in text[-lines:])
