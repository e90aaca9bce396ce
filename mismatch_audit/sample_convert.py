"""A Llama GGUF file -> a model directory that from_pretrained and an engine load.

Written out because the general GGUF importer of transformers 5.19 drops the rule that splits digits
one by one, and so tokenises every number in another way than the model was trained on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

_CONTROL_TOKEN = 3  # token_type of a special token in GGUF

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def convert(source: Path, directory: Path) -> None:
    """Write config, generation config, tokenizer and bf16 weights of `source` into `directory`.

    Weights are dequantised to float32 and rounded to bf16 (nearest, ties to even). Raises
    ValueError, KeyError or IndexError when the file is not a whole Llama GGUF with SmolLM's
    tokenizer.
    """
    from gguf import GGUFReader

    reader = GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    tensors = list(reader.tensors)
    config = _config(facts, {tensor.name for tensor in tensors})
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    _write_tokenizer(facts, directory)
    _write_weights(tensors, config, directory / "model.safetensors")


def _config(facts: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """config.json from the GGUF's metadata."""
    heads = facts["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": facts["general.architecture"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        "head_dim": facts["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "hidden_size": facts["llama.embedding_length"],
        "initializer_range": 0.02,
        "intermediate_size": facts["llama.feed_forward_length"],
        "max_position_embeddings": facts["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": facts["llama.block_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "rms_norm_eps": _decimal(facts["llama.attention.layer_norm_rms_epsilon"]),
        # transformers 5 reads rope_parameters, transformers 4 and older engines rope_theta.
        "rope_parameters": {
            "rope_theta": _decimal(facts["llama.rope.freq_base"]),
            "rope_type": "default",
        },
        "rope_theta": _decimal(facts["llama.rope.freq_base"]),
        "tie_word_embeddings": "output.weight" not in names,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": facts["llama.vocab_size"],
    }


def _decimal(stored: float) -> float:
    """The short decimal that a float32 of the GGUF stands for: 9.99999975e-06 -> 1e-05."""
    import numpy as np

    return float(str(np.float32(stored)))


def _write_weights(tensors: list[Any], config: dict[str, Any], path: Path) -> None:
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    state: dict[str, torch.Tensor] = {}
    for tensor in tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.removesuffix(".weight").rpartition(".")[2]
        if kind in heads:
            values = _rotate_half_order(values, heads[kind])
        state[_hf_name(tensor.name)] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    save_file(state, path, metadata={"format": "pt"})


def _hf_name(name: str) -> str:
    """GGUF tensor name -> the name in LlamaForCausalLM. Raises KeyError for any other tensor."""
    stem = name.removesuffix(".weight")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.weight"
    block, layer, kind = stem.split(".")
    if block != "blk":
        raise KeyError(name)
    return f"model.layers.{int(layer)}.{_BLOCK_NAMES[kind]}.weight"


def _rotate_half_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's row order of q and k. [heads * head_dim, width] -> the same shape.

    GGUF keeps the two coordinates of a rotary pair next to each other (2i, 2i + 1); transformers
    and vLLM rotate coordinate i with i + head_dim / 2.
    """
    rows, width = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


def _write_tokenizer(facts: dict[str, Any], directory: Path) -> None:
    """tokenizer.json (byte-level BPE; digits apart, one by one) and its configuration."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if (facts["tokenizer.ggml.model"], facts["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise ValueError("the tokenizer is not the byte-level BPE of SmolLM")
    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            # The class that takes tokenizer.json as it is. GPT2Tokenizer of transformers 5 makes
            # its own pre-tokeniser and would lose the digit rule again.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": facts["tokenizer.ggml.add_bos_token"],
            "add_prefix_space": facts["tokenizer.ggml.add_space_prefix"],
            "bos_token": tokens[facts["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[facts["tokenizer.ggml.eos_token_id"]],
            "pad_token": tokens[facts["tokenizer.ggml.padding_token_id"]],
            "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
            "chat_template": facts["tokenizer.chat_template"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": facts["llama.context_length"],
        },
    )


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
