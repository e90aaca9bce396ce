"""A sample of the engine's answers into the traffic log, with token ids and log-probs.

The engine is asked for both (vLLM's ``return_token_ids`` and ``logprobs``), the log gets them, and
the client gets what it asked for: parts that it did not ask for are null, as in an answer to its
own request.
"""

from __future__ import annotations

import json
import logging
import queue
import random
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kernel_contracts.errors import AuditError
from mismatch_audit.monitor.traffic import TrafficRow, TrafficStage, TrafficWriter
from mismatch_audit.routing.proxy.facts import Asked
from mismatch_audit.routing.proxy.metrics import Metrics
from mismatch_audit.routing.proxy.sse import events, payload

log = logging.getLogger("mismatch_audit.router")

CLAMPED = -9998.0
"""vLLM writes log-probs that it cannot give as -9999."""

_CHANGES_Q: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (None, 1), "best_of": (None, 1), "echo": (None, False), "suffix": (None, ""),
    "min_p": (None, 0, 0.0), "repetition_penalty": (None, 1, 1.0),
    "presence_penalty": (None, 0, 0.0), "frequency_penalty": (None, 0, 0.0),
    "logit_bias": (None, {}), "allowed_token_ids": (None, []), "bad_words": (None, []),
    "use_beam_search": (None, False), "min_tokens": (None, 0), "structured_outputs": (None,),
    "response_format": (None, {"type": "text"}), "include_reasoning": (None, True),
    "prompt_logprobs": (None,), "prompt_embeds": (None,), "logprob_token_ids": (None, []),
    "return_tokens_as_token_ids": (None, False), "watermarking": (None, False),
}  # fmt: skip
"""Values with which a row of the log says all that there is to say about how a token was drawn."""


@dataclass(frozen=True)
class MirrorSettings:
    """share: of the engine's requests, drawn at random.  temperature, top_p, top_k: what the
    engine uses where a request says nothing (its generation config)."""

    share: float = 0.01
    stage: TrafficStage = "canary"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    weights_version: str | None = None


class Mirror:
    """Draws, asks, and hands rows to a thread that writes: a slow disk delays no request. Rows that
    find the queue full are dropped and counted."""

    def __init__(
        self,
        writer: TrafficWriter,
        settings: MirrorSettings,
        metrics: Metrics,
        *,
        queue_size: int = 1000,
    ) -> None:
        self.settings, self.metrics, self._writer = settings, metrics, writer
        self._rows: queue.Queue[TrafficRow | None] = queue.Queue(queue_size)
        self._random = random.Random()
        self._thread = threading.Thread(target=self._write, name="mirror", daemon=True)
        self._thread.start()

    def draw(self, asked: Asked) -> bool:
        """This request is mirrored."""
        if self._random.random() >= self.settings.share:
            return False
        if not representable(asked):
            self.metrics.mirrored.labels("skipped").inc()
            return False
        return True

    def begin(self, asked: Asked, build: str, stage: TrafficStage | None = None) -> Capture:
        """What to send in place of the request, and where its answer is collected."""
        return Capture(asked, build, self.settings, stage or self.settings.stage)

    def finish(self, capture: Capture) -> None:
        """Queue the row of a whole answer; count one that is not."""
        try:
            row = capture.row()
        except ValueError as error:  # pydantic's ValidationError is one
            log.warning("an answer does not fit the traffic log: %s", str(error).split("\n")[0])
            row = None
        if row is None:
            self.metrics.mirrored.labels("incomplete").inc()
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self.metrics.mirrored.labels("dropped").inc()

    def _write(self) -> None:
        while (row := self._rows.get()) is not None:
            try:
                self._writer.write(row)
                self.metrics.mirrored.labels("written").inc()
            except AuditError as error:
                self.metrics.mirrored.labels("failed").inc()
                log.error("the traffic log: %s", error)

    def close(self) -> None:
        """Write what is queued, then stop."""
        self._rows.put(None)
        self._thread.join(timeout=30)
        self._writer.close()


def representable(asked: Asked) -> bool:
    """One prompt, one answer, drawn in a way that a row can state."""
    document = asked.document
    if any(document.get(name) not in plain for name, plain in _CHANGES_Q.items()):
        return False
    if asked.kind == "completion":
        prompt = document.get("prompt")
        return isinstance(prompt, str) or (
            isinstance(prompt, list) and bool(prompt) and all(isinstance(t, int) for t in prompt)
        )
    return not document.get("tools") and isinstance(document.get("messages"), list)


class Capture:
    """The answer to one mirrored request, collected while it passes."""

    def __init__(
        self, asked: Asked, build: str, settings: MirrorSettings, stage: TrafficStage
    ) -> None:
        self.asked, self.build, self.settings, self.stage = asked, build, settings, stage
        document = asked.document
        self.ids_asked = document.get("return_token_ids") is True
        given = document.get("logprobs")
        self.logprobs_asked = given is True or (isinstance(given, int) and given is not False)
        self.prompt: list[int] | None = None
        self.tokens: list[int] = []
        self.logprobs: list[float | None] = []
        self.finish_reason: str | None = None
        self.cached: int | None = None
        self.whole = False

    def body(self, *, stream: bool | None = None) -> bytes:
        """The request with token ids and log-probs asked for. stream: None leaves it as it is."""
        changed = {**self.asked.document, "return_token_ids": True}
        if stream is not None:
            changed["stream"] = stream
            changed.pop("stream_options", None)
        if not self.logprobs_asked:
            changed["logprobs"] = True if self.asked.kind == "chat" else 0
        return json.dumps(changed).encode()  # ASCII: half a surrogate pair stays an escape

    def stream(self, block: bytes) -> bytes:
        """A block of events: collected, and as the client gets it."""
        out = []
        for event in events(block):
            data = payload(event)
            if data is None:
                self.whole = self.whole or b"[DONE]" in event
                out.append(event)
                continue
            document = json.loads(data)
            self._collect(document)
            self._strip(document)
            text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
            out.append(b"data: " + text.encode("utf-8", "surrogatepass") + b"\n\n")
        return b"".join(out)

    def answer(self, body: bytes) -> bytes:
        """A whole answer: collected, and as the client gets it."""
        document = json.loads(body)
        self._collect(document)
        self._strip(document)
        self.whole = True
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode(
            "utf-8", "surrogatepass"
        )

    def spoil(self) -> None:
        """Something in the answer was not understood: no row is made of it."""
        self.prompt, self.whole = None, False

    def _collect(self, document: dict[str, Any]) -> None:
        usage = document.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        if isinstance(details.get("cached_tokens"), int):
            self.cached = details["cached_tokens"]
        choices = document.get("choices") or []
        for holder in (document, *choices):
            if holder.get("prompt_token_ids") is not None:
                self.prompt = holder["prompt_token_ids"]
        for choice in choices:
            self.tokens += choice.get("token_ids") or []
            self.logprobs += _logprobs(choice.get("logprobs"))
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _strip(self, document: dict[str, Any]) -> None:
        choices = document.get("choices") or []
        if not self.ids_asked:
            for holder in (document, *choices):
                for name in ("prompt_token_ids", "token_ids"):
                    if name in holder:
                        holder[name] = None
        if not self.logprobs_asked:
            for choice in choices:
                if "logprobs" in choice:
                    choice["logprobs"] = None

    def row(self) -> TrafficRow | None:
        """The row; None unless the answer came whole. Raises ValueError for an impossible one."""
        if not self.whole or not self.prompt or self.finish_reason is None:
            return None
        if len(self.logprobs) != len(self.tokens):
            return None
        document, settings = self.asked.document, self.settings
        metadata = {
            key: str(value).lower() if isinstance(value, bool) else value
            for key, value in self.asked.facts.metadata.items()
        }
        return TrafficRow(
            request_id=uuid.uuid4().hex,
            stage=self.stage,
            engine_build=self.build,
            prompt_token_ids=tuple(self.prompt),
            response_token_ids=tuple(self.tokens),
            engine_logprobs=tuple(self.logprobs),
            weights_version=settings.weights_version,
            temperature=float(_given(document.get("temperature"), settings.temperature)),
            top_p=float(_given(document.get("top_p"), settings.top_p)),
            top_k=int(_given(document.get("top_k"), settings.top_k)),
            finish_reason=self.finish_reason,
            n_cached_tokens=self.cached,
            metadata=metadata,
        )


def _given(value: Any, default: float) -> float:
    return default if value is None else value


def _logprobs(part: Any) -> list[float | None]:
    """Of the tokens of one choice or chunk: both shapes that OpenAI's API has. What is not a
    log-prob is unknown."""
    if not isinstance(part, dict):
        return []
    if isinstance(part.get("content"), list):
        values = [entry.get("logprob") for entry in part["content"]]
    else:
        values = part.get("token_logprobs") or []
    return [v if isinstance(v, int | float) and v > CLAMPED else None for v in values]
