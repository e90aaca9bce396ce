"""Every family and layout maps to the same canonical tensors, so that fusing cannot hide a fault.

The argument: take masters, write them the way trainers and engines store them (fused, stacked,
sharded, transposed, wrapped, tied, adapted), and the canonical views must be the masters again,
element by element; where the layout cannot be known, there is an error and no guess.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from weights_zoo import (
    GPT2,
    LLAMA,
    MOE,
    Tensors,
    cast,
    fused,
    gpt2_weights,
    llama_weights,
    moe_weights,
    shard,
    stack_experts,
    step,
    write,
    write_ranks,
)

from kernel_contracts.errors import InputError
from mismatch_audit.weights.checkpoint import Checkpoint
from mismatch_audit.weights.compare import compare_sides
from mismatch_audit.weights.families import geometry_of
from mismatch_audit.weights.findings import Fault
from mismatch_audit.weights.layout import Layout
from mismatch_audit.weights.memory import memory_side
from mismatch_audit.weights.sides import open_side


def _layout(tensors: Tensors | list[Tensors], config) -> Layout:
    return memory_side("x", tensors, config).layout


def _assembled(layout: Layout, name: str) -> torch.Tensor:
    """A canonical tensor put together from its pieces (their agreement where they overlap)."""
    pieces = layout.tensors[name]
    whole = torch.full(layout.shape(name), float("nan"))
    for piece in pieces:
        start = piece.start or (0,) * len(piece.shape)
        region = tuple(slice(s, s + n) for s, n in zip(start, piece.shape, strict=True))
        whole[region] = piece.view().float()
    return whole


def _same(layout: Layout, masters: Tensors) -> None:
    assert set(layout.tensors) == set(masters)
    for name, value in masters.items():
        assert torch.equal(_assembled(layout, name), value.float()), name


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3"])
def test_fused_engine_names_are_cut_by_heads(model_type: str) -> None:
    """2 key-value heads against 4 query heads: equal thirds would be wrong."""
    masters = llama_weights()
    config = {**LLAMA, "model_type": model_type}
    _same(_layout(fused(masters), config), masters)
    _same(_layout(masters, config), masters)


def test_fused_biases_follow_their_weights() -> None:
    masters = {
        f"model.layers.0.self_attn.{p}_proj.bias": torch.randn(n)
        for p, n in (("q", 64), ("k", 32), ("v", 32))
    }
    whole = {"model.layers.0.self_attn.qkv_proj.bias": torch.cat(list(masters.values()))}
    _same(_layout(whole, {**LLAMA, "model_type": "qwen2"}), masters)


@pytest.mark.parametrize("engine", [False, True])
def test_expert_stacks(engine: bool) -> None:
    masters = moe_weights()
    stored = stack_experts(fused(masters), engine)
    assert any("gate_up_proj" in n or "w13" in n for n in stored)
    _same(_layout(stored, MOE), masters)


def test_expert_stacks_stored_inputs_first() -> None:
    """[E, H, 2I] stacks are told from [E, 2I, H] by where the hidden size is."""
    masters = moe_weights()
    stored = stack_experts(masters)
    for name in list(stored):
        if name.endswith((".gate_up_proj", ".experts.down_proj")):
            stored[name] = stored[name].transpose(1, 2).contiguous()
    _same(_layout(stored, MOE), masters)


def test_mixtral_names() -> None:
    masters = moe_weights()
    rename = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    stored = {}
    for name, value in masters.items():
        if ".experts." in name:
            leaf = name.split(".")[-2]
            name = name.replace("mlp.experts", "block_sparse_moe.experts").replace(
                leaf, rename[leaf]
            )
        stored[name.replace("mlp.gate.", "block_sparse_moe.gate.")] = value
    _same(_layout(stored, {**MOE, "model_type": "mixtral"}), masters)


def test_gpt2_conv1d_against_the_engine() -> None:
    """transformers stores [in, out]; an engine stores [out, in]: the canonical tensors agree."""
    stored = gpt2_weights()
    engine = {
        name: value.t()
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        else value
        for name, value in stored.items()
        if not name.endswith(".attn.bias")
    }
    ours, theirs = _layout(stored, GPT2), _layout(engine, GPT2)
    assert set(ours.tensors) == set(theirs.tensors)
    assert ours.dropped  # the causal mask is no weight
    for name in ours.tensors:
        assert torch.equal(_assembled(ours, name), _assembled(theirs, name)), name
    q = _assembled(ours, "transformer.h.1.attn.q_proj.weight")
    assert torch.equal(q, stored["transformer.h.1.attn.c_attn.weight"][:, :32].t())


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_shards(ranks: int) -> None:
    """4 ranks on 2 key-value heads: each is replicated on two ranks."""
    masters = llama_weights()
    _same(_layout(shard(masters, ranks), LLAMA), masters)
    _same(_layout([fused(own) for own in shard(masters, ranks)], LLAMA), masters)


@settings(max_examples=20, deadline=None)
@given(
    heads=st.sampled_from([2, 4, 8]),
    group=st.sampled_from([1, 2]),
    head_dim=st.sampled_from([4, 8]),
    ranks=st.sampled_from([1, 2]),
)
def test_any_head_geometry_survives_fusing_and_sharding(
    heads: int, group: int, head_dim: int, ranks: int
) -> None:
    config = {
        **LLAMA,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // group,
        "head_dim": head_dim,
        "num_hidden_layers": 1,
    }
    masters = llama_weights(1, config)
    shards = shard(masters, ranks, heads // group) if ranks > 1 else [masters]
    _same(_layout([fused(own) for own in shards], config), masters)


@pytest.mark.parametrize(
    "wrap",
    ["module.{}", "_orig_mod.{}", "model._fsdp_wrapped_module.{}", "base_model.model.{}"],
)
def test_wrappers_of_trainers_are_removed(wrap: str) -> None:
    masters = llama_weights()
    stored = {}
    for name, value in masters.items():
        if wrap.startswith("model."):
            name = name.removeprefix("model.") if name.startswith("model.") else name
            stored[name if name.startswith("lm_head") else wrap.format(name)] = value
        else:
            stored[wrap.format(name)] = value
    _same(_layout(stored, LLAMA), masters)


def test_multimodal_shells_and_bare_backbones() -> None:
    masters = llama_weights()
    body = {n: v for n, v in masters.items() if n != "lm_head.weight"}
    bare = {n.removeprefix("model."): v for n, v in body.items()}
    shell = {f"model.language_model.{n.removeprefix('model.')}": v for n, v in body.items()}
    _same(_layout(bare, LLAMA), body)
    _same(_layout(shell, {"text_config": LLAMA, "model_type": "gemma3"}), body)


@pytest.mark.parametrize(
    ("tensors", "config", "wanted"),
    [
        (fused(llama_weights()), {}, "how many heads"),
        (fused(llama_weights()), {**LLAMA, "num_key_value_heads": 4}, "need 64"),
        (
            {**llama_weights(), **fused(llama_weights())},
            LLAMA,
            "both claim to be",
        ),
        ({"a.weight": torch.ones(2)}, {"num_attention_heads": "four"}, "is not a size"),
    ],
)
def test_an_unknowable_layout_is_an_error(tensors: Tensors, config, wanted: str) -> None:
    with pytest.raises(InputError, match=wanted):
        memory_side("x", tensors, config)


def test_geometry_reads_old_and_new_config_spellings() -> None:
    g = geometry_of({"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2})
    assert (g.hidden, g.heads, g.kv_heads, g.head_dim, g.layers, g.tied) == (32, 4, 4, 8, 2, True)
    g = geometry_of({"text_config": {**LLAMA, "rope_parameters": {"rope_theta": 5e5}}})
    assert (g.kv_heads, g.head_dim, g.rope["theta"]) == (2, 16, 10000.0)


# -- adapters ----------------------------------------------------------------------------------


def _adapter(folder: Path, names: list[str], rank: int = 4, **config) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(3)
    factors = {}
    for name in names:
        rows = llama_weights()[f"{name}.weight"].shape
        stem = f"base_model.model.{name}"
        factors[f"{stem}.lora_A.weight"] = torch.randn(rank, rows[1], generator=generator) * 0.1
        factors[f"{stem}.lora_B.weight"] = torch.randn(rows[0], rank, generator=generator) * 0.1
    save_file(factors, folder / "adapter_model.safetensors")
    document = {"r": rank, "lora_alpha": 8, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(document))
    return folder


def _merged(masters: Tensors, folder: Path, scaling: float) -> Tensors:
    from safetensors.torch import load_file

    factors = load_file(folder / "adapter_model.safetensors")
    out = dict(masters)
    for name in [n for n in factors if "lora_A" in n]:
        target = name.removeprefix("base_model.model.").replace(".lora_A", "")
        out[target] = masters[target] + scaling * factors[name.replace("_A", "_B")] @ factors[name]
    return out


Q = [f"model.layers.{i}.self_attn.q_proj" for i in range(3)]


@pytest.mark.parametrize(
    ("config", "scaling"),
    [({}, 2.0), ({"use_rslora": True}, 4.0), ({"alpha_pattern": {"q_proj": 4}}, 1.0)],
)
def test_a_merged_adapter_equals_what_is_served(tmp_path: Path, config, scaling: float) -> None:
    masters = llama_weights()
    adapter = _adapter(tmp_path / "adapter", Q, **config)
    base = write(tmp_path / "base", masters)
    good = write(tmp_path / "good", cast(_merged(masters, adapter, scaling)))
    report = compare_sides(open_side(base, adapter), open_side(good))
    assert report.exit_code == 0, report.findings
    # merged once more in bf16, as trainers do: other roundings, still the same adapter
    twice = cast(_merged(cast(masters), adapter, scaling))
    report = compare_sides(open_side(base, adapter), open_side(write(tmp_path / "twice", twice)))
    assert report.exit_code == 0, [f.title for f in report.findings]


def test_an_adapter_that_is_off_or_scaled_wrongly_is_named(tmp_path: Path) -> None:
    masters = llama_weights()
    adapter = _adapter(tmp_path / "adapter", Q)
    side = open_side(write(tmp_path / "base", masters), adapter)
    report = compare_sides(side, open_side(write(tmp_path / "off", cast(masters))))
    assert [f.fault for f in report.findings] == [Fault.ADAPTER_OFF]
    assert len(report.findings[0].tensors) == 3
    wrong = write(tmp_path / "half", cast(_merged(masters, adapter, 1.0)))
    report = compare_sides(side, open_side(wrong))
    assert report.exit_code == 1
    sharded = write_ranks(tmp_path / "tp", shard(cast(_merged(masters, adapter, 2.0)), 2))
    assert compare_sides(side, open_side(sharded)).exit_code == 0


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"r": 5}, "factors have rank 4"),
        ({"lora_alpha": None}, "lora_alpha"),
    ],
)
def test_adapters_that_cannot_be_merged_are_refused(tmp_path: Path, change, wanted: str) -> None:
    base = write(tmp_path / "base", llama_weights())
    with pytest.raises(InputError, match=wanted):
        open_side(base, _adapter(tmp_path / "adapter", Q, **change))


def test_adapter_mistakes(tmp_path: Path) -> None:
    """An adapter in place of a checkpoint, one for other modules, a missing factor."""
    adapter = _adapter(tmp_path / "adapter", Q)
    with pytest.raises(InputError, match="LoRA factors"):
        open_side(adapter)
    base = write(tmp_path / "base", {n: v for n, v in llama_weights().items() if "q_proj" not in n})
    with pytest.raises(InputError, match="the base lacks"):
        open_side(base, adapter)
    save_file({"x.lora_A.weight": torch.ones(4, 2)}, adapter / "adapter_model.safetensors")
    with pytest.raises(InputError, match="do not pair"):
        open_side(write(tmp_path / "full", llama_weights()), adapter)


def test_a_side_is_lazy(tmp_path: Path) -> None:
    """Opening reads headers only: views are made when asked, and released pages read again."""
    side = open_side(write(tmp_path, step(llama_weights())))
    assert isinstance(side.checkpoint, Checkpoint)
    before = _assembled(side.layout, "lm_head.weight")
    side.checkpoint.release()
    assert torch.equal(before, _assembled(side.layout, "lm_head.weight"))
