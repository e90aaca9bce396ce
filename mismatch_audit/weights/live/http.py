"""A live engine that somebody else serves: vLLM's OpenAI-compatible server in development mode.

    VLLM_SERVER_DEV_MODE=1 vllm serve CKPT --worker-extension-cls \\
        mismatch_audit.weights.live.extension.WeightExtension

Development mode opens /collective_rpc, /server_info, /weight_info, /update_weight_version and
/reset_prefix_cache to whoever reaches the port: bind it to the loopback interface.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from kernel_contracts.errors import InputError
from mismatch_audit.programs.process import EngineError
from mismatch_audit.weights.live.base import NextToken, Version
from mismatch_audit.weights.live.process import EXTENSION
from mismatch_audit.weights.live.remote import ExtensionEngine

_LARGEST_ANSWER = 256 << 20
_HITS = re.compile(r"^vllm:prefix_cache_hits(?:_total)?\{[^}]*\}\s+([0-9.eE+]+)$", re.MULTILINE)
TOP = 5
FLAG = f"--worker-extension-cls {EXTENSION}"
START = f"VLLM_SERVER_DEV_MODE=1 vllm serve CKPT {FLAG}"


class HttpEngine(ExtensionEngine):
    """Raises InputError for a server without development mode or without our extension,
    EngineError when it does not answer. timeout: seconds per request."""

    def __init__(self, url: str, *, timeout: float = 300, scratch: Path | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise InputError(
                "not a server's address", where=url, fix="for example http://127.0.0.1:8000"
            )
        super().__init__(url.rstrip("/"), scratch)
        self._timeout = timeout
        models = self._json("GET", "/v1/models").get("data") or [{}]
        self._model = str(models[0].get("id", ""))
        status, text = self._request("GET", "/weight_info")
        if status == 404:
            raise InputError("the server is not in development mode", where=url, fix=START)
        if status != 200:
            raise EngineError(f"/weight_info answered {status}: {text[:200]}", where=url)
        try:
            self.facts()
        except EngineError as error:
            raise InputError(
                "the server's workers lack the audit's extension, without which weights can "
                "neither be read back nor probed",
                where=url,
                fix=f"start it with: {START}",
            ) from error

    def _request(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        request = Request(
            self.spec + path,
            data=data if data is not None or method == "GET" else b"",
            headers={"Content-Type": "application/json"},
            method=method,
        )
        try:
            with urlopen(request, timeout=self._timeout) as response:
                answer = response.read(_LARGEST_ANSWER + 1)
                status = int(response.status)
        except HTTPError as error:
            return error.code, error.read(4096).decode("utf-8", "replace")
        except (URLError, TimeoutError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise EngineError(
                f"the server does not answer {path}: {reason}",
                where=self.spec,
                fix="check the address, and that the server has finished loading",
            ) from error
        if len(answer) > _LARGEST_ANSWER:
            raise EngineError(f"{path} answered more than 256 MiB", where=self.spec)
        return status, answer.decode("utf-8", "replace")

    def _json(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        status, text = self._request(method, path, body)
        if status != 200:
            raise EngineError(f"{path} answered {status}: {text[:300]}", where=self.spec)
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise EngineError(f"{path} did not answer JSON: {error}", where=self.spec) from error
        if not isinstance(document, dict):
            raise EngineError(f"{path} did not answer an object", where=self.spec)
        return document

    def rpc(self, method: str, *args: Any) -> list[Any]:
        body = {"method": method, "args": list(args), "timeout": self._timeout}
        return list(self._json("POST", "/collective_rpc", body).get("results") or [])

    def weight_version(self) -> Version:
        version: Version = self._json("GET", "/weight_info").get("weight_version")
        return version

    def set_version(self, version: Version) -> None:
        self._json("POST", "/update_weight_version", {"new_version": str(version)})

    def flush(self) -> bool:
        return bool(self._json("POST", "/reset_prefix_cache").get("success"))

    def _complete(self, ids: Sequence[int], **fields: Any) -> dict[str, Any]:
        body = {
            "model": self._model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0,
            "return_token_ids": True,
            **fields,
        }
        answer = self._json("POST", "/v1/completions", body)
        choice: dict[str, Any] = answer["choices"][0]
        sent = choice.get("prompt_token_ids")
        if sent is not None and list(sent) != list(ids):
            raise EngineError("the server scored other tokens than were sent", where=self.spec)
        return {**choice, "usage": answer.get("usage") or {}}

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        out = []
        for ids in sequences:
            rows = self._complete(ids, prompt_logprobs=0, cache_salt=uuid.uuid4().hex)[
                "prompt_logprobs"
            ]
            out.append([float(rows[i][str(ids[i])]["logprob"]) for i in range(1, len(ids))])
        return out

    def _hits(self) -> int | None:
        status, text = self._request("GET", "/metrics")
        found = _HITS.findall(text) if status == 200 else []
        return round(sum(float(value) for value in found)) if found else None

    def _settled_hits(self) -> int | None:
        """Hits so far, once the counter stands still: the server counts a moment after it answers,
        and an earlier request's hits must not be taken for the next one's."""
        hits = self._hits()
        for _ in range(10):
            time.sleep(0.2)
            earlier, hits = hits, self._hits()
            if hits == earlier:
                break
        return hits

    def _counted_since(self, before: int) -> int | None:
        """Hits since then. The server counts a moment after it answers: ask again before "none"."""
        for pause in (0.0, 0.1, 0.3, 1.0):
            time.sleep(pause)
            after = self._hits()
            if after is None or after > before:
                break
        return after - before if after is not None else None

    def next_tokens(
        self, prompts: Sequence[Sequence[int]], *, use_cache: bool = True
    ) -> list[NextToken]:
        """Cached tokens come from the answer's usage where the server gives it, else from the
        difference of its hit counter (which other clients' requests would blur)."""
        tokens = []
        for ids in prompts:
            salt = {} if use_cache else {"cache_salt": uuid.uuid4().hex}
            before = self._settled_hits()
            choice = self._complete(ids, logprobs=TOP, return_tokens_as_token_ids=True, **salt)
            details = choice["usage"].get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens")
            if cached is None and before is not None:
                cached = self._counted_since(before)
            top = choice["logprobs"]["top_logprobs"][0]
            tokens.append(
                NextToken(
                    {int(key.removeprefix("token_id:")): float(v) for key, v in top.items()},
                    cached,
                )
            )
        return tokens

    def facts(self) -> dict[str, Any]:
        facts = super().facts()
        if "server" not in facts:
            info = self._json("GET", "/server_info?config_format=json").get("vllm_config") or {}
            self._facts = {**(self._facts or {}), "server": _summary(info)}
            facts = super().facts()
        return facts

    def close(self) -> None:
        """The server was there before and stays."""


def _summary(config: dict[str, Any]) -> dict[str, Any]:
    """The few fields of the server's own configuration that decide numbers."""
    wanted = {
        "model_config": ("model", "dtype", "quantization", "logprobs_mode", "max_logprobs"),
        "cache_config": ("cache_dtype", "block_size", "enable_prefix_caching"),
        "parallel_config": ("tensor_parallel_size", "pipeline_parallel_size"),
    }
    return {
        f"{part}.{key}": (config.get(part) or {}).get(key)
        for part, keys in wanted.items()
        for key in keys
        if key in (config.get(part) or {})
    }
