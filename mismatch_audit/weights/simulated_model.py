"""A tiny decoder with attention, rotary positions, a gated MLP and one layer of experts.

It exists so that every weight-sync fault has a real consequence: the trainer runs it with fp32
masters, the simulated engine with quantised layers, and both give log-probs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from mismatch_audit.weights.buffers import inverse_frequencies
from mismatch_audit.weights.families import geometry_of
from mismatch_audit.weights.probes import gated_mlp

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_hidden_layers": 3,
    "vocab_size": 64,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
}
HIDDEN, HEADS, HEAD_DIM = 128, 4, 32
LAYERS, EXPERTS = 3, 4
MOE_LAYER = LAYERS - 1
ADAPTED = "model.layers.1.self_attn.o_proj"
Tensors = dict[str, torch.Tensor]


def initial_master(seed: int) -> Tensors:
    """fp32 weights with canonical names. Rows differ in size, as trained weights do."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(out: int, inputs: int) -> torch.Tensor:
        size = torch.exp(0.5 * torch.randn(out, 1, generator=generator))
        values: torch.Tensor = torch.randn(out, inputs, generator=generator) * size
        return torch.mul(values, inputs**-0.5)

    weights = {"model.embed_tokens.weight": torch.randn(64, HIDDEN, generator=generator) * 0.25}
    for layer in range(LAYERS):
        p = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{p}{norm}.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=generator)
        for part in "qkvo":
            # sharper attention than 1.0 gives: positions then matter by 2 nats and not by the
            # sentinel's limit of 1, where another machine's rounding would decide
            size = 1.2 if part in "qk" else 1.0
            weights[f"{p}self_attn.{part}_proj.weight"] = size * matrix(HIDDEN, HIDDEN)
        if layer == MOE_LAYER:
            weights[f"{p}mlp.gate.weight"] = matrix(EXPERTS, HIDDEN)
        stems = [f"mlp.experts.{e}." for e in range(EXPERTS)] if layer == MOE_LAYER else ["mlp."]
        inner = 128 if layer == MOE_LAYER else 256
        for stem in stems:
            weights[f"{p}{stem}gate_proj.weight"] = matrix(inner, HIDDEN)
            weights[f"{p}{stem}up_proj.weight"] = matrix(inner, HIDDEN)
            weights[f"{p}{stem}down_proj.weight"] = matrix(HIDDEN, inner)
    weights["model.norm.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=generator)
    return weights


def updated(master: Tensors, relative: float, seed: int) -> Tensors:
    """The master after one push's worth of training: every tensor moved by a relative size."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, value in master.items():
        noise = torch.randn(value.shape, generator=generator)
        out[name] = value + noise * relative * value.norm() / noise.norm()
    return out


@dataclass(frozen=True)
class LowRankUpdate:
    """An adapter on one layer; scale * B A."""

    a: torch.Tensor
    b: torch.Tensor

    @property
    def delta(self) -> torch.Tensor:
        return self.b @ self.a


def adapter(seed: int, rank: int = 4) -> LowRankUpdate:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rank, HIDDEN, generator=generator) / HIDDEN**0.5
    return LowRankUpdate(a, 0.1 * torch.randn(HIDDEN, rank, generator=generator))


Linear = Callable[[str, torch.Tensor], torch.Tensor]
Experts = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass
class Parts:
    """What a program supplies to the shared forward. linear: fused layer name, x -> y."""

    linear: Linear
    expert: Experts
    gain: Callable[[str], torch.Tensor]
    embedding: torch.Tensor
    head: torch.Tensor
    router: torch.Tensor
    frequencies: torch.Tensor


KeyValues = list[tuple[torch.Tensor, torch.Tensor]]


def _norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * gain


def _rotate(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    angle = torch.arange(x.shape[0])[:, None] * frequencies
    cos, sin = torch.cat([angle.cos()] * 2, -1)[:, None], torch.cat([angle.sin()] * 2, -1)[:, None]
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def forward(
    parts: Parts, tokens: torch.Tensor, cached: KeyValues | None = None
) -> tuple[torch.Tensor, KeyValues]:
    """(log-probs ``[T, V]``, keys and values of every layer) of one sequence of ids ``[T]``.

    cached: keys and values of a prefix, used in place of fresh ones.
    """
    x = parts.embedding[tokens]
    length, kept = len(tokens), []
    mask = torch.full((length, length), float("-inf")).triu(1)
    for layer in range(LAYERS):
        p = f"model.layers.{layer}."
        qkv = parts.linear(f"{p}self_attn.qkv_proj", _norm(x, parts.gain(f"{p}input_layernorm")))
        q, k, v = (part.view(length, HEADS, HEAD_DIM) for part in qkv.chunk(3, -1))
        q, k = _rotate(q, parts.frequencies), _rotate(k, parts.frequencies)
        if cached is not None:
            n = len(cached[layer][0])
            k = torch.cat([cached[layer][0], k[n:]])
            v = torch.cat([cached[layer][1], v[n:]])
        kept.append((k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5 + mask
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(length, HIDDEN)
        x = x + parts.linear(f"{p}self_attn.o_proj", mixed)
        h = _norm(x, parts.gain(f"{p}post_attention_layernorm"))
        x = x + (_mixture(parts, h) if layer == MOE_LAYER else _dense(parts, p, h))
    logits = _norm(x, parts.gain("model.norm")) @ parts.head.t()
    return torch.log_softmax(logits, -1), kept


def _dense(parts: Parts, prefix: str, h: torch.Tensor) -> torch.Tensor:
    gate, up = parts.linear(f"{prefix}mlp.gate_up_proj", h).chunk(2, -1)
    return parts.linear(f"{prefix}mlp.down_proj", F.silu(gate) * up)


def _mixture(parts: Parts, h: torch.Tensor) -> torch.Tensor:
    """Top-1 routing."""
    weight, chosen = (h @ parts.router.t()).softmax(-1).max(-1)
    out = torch.zeros_like(h)
    for expert in range(EXPERTS):
        rows = chosen == expert
        if bool(rows.any()):
            out[rows] = parts.expert(expert, h[rows]) * weight[rows, None]
    return out


def trainer_parts(master: Tensors, update: LowRankUpdate) -> Parts:
    """The reference program: fp32 masters, the adapter merged."""
    merged = merge(master, update)

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ fused(merged, name).t()

    def expert(index: int, x: torch.Tensor) -> torch.Tensor:
        gate_up, down = expert_weights(merged, index)
        return gated_mlp(x, gate_up, down)

    frequencies = inverse_frequencies(geometry_of(CONFIG))
    embedding = merged["model.embed_tokens.weight"]
    return Parts(
        linear,
        expert,
        lambda name: merged[f"{name}.weight"],
        embedding,
        embedding,
        merged[f"model.layers.{MOE_LAYER}.mlp.gate.weight"],
        frequencies if frequencies is not None else torch.zeros(HEAD_DIM // 2),
    )


def merge(master: Tensors, update: LowRankUpdate) -> Tensors:
    return {**master, f"{ADAPTED}.weight": master[f"{ADAPTED}.weight"] + update.delta}


FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def parts_of(name: str) -> list[str]:
    """Canonical weights (without .weight) inside an engine's layer, in order."""
    for leaf, parts in FUSED.items():
        if name.endswith(leaf):
            return [name.removesuffix(leaf) + part for part in parts]
    return [name]


def fused(master: Tensors, name: str) -> torch.Tensor:
    return torch.cat([master[f"{part}.weight"] for part in parts_of(name)])


def expert_weights(master: Tensors, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate_up ``[2 I, H]``, down ``[H, I]``) of one expert."""
    stem = f"model.layers.{MOE_LAYER}.mlp.experts.{index}."
    gate_up = torch.cat([master[f"{stem}gate_proj.weight"], master[f"{stem}up_proj.weight"]])
    return gate_up, master[f"{stem}down_proj.weight"]


DENSE_LAYERS = tuple(
    f"model.layers.{layer}.{leaf}"
    for layer in range(LAYERS)
    for leaf in (
        "self_attn.qkv_proj",
        "self_attn.o_proj",
        *(() if layer == MOE_LAYER else ("mlp.gate_up_proj", "mlp.down_proj")),
    )
)
EXPERT_STACK = f"model.layers.{MOE_LAYER}.mlp.experts"
