"""Quantised layouts are exact, and a quantised weight is judged by bytes, not by error norms.

Encoders are checked against their definitions, element by element in float64; then each fault of
a stored quantised weight is injected and must be named, in files and per rank.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weights_zoo import LLAMA, Tensors, cast

from kernel_contracts.errors import InputError
from mismatch_audit.weights.compare import CompareOptions, compare_sides
from mismatch_audit.weights.findings import Fault, WeightReport
from mismatch_audit.weights.memory import memory_side
from mismatch_audit.weights.rounding import nearest
from mismatch_audit.weights.schemes import (
    SCHEMES,
    e4m3_to_float,
    e8m0_bytes,
    e8m0_to_float,
    infer_scheme,
    scheme_by_name,
    swizzle,
    unswizzle,
)

NAME = "model.layers.0.mlp.up_proj.weight"
OTHER = "model.layers.0.mlp.gate_proj.weight"


def _weights(seed: int = 0, rows: int = 256, columns: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(torch.randn(rows, 1, generator=generator))
    return torch.randn(rows, columns, generator=generator) * size


# -- formats -----------------------------------------------------------------------------------


def test_e4m3_table_is_the_format() -> None:
    """S.EEEE.MMM, bias 7, no infinity, NaN at 0x7F (OCP 8-bit floating point, section 5)."""
    values = e4m3_to_float(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn))
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = (
            mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        )
        if byte & 0x7F == 0x7F:
            assert torch.isnan(values[byte])
        else:
            assert values[byte] == (-size if byte & 128 else size)


@settings(max_examples=200, deadline=None)
@given(st.floats(2.0**-100, 2.0**100))
def test_e8m0_scales_by_definition(amax: float) -> None:
    """floor: 2^(floor(log2 amax) - 8); ceil: the smallest power of two with amax / s <= 448."""
    value = torch.tensor([amax], dtype=torch.float32)
    floor = float(e8m0_to_float(e8m0_bytes(value, "floor")))
    ceil = float(e8m0_to_float(e8m0_bytes(value, "ceil")))
    exact = float(value)
    assert 256 <= exact / floor < 512
    assert exact / ceil <= 448
    assert exact / (ceil / 2) > 448


def test_e8m0_edges() -> None:
    assert e8m0_bytes(torch.tensor([0.0])).tolist() == [0]
    assert e8m0_bytes(torch.tensor([256.0])).tolist() == [127]
    assert torch.isnan(e8m0_to_float(torch.tensor([0xFF], dtype=torch.uint8))).all()
    assert e8m0_to_float(torch.tensor([0, 127, 254], dtype=torch.uint8)).tolist() == [
        2.0**-127, 1.0, 2.0**127
    ]  # fmt: skip


@pytest.mark.parametrize("name", SCHEMES)
def test_decode_is_within_half_a_step(name: str) -> None:
    """No element is farther from its weight than half a step of its own block (or saturation)."""
    scheme, weight = SCHEMES[name], _weights()
    payload, scale = scheme.encode(weight)
    assert payload.shape == weight.shape
    assert tuple(scale.shape) == scheme.scale_shape((256, 256))
    error = (scheme.decode(payload, scale) - weight).double().abs()
    if name == "channel_int8":
        step = weight.abs().amax(1, keepdim=True) / 127
        assert bool((error <= step.double() * 0.5001).all())
    elif name == "mxfp8":
        largest = weight.view(256, 8, 32).abs().amax(2).repeat_interleave(32, 1)
        assert bool((error <= largest.double() / 8 + 1e-12).all())  # floor scales saturate
        error = (scheme_by_name("mxfp8:ceil").decode(*scheme_by_name("mxfp8:ceil").encode(weight))
                 - weight).double().abs()  # fmt: skip
        assert bool((error <= torch.maximum(weight.double().abs() / 16, largest * 2.0**-16)).all())
    else:
        assert float(error.norm() / weight.double().norm()) < 0.03


@pytest.mark.parametrize("shape", [(256, 256), (130, 96), (64, 32), (200, 300)])
def test_block_scales_of_ragged_shapes(shape: tuple[int, int]) -> None:
    weight = _weights(1, *shape)
    for name in ("mxfp8", "block_fp8"):
        scheme = SCHEMES[name]
        payload, scale = scheme.encode(weight)
        assert tuple(scale.shape) == scheme.scale_shape(shape)
        value = scheme.decode(payload, scale)
        assert float((value - weight).norm() / weight.norm()) < 0.05


def test_a_block_scale_is_the_blocks_own() -> None:
    weight = torch.ones(256, 256)
    weight[128:, :128] = 4.0
    scale = SCHEMES["block_fp8"].encode(weight)[1]
    assert torch.allclose(scale * 448, torch.tensor([[1.0, 1.0], [4.0, 1.0]]))


@pytest.mark.parametrize("shape", [(128, 4), (256, 8), (130, 5), (512, 32), (1, 1)])
def test_swizzle_round_trip_and_order(shape: tuple[int, int]) -> None:
    scale = torch.randint(0, 255, shape, dtype=torch.uint8)
    flat = swizzle(scale)
    assert torch.equal(unswizzle(flat, shape), scale)
    if shape == (256, 8):
        # element (row, column): tile, then row % 32, then row // 32 % 4, then column % 4
        row, column = 77, 6
        tile = (row // 128) * 2 + column // 4
        place = tile * 512 + row % 32 * 16 + row // 32 % 4 * 4 + column % 4
        assert flat[place] == scale[row, column]


def test_schemes_are_recognised_by_their_scales() -> None:
    for name, scheme in SCHEMES.items():
        payload, scale = scheme.encode(_weights())
        found = infer_scheme(payload.dtype, (256, 256), scale.dtype, tuple(scale.shape))
        assert found is not None
        assert found.name == name
    assert infer_scheme(torch.int8, (256, 256), torch.float32, (7,)) is None


def test_floor_and_ceil_scales_differ_in_a_fifth_of_the_bytes_and_little_in_value() -> None:
    """Gaussian weights, K = 1024: the reason why norms cannot tell the two apart."""
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    floor, ceil = scheme_by_name("mxfp8:floor"), scheme_by_name("mxfp8:ceil")
    (pf, sf), (pc, sc) = floor.encode(weight), ceil.encode(weight)
    assert 0.14 < float((sf != sc).float().mean()) < 0.22
    gap = float((floor.decode(pf, sf) - ceil.decode(pc, sc)).norm() / weight.norm())
    assert 0.01 < gap < 0.02


def test_quantiser_names() -> None:
    assert scheme_by_name("mxfp8:ceil").scale_mode == "ceil"
    assert scheme_by_name("channel_int8:stored:truncated").variant.count("payload") == 2
    for wrong in ("mxfp4", "mxfp8:sideways"):
        with pytest.raises(InputError):
            scheme_by_name(wrong)


# -- faults of stored quantised weights ----------------------------------------------------------

SCALES = {"block_fp8": "weight_scale_inv"}


def _served(name: str, weight: torch.Tensor, scheme: str, scale_dtype=None) -> Tensors:
    payload, scale = scheme_by_name(scheme).encode(weight, scale_dtype)
    kind = SCALES.get(scheme.split(":")[0], "weight_scale")
    return {name: payload, f"{name.removesuffix('weight')}{kind}": scale}


def _run(served: Tensors | list[Tensors], quantiser: str | None = None, **extra) -> WeightReport:
    master = {NAME: _weights(), OTHER: _weights(1), **extra}
    return compare_sides(
        memory_side("trainer", master, LLAMA),
        memory_side("served", served, LLAMA),
        options=CompareOptions(
            threads=1, quantiser=scheme_by_name(quantiser) if quantiser else None
        ),
    )


def _both(scheme: str, make: Callable[[Tensors], Tensors] = lambda x: x) -> Tensors:
    return make({**_served(NAME, _weights(), scheme), **_served(OTHER, _weights(1), scheme)})


@pytest.mark.parametrize("scheme", [*SCHEMES, "mxfp8:ceil", "channel_int8:stored"])
def test_clean_quantised_twins_are_quiet(scheme: str) -> None:
    report = _run(_both(scheme), quantiser=scheme)
    assert report.exit_code == 0, [f.title for f in report.findings]
    assert all(r.relative_error is not None and r.relative_error < 0.06 for r in report.reports)


@pytest.mark.parametrize("scheme", ["mxfp8", "block_fp8", "channel_fp8", "channel_int8"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_scales_made_before_the_cut_are_understood_per_rank(scheme: str, ranks: int) -> None:
    """Row-parallel ranks hold columns whose scales were computed over all columns."""
    weight = _weights(2, 256, 512)
    down = "model.layers.0.mlp.down_proj.weight"
    whole = _served(down, weight, scheme)
    scale_name = next(n for n in whole if "scale" in n)
    served: list[Tensors] = []
    for rank in range(ranks):
        scale = whole[scale_name]
        cut = scale.chunk(ranks, 1)[rank] if scale.shape[1] > 1 else scale
        served.append({down: whole[down].chunk(ranks, 1)[rank].contiguous(),
                       scale_name: cut.contiguous()})  # fmt: skip
    trainer = memory_side("trainer", {down: weight}, LLAMA)
    clean = compare_sides(trainer, memory_side("served", list(served), LLAMA))
    assert clean.exit_code == 0, [f.title for f in clean.findings]
    other = _served(down, _weights(3, 256, 512), scheme)
    served[1] = {n: (v.chunk(ranks, 1)[1] if v.ndim > 1 and v.shape[1] > 1 else v).contiguous()
                 for n, v in other.items()}  # fmt: skip
    damaged = compare_sides(trainer, memory_side("served", list(served), LLAMA))
    assert damaged.exit_code == 1
    assert damaged.reports[0].ranks == [1]


def _scale(served: Tensors, make: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    name = next(n for n in served if n.startswith(NAME.removesuffix("weight")) and "scale" in n)
    return {**served, name: make(served[name].clone())}


def _swapped(served: Tensors) -> Tensors:
    return {n.replace("up_proj", "X").replace("gate_proj", "up_proj").replace("X", "gate_proj"): v
            for n, v in served.items()}  # fmt: skip


QUANTISED_FAULTS: dict[str, tuple[Callable[[], Tensors], Fault]] = {
    "ceil scales": (lambda: _both("mxfp8:ceil"), Fault.QUANTIZER),
    "nearest scales": (lambda: _both("mxfp8:nearest"), Fault.QUANTIZER),
    "truncated payload": (lambda: _both("block_fp8:truncated"), Fault.QUANTIZER),
    "payload from stored scales": (
        lambda: {
            **_served(NAME, _weights(), "channel_int8:stored", torch.bfloat16),
            **_served(OTHER, _weights(1), "channel_int8:stored", torch.bfloat16),
        },
        Fault.QUANTIZER,
    ),
    "unwritten scales": (
        lambda: _both("mxfp8", lambda s: _scale(s, lambda x: x.fill_(0xFF))), Fault.UNWRITTEN
    ),
    "NaN scale": (
        lambda: _both("block_fp8", lambda s: _scale(s, lambda x: x.fill_(float("nan")))),
        Fault.UNWRITTEN,
    ),
    "permuted scales": (lambda: _both("mxfp8", lambda s: _scale(s, lambda x: x.flip(0))),
                        Fault.PERMUTED),
    "permuted float scales": (
        lambda: _both("channel_int8", lambda s: _scale(s, lambda x: x.flip(0))), Fault.PERMUTED
    ),
    "zeroed": (lambda: _both("channel_int8", lambda s: {**s, NAME: torch.zeros_like(s[NAME])}),
               Fault.ZEROED),
    "scale missing": (
        lambda: {n: v for n, v in _both("channel_int8").items()
                 if "scale" not in n or "gate" in n},
        Fault.SCALE_MISSING,
    ),
    "unscaled cast": (
        lambda: {**_served(OTHER, _weights(1), "mxfp8"),
                 NAME: nearest(_weights(), torch.float8_e4m3fn)},
        Fault.UNSCALED,
    ),
    "unscaled cast with neutral scales": (
        lambda: _both("mxfp8", lambda s: {**_scale(s, lambda x: x.fill_(127)),
                                          NAME: nearest(_weights(), torch.float8_e4m3fn)}),
        Fault.UNSCALED,
    ),
    "gate and up swapped": (lambda: _swapped(_both("mxfp8")), Fault.SWAPPED),
    "transposed": (
        lambda: {**_both("mxfp8"), **_served(NAME, _weights().t().contiguous(), "mxfp8")},
        Fault.TRANSPOSED,
    ),
    "another initialisation": (
        lambda: {**_both("mxfp8"), **_served(NAME, _weights(9), "mxfp8")}, Fault.UNRELATED
    ),
    "a step behind": (
        lambda: {**_both("mxfp8"), **_served(NAME, _weights() + 0.3 * _weights(9), "mxfp8")},
        Fault.STALE,
    ),
    "old scales, new payload": (
        lambda: _both("block_fp8", lambda s: _scale(s, lambda x: x * 1.01)), Fault.STALE
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTISED_FAULTS)
def test_each_quantised_fault_is_found_and_named(name: str) -> None:
    make, wanted = QUANTISED_FAULTS[name]
    report = _run(make())
    assert report.exit_code == 1
    assert {finding.fault for finding in report.findings} == {wanted}


def test_an_error_norm_would_pass_an_unscaled_cast() -> None:
    """Why bytes: the unscaled cast of small-range weights has the error of a healthy copy."""
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    value = nearest(weight, torch.float8_e4m3fn).float()
    assert float((value - weight).norm() / weight.norm()) < 0.035


def test_other_tensors_beside_quantised_ones_are_still_compared() -> None:
    norm = "model.norm.weight"
    served = {**_both("mxfp8"), norm: torch.ones(64).bfloat16()}
    assert _run(served, **{norm: torch.ones(64)}).exit_code == 0
    assert _run(served, **{norm: torch.ones(64) * 3}).exit_code == 1


def test_activation_scales_are_noted_not_compared() -> None:
    served = {**_both("channel_fp8"), NAME.replace("weight", "input_scale"): torch.tensor(0.5)}
    report = _run(served)
    assert report.exit_code == 0
    assert any("input_scale" in note for note in report.notes)


def test_quantised_against_a_quantised_master() -> None:
    """Two quantised checkpoints compare byte by byte, payload and scales alike."""
    one = _both("mxfp8")
    trainer = memory_side("trainer", one, LLAMA)
    assert compare_sides(trainer, memory_side("served", _both("mxfp8"), LLAMA)).exit_code == 0
    other = memory_side("served", _scale(one, lambda x: x + 1), LLAMA)
    assert compare_sides(trainer, other).exit_code == 1


def test_a_bf16_copy_of_a_quantised_weight_is_not_the_master() -> None:
    """Dequantised values in a bf16 tensor are no cast of the master."""
    scheme = SCHEMES["mxfp8"]
    value = scheme.decode(*scheme.encode(_weights()))
    served = {**cast({OTHER: _weights(1)}), NAME: value.bfloat16()}
    assert _run(served).exit_code == 1
