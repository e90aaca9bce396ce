"""The storage half of the simulated engine: loading, fusing, derived copies, the captured graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from mismatch_audit.weights.buffers import inverse_frequencies
from mismatch_audit.weights.families import geometry_of
from mismatch_audit.weights.schemes import E8M0_UNWRITTEN, Scheme, swizzle
from mismatch_audit.weights.simulated_model import (
    CONFIG,
    DENSE_LAYERS,
    EXPERT_STACK,
    EXPERTS,
    HEAD_DIM,
    KeyValues,
    LowRankUpdate,
    Tensors,
    parts_of,
)
from mismatch_audit.weights.simulated_push import Push, scale_name

STACKS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}
EMBEDDING = "model.embed_tokens.weight"
_ROW_CUT = ("o_proj", "down_proj", ".w2_")
_COLUMN_CUT = {"qkv_proj": 3, "gate_up_proj": 2, ".w13_": 2, "embed_tokens": 1, "lm_head": 1}


def is_replicated(name: str, whole: torch.Tensor) -> bool:
    """Whether both tensor-parallel ranks hold all of an engine's tensor."""
    if any(leaf in name for leaf in _ROW_CUT):
        return whole.shape[-1] == 1
    return not any(leaf in name for leaf in _COLUMN_CUT)


def rank_slices(name: str, whole: torch.Tensor) -> list[list[tuple[Any, ...]]]:
    """Regions of an engine's tensor for each of two ranks, in the order a rank holds them."""
    if is_replicated(name, whole):
        return [[(...,)], [(...,)]]
    if any(leaf in name for leaf in _ROW_CUT):
        half = whole.shape[-1] // 2
        return [[(..., slice(0, half))], [(..., slice(half, None))]]
    count = next(n for leaf, n in _COLUMN_CUT.items() if leaf in name)
    rows = whole.shape[-2] // count
    return [
        [
            (..., slice(p * rows + r * rows // 2, p * rows + (r + 1) * rows // 2), slice(None))
            for p in range(count)
        ]
        for r in range(2)
    ]


@dataclass
class Storage:
    """params: what a read-back shows. derived: the kernel's copies. captured: what it reads.

    scheme None serves bf16. faults: flags of ``sync_faults.py``.
    """

    scheme: Scheme | None
    adapter: LowRankUpdate
    faults: frozenset[str] = frozenset()
    params: Tensors = field(default_factory=dict)
    derived: Tensors = field(default_factory=dict)
    captured: Tensors = field(default_factory=dict)
    version: int = 0
    cache_hits: int = 0
    declared_dtypes: dict[str, str] = field(default_factory=dict)
    frequencies: torch.Tensor = field(default_factory=lambda: torch.zeros(HEAD_DIM // 2))
    eos: frozenset[int] = frozenset(range(8))
    adapter_active: bool = True
    echo: Tensors = field(default_factory=dict)
    _cache: dict[tuple[int, ...], KeyValues] = field(default_factory=dict)

    def start(self, push: Push) -> None:
        """Allocates storage from a first load, derives the kernel's copies, captures the graph."""
        frequencies = inverse_frequencies(geometry_of(CONFIG))
        if frequencies is not None:
            self.frequencies = frequencies
        self.params = {n: v.clone() for n, v in self._filled(push, self._storage(push)).items()}
        if "unquantised_layer" in self.faults and self.scheme is not None:
            self._dequantise_in_place(DENSE_LAYERS[1], push)
        if "untied_head" in self.faults:
            self.params["lm_head.weight"] = self.params[EMBEDDING].clone()
        for name in self.params:
            self._derive(name)
        self.captured = {**self.params, **self.derived}
        self.declared_dtypes = self.live_dtypes()
        self.version = push.version

    def _storage(self, push: Push) -> dict[str, tuple[list[str], int | None]]:
        """Engine tensor -> the pushed tensors that fill it (dim 0: stacked by expert)."""
        kinds = ["weight"]
        if self.scheme is not None:
            kinds.append(scale_name("x.weight", self.scheme).removeprefix("x."))
        table: dict[str, tuple[list[str], int | None]] = {}
        for layer in DENSE_LAYERS:
            for kind in kinds:
                parts = parts_of(layer)
                if "gate_up_swap" in self.faults and layer.endswith("gate_up_proj"):
                    parts = parts[::-1]
                if "qk_swap" in self.faults and layer.endswith("qkv_proj"):
                    parts = [parts[1], parts[0], parts[2]]
                table[f"{layer}.{kind}"] = ([f"{part}.{kind}" for part in parts], None)
        for stack, leaves in STACKS.items():
            for kind in kinds:
                names = [f"{EXPERT_STACK}.{e}.{x}.{kind}" for e in range(EXPERTS) for x in leaves]
                table[f"{EXPERT_STACK}.{stack}_{kind}"] = (names, 0)
        used = {name for parts, _ in table.values() for name in parts}
        table |= {name: ([name], None) for name in push.tensors if name not in used}
        return table

    def _filled(self, push: Push, storage: dict[str, tuple[list[str], int | None]]) -> Tensors:
        """The engine's tensors that this push fills completely."""
        out: Tensors = {}
        for name, (parts, dim) in storage.items():
            if all(part in push.tensors for part in parts):
                values = [push.tensors[part] for part in parts]
                stacked = torch.cat(values) if dim is None else torch.stack(self._experts(values))
                out[name] = stacked
        return out

    @staticmethod
    def _experts(values: list[torch.Tensor]) -> list[torch.Tensor]:
        each = len(values) // EXPERTS
        return [torch.cat(values[e * each : (e + 1) * each]) for e in range(EXPERTS)]

    def _dequantise_in_place(self, layer: str, push: Push) -> None:
        """A layer on the engine's own ignore list: kept in bf16 from the start."""
        scheme = self.scheme
        if scheme is None:
            return
        scale = self.params.pop(scale_name(f"{layer}.weight", scheme))
        weight = scheme.decode(self.params[f"{layer}.weight"], scale)
        self.params[f"{layer}.weight"] = weight.bfloat16()

    def fill_sentinels(self) -> int:
        """Writes the unwritten marker into every scale; returns how many scales there are."""
        filled = 0
        for name, value in self.params.items():
            if "scale" in name:
                value.fill_(E8M0_UNWRITTEN if value.dtype == torch.uint8 else float("nan"))
                filled += value.numel()
        return filled

    def receive(self, push: Push) -> bool:
        """Applies a push; True is the acknowledgement (HTTP 200)."""
        if "not_applied" in self.faults:
            return True
        storage = self._storage(push)
        if "echoed_read_back" in self.faults:
            self.echo = {**self.params, **self._filled(push, storage)}
        if self.faults & {"version_without_load", "echoed_read_back"}:
            self.version = push.version
            return True
        for name, whole in self._filled(push, storage).items():
            if not self._dropped(name):
                self._write(name, whole)
        if "unquantised_layer" in self.faults and self.scheme is not None:
            self._write_unquantised(push)
        if "lm_head.weight" in self.params and "untied_head" not in self.faults:
            self.params["lm_head.weight"].copy_(self.params[EMBEDDING])
        for name in storage:
            if name in self.params:
                self._derive(name)
        if "zeroed_rope" in self.faults:
            self.frequencies = torch.zeros_like(self.frequencies)
        if "adapter_off" in self.faults:
            self.adapter_active = False
        if "eos_lost" in self.faults:
            self.eos = frozenset()
        if "stale_prefix_cache" not in self.faults:
            self._cache.clear()
        self.version = push.version
        return True

    def _dropped(self, name: str) -> bool:
        layer_1 = "model.layers.1." in name
        later = any(f"model.layers.{i}." in name for i in (1, 2)) or name == "model.norm.weight"
        return (
            ("skipped_layer" in self.faults and layer_1)
            or ("partial_push" in self.faults and later)
            or ("never_written" in self.faults and "layers.1.mlp.gate_up_proj" in name)
        )

    def _write(self, name: str, whole: torch.Tensor) -> None:
        live = self.params.get(name)
        if live is None:
            return  # a scale of a layer that this engine does not quantise
        if live.dtype != whole.dtype and live.element_size() != whole.element_size() == 1:
            return
        if "live_dtype" in self.faults and "layernorm" in name:
            self.params[name] = self.captured[name] = whole.half()
        elif "storage_moved" in self.faults:
            self.params[name] = whole.clone()  # the captured graph keeps the old memory
        elif "blended_copy" in self.faults and name.endswith("mlp.gate.weight"):
            self.captured[name] = ((self.captured[name].float() + whole.float()) / 2).to(live.dtype)
            self.params[name] = whole.clone()
        elif "shard_stale" in self.faults and whole.ndim > 1:
            mask = self._rank_one(name, whole)
            live.copy_(torch.where(mask, live.float(), whole.float()).to(live.dtype))
        else:
            live.copy_(whole)
        if name not in self.captured:
            self.captured[name] = self.params[name]

    def _write_unquantised(self, push: Push) -> None:
        scheme, layer = self.scheme, DENSE_LAYERS[1]
        if scheme is None or f"{layer}.weight" not in push.tensors:
            return
        payload = push.tensors[f"{layer}.weight"]
        scale = push.tensors[scale_name(f"{layer}.weight", scheme)]
        self.params[f"{layer}.weight"].copy_(scheme.decode(payload, scale))

    @staticmethod
    def _rank_one(name: str, whole: torch.Tensor) -> torch.Tensor:
        """Elements that the second of two tensor-parallel ranks holds."""
        mask = torch.zeros(whole.shape, dtype=torch.bool)
        for region in rank_slices(name, whole)[1]:
            mask[region] = True
        return mask if not is_replicated(name, whole) else torch.zeros_like(mask)

    def _derive(self, name: str) -> None:
        """The kernel's own copy of mxfp8 scales, in tensor-core order."""
        if self.scheme is None or self.scheme.name != "mxfp8" or "scale" not in name:
            return
        key = f"{name}.swizzled"
        frozen = ("stale_copy" in self.faults and "layers.1.mlp.gate_up_proj" in name) or (
            "stale_expert_copy" in self.faults and ".w13_" in name
        )
        if frozen and key in self.derived:
            return
        scale = self.params[name]
        flat = torch.stack([swizzle(one) for one in scale]) if scale.ndim == 3 else swizzle(scale)
        if "storage_moved" in self.faults and key in self.derived:
            self.derived[key] = flat
        elif key in self.derived:
            self.derived[key].copy_(flat)
        else:
            self.derived[key] = flat

    def live_dtypes(self) -> dict[str, str]:
        return {
            name: str(value.dtype).removeprefix("torch.") for name, value in self.params.items()
        }
