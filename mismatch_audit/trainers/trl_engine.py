"""The vLLM that a TRL trainer holds in its own process: what it is, what it serves, how to push.

Only the colocated mode has one. Everything is read through public vLLM attributes and the audit's
own worker extension, whose methods are called on the worker in place.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_contracts.errors import InputError
from mismatch_audit.weights.live.extension import WeightExtension

if TYPE_CHECKING:
    from mismatch_audit.weights.sides import Side

Tokens = Sequence[Sequence[int]]


class _Worker(WeightExtension):
    """The extension's methods on a worker that was started without it."""

    def __init__(self, worker: Any) -> None:
        self.model_runner, self.vllm_config = worker.model_runner, worker.vllm_config
        self.rank = int(getattr(worker, "rank", 0))


class ColocatedEngine:
    """A ``gate.ServedEngine`` on ``trainer.vllm_generation``. Raises InputError without one.

    sync: what ``push`` of a new version runs: the trainer's own sync, so that a fault in it is
    seen and not repaired.  Older versions (the way back) are loaded from their checkpoint.
    """

    def __init__(self, generation: Any, sync: Callable[[], None] | None = None) -> None:
        llm = getattr(generation, "llm", None)
        if llm is None:
            raise InputError(
                "this trainer holds no vLLM engine in its process",
                fix="use vllm_mode='colocate', or leave out `weights` and `guard`",
            )
        self.llm, self._sync, self.version = llm, sync, 0
        executor = llm.llm_engine.model_executor
        self.worker = _Worker(executor.driver_worker)

    def facts(self) -> dict[str, Any]:
        """dtype, logprobs_mode, version: read back from the running engine."""
        import vllm

        config = self.llm.llm_engine.model_config
        mode = config.logprobs_mode
        return {
            "version": vllm.__version__,
            "dtype": str(config.dtype).removeprefix("torch."),
            "logprobs_mode": str(getattr(mode, "value", mode)),
        }

    def weight_version(self) -> int:
        """The version of the last push through this object."""
        return self.version

    def push(self, checkpoint: Path, version: int) -> None:
        """The trainer's own sync for a new version; a stored checkpoint for an older one."""
        if self._sync is not None and version > self.version:
            self._sync()
        else:
            self.worker.audit_weights_push(str(checkpoint))
            self.llm.reset_prefix_cache()
        self.version = version

    def logprobs(self, sequences: Tokens) -> list[list[float]]:
        """Teacher-forced log-probs (nats, temperature 1) of tokens 1.., prefix cache not read."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=0,
            skip_reading_prefix_cache=True,
        )  # fmt: skip
        prompts = [{"prompt_token_ids": list(ids)} for ids in sequences]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [
            [output.prompt_logprobs[i][ids[i]].logprob for i in range(1, len(ids))]
            for ids, output in zip(sequences, outputs, strict=True)
        ]

    def read_served(self) -> Side:
        """Every tensor that the engine applies, read through its layers."""
        from mismatch_audit.weights.sides import open_side

        folder = Path(tempfile.mkdtemp(prefix="mismatch-audit-readback-"))
        self.worker.audit_weights_read(str(folder))
        config = self.llm.llm_engine.model_config.hf_config.to_dict()
        (folder / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
        return open_side(folder)


class TrainedModel:
    """A ``gate.TrainerSide`` on a trainer's model (one process, weights not sharded)."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def export(self, folder: Path) -> Path:
        """The current weights as a checkpoint."""
        from safetensors.torch import save_file

        named = {n: p.detach().cpu().contiguous().clone() for n, p in self.model.named_parameters()}
        save_file(named, folder / "model.safetensors")
        self.model.config.save_pretrained(folder)
        return folder

    def logprobs(self, sequences: Tokens) -> list[list[float]]:
        """By the trainer's own program at temperature 1, one sequence at a time."""
        import torch

        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                return [self._one(torch, list(ids)) for ids in sequences]
        finally:
            self.model.train(was_training)

    def _one(self, torch: Any, ids: list[int]) -> list[float]:
        tokens = torch.tensor([ids], device=self.model.device)
        rows = self.model(input_ids=tokens).logits[0, :-1].float().log_softmax(-1)
        picked: list[float] = rows.gather(-1, tokens[0, 1:, None])[:, 0].tolist()
        return picked


def shield_llvmlite() -> None:
    """Let vLLM start on a CPU in a process that has loaded numba.

    vLLM looks through the attributes of every loaded module for ``__dict__``; llvmlite's library
    object answers to any name with a C function, and the start fails with "'_lib_fn_wrapper' object
    has no attribute 'get'". No C function is named with two underscores in front.
    """
    import sys

    module = sys.modules.get("llvmlite.binding.ffi")
    kind: Any = type(getattr(module, "lib", None))
    lookup = kind.__dict__.get("__getattr__")
    if lookup is None or getattr(lookup, "shielded", False):
        return

    def guarded(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lookup(self, name)

    guarded.shielded = True  # type: ignore[attr-defined]
    kind.__getattr__ = guarded


def cpu_sync(generation: Any) -> None:
    """Sync a trainer's weights into a colocated vLLM on a CPU.

    vLLM packs linear weights after loading there and drops the parameters' loaders, so TRL's own
    ``sync_weights`` raises AttributeError ('weight_loader'). ``reload_weights`` restores, loads and
    packs again. Tied heads are not packed again by it (a limit of vLLM's): use untied models.
    """
    params = [(n, p.detach().clone()) for n, p in generation._iter_named_params()]
    worker = generation.llm.llm_engine.model_executor.driver_worker
    worker.model_runner.reload_weights(weights_iterator=iter(params))
    generation.llm.reset_prefix_cache()


@contextmanager
def watched_requests(llm: Any) -> Iterator[list[int | None]]:
    """Prompt tokens that came from the prefix cache, one number a request of ``llm.generate``."""
    original, seen = llm.generate, list[int | None]()
    replaced = llm.__dict__.get("generate")

    def generate(*args: Any, **kwargs: Any) -> Any:
        outputs = original(*args, **kwargs)
        seen.extend(getattr(o, "num_cached_tokens", None) for o in outputs)
        return outputs

    llm.generate = generate
    try:
        yield seen
    finally:
        if replaced is None:
            del llm.generate
        else:
            llm.generate = replaced
