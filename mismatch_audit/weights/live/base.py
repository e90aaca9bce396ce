"""A running engine as the weight audit sees it: push to it, probe it, read back what it applies.

Everything that is read comes through the layers (see ``probes.py``), never from parameters alone:
on a CPU vLLM packs linear weights away and leaves parameters of zero elements, and on a GPU a
quantised layer multiplies with a repacked copy.

    with open_engine("vllm:checkpoints/step-12") as engine: ...      # our own process
    with open_engine("http://127.0.0.1:8000") as engine: ...         # a running server
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kernel_contracts.errors import InputError

if TYPE_CHECKING:
    from types import TracebackType

    import torch

Version = int | str | None
IN_PROCESS = "vllm:"
URL_SCHEMES = ("http://", "https://")


@dataclass(frozen=True)
class PushReceipt:
    """What the engine answered to one push. It is a claim; the checks are the evidence.

    tensors, bytes: what was sent. version: what the engine reports afterwards. flushed: whether
    the prefix cache said that it was emptied (None: nobody asked it to). not_loaded: parameters
    that the loader itself says it was not given.
    """

    checkpoint: str
    version: Version
    tensors: int
    bytes: int
    seconds: float
    flushed: bool | None = None
    not_loaded: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerInfo:
    """A linear layer of the engine, by the engine's (fused) module name.

    parts: canonical leaves it holds, in order. in_features, out_features: of this rank.
    dtype: of its activations. scheme: how its weight is stored (``channel_int8``, ...), None when
    it is not quantised, "unknown" when it is and we cannot decode it. method: the engine's class.
    """

    name: str
    parts: tuple[str, ...]
    in_features: int
    out_features: int
    dtype: str
    scheme: str | None
    method: str


@dataclass(frozen=True)
class NextToken:
    """The engine's own next-token row after a prompt, on the serving path (prefix cache allowed).

    top: token id -> log-prob (nats). cached_tokens: prompt tokens that came from the prefix cache;
    None when this engine does not tell.
    """

    top: Mapping[int, float] = field(default_factory=dict)
    cached_tokens: int | None = None


class LiveEngine(Protocol):
    """A running engine. Raises EngineError when it fails, InputError for what cannot be sent."""

    @property
    def spec(self) -> str:
        """How it was addressed, for reports."""

    def facts(self) -> dict[str, Any]:
        """What really runs, read back: program, version, dtype, kv_cache_dtype, quantization,
        logprobs_mode, weight_version, device, ranks, config (the model's config.json), ..."""

    def weight_version(self) -> Version:
        """The version of the served weights as the engine reports it; None when it has none."""

    def push(self, checkpoint: Path, version: Version = None, *, flush: bool = True) -> PushReceipt:
        """Load a checkpoint folder's tensors into the running engine, flush the prefix cache, set
        the version (None leaves it). A checkpoint may hold some tensors only: others are kept."""

    def flush(self) -> bool:
        """Empty the prefix cache; whether the engine says that it did."""

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Teacher-forced log-probs (nats) of tokens 1.. of each sequence, prefix cache not read."""

    def next_tokens(
        self, prompts: Sequence[Sequence[int]], *, use_cache: bool = True
    ) -> list[NextToken]:
        """The next-token row after each prompt, one request at a time."""

    def names(self) -> dict[str, LayerInfo]:
        """Linear layers by the engine's module name."""

    def effective_weight(self, layer: str) -> torch.Tensor:
        """The matrix ``[out, in]`` that a layer applies, by identity rows through its kernel."""

    def apply(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """``{layer: x [n, in]}`` -> ``{layer: x W^T [n, out]}`` through the live kernels."""

    def read_back(self, folder: Path) -> Path:
        """Write what the engine applies as a checkpoint folder (one file per rank) that
        ``open_side`` reads: quantised layers as payload and scales, others by effective weight,
        the embedding through its look-up, norms and biases from their parameters."""

    def parameters(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Live parameters and buffers: (shape, dtype), as the engine lists them."""

    def own_checksums(self) -> dict[str, str] | None:
        """The engine's own weight digests, to be distrusted; None when it has none."""

    def fill_scales(self) -> int:
        """Mark every scale that can be reached as unwritten; how many were marked."""

    def close(self) -> None:
        """End what ``open_engine`` started; a server that ran before is left running."""

    def __enter__(self) -> LiveEngine: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def is_engine_spec(text: str) -> bool:
    """Whether a command-line argument names a live engine rather than a file."""
    return text.startswith((IN_PROCESS, *URL_SCHEMES))


def open_engine(spec: str, **options: Any) -> LiveEngine:
    """``vllm:CHECKPOINT_DIR`` (or a bare folder): vLLM in a process of our own. ``http://host:port``:
    a vLLM server that was started with VLLM_SERVER_DEV_MODE=1 and our worker extension.

    options: of the in-process engine: dtype, args, env, log_path. Raises InputError for a spec that
    is neither, EngineError when the engine does not come up.
    """
    if spec.startswith(URL_SCHEMES):
        from mismatch_audit.weights.live.http import HttpEngine

        return HttpEngine(spec, **options)
    folder = local_checkpoint(spec.removeprefix(IN_PROCESS))
    if not (folder / "config.json").is_file():
        raise InputError(
            "no engine: neither http://host:port nor a checkpoint folder with a config.json",
            where=spec,
            fix="give vllm:CHECKPOINT_DIR or the address of a running server",
        )
    from mismatch_audit.weights.live.process import ProcessEngine

    return ProcessEngine(folder, **options)


def local_checkpoint(name: str) -> Path:
    """A checkpoint folder; ``sample`` is the sample model's, built when absent."""
    from mismatch_audit.sample_model import SAMPLE_NAME, sample_model_path

    return sample_model_path() if name == SAMPLE_NAME else Path(name).expanduser()
