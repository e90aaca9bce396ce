"""An engine in miniature: fused quantised storage, a swizzled copy of the scales, a captured
graph, a prefix cache, an adapter, versions. Its layouts are those of real engines, byte for byte
(``schemes.py``), so that every guard meets the state that it was invented for.

Without fault flags it is the clean twin.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mismatch_audit.weights.rounding import nearest
from mismatch_audit.weights.schemes import e4m3_to_float, unswizzle
from mismatch_audit.weights.simulated_model import (
    ADAPTED,
    DENSE_LAYERS,
    EXPERT_STACK,
    EXPERTS,
    MOE_LAYER,
    Parts,
    Tensors,
    forward,
    parts_of,
)
from mismatch_audit.weights.simulated_push import scale_name_of
from mismatch_audit.weights.simulated_storage import EMBEDDING, STACKS, Storage, rank_slices


class SimulatedEngine(Storage):
    """The kernels and the introspection of the simulated engine."""

    def _kernel_weight(self, name: str, index: int | None = None) -> torch.Tensor:
        """What the kernel multiplies with: captured payload, captured (swizzled) scales."""
        payload = self.captured[name]
        if self.scheme is None or payload.element_size() > 1:
            return payload.float() if index is None else payload[index].float()
        scale = self.captured[scale_name_of(name, self.scheme)]
        swizzled = self.captured.get(f"{scale_name_of(name, self.scheme)}.swizzled")
        if index is not None:
            payload, scale = payload[index], scale[index]
            swizzled = swizzled[index] if swizzled is not None else None
        if swizzled is not None:
            scale = unswizzle(swizzled, (scale.shape[0], scale.shape[1]))
        return self.scheme.decode(payload, scale)

    def _activation(self, x: torch.Tensor, quantised: bool) -> torch.Tensor:
        scheme = self.scheme
        if not quantised or scheme is None:
            return x.bfloat16().float()
        if scheme.name == "channel_int8":
            step = x.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
            return (x / step).round().clamp(-128, 127) * step
        if scheme.name == "mxfp8":
            payload, scale = scheme.encode(x)
            return scheme.decode(payload, scale)
        groups = x.view(x.shape[0], -1, 128)
        step = groups.abs().amax(2, keepdim=True).clamp_min(1e-12) / 448
        return (e4m3_to_float(nearest(groups / step, torch.float8_e4m3fn)) * step).view(x.shape)

    def linear(self, layer: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """The layer as the kernel computes it, adapter included."""
        weight = self._kernel_weight(f"{layer}.weight")
        quantised = self.captured[f"{layer}.weight"].element_size() == 1

        def apply(x: torch.Tensor) -> torch.Tensor:
            y = self._activation(x, quantised) @ weight.t()
            if layer == ADAPTED and self.adapter_active:
                y = y + x @ self.adapter.a.t() @ self.adapter.b.t()
            return y

        return apply

    def expert(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        gate_up = self._kernel_weight(f"{EXPERT_STACK}.w13_weight", index)
        down = self._kernel_weight(f"{EXPERT_STACK}.w2_weight", index)
        quantised = self.scheme is not None

        def apply(x: torch.Tensor) -> torch.Tensor:
            gate, up = (self._activation(x, quantised) @ gate_up.t()).chunk(2, -1)
            h = torch.nn.functional.silu(gate) * up
            return self._activation(h, quantised) @ down.t()

        return apply

    def own_weight(self, layer: str, index: int | None = None) -> torch.Tensor:
        """The weight that the parameters (not the kernel's copies) stand for."""
        payload = self.params[layer]
        if self.scheme is None or payload.element_size() > 1:
            return payload.float() if index is None else payload[index].float()
        scale = self.params[scale_name_of(layer, self.scheme)]
        if index is not None:
            payload, scale = payload[index], scale[index]
        return self.scheme.decode(payload, scale)

    def parts(self) -> Parts:
        """The engine's program for the shared forward, from what its kernels hold now."""
        head = self.captured.get("lm_head.weight", self.captured[EMBEDDING])
        linears = {name: self.linear(name) for name in DENSE_LAYERS}
        experts = [self.expert(index) for index in range(EXPERTS)]
        return Parts(
            lambda name, x: linears[name](x),
            lambda index, x: experts[index](x),
            lambda name: self.captured[f"{name}.weight"].float(),
            self.captured[EMBEDDING].float(),
            head.float(),
            self.captured[f"model.layers.{MOE_LAYER}.mlp.gate.weight"].float(),
            self.frequencies,
        )

    def log_probs(self, tokens: list[int], use_cache: bool = True) -> torch.Tensor:
        """``[T, V]``; the first half of a prompt may come from the prefix cache."""
        key = tuple(tokens[: len(tokens) // 2])
        cached = self._cache.get(key) if use_cache else None
        self.cache_hits += cached is not None
        rows, kept = forward(self.parts(), torch.tensor(tokens), cached)
        if use_cache and key:
            self._cache.setdefault(key, [(k[: len(key)], v[: len(key)]) for k, v in kept])
        return rows

    def read_back_ranks(self) -> list[Tensors]:
        """The same, as two tensor-parallel ranks would hold it."""
        ranks: list[Tensors] = [{}, {}]
        for name, value in self.read_back().items():
            for rank, regions in enumerate(rank_slices(name, value)):
                parts = [value[region] for region in regions]
                ranks[rank][name] = torch.cat(parts, -2) if len(parts) > 1 else parts[0].clone()
        return ranks

    def read_back(self) -> Tensors:
        """Copies of the parameters and buffers, by the engine's names."""
        source = self.params
        if "echoed_read_back" in self.faults and self.echo:
            source = self.echo
        copies = {name: value.clone() for name, value in source.items()}
        return {**copies, "model.rotary_emb.inv_freq": self.frequencies.clone()}

    def quantised_layers(self) -> frozenset[str]:
        """Canonical weights that this engine holds quantised."""
        out = []
        for name, value in self.params.items():
            if value.element_size() > 1 or not name.endswith("weight"):
                continue
            layer = name.removesuffix(".weight")
            out += [f"{part}.weight" for part in parts_of(layer)] if layer in DENSE_LAYERS else []
            for stack, leaves in STACKS.items():
                if name == f"{EXPERT_STACK}.{stack}_weight":
                    out += [
                        f"{EXPERT_STACK}.{e}.{leaf}.weight"
                        for e in range(EXPERTS)
                        for leaf in leaves
                    ]
        return frozenset(out)
