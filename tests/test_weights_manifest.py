"""A manifest stands for weights: equal digests iff equal canonical bytes after the stated cast.

Layout, order, files and threads must not change a digest; one flipped bit, another dtype or shape
must. Edited manifests are refused, and comparing two needs no weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weights_zoo import (
    LLAMA,
    MOE,
    Tensors,
    cast,
    fused,
    llama_weights,
    moe_weights,
    shard,
    stack_experts,
    step,
    write,
    write_sharded,
)

from kernel_contracts.errors import InputError
from mismatch_audit.weights import digest as digest_module
from mismatch_audit.weights.digest import build_manifest, hash_tensor
from mismatch_audit.weights.findings import Fault
from mismatch_audit.weights.manifest import Manifest, compare_manifests, read_manifest
from mismatch_audit.weights.memory import memory_side
from mismatch_audit.weights.schemes import SCHEMES
from mismatch_audit.weights.sides import open_side

MASTER = llama_weights()
Q = "model.layers.1.self_attn.q_proj.weight"


def _manifest(tensors: Tensors, how: str = "none", config=LLAMA, **options) -> Manifest:
    return build_manifest(memory_side("x", tensors, config), how, **options)


def test_digests_do_not_depend_on_layout_order_files_or_threads(tmp_path: Path) -> None:
    wanted = _manifest(MASTER, "bf16").digest
    served = cast(MASTER)
    assert _manifest(fused(served)).digest == wanted
    assert _manifest(dict(reversed(list(served.items())))).digest == wanted
    assert build_manifest(open_side(write_sharded(tmp_path / "s", served))).digest == wanted
    assert _manifest(MASTER, "bf16", threads=1).digest == wanted
    moe = moe_weights()
    stacked = stack_experts(fused(cast(moe)), engine=True)
    assert _manifest(stacked, config=MOE).digest == _manifest(moe, "bf16", MOE).digest


def test_chunks_of_a_tensor_hash_alike_however_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors longer than a chunk, rows that do not divide it, transposed views, tiny tasks."""
    value = torch.randn(700, 37)
    tensors = {
        "model.a.weight": value,
        "model.b.weight": torch.randn(5000),
        "model.e.weight": torch.empty(0, 3),
    }
    whole = _manifest(tensors)
    assert whole.tensors["model.a.weight"] == hash_tensor(value)
    monkeypatch.setattr(digest_module, "CHUNK_ELEMENTS", 256)
    small = _manifest(tensors)
    monkeypatch.setattr(digest_module, "TASK_ELEMENTS", 512)
    assert _manifest(tensors).digest == small.digest != whole.digest
    strided = {**tensors, "model.a.weight": value.t().contiguous().t()}
    assert not strided["model.a.weight"].is_contiguous()
    assert _manifest(strided).digest == small.digest


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31))
def test_one_bit_changes_the_digest(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = {"model.a.weight": torch.randn(20, 30, generator=generator).bfloat16()}
    before = _manifest(values)
    place = int(torch.randint(600, (1,), generator=generator))
    values["model.a.weight"].view(-1).view(torch.int16)[place] ^= 1
    after = _manifest(values)
    assert before.digest != after.digest
    assert before.tensors["model.a.weight"].digest != after.tensors["model.a.weight"].digest


def test_dtype_and_shape_are_part_of_the_digest() -> None:
    zeros = torch.zeros(4, 6)
    entries = {
        hash_tensor(zeros).digest,
        hash_tensor(zeros.view(6, 4)).digest,
        hash_tensor(zeros.view(24)).digest,
        hash_tensor(zeros.view(torch.int32)).digest,
        hash_tensor(torch.zeros(4, 12).bfloat16()).digest,
    }
    assert len(entries) == 5


def test_written_manifests_read_back(tmp_path: Path) -> None:
    manifest = _manifest(MASTER, "bf16", step=17, data_cut="2026-01-31")
    manifest.write(tmp_path / "m.json")
    assert read_manifest(tmp_path / "m.json") == manifest
    document = json.loads((tmp_path / "m.json").read_text())
    assert document["step"] == 17
    assert document["data_cut"] == "2026-01-31"
    assert document["cast"] == "bf16"
    assert document["versions"]["torch"]
    assert len((tmp_path / "m.json").read_text().splitlines()) < len(MASTER) + 25


def _edit(path: Path, change) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda d: d["tensors"].pop(Q), "do not add up"),
        (lambda d: d["tensors"][Q].update(digest="0" * 64), "do not add up"),
        (lambda d: d.update(schema="v9"), "is not a manifest"),
        (lambda d: d.update(algorithm="md5"), "hashed another way"),
        (lambda d: d.update(chunk_elements=7), "hashed another way"),
        (lambda d: d["tensors"].update({Q: 3}), "malformed"),
        (lambda d: d.pop("tensors"), "malformed"),
    ],
)
def test_edited_manifests_are_refused(tmp_path: Path, change, wanted: str) -> None:
    path = tmp_path / "m.json"
    _manifest(MASTER).write(path)
    _edit(path, change)
    with pytest.raises(InputError, match=wanted):
        read_manifest(path)


def test_two_manifests_compare_without_weights() -> None:
    ours = _manifest(MASTER, "bf16", step=4)
    served = cast(MASTER)
    assert compare_manifests(ours, _manifest(fused(served))).exit_code == 0
    old = _manifest(step(MASTER), "bf16", step=3)
    stale = _manifest({**served, Q: cast(step(MASTER))[Q]})
    report = compare_manifests(ours, stale, old)
    assert [f.fault for f in report.findings] == [Fault.STALE]
    assert report.findings[0].evidence["by"] == "equals the previous manifest"
    cases: dict[Fault, Tensors] = {
        Fault.SWAPPED: fused(served, reverse=True),
        Fault.ZEROED: {**served, Q: torch.zeros_like(served[Q])},
        Fault.NONFINITE: {**served, Q: served[Q] * float("nan")},
        Fault.MISSING: {n: v for n, v in served.items() if n != Q},
        Fault.EXTRA: {**served, "model.layers.1.mlp.foo.weight": served[Q]},
        Fault.SHAPE: {**served, Q: served[Q][:32]},
        Fault.DTYPE: {**served, Q: served[Q].float()},
        Fault.NOTHING_PUSHED: cast(step(MASTER)),
    }
    for fault, tensors in cases.items():
        report = compare_manifests(ours, _manifest(tensors))
        assert report.exit_code == 1
        assert {f.fault for f in report.findings} == {fault}, fault
    assert any("steps differ" in note for note in compare_manifests(ours, old).notes)


def test_tied_heads_in_manifests() -> None:
    headless = {n: v for n, v in MASTER.items() if n != "lm_head.weight"}
    embedding = cast(MASTER)["model.embed_tokens.weight"]
    ours = _manifest(headless, "bf16")
    tied = {**cast(headless), "lm_head.weight": embedding}
    assert compare_manifests(ours, _manifest(tied)).exit_code == 0
    stale = {**cast(headless), "lm_head.weight": embedding + 1}
    report = compare_manifests(ours, _manifest(stale))
    assert [f.fault for f in report.findings] == [Fault.UNTIED]


def test_different_casts_do_not_compare() -> None:
    with pytest.raises(InputError, match="one is of cast"):
        compare_manifests(_manifest(MASTER, "bf16"), _manifest(MASTER, "fp16"))
    with pytest.raises(InputError, match="unknown quantiser"):
        _manifest(MASTER, "int3")


@pytest.mark.parametrize("name", SCHEMES)
def test_a_quantised_cast_equals_the_served_checkpoint(name: str) -> None:
    """Trainer's manifest of the quantised cast against what an engine stores."""
    scheme = SCHEMES[name]
    served: Tensors = {}
    kind = "weight_scale_inv" if name == "block_fp8" else "weight_scale"
    for key, value in MASTER.items():
        if key.endswith("_proj.weight"):
            payload, scale = scheme.encode(value)
            served[key], served[key.removesuffix("weight") + kind] = payload, scale
        else:
            served[key] = value.bfloat16()
    ours = _manifest(MASTER, name)
    assert compare_manifests(ours, _manifest(served)).exit_code == 0
    if name == "mxfp8":
        assert _manifest(MASTER, "mxfp8:ceil").digest != ours.digest


def test_an_adapter_is_merged_before_hashing(tmp_path: Path) -> None:
    from test_weights_layout import _adapter, _merged

    adapter = _adapter(tmp_path / "adapter", [Q.removesuffix(".weight")])
    side = open_side(write(tmp_path / "base", MASTER), adapter)
    merged = _manifest(_merged(MASTER, adapter, 2.0), "bf16")
    assert build_manifest(side, "bf16").digest == merged.digest


def test_ranks_cannot_be_hashed_silently() -> None:
    side = memory_side("x", list(shard(cast(MASTER), 2)), LLAMA)
    with pytest.raises(InputError, match="cut into ranks"):
        build_manifest(side)
