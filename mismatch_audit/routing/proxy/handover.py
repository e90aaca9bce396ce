"""Rules that are known in decode: the engine answers until a token that it may not give, and the
reference takes over there.

The engine is asked for token ids and its two best log-probs. Each token is held against the rules
before it is passed on; the first that a rule keeps from the engine ends its part, and the reference
goes on from the ids so far, as from a prompt. What the client gets is one stream.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mismatch_audit.routing.decide import Decider
from mismatch_audit.routing.matching import Facts
from mismatch_audit.routing.proxy.facts import Asked
from mismatch_audit.routing.proxy.mirror import representable
from mismatch_audit.routing.proxy.sse import events, payload


def eligible(asked: Asked, decider: Decider) -> bool:
    """One streamed completion of one prompt that only decode rules concern, and whose client wants
    neither log-probs nor stop texts, which a seam could cut."""
    document = asked.document
    return (
        asked.kind == "completion"
        and asked.stream
        and document.get("logprobs") is None
        and not document.get("stop")
        and isinstance(document.get("max_tokens", 16), int)
        and representable(asked)
        and decider.undecided(asked.facts)
    )


class Unclear(Exception):
    """The engine's account lacks what the rules need."""


@dataclass
class Handover:
    """One such request.

    settled: tokens whose text the client has; the reference goes on from there, so that a
    character of several tokens is not cut.  slice: that ended the engine's part, "" before.
    finished: the engine has given its last token.
    """

    asked: Asked
    decider: Decider
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    settled: int = 0
    slice: str = ""
    finished: bool = False
    id: Any = None

    def engine_body(self) -> bytes:
        """The request with what the rules need asked for."""
        changed = {
            **self.asked.document, "return_token_ids": True, "logprobs": 2,
            "return_tokens_as_token_ids": True,
        }  # fmt: skip
        return json.dumps(changed).encode()

    def reference_body(self) -> bytes:
        """The rest: the prompt and the settled tokens as ids, fewer tokens to go."""
        budget = int(self.asked.document.get("max_tokens", 16))
        changed = {
            **self.asked.document, "prompt": self.prompt + self.tokens[: self.settled],
            "max_tokens": budget - self.settled, "add_special_tokens": False,
        }  # fmt: skip
        return json.dumps(changed).encode()

    def engine_events(self, block: bytes) -> bytes:
        """What the client may get of a block. Sets ``slice`` at the first token that a rule keeps
        from the engine: nothing of its event or later ones is passed on. Raises Unclear."""
        out = []
        for event in events(block):
            data = payload(event)
            if data is None:
                out.append(event)
                continue
            document = json.loads(data)
            self.id = self.id or document.get("id")
            for choice in document.get("choices") or []:
                if not self._admit(choice):
                    return b"".join(out)
            out.append(self._as_asked(document))
        return b"".join(out)

    def _admit(self, choice: dict[str, Any]) -> bool:
        if choice.get("prompt_token_ids"):
            self.prompt = choice["prompt_token_ids"]
        ids = choice.get("token_ids") or []
        for step, (token, decode) in enumerate(zip(ids, _accounts(choice, len(ids)), strict=True)):
            position = len(self.tokens) + step
            context = len(self.prompt) + position
            if not self.prompt:
                raise Unclear
            spans = {
                "position": (float(position), float(position)),
                "context_length": (float(context), float(context)),
            }
            facts = Facts(self.asked.facts.metadata, spans, {**decode, "token_id": token})
            rule = self.decider.denied(facts)
            if rule is not None:
                self.slice = rule.slice
                return False
        self.tokens += ids
        self.finished = self.finished or choice.get("finish_reason") is not None
        if choice.get("text") or self.finished:
            self.settled = len(self.tokens)
        return True

    def reference_events(self, block: bytes) -> bytes:
        """A block of the reference's part, as of the same answer."""
        out = []
        for event in events(block):
            data = payload(event)
            if data is None:
                out.append(event)
                continue
            document = json.loads(data)
            if self.id is not None:
                document["id"] = self.id
            for choice in document.get("choices") or []:
                if "prompt_token_ids" in choice:  # its prompt is not the client's
                    choice["prompt_token_ids"] = None
            usage = document.get("usage")
            if isinstance(usage, dict):
                usage["prompt_tokens"] = usage.get("prompt_tokens", 0) - self.settled
                usage["completion_tokens"] = usage.get("completion_tokens", 0) + self.settled
            out.append(self._as_asked(document))
        return b"".join(out)

    def _as_asked(self, document: dict[str, Any]) -> bytes:
        ids = self.asked.document.get("return_token_ids") is True
        for choice in document.get("choices") or []:
            choice["logprobs"] = None
            if not ids:
                choice |= {k: None for k in ("token_ids", "prompt_token_ids") if k in choice}
        return b"data: " + _bytes(document) + b"\n\n"


def _accounts(choice: Mapping[str, Any], n: int) -> list[dict[str, float]]:
    """The engine's columns of each token of a chunk. Raises Unclear."""
    given = choice.get("logprobs") or {}
    top, own = given.get("top_logprobs") or [], given.get("token_logprobs") or []
    if len(top) != n or len(own) != n:
        raise Unclear
    found = []
    for best, logprob in zip(top, own, strict=True):
        ranked = sorted(((v, k) for k, v in (best or {}).items()), reverse=True)
        if len(ranked) < 2 or not isinstance(logprob, int | float):
            raise Unclear
        first, name = ranked[0]
        account = {
            "engine_margin": first - ranked[1][0], "engine_logprob": float(logprob),
            "engine_prob": math.exp(min(logprob, 0.0)), "engine_top1_logprob": first,
        }  # fmt: skip
        number = name.removeprefix("token_id:")
        if number.isdecimal():
            account["engine_top1"] = float(number)
        found.append(account)
    return found


def _bytes(document: Any) -> bytes:
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")
