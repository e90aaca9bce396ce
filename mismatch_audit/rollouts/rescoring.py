"""``--rescore`` and ``--rescore-engine``: both programs on the tokens of recorded rollouts."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.formats.base import ReadOptions, Source
from mismatch_audit.rollouts.rescore import Rescorer
from mismatch_audit.rollouts.schema import Header


class EngineRescorer(Rescorer):
    """vLLM's prefill, in a process of its own that starts with the first batch.

    It fills ``sampler_logprob`` where a source has none, and ``rescore_logprob`` where the
    sampler's own are there: with these policy lag and implementation error come apart.  log: the
    engine's output.  Raises InputError where vLLM is not installed, EngineError where it fails.
    """

    def __init__(self, model: str, *, dtype: str = "bfloat16", log: Path, **options: Any) -> None:
        super().__init__(model, dtype=dtype, side="rescore_logprob", **options)
        self._log = log
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._by = f"vLLM's prefill, {dtype}"

    @property
    def program(self) -> Any:
        if self._program is None:
            from mismatch_audit.programs.vllm_engine import VllmEngine
            from mismatch_audit.sample_model import resolve_model
            from mismatch_audit.settings import EngineSettings

            self._folder = tempfile.TemporaryDirectory(prefix="mismatch-audit-")
            self._program = VllmEngine(
                resolve_model(self.model),
                EngineSettings(dtype=self.dtype),
                workdir=Path(self._folder.name),
                log_path=self._log,
            )
        return self._program

    def score(self, batch: TokenBatch) -> TokenBatch:
        self.side = "rescore_logprob" if batch.has("sampler_logprob") else "sampler_logprob"
        return super().score(batch)

    def header(self, header: Header) -> Header:
        drawn = "sampler_logprob" not in header.lacks
        self.side = "rescore_logprob" if drawn else "sampler_logprob"
        changed = super().header(header)
        return changed if drawn else replace(changed, engine_dtype=self.dtype)

    def close(self) -> None:
        super().close()
        if self._folder is not None:
            self._folder.cleanup()


class Rescoring:
    """The programs asked for, one after the other. reference, engine: a checkpoint's folder, a hub
    id or ``sample``; None leaves that side as it is recorded."""

    def __init__(
        self, reference: str | None, engine: str | None, *, engine_dtype: str, log: Path
    ) -> None:
        self.model = reference or engine
        self.steps: list[Rescorer] = []
        if reference is not None:
            self.steps.append(Rescorer(reference))
        if engine is not None:
            self.steps.append(EngineRescorer(engine, dtype=engine_dtype, log=log))

    def options(self, options: ReadOptions) -> ReadOptions:
        """Text dumps are read with the model's own tokenizer, unless one was named."""
        if self.model is None or options.tokenizer is not None:
            return options
        from mismatch_audit.sample_model import resolve_model

        return replace(options, tokenizer=Path(resolve_model(self.model)))

    def announce(self, sources: list[Source]) -> None:
        """The sources' headers as they are once scored."""
        for source in sources:
            for step in self.steps:
                source.header = step.header(source.header)

    def score(self, batch: TokenBatch) -> TokenBatch:
        """The batch with what the programs can fill in."""
        for step in self.steps:
            batch = step.score(batch)
        return batch

    def close(self) -> None:
        """End the engine, free the weights."""
        for step in self.steps:
            step.close()
