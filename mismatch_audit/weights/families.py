"""Tables: how each model family's weights are named and packed, by trainers and by engines.

Canonical names are those of an unfused transformers module (``model.layers.0.self_attn.q_proj.
weight``; ``model.layers.0.mlp.experts.3.up_proj.weight``), and a canonical linear weight is
``[out, in]``. Supporting a family means adding a row here, never code elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kernel_contracts.errors import InputError

# Wrappers that trainers leave in names. Removed wherever they stand.
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
# Prefixes of adapters, data-parallel wrappers and multimodal shells, in the order tried.
PREFIXES = (
    ("base_model.model.", ""),
    ("module.", ""),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)


@dataclass(frozen=True)
class Fused:
    """A stored tensor that holds ``parts`` one after the other along the output dimension.

    sizes: ``heads`` (q, k, v by head counts) or ``equal``.
    """

    leaf: str
    parts: tuple[str, ...]
    sizes: Literal["heads", "equal"]


@dataclass(frozen=True)
class Experts:
    """A stored stack ``[experts, ...]``; each expert's slab holds ``parts`` along its outputs."""

    leaf: str
    parts: tuple[str, ...]
    into: str = "mlp.experts"


@dataclass(frozen=True)
class Family:
    """One family's tables. Leaves are the module path inside a layer.

    renames: leaf prefixes that only differ in name. column / row: leaves that tensor
    parallelism cuts along outputs / inputs. conv1d: leaves that transformers stores ``[in, out]``.
    ignored: stored tensors that are no weights (causal masks).
    """

    name: str
    model_types: tuple[str, ...]
    root: str = "model."
    layer: str = "layers"
    renames: Mapping[str, str] = field(default_factory=dict)
    fused: tuple[Fused, ...] = ()
    experts: tuple[Experts, ...] = ()
    column: tuple[str, ...] = ()
    row: tuple[str, ...] = ()
    conv1d: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    embedding: str = "model.embed_tokens.weight"
    kv: tuple[str, ...] = ("self_attn.k_proj", "self_attn.v_proj")


_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj")
_LLAMA_FUSED = (
    Fused("self_attn.qkv_proj", _ATTENTION, "heads"),
    Fused("mlp.gate_up_proj", _MLP, "equal"),
)
_LLAMA_COLUMN = (*_ATTENTION, *_MLP, "model.embed_tokens", "lm_head")
_LLAMA_ROW = ("self_attn.o_proj", "mlp.down_proj")
_SWIGLU = ("gate_proj", "up_proj")

LLAMA = Family(
    "llama",
    ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_text", "phi3"),
    fused=_LLAMA_FUSED,
    column=_LLAMA_COLUMN,
    row=_LLAMA_ROW,
)

QWEN_MOE = Family(
    "qwen-moe",
    ("qwen3_moe", "qwen2_moe"),
    fused=(
        *_LLAMA_FUSED,
        Fused(
            "mlp.shared_expert.gate_up_proj",
            ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
            "equal",
        ),
    ),
    experts=(
        # transformers 5 in memory: experts.gate_up_proj [E, 2I, H]; vLLM: experts.w13_weight
        Experts("mlp.experts.gate_up_proj", _SWIGLU),
        Experts("mlp.experts.w13", _SWIGLU),
        Experts("mlp.experts.down_proj", ("down_proj",)),
        Experts("mlp.experts.w2", ("down_proj",)),
    ),
    column=(
        *_LLAMA_COLUMN,
        "mlp.experts.*.gate_proj",
        "mlp.experts.*.up_proj",
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj",
    ),
    row=(*_LLAMA_ROW, "mlp.experts.*.down_proj", "mlp.shared_expert.down_proj"),
)

MIXTRAL = Family(
    "mixtral",
    ("mixtral",),
    renames={
        "block_sparse_moe.gate": "mlp.gate",
        "block_sparse_moe.experts.*.w1": "mlp.experts.*.gate_proj",
        "block_sparse_moe.experts.*.w3": "mlp.experts.*.up_proj",
        "block_sparse_moe.experts.*.w2": "mlp.experts.*.down_proj",
        "block_sparse_moe.experts.w13": "mlp.experts.w13",
        "block_sparse_moe.experts.w2": "mlp.experts.w2",
    },
    fused=_LLAMA_FUSED,
    experts=QWEN_MOE.experts,
    column=QWEN_MOE.column,
    row=QWEN_MOE.row,
)

GPT2 = Family(
    "gpt2",
    ("gpt2",),
    root="transformer.",
    layer="h",
    fused=(Fused("attn.c_attn", ("attn.q_proj", "attn.k_proj", "attn.v_proj"), "equal"),),
    column=(
        "attn.q_proj",
        "attn.k_proj",
        "attn.v_proj",
        "mlp.c_fc",
        "transformer.wte",
        "lm_head",
    ),
    row=("attn.c_proj", "mlp.c_proj"),
    conv1d=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    ignored=("attn.bias", "attn.masked_bias"),
    embedding="transformer.wte.weight",
    kv=(),
)

FAMILIES = (LLAMA, QWEN_MOE, MIXTRAL, GPT2)


def family_of(model_type: str) -> Family:
    """The table of a config.json ``model_type``.

    Families outside the table read as Llama: their unfused names need no table, and a fused
    tensor that the table does not know is reported as missing, never guessed.
    """
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    return LLAMA


@dataclass(frozen=True)
class Geometry:
    """Sizes that decide where the parts of a fused tensor begin. Zero means unknown."""

    model_type: str = ""
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    layers: int = 0
    vocabulary: int = 0
    experts: int = 0
    tied: bool | None = None
    rope: Mapping[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> Family:
        return family_of(self.model_type)


def _size(config: Mapping[str, Any], where: str, *keys: str) -> int:
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InputError(f"{key} = {value!r} is not a size", where=where)
        return value
    return 0


def geometry_of(config: Mapping[str, Any], where: str = "config.json") -> Geometry:
    """Geometry of a config.json's content ({} gives one with nothing known).

    Raises InputError for a size that is not one.
    """
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else config
    hidden = _size(inner, where, "hidden_size", "n_embd")
    heads = _size(inner, where, "num_attention_heads", "n_head")
    head_dim = _size(inner, where, "head_dim") or (hidden // heads if heads else 0)
    tied = config.get("tie_word_embeddings", inner.get("tie_word_embeddings"))
    model_type = str(inner.get("model_type", config.get("model_type", "")))
    if tied is None and model_type in ("gpt2", "gemma", "gemma2", "gemma3", "gemma3_text"):
        tied = True  # the families whose configuration class ties by default
    rope = inner.get("rope_parameters") or inner.get("rope_scaling") or {}
    theta = inner.get("rope_theta", rope.get("rope_theta") if isinstance(rope, Mapping) else None)
    return Geometry(
        model_type=model_type,
        hidden=hidden,
        heads=heads,
        kv_heads=_size(inner, where, "num_key_value_heads") or heads,
        head_dim=head_dim,
        layers=_size(inner, where, "num_hidden_layers", "n_layer"),
        vocabulary=_size(inner, where, "vocab_size"),
        experts=_size(inner, where, "num_experts", "num_local_experts"),
        tied=bool(tied) if tied is not None else None,
        rope={"theta": theta, "parameters": rope if isinstance(rope, Mapping) else {}},
    )
