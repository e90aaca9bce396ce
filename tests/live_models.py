"""Tiny Llama checkpoints that real vLLM loads in a second, and updates of them."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token",
                "dynamic": True,
            },
        }
    },
}  # fmt: skip


def master(seed: int = 0) -> Tensors:
    """fp32 weights of CONFIG, tied: no lm_head. Scaled so that log-probs differ from uniform."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    h, i = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    kv = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    weights = {"model.embed_tokens.weight": normal(CONFIG["vocab_size"], h) * 2}
    for layer in range(CONFIG["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        weights |= {
            f"{p}input_layernorm.weight": 1 + 0.1 * normal(h),
            f"{p}post_attention_layernorm.weight": 1 + 0.1 * normal(h),
            f"{p}self_attn.q_proj.weight": normal(h, h),
            f"{p}self_attn.k_proj.weight": normal(kv, h),
            f"{p}self_attn.v_proj.weight": normal(kv, h),
            f"{p}self_attn.o_proj.weight": normal(h, h),
            f"{p}mlp.gate_proj.weight": normal(i, h),
            f"{p}mlp.up_proj.weight": normal(i, h),
            f"{p}mlp.down_proj.weight": normal(h, i),
        }
    weights["model.norm.weight"] = 1 + 0.1 * normal(h)
    return weights


def stepped(weights: Tensors, seed: int, size: float = 0.01) -> Tensors:
    """The master after one step: every weight moves by ``size`` of its tensor's rms."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value + size * value.square().mean().sqrt()
        * torch.randn(value.shape, generator=generator)
        for name, value in weights.items()
    }  # fmt: skip


def write(folder: Path, weights: Tensors, config: dict[str, Any] = CONFIG) -> Path:
    """A checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({n: v.contiguous() for n, v in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def quantised(weights: Tensors) -> Tensors:
    """W8A8 as compressed-tensors stores it: int8 payload and an fp32 scale per output."""
    out: Tensors = {}
    for name, value in weights.items():
        if name.endswith("proj.weight"):
            scale = value.abs().amax(1, keepdim=True) / 127
            out[name] = (value / scale).round().clamp(-128, 127).to(torch.int8)
            out[f"{name}_scale"] = scale
        else:
            out[name] = value
    return out


def tokenizer(folder: Path) -> None:
    """A word-level tokenizer, which a server wants even when it is sent token ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(CONFIG["vocab_size"])}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")),
        bos_token="w0", eos_token="w1", unk_token="w0",
    ).save_pretrained(folder)  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
