"""A live engine of our own: vLLM in a separate process, started for the audit."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mismatch_audit.programs.process import EngineProcess
from mismatch_audit.programs.vllm_engine import (
    engine_args,
    launch_env,
    require_vllm,
)
from mismatch_audit.settings import EngineSettings
from mismatch_audit.weights.live.base import IN_PROCESS, NextToken, Version
from mismatch_audit.weights.live.remote import ExtensionEngine

EXTENSION = "mismatch_audit.weights.live.extension.WeightExtension"
_WORKER = (sys.executable, "-m", "mismatch_audit.weights.live.worker")


class ProcessEngine(ExtensionEngine):
    """Raises InputError when vLLM is not installed, EngineError when it fails.

    dtype: of weights and activations. args: passed to ``vllm.LLM``; env: to its process.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        dtype: str = "auto",
        args: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        log_path: Path | None = None,
        startup_timeout: float = 600,
        scratch: Path | None = None,
    ) -> None:
        require_vllm()
        import torch

        super().__init__(f"{IN_PROCESS}{checkpoint}", scratch)
        cuda = torch.cuda.is_available()
        tokenizer = any(Path(checkpoint).glob("tokenizer*"))
        own = {"worker_extension_cls": EXTENSION, "skip_tokenizer_init": not tokenizer}
        settings = EngineSettings(dtype=dtype, args={**own, **(args or {})}, env=env or {})
        if log_path is None:
            log_path = Path(tempfile.mkdtemp(prefix="mismatch-audit-engine-")) / "engine.log"
        self.log_path = log_path
        self._process = EngineProcess(_WORKER, launch_env(settings.env, cuda=cuda), log_path)
        self._process.send("load", model=str(checkpoint), args=engine_args(settings, cuda=cuda))
        self._process.receive(startup_timeout)

    def _call(self, op: str, **fields: Any) -> dict[str, Any]:
        self._process.send(op, **fields)
        return self._process.receive()

    def rpc(self, method: str, *args: Any) -> list[Any]:
        return list(self._call("rpc", method=method, args=list(args))["results"])

    def weight_version(self) -> Version:
        version: Version = self._call("version")["version"]
        return version

    def set_version(self, version: Version) -> None:
        self._call("set_version", version=str(version))

    def flush(self) -> bool:
        return bool(self._call("flush")["flushed"])

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        rows: list[list[float]] = self._call("logprobs", sequences=[list(s) for s in sequences])[
            "logprobs"
        ]
        return rows

    def next_tokens(
        self, prompts: Sequence[Sequence[int]], *, use_cache: bool = True
    ) -> list[NextToken]:
        answer = self._call("next", prompts=[list(p) for p in prompts], use_cache=use_cache)
        return [
            NextToken({int(k): float(v) for k, v in item["top"].items()}, int(item["cached"]))
            for item in answer["tokens"]
        ]

    def close(self) -> None:
        self._process.close()
