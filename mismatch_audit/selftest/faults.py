"""The menu: each fault is one that has happened in a training run, made small enough to hide.

A fault touches one place: the model while it runs, the prompt, the logits, or only the log-prob
that is reported for the sampled token. Everything is computed in float32; where a fault is a low
precision, values are rounded to it (a CPU without AVX-512 has no fast bf16 or fp8 matmul).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from kernel_contracts.errors import InputError, UnsoundError
from mismatch_audit.programs.base import Sequence_

E4M3_MAX = 448.0
TEMPERATURE = 0.9
TOP_P = 0.8
"""As in the generation_config.json of widely served chat models, which engines apply unasked."""
STALE = 0.05
ROPE_FACTOR = 1.25


@dataclass(frozen=True)
class Fault:
    """One way in which an engine is wrong.

    moves: ``rows`` or ``reported`` (see ``kernel_contracts.selftest.Injection``).  model: the model
    -> a context in which it computes wrongly.  prompt: sequence and BOS id -> the sequence that the
    faulted program sees.  logits: ``[T, V]`` of the engine -> changed ones.  unnormalised: what
    ``logits`` gives are log-probs that are reported as they are, though they need not sum to 1.
    support: logits ``[T, V]`` -> mask of the tokens that the sampler can draw.  reported:
    (log-probs of the tokens ``[T]``, log-mass of the support ``[T]``, sequence lengths) -> what is
    reported.
    """

    name: str
    meaning: str
    moves: Literal["rows", "reported"] = "rows"
    model: Callable[[Any], AbstractContextManager[None]] | None = None
    prompt: Callable[[Sequence_, int], Sequence_] | None = None
    logits: Callable[[torch.Tensor], torch.Tensor] | None = None
    unnormalised: bool = False
    support: Callable[[torch.Tensor], torch.Tensor] | None = None
    reported: Callable[[torch.Tensor, torch.Tensor, list[int]], torch.Tensor] | None = None

    @property
    def needs_forward(self) -> bool:
        """The model runs again; the others act on rows that are there."""
        return self.model is not None or self.prompt is not None


def e4m3(x: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
    """The nearest values on the e4m3 grid times ``scale``, in x's dtype; the end beyond its end."""
    grid = (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return grid.to(x.dtype) * scale


def decoder_layers(model: Any) -> torch.nn.ModuleList:
    """The decoder's layers: the longest ModuleList. Raises InputError where there is none."""
    lists = [m for m in model.base_model.modules() if isinstance(m, torch.nn.ModuleList) and len(m)]
    if not lists:
        raise InputError("the model has no list of decoder layers to put a fault into")
    return max(lists, key=len)


def _linears(module: torch.nn.Module) -> list[torch.nn.Linear]:
    found = [m for m in module.modules() if isinstance(m, torch.nn.Linear)]
    if not found:
        raise InputError(f"{type(module).__name__} has no linear layers to put a fault into")
    return found


@contextmanager
def _changed(
    linears: list[torch.nn.Linear], change: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Weights replaced inside the block; afterwards the very tensors of before are back."""
    before = [layer.weight for layer in linears]
    try:
        for layer in linears:
            changed = change(layer.weight.detach())
            layer.weight = torch.nn.Parameter(changed, requires_grad=False)
        yield
    finally:
        for layer, weight in zip(linears, before, strict=True):
            layer.weight = weight


@contextmanager
def fp8_weights(model: Any) -> Iterator[None]:
    """Every linear weight of the decoder on the e4m3 grid, one scale a tensor."""
    with _changed(_linears(decoder_layers(model)), lambda w: e4m3(w, w.abs().max() / E4M3_MAX)):
        yield


def stale_layer(size: float) -> Callable[[Any], AbstractContextManager[None]]:
    """The middle layer's weights off by Gaussian noise of ``size`` times their rms, as if it had
    missed the pushes of the last while."""

    @contextmanager
    def fault(model: Any) -> Iterator[None]:
        layers = decoder_layers(model)
        generator = torch.Generator().manual_seed(0)

        def change(w: torch.Tensor) -> torch.Tensor:
            noise = torch.randn(w.shape, generator=generator).to(w)
            return w + size * w.pow(2).mean().sqrt() * noise

        with _changed(_linears(layers[len(layers) // 2]), change):
            yield

    return fault


def rope_scaling(factor: float) -> Callable[[Any], AbstractContextManager[None]]:
    """Linear position interpolation on one side only: every rotary frequency divided."""

    @contextmanager
    def fault(model: Any) -> Iterator[None]:
        rotary = [
            m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), torch.Tensor)
        ]
        if not rotary:
            raise InputError(
                "the model has no rotary frequencies: the fault wrong_rope does not apply to it",
                fix="name the faults to inject with --fault",
            )
        before = [m.inv_freq for m in rotary]
        try:
            for module in rotary:
                module.inv_freq = module.inv_freq / factor
            yield
        finally:
            for module, frequencies in zip(rotary, before, strict=True):
                module.inv_freq = frequencies

    return fault


class _RoundedCache(TorchFunctionMode):
    """Rounds keys and values on their way into attention, as a cache in e4m3 with scale 1 does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, key, value, *rest = args
            self.calls += 1
            return func(query, e4m3(key), e4m3(value), *rest, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def fp8_kv(model: Any) -> Iterator[None]:
    """Keys (after their rotation) and values rounded to e4m3."""
    with _RoundedCache() as rounding:
        yield
    if not rounding.calls:
        raise UnsoundError(
            "the fault fp8_kv did nothing: the model's attention is not sdpa",
            fix="load the reference with attn_implementation sdpa, or leave the fault out",
        )


def double_bos(sequence: Sequence_, bos: int) -> Sequence_:
    """One more BOS before the prompt."""
    ids = (bos, *sequence.token_ids)
    return replace(sequence, token_ids=ids, prompt_length=sequence.prompt_length + 1)


def bf16_log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Logits cast to bf16, log-softmax in bf16: log-probs ``[T, V]`` that sum to about 1."""
    return torch.log_softmax(logits.bfloat16(), dim=-1).float()


def top_p_support(top_p: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Logits ``[T, V]`` -> mask of the fewest most likely tokens of mass at least ``top_p``."""

    def support(logits: torch.Tensor) -> torch.Tensor:
        ordered, index = torch.softmax(logits, dim=-1).sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        return torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, index, before < top_p)

    return support


def renormalised(logprob: torch.Tensor, log_mass: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return logprob - log_mass


def _shifted(logprob: torch.Tensor, log_mass: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Each token gets the value of the one before it; the first gets the last one's."""
    return torch.cat([part.roll(1) for part in torch.split(logprob, lengths)])


MENU: tuple[Fault, ...] = (
    Fault(
        "bf16_log_softmax",
        "log-probs by a log-softmax in bf16 of logits in bf16",
        logits=bf16_log_softmax,
        unnormalised=True,
    ),
    Fault(
        "temperature",
        f"logits divided by {TEMPERATURE}, unknown to the trainer",
        logits=lambda z: z / TEMPERATURE,
    ),
    Fault(
        "top_p",
        f"samples from the top-p {TOP_P} set and reports log-probs renormalised over it",
        moves="reported",
        support=top_p_support(TOP_P),
        reported=renormalised,
    ),
    Fault("fp8_kv", "keys and values rounded to e4m3, scale 1", model=fp8_kv),
    Fault("fp8_weights", "linear weights rounded to e4m3, a scale per tensor", model=fp8_weights),
    Fault(
        "stale_layer",
        f"one layer of an earlier push: weights off by {STALE:g} of their rms",
        model=stale_layer(STALE),
    ),
    Fault(
        "wrong_rope",
        f"linear RoPE scaling by {ROPE_FACTOR:g} on one side",
        model=rope_scaling(ROPE_FACTOR),
    ),
    Fault(
        "shifted_logprobs",
        "reported log-probs off by one row",
        moves="reported",
        reported=_shifted,
    ),
    Fault("double_bos", "a second BOS before the prompt", prompt=double_bos),
)


def chosen(names: list[str] | None) -> tuple[Fault, ...]:
    """The menu, or the faults of it that are named. Raises InputError for an unknown name."""
    known = {fault.name: fault for fault in MENU}
    for name in names or ():
        if name not in known:
            raise InputError(
                f"no fault {name!r}", where="--fault", fix=f"one of: {', '.join(known)}"
            )
    return MENU if not names else tuple(known[name] for name in known if name in names)
