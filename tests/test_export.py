"""What is exported is what was promised: unbiased, seeded, exact bytes, resumable, never half.

Stochastic rounding is proven exactly (all 2^16 random values enumerated), the silent bug of
rounding after the cast is injected and refused, and every interruption point is tried.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from weights_zoo import LLAMA, Tensors, cast, llama_weights, step, write, write_sharded

from kernel_contracts.errors import InputError, UnsoundError
from mismatch_audit.weights import export as export_module
from mismatch_audit.weights.compare import compare_sides
from mismatch_audit.weights.digest import build_manifest
from mismatch_audit.weights.export import ExportOptions, export_checkpoint
from mismatch_audit.weights.findings import Fault
from mismatch_audit.weights.manifest import compare_manifests, read_manifest
from mismatch_audit.weights.sides import open_side
from mismatch_audit.weights.stochastic import (
    Noise,
    add_and_truncate,
    between,
    rounded_after_cast,
    self_test,
    stochastic,
)

MASTER = llama_weights()


def _export(source: Path, out: Path, **options) -> Tensors:
    export_checkpoint(source, out, ExportOptions(threads=1, **options))
    tensors: Tensors = {}
    for path in sorted(out.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


# -- the rounding itself ---


@settings(max_examples=40, deadline=None)
@given(st.floats(-(2.0**20), 2.0**20, width=32))
def test_bf16_stochastic_rounding_is_exactly_unbiased(value: float) -> None:
    """Over all 2^16 random values the mean of q is w, exactly (float64 sums of bf16 are exact)."""
    w = torch.full((1 << 16,), value)
    q = add_and_truncate(w, torch.arange(1 << 16, dtype=torch.int32)).double()
    assert float(q.mean()) == float(w[0].double())
    assert len(q.unique()) <= 2
    step_size = max(abs(value) * 2.0**-7, 2.0**-133)
    assert float((q - value).abs().max()) <= step_size


def test_special_values_survive() -> None:
    values = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, -2.5])
    values[4:5].view(torch.int32)[0] = 0x7F800001  # a NaN whose payload bf16 cannot hold
    q = add_and_truncate(values, torch.full((7,), 65535, dtype=torch.int32))
    assert torch.isnan(q[4])
    assert torch.equal(q[[0, 1, 2, 3, 5, 6]].float(), values[[0, 1, 2, 3, 5, 6]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_other_formats_are_unbiased_over_a_grid_of_random_numbers(dtype: torch.dtype) -> None:
    values = torch.randn(50, generator=torch.Generator().manual_seed(0))
    uniform = ((torch.arange(4096).double() + 0.5) / 4096)[:, None].expand(4096, 50)
    q = between(values.expand(4096, 50), uniform, dtype).double()
    spacing = (q.amax(0) - q.amin(0)).clamp_min(1e-12)
    assert float(((q.mean(0) - values.double()).abs() / spacing).max()) < 1 / 4000


def test_noise_depends_on_seed_push_and_name_and_not_on_the_slice() -> None:
    noise = Noise(3, 1)
    whole = noise.draw("a", 0, 1000, 16)
    for start, count in ((0, 10), (7, 100), (512, 488), (999, 1)):
        assert torch.equal(noise.draw("a", start, count, 16), whole[start : start + count])
        assert torch.equal(
            noise.draw("a", start, count, 32), noise.draw("a", 0, 1000, 32)[start : start + count]
        )
    for other in (Noise(4, 1), Noise(3, 2), Noise(3)):
        assert not torch.equal(other.draw("a", 0, 1000, 16), whole)
    assert not torch.equal(noise.draw("b", 0, 1000, 16), whole)
    counts = np.bincount(noise.draw("a", 0, 1 << 16, 16).numpy() >> 12, minlength=16)
    assert counts.min() > 3800


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_the_self_test_passes_the_right_one_and_names_every_wrong_one(dtype: torch.dtype) -> None:
    """Injected: rounding after the cast (silent), a biased threshold, a seed that is ignored."""
    assert self_test(stochastic, dtype).problem is None
    after = self_test(rounded_after_cast, dtype).problem
    assert after is not None
    assert "already cast" in after

    def biased(name: str, start: int, noise: Noise):
        def rounded(values: torch.Tensor, to: torch.dtype) -> torch.Tensor:
            uniform = noise.draw(name, start, values.numel(), 32).double() / 2**32
            return between(values, uniform * 0.9, to)

        return rounded

    problem = self_test(biased, dtype).problem
    assert problem is not None
    assert "biased" in problem

    def deaf(name: str, start: int, noise: Noise):
        return stochastic(name, start, Noise(0, 0))

    problem = self_test(deaf, dtype).problem
    assert problem is not None
    assert "seed" in problem


# -- the exporter ---


def test_nearest_equals_the_cast_and_keeps_the_layout(tmp_path: Path) -> None:
    """Same files, names and order; config says bf16; the manifest is the trainer's."""
    source = write_sharded(tmp_path / "master", MASTER)
    (source / "tokenizer.json").write_text("{}")
    (source / "optimizer.bin").write_bytes(b"not copied")
    served = _export(source, tmp_path / "out", step=7, data_cut="2026-02")
    assert all(torch.equal(served[n], v) for n, v in cast(MASTER).items())
    out = tmp_path / "out"
    assert sorted(p.name for p in out.iterdir()) == sorted(
        ["config.json", "manifest.json", "tokenizer.json", "model.safetensors.index.json",
         "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    )  # fmt: skip
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert compare_sides(open_side(source), open_side(out)).exit_code == 0
    manifest = read_manifest(out / "manifest.json")
    assert (manifest.step, manifest.data_cut, manifest.cast) == (7, "2026-02", "bf16")
    assert compare_manifests(build_manifest(open_side(source), "bf16"), manifest).exit_code == 0


def test_integers_and_halves_pass_through(tmp_path: Path) -> None:
    extra = {"model.counter": torch.arange(5), "model.half.weight": torch.randn(3).half()}
    served = _export(write(tmp_path / "m", {**MASTER, **extra}), tmp_path / "out")
    assert torch.equal(served["model.counter"], torch.arange(5))
    assert torch.equal(served["model.half.weight"], extra["model.half.weight"])


def test_seeds_pushes_and_dithers(tmp_path: Path) -> None:
    """stochastic: another seed or push, another copy. dither: another seed only."""
    source = write(tmp_path / "m", MASTER)

    def copy(name: str, **options) -> torch.Tensor:
        return _export(source, tmp_path / name, **options)["lm_head.weight"]

    first = copy("a", rounding="stochastic", seed=1, push=1)
    assert torch.equal(first, copy("b", rounding="stochastic", seed=1, push=1))
    assert not torch.equal(first, copy("c", rounding="stochastic", seed=2, push=1))
    assert not torch.equal(first, copy("d", rounding="stochastic", seed=1, push=2))
    dither = copy("e", rounding="dither", seed=1, push=1)
    assert torch.equal(dither, copy("f", rounding="dither", seed=1, push=2))
    assert not torch.equal(dither, copy("g", rounding="dither", seed=2, push=1))
    report = compare_sides(open_side(source), open_side(tmp_path / "a"))
    assert Fault.ROUNDING in {f.fault for f in report.findings}


def test_threads_and_blocks_do_not_change_a_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "m", MASTER)
    one = _export(source, tmp_path / "a", rounding="stochastic")
    monkeypatch.setattr(export_module, "BLOCK_ELEMENTS", 1000)
    export_checkpoint(source, tmp_path / "b", ExportOptions("stochastic", threads=2))
    other = load_file(tmp_path / "b" / "model.safetensors")
    assert all(torch.equal(one[n], other[n]) for n in one)


def test_unbiased_through_the_whole_exporter(tmp_path: Path) -> None:
    """The mean of 64 exports is within 5 standard errors of the master, in each of 8 groups."""
    w = torch.randn(64, 64, generator=torch.Generator().manual_seed(3)) * 0.05
    source = write(tmp_path / "m", {"model.x.weight": w}, None)
    total = torch.zeros(64, 64, dtype=torch.float64)
    for push in range(64):
        total += _export(source, tmp_path / f"{push}", rounding="stochastic", push=push)[
            "model.x.weight"
        ].double()
    step_size = torch.exp2(torch.floor(torch.log2(w.abs().double())) - 7)
    place = (w.double().abs() / step_size) % 1
    error = (total / 64 - w.double()) * w.double().sign() / step_size
    for group in range(8):
        members = (place >= group / 8) & (place < (group + 1) / 8)
        variance = float((place * (1 - place))[members].sum()) / int(members.sum()) ** 2
        assert abs(float(error[members].mean())) < 5 * (variance / 64) ** 0.5


def test_the_silent_bug_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = write(tmp_path / "m", MASTER)
    with pytest.raises(UnsoundError, match="already cast"):
        export_checkpoint(
            source, tmp_path / "out", ExportOptions("stochastic"), make=rounded_after_cast
        )
    assert not (tmp_path / "out").exists()


def test_feedback_carries_its_error_and_nothing_is_lost(tmp_path: Path) -> None:
    """state_t = master_t + state_(t-1) - served_t, exactly; the running mean tracks the master."""
    w = MASTER["lm_head.weight"]
    source = write(tmp_path / "0", {"lm_head.weight": w}, None)
    previous, state, total = None, torch.zeros_like(w), torch.zeros_like(w, dtype=torch.float64)
    for push in range(12):
        out = tmp_path / f"out{push}"
        served = _export(source, out, rounding="feedback", state=previous)["lm_head.weight"]
        wanted = w + state
        assert torch.equal(served, wanted.bfloat16())
        state = wanted - served.float()
        kept = load_file(out / "feedback" / "model.safetensors")["lm_head.weight"]
        assert torch.equal(kept, state)
        total += served.double()
        previous = out
    mean_error = float((total / 12 - w.double()).norm())
    assert mean_error < 0.2 * float((w.bfloat16().double() - w.double()).norm())


def test_feedback_mistakes(tmp_path: Path) -> None:
    source = write(tmp_path / "m", MASTER)
    with pytest.raises(InputError, match="only feedback"):
        _export(source, tmp_path / "a", rounding="dither", state=tmp_path)
    with pytest.raises(InputError, match="cannot read"):
        _export(source, tmp_path / "b", rounding="feedback", state=tmp_path / "gone")
    _export(write(tmp_path / "n", {"x.weight": torch.ones(2)}), tmp_path / "c", rounding="feedback")
    with pytest.raises(InputError, match="has no"):
        _export(source, tmp_path / "d", rounding="feedback", state=tmp_path / "c")


class _Stop(Exception):
    """A crash, injected."""


@pytest.mark.parametrize("rounding", ["stochastic", "feedback"])
def test_an_interrupted_export_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounding: str
) -> None:
    """Stopped after every possible number of journal entries, it ends as the undisturbed one."""
    few = {n: v for n, v in MASTER.items() if "layers.0" in n or "layers" not in n}
    source = write_sharded(tmp_path / "m", few)
    whole = _export(source, tmp_path / "whole", rounding=rounding)
    journal_write = export_module.Journal.write
    written = 0
    for stop_after in range(1, 2 * len(few), 3):
        out = tmp_path / f"out{stop_after}"
        calls = 0

        def stopping(journal, folder, limit=stop_after) -> None:
            nonlocal calls
            calls += 1
            if calls > limit:
                raise _Stop
            journal_write(journal, folder)

        monkeypatch.setattr(export_module.Journal, "write", stopping)
        try:
            _export(source, out, rounding=rounding)
        except _Stop:
            written += 1
            assert not (out / "manifest.json").exists()  # nothing looks finished
        monkeypatch.setattr(export_module.Journal, "write", journal_write)
        resumed = _export(source, out, rounding=rounding) if calls > stop_after else whole
        assert all(torch.equal(whole[n], resumed[n]) for n in whole)
        assert not list(out.rglob("*.partial"))
        if rounding == "feedback":
            for path in sorted((tmp_path / "whole" / "feedback").iterdir()):
                assert path.read_bytes() == (out / "feedback" / path.name).read_bytes()
    assert written >= 3


def test_resuming_with_other_options_or_another_master_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write(tmp_path / "m", MASTER), tmp_path / "out"

    def crash(*_) -> None:
        raise _Stop

    with monkeypatch.context() as patch:
        patch.setattr(export_module, "_write_beside", crash)
        with pytest.raises(_Stop):
            _export(source, out)
    with pytest.raises(InputError, match="another rounding, seed"):
        _export(source, out, rounding="dither", seed=3)
    save_file(step(MASTER), source / "model.safetensors")
    os.utime(source / "model.safetensors", ns=(1, 1))
    with pytest.raises(InputError, match="another source"):
        _export(source, out)


def test_output_folders_are_never_overwritten(tmp_path: Path) -> None:
    source, out = write(tmp_path / "m", MASTER), tmp_path / "out"
    _export(source, out)
    with pytest.raises(InputError, match="not empty"):
        _export(source, out)
    (tmp_path / "file").write_text("x")
    with pytest.raises((InputError, OSError)):
        _export(source, tmp_path / "file")


@pytest.mark.parametrize(
    ("tensors", "options", "wanted"),
    [
        (cast(MASTER), {}, "nothing to round"),
        (MASTER, {"dtype": "fp4"}, "cannot export to"),
        (MASTER, {"rounding": "up"}, "unknown rounding"),
    ],
)
def test_what_cannot_be_exported(tmp_path: Path, tensors, options, wanted: str) -> None:
    with pytest.raises(InputError, match=wanted):
        _export(write(tmp_path / "m", tensors), tmp_path / "out", **options)


def test_a_full_disk_keeps_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write(tmp_path / "m", MASTER, LLAMA), tmp_path / "out"
    real, calls = os.pwrite, 0

    def full(*arguments) -> int:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(export_module.os, "pwrite", full)
        with pytest.raises(InputError, match="No space left"):
            _export(source, out)
    assert _export(source, out)["lm_head.weight"].equal(cast(MASTER)["lm_head.weight"])
