"""vLLM worker extension: what the layers of a running engine apply, and pushes into it.

    vllm serve ... --worker-extension-cls mismatch_audit.weights.live.extension.WeightExtension

Arguments and results are JSON; tensors travel as safetensors files, which the server and the
auditor must both see. Every method runs on every rank. Linear layers are read by identity rows
through ``quant_method.apply``, which is what their forward calls: on a CPU vLLM packs the weights
away (the parameter keeps no element), on a GPU kernels use repacked copies.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mismatch_audit.programs.capture import CaptureExtension
from mismatch_audit.programs.vllm_facts import config_facts
from mismatch_audit.weights.live.injection import FaultInjection
from mismatch_audit.weights.live.int8 import Int8Reading, read_int8
from mismatch_audit.weights.live.transit import Complaints, Shards, stored

_CHUNK = 256
_DERIVED = ("azp_adj",)  # made from the payload when it is packed; no checkpoint has it


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class WeightExtension(CaptureExtension, FaultInjection):
    """Methods that vLLM adds to its worker class; capture's come along, as there is one class."""

    rank: int
    vllm_config: Any

    def _audit_model(self) -> Any:
        return self.model_runner.get_model()

    def _audit_linears(self) -> dict[str, Any]:
        """Linear layers and the head by module name. An embedding also has a matrix product, which
        its look-up never uses: it is read from its parameter."""
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        return {
            name: module
            for name, module in self._audit_model().named_modules()
            if isinstance(module, LinearBase | ParallelLMHead)
            and getattr(module, "quant_method", None) is not None
        }

    def _audit_width(self, module: Any) -> int:
        for attribute in ("input_size_per_partition", "input_size", "embedding_dim"):
            if hasattr(module, attribute):
                return int(getattr(module, attribute))
        raise RuntimeError(f"mismatch-audit: {type(module).__name__} has no input width")

    def _audit_scheme(self, module: Any) -> str | None:
        """How a layer stores its weight: None unquantised, a scheme's name, or unknown."""
        method = type(getattr(module, "quant_method", None)).__name__
        if method in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"):
            return None
        inner = type(getattr(module, "scheme", None)).__name__
        scale = getattr(module, "weight_scale", None)
        rows = sum(getattr(module, "logical_widths", [])) or None
        if "Int8" in inner and isinstance(scale, torch.Tensor) and scale.numel() == rows:
            return "channel_int8"
        return "unknown"

    def _audit_run(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        """x W^T through the layer's own kernel, without bias and without collectives."""
        with torch.inference_mode():
            rows: torch.Tensor = module.quant_method.apply(module, x, None)
            return rows

    def _audit_effective(self, module: Any) -> torch.Tensor:
        width, dtype = self._audit_width(module), self.model_runner.model_config.dtype
        eye = torch.eye(width, dtype=dtype, device=self.model_runner.device)
        parts = [
            self._audit_run(module, eye[at : at + _CHUNK].contiguous())
            for at in range(0, width, _CHUNK)
        ]
        weight = torch.cat(parts).t()
        shard = getattr(module, "shard_indices", None)  # the head: without its padding rows
        return weight[: shard.num_org_elements] if shard is not None else weight

    def audit_weights_facts(self) -> dict[str, Any]:
        """What runs, read from live objects; the model's config comes along."""
        import vllm

        config, runner = self.vllm_config, self.model_runner
        model = config.model_config
        numel = {n: p.numel() for n, p in self._audit_model().named_parameters()}
        facts = {
            "program": "vllm",
            "version": vllm.__version__,
            "torch": str(torch.__version__),
            **self.audit_facts(),
            **config_facts(config),
            "max_model_len": int(model.max_model_len),
            "vocab_size": int(model.get_vocab_size()),
            "rank": int(getattr(self, "rank", 0)),
            "ranks": int(config.parallel_config.world_size),
            "checkpoint": str(model.model),
            "empty_parameters": sorted(n for n, count in numel.items() if not count),
            "device": str(runner.device),
            "config": model.hf_config.to_dict(),
        }
        return {key: _plain(value) for key, value in facts.items()}

    def audit_weights_layers(self) -> list[dict[str, Any]]:
        """Linear layers: name, parts (unfused names), sizes of this rank, scheme."""
        model = self._audit_model()
        packed = getattr(model, "packed_modules_mapping", None) or {}
        dtype = _name(self.model_runner.model_config.dtype)
        out = []
        for name, module in self._audit_linears().items():
            prefix, _, leaf = name.rpartition(".")
            parts = [f"{prefix}.{p}" if prefix else p for p in packed.get(leaf, [leaf])]
            shard = getattr(module, "shard_indices", None)
            rows = getattr(module, "output_size_per_partition", getattr(module, "output_size", 0))
            out.append(
                {
                    "name": name,
                    "parts": parts,
                    "in_features": self._audit_width(module),
                    "out_features": int(shard.num_org_elements if shard is not None else rows),
                    "dtype": dtype,
                    "scheme": self._audit_scheme(module),
                    "method": type(module.quant_method).__name__,
                }
            )
        return out

    def audit_weights_parameters(self) -> list[list[Any]]:
        """[name, shape, dtype] of parameters and buffers."""
        model = self._audit_model()
        named = [*model.named_parameters(), *model.named_buffers()]
        return [[name, list(value.shape), _name(value.dtype)] for name, value in named]

    def audit_weights_push(self, folder: str) -> dict[str, Any]:
        """Load a checkpoint folder's tensors in place; layers that it does not name are kept."""
        sent: dict[str, int] = {}
        if not any(Path(folder).glob("*.safetensors")):
            return {"tensors": 0, "bytes": 0, "seconds": 0.0, "not_loaded": []}

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in stored(Path(folder)):
                sent[name] = value.nbytes
                yield name, value

        started = time.perf_counter()
        with Complaints() as complaints:
            self.model_runner.reload_weights(weights_iterator=tensors())
        return {
            "tensors": len(sent),
            "bytes": sum(sent.values()),
            "seconds": time.perf_counter() - started,
            "not_loaded": complaints.lines,
        }

    def audit_weights_apply(self, source: str, folder: str) -> list[str]:
        """Rows of ``source`` ({layer: x}) through the live layers, into ``folder``."""
        linears, dtype = self._audit_linears(), self.model_runner.model_config.dtype
        out = {}
        for name, x in load_file(source).items():
            if name not in linears:
                raise RuntimeError(f"no linear layer {name!r}")
            rows = self._audit_run(linears[name], x.to(self.model_runner.device, dtype))
            shard = getattr(linears[name], "shard_indices", None)
            rows = rows[:, : shard.num_org_elements] if shard is not None else rows
            out[name] = rows.cpu().contiguous()
        save_file(out, Path(folder) / f"applied-rank-{getattr(self, 'rank', 0)}-0.safetensors")
        return sorted(out)

    def audit_weights_effective(self, layer: str, path: str) -> list[int]:
        """One layer's matrix [out, in] of this rank into ``path`` (rank 0 writes)."""
        linears = self._audit_linears()
        if layer not in linears:
            raise RuntimeError(f"no linear layer {layer!r}")
        weight = self._audit_effective(linears[layer]).cpu().contiguous()
        if getattr(self, "rank", 0) == 0:
            save_file({"weight": weight}, path)
        return list(weight.shape)

    def audit_weights_read(self, folder: str) -> dict[str, Any]:
        """Write what this rank applies as a checkpoint. unread: parameters that nothing covers."""
        shards = Shards(Path(folder), int(getattr(self, "rank", 0)))
        linears = self._audit_linears()
        done: set[str] = set()
        unread: list[str] = []
        off_scale: list[str] = []
        saturating: list[str] = []
        for name, module in linears.items():
            scheme = self._audit_scheme(module)
            done |= {f"{name}.{leaf}" for leaf in ("weight", "weight_scale")}
            if scheme is None:
                shards.add(f"{name}.weight", self._audit_effective(module))
            elif scheme == "channel_int8":
                reading = self._audit_int8(module)
                shards.add(f"{name}.weight", reading.payload)
                shards.add(f"{name}.weight_scale", reading.scale)
                for flag, names in (("off_scale", off_scale), ("saturates", saturating)):
                    if getattr(reading, flag):
                        names.append(name)
                if not reading.whole and not reading.off_scale:
                    unread.append(f"{name}.weight")
            else:
                unread.append(f"{name}.weight")
        rotary = self._audit_rotary()
        if rotary is not None:
            shards.add("model.rotary_emb.inv_freq", rotary)
        for name, value in self._audit_model().named_parameters():
            owner = self._audit_model().get_submodule(name.rpartition(".")[0])
            if name in done or name.endswith(_DERIVED) or not value.is_floating_point():
                continue
            if not value.numel():
                unread.append(name)
                continue
            shard = getattr(owner, "shard_indices", None)
            shards.add(name, value[: shard.num_org_elements] if shard is not None else value)
        shards.write()
        return {
            "tensors": shards.names,
            "bytes": shards.bytes,
            "unread": unread,
            "off_scale": off_scale,
            "saturating": saturating,
        }

    def _audit_int8(self, module: Any) -> Int8Reading:
        """The packed payload of a per-channel int8 layer, through its kernel."""
        dtype, device = self.model_runner.model_config.dtype, self.model_runner.device
        return read_int8(
            lambda x: self._audit_run(module, x.to(device, dtype)).float().cpu(),
            self._audit_width(module),
            module.weight_scale.detach().float().reshape(-1, 1).cpu(),
            exact=dtype == torch.float32,
        )

    def _audit_rotary(self) -> torch.Tensor | None:
        """Inverse frequencies [head_dim / 2] of the live cos/sin table: angles at position 1."""
        for module in self._audit_model().modules():
            table = getattr(module, "cos_sin_cache", None)
            if type(module).__name__ == "RotaryEmbedding" and isinstance(table, torch.Tensor):
                cos, sin = table[1].float().chunk(2)
                return torch.atan2(sin, cos)
        return None

    def audit_weights_fill(self) -> dict[str, int]:
        """Mark the scales of every layer as unwritten; how many were marked."""
        marked = 0
        for module in self._audit_linears().values():
            scale = getattr(module, "weight_scale", None)
            if self._audit_scheme(module) is not None and isinstance(scale, torch.Tensor):
                with torch.inference_mode():
                    if scale.dtype == torch.uint8:
                        scale.fill_(0xFF)
                    elif scale.numel():
                        scale.fill_(math.nan)
                marked += 1
        return {"marked": marked}

    def audit_weights_mend(self) -> dict[str, int]:
        """Works around a fault of vLLM's int8 kernel on a CPU: it points to the scales that it was
        made with, and a reload frees those once they are copied. From now on a kernel holds them.
        """
        import vllm._custom_ops

        ops: Any = vllm._custom_ops
        make = getattr(ops, "create_onednn_scaled_mm", None)
        if make is None or hasattr(make, "audit_mended"):
            return {"mended": 0}

        def holding(weight: torch.Tensor, scales: torch.Tensor, *rest: Any, **named: Any) -> Any:
            handler = make(weight, scales, *rest, **named)
            handler.audit_scales = scales
            return handler

        holding.__dict__["audit_mended"] = True
        ops.create_onednn_scaled_mm = holding
        return {"mended": 1}

    def audit_weights_checksums(self) -> dict[str, str]:
        """The engine's own digests, by parameter (without its rank prefix)."""
        own = getattr(self, "compute_weight_checksums", None)
        found = own() if own is not None else {}
        return {name.rpartition(":")[2]: digest for name, digest in found.items()}


def _plain(value: Any) -> Any:
    """Only what JSON can hold."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    # str(): torch's version is a subclass of str, which vLLM's serialiser refuses (and then hangs).
    return value if isinstance(value, int | float | bool) or value is None else str(value)
