"""Tiny checkpoints of every family and layout, for the weight tests. No network, no real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "vocab_size": 96,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
MOE: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_experts": 4,
    "moe_intermediate_size": 32,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "vocab_size": 80,
}


def _normal(seed: int):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator) * 0.05


def llama_weights(seed: int = 0, config: dict[str, Any] = LLAMA) -> Tensors:
    """fp32 master of a small Llama, unfused names."""
    normal = _normal(seed)
    h, i = config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    weights = {"model.embed_tokens.weight": normal(config["vocab_size"], h)}
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        weights |= {
            f"{p}input_layernorm.weight": 1 + normal(h),
            f"{p}post_attention_layernorm.weight": 1 + normal(h),
            f"{p}self_attn.q_proj.weight": normal(q, h),
            f"{p}self_attn.k_proj.weight": normal(kv, h),
            f"{p}self_attn.v_proj.weight": normal(kv, h),
            f"{p}self_attn.o_proj.weight": normal(h, q),
        }
        if config["model_type"] == "qwen3_moe":
            m = config["moe_intermediate_size"]
            weights[f"{p}mlp.gate.weight"] = normal(config["num_experts"], h)
            for e in range(config["num_experts"]):
                weights[f"{p}mlp.experts.{e}.gate_proj.weight"] = normal(m, h)
                weights[f"{p}mlp.experts.{e}.up_proj.weight"] = normal(m, h)
                weights[f"{p}mlp.experts.{e}.down_proj.weight"] = normal(h, m)
        else:
            weights[f"{p}mlp.gate_proj.weight"] = normal(i, h)
            weights[f"{p}mlp.up_proj.weight"] = normal(i, h)
            weights[f"{p}mlp.down_proj.weight"] = normal(h, i)
    weights["model.norm.weight"] = 1 + normal(h)
    weights["lm_head.weight"] = normal(config["vocab_size"], h)
    return weights


def moe_weights(seed: int = 0) -> Tensors:
    return llama_weights(seed, MOE)


def gpt2_weights(seed: int = 0) -> Tensors:
    """As transformers stores it: Conv1D, [in, out], fused c_attn."""
    normal, e = _normal(seed), GPT2["n_embd"]
    weights = {"transformer.wte.weight": normal(GPT2["vocab_size"], e)}
    weights["transformer.wpe.weight"] = normal(16, e)
    for layer in range(GPT2["n_layer"]):
        p = f"transformer.h.{layer}."
        weights |= {
            f"{p}ln_1.weight": 1 + normal(e),
            f"{p}ln_1.bias": normal(e),
            f"{p}attn.bias": torch.ones(1, 1, 16, 16).tril().bool(),
            f"{p}attn.c_attn.weight": normal(e, 3 * e),
            f"{p}attn.c_attn.bias": normal(3 * e),
            f"{p}attn.c_proj.weight": normal(e, e),
            f"{p}attn.c_proj.bias": normal(e),
            f"{p}mlp.c_fc.weight": normal(e, 4 * e),
            f"{p}mlp.c_fc.bias": normal(4 * e),
            f"{p}mlp.c_proj.weight": normal(4 * e, e),
            f"{p}mlp.c_proj.bias": normal(e),
        }
    weights["transformer.ln_f.weight"] = 1 + normal(e)
    weights["transformer.ln_f.bias"] = normal(e)
    return weights


def cast(weights: Tensors, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    return {
        name: value.to(dtype) if value.is_floating_point() else value.clone()
        for name, value in weights.items()
    }


def fused(weights: Tensors, reverse: bool = False) -> Tensors:
    """The names and layout that an engine holds. reverse: up before gate, k before q (a fault)."""
    out: Tensors = {}
    for name, value in weights.items():
        if any(part in name for part in (".k_proj.", ".v_proj.", ".up_proj.")):
            if ".experts." in name:
                out[name] = value
            continue
        if ".q_proj." in name:
            group = [name, name.replace("q_proj", "k_proj"), name.replace("q_proj", "v_proj")]
            name = name.replace("q_proj", "qkv_proj")
        elif ".gate_proj." in name and ".experts." not in name:
            group = [name, name.replace("gate_proj", "up_proj")]
            group = group[::-1] if reverse else group
            name = name.replace("gate_proj", "gate_up_proj")
        else:
            out[name] = value
            continue
        out[name] = torch.cat([weights[part] for part in group])
    return out


def stack_experts(weights: Tensors, engine: bool = False) -> Tensors:
    """Experts as one stack: transformers' packed names, or the engine's w13 / w2."""
    out = {name: value for name, value in weights.items() if ".experts." not in name}
    for layer in range(MOE["num_hidden_layers"]):
        p = f"model.layers.{layer}.mlp.experts."
        each = range(MOE["num_experts"])
        gate_up = torch.stack(
            [
                torch.cat([weights[f"{p}{e}.gate_proj.weight"], weights[f"{p}{e}.up_proj.weight"]])
                for e in each
            ]
        )
        down = torch.stack([weights[f"{p}{e}.down_proj.weight"] for e in each])
        out[f"{p}w13_weight" if engine else f"{p}gate_up_proj"] = gate_up
        out[f"{p}w2_weight" if engine else f"{p}down_proj"] = down
    return out


_COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_ROW = ("o_proj", "down_proj")


def shard(weights: Tensors, ranks: int, kv_heads: int = 2) -> list[Tensors]:
    """Tensor-parallel shards of unfused weights."""
    out: list[Tensors] = []
    for rank in range(ranks):
        own: Tensors = {}
        for name, value in weights.items():
            if any(f"{leaf}.weight" in name for leaf in _ROW):
                own[name] = value.chunk(ranks, 1)[rank].contiguous()
            elif any(f"{leaf}.weight" in name for leaf in _COLUMN):
                replicated = "k_proj" in name or "v_proj" in name
                parts = min(ranks, kv_heads) if replicated else ranks
                own[name] = value.chunk(parts)[rank * parts // ranks].contiguous()
            else:
                own[name] = value
        out.append(own)
    return out


def write(folder: Path, weights: Tensors, config: dict[str, Any] | None = LLAMA) -> Path:
    """One safetensors file and a config."""
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: value.contiguous().clone() for name, value in weights.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_ranks(folder: Path, shards: list[Tensors], config: dict[str, Any] = LLAMA) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for rank, weights in enumerate(shards):
        own = {name: value.contiguous().clone() for name, value in weights.items()}
        save_file(own, folder / f"model-rank-{rank}-part-0.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_sharded(folder: Path, weights: Tensors, files: int = 2) -> Path:
    """Several files and an index, as large checkpoints come."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(weights)
    mapping = {}
    for part in range(files):
        own = names[part::files]
        shard_name = f"model-{part + 1:05d}-of-{files:05d}.safetensors"
        save_file({n: weights[n].contiguous().clone() for n in own}, folder / shard_name)
        mapping |= dict.fromkeys(own, shard_name)
    index = {"metadata": {"total_size": 0}, "weight_map": mapping}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def step(weights: Tensors, size: float = 2e-3, seed: int = 9) -> Tensors:
    """The master after an update that bf16 can see."""
    normal = _normal(seed)
    return {
        name: value + normal(*value.shape) * (size / 0.05) if value.is_floating_point() else value
        for name, value in weights.items()
    }
