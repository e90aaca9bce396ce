"""Every weight-sync fault of the menu is caught and named; the clean twin passes every check.

The argument of the matrix: no single check is enough. Each of the seven guards and of the four
complementary checks has a fault that it sees, and each of the four has one that it cannot see and
another can; the table in docs/weights.md is these very results.
"""

from __future__ import annotations

import math

import pytest
import torch
from weights_fault_matrix import COLUMNS, DOCS, SCHEMES, between, faults_of, result, text

from mismatch_audit.weights import sync_checks as checks
from mismatch_audit.weights.probes import (
    effective_weight,
    movement_coefficient,
    probe_expert,
    probe_linear,
    relative_error,
)
from mismatch_audit.weights.schemes import SCHEMES as LAYOUTS
from mismatch_audit.weights.schemes import scheme_by_name
from mismatch_audit.weights.simulated_engine import SimulatedEngine
from mismatch_audit.weights.simulated_model import DENSE_LAYERS, adapter, initial_master
from mismatch_audit.weights.simulated_push import export_push
from mismatch_audit.weights.sync_checks import RolloutStep
from mismatch_audit.weights.sync_faults import MENU, run_fault

CASES = [(scheme, i) for scheme in SCHEMES for i, _ in faults_of(scheme)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_clean_twin_passes_every_check(scheme: str) -> None:
    audit = result(None, scheme)
    assert audit.failing == []
    assert audit.cause == ""
    unobserved = {name for name, r in audit.results.items() if r.ok is None}
    assert unobserved == (set() if scheme == "mxfp8" else {"unwritten_scales", "set_audit"})


@pytest.mark.parametrize(
    ("scheme", "index"), CASES, ids=lambda v: MENU[v].flag if isinstance(v, int) else v
)
def test_each_sync_fault_is_caught_and_named(scheme: str, index: int) -> None:
    audit, fault = result(index, scheme), MENU[index]
    assert audit.failing, "not caught"
    assert fault.is_named(audit.cause), audit.cause


# what each check alone can see, and what the strongest checks cannot (scheme, fault, must, mustn't)
BLIND_SPOTS = [
    ("mxfp8", "stale_copy", {"dense_self_probe"}, {"read_back", "canary_push", "version"}),
    ("mxfp8", "stale_expert_copy", {"expert_probe"}, {"dense_self_probe", "read_back"}),
    ("mxfp8", "never_written", {"anchored_probe", "read_back"}, {"dense_self_probe"}),
    ("mxfp8", "scale_rounding", {"read_back"}, {"dense_self_probe", "anchored_probe"}),
    ("mxfp8", "unscaled_cast", {"read_back"}, {"dense_self_probe", "anchored_probe"}),
    ("mxfp8", "unquantised_layer", {"set_audit"}, {"live_dtype", "anchored_probe"}),
    ("mxfp8", "live_dtype", {"live_dtype"}, {"set_audit", "anchored_probe"}),
    ("mxfp8", "incoming_dtype", {"incoming_dtype"}, set(COLUMNS) - {"incoming_dtype"}),
    ("mxfp8", "storage_moved", {"canary_push"}, {"read_back", "anchored_probe", "version"}),
    ("bf16", "skipped_layer", {"read_back"}, {"anchored_probe", "canary_push", "version"}),
    ("bf16", "storage_moved", {"canary_push"}, set(COLUMNS) - {"canary_push"}),
    ("bf16", "adapter_off", {"anchored_probe"}, set(COLUMNS) - {"anchored_probe"}),
    ("bf16", "stale_prefix_cache", {"prefix_cache"}, set(COLUMNS) - {"prefix_cache"}),
    ("bf16", "blended_copy", {"zero_change_push"}, set(COLUMNS) - {"zero_change_push"}),
    ("bf16", "eos_lost", {"rollout_sentinel"}, set(COLUMNS) - {"rollout_sentinel"}),
    ("bf16", "not_applied", {"version", "read_back", "canary_push"}, {"anchored_probe"}),
    ("bf16", "version_without_load", {"read_back", "canary_push"}, {"version"}),
    ("bf16", "echoed_read_back", {"canary_push"}, {"read_back", "version", "anchored_probe"}),
]


@pytest.mark.parametrize(("scheme", "flag", "sees", "blind"), BLIND_SPOTS)
def test_blind_spots(scheme: str, flag: str, sees: set[str], blind: set[str]) -> None:
    index = next(i for i, fault in faults_of(scheme) if fault.flag == flag)
    failing = set(result(index, scheme).failing)
    assert sees <= failing
    assert not blind & failing


def test_every_check_is_needed() -> None:
    """Each column finds something in at least one scheme."""
    for check in COLUMNS:
        assert any(result(i, s).results[check].ok is False for s, i in CASES), check


def test_the_table_in_the_docs_is_these_results() -> None:
    assert between(DOCS.read_text("utf-8"), "fault-matrix") == text()


@pytest.mark.parametrize("scheme", ["block_fp8", "channel_int8"])
@pytest.mark.parametrize("flag", [None, "nan_scale", "skipped_layer", "wrong_rounding"])
def test_other_layouts(scheme: str, flag: str | None) -> None:
    fault = next((f for f in MENU if f.flag == flag), None)
    audit = run_fault(fault, scheme)
    if fault is None:
        assert audit.failing == []
    else:
        assert audit.failing
        assert fault.is_named(audit.cause), audit.cause


# -- discriminating power (K = 1024, N = 512, MXFP8 activations and weights) ---


def _mx(x: torch.Tensor) -> torch.Tensor:
    return LAYOUTS["mxfp8"].decode(*LAYOUTS["mxfp8"].encode(x))


def _normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_probes_separate_healthy_from_wrong_by_an_order() -> None:
    """Healthy below .05, every layout fault above .25."""
    weight = _normal(0, 512, 1024)
    payload, scale = LAYOUTS["mxfp8"].encode(weight)
    other_scale = LAYOUTS["mxfp8"].encode(_normal(1, 512, 1024) * torch.exp(_normal(2, 512, 1)))[1]
    own = LAYOUTS["mxfp8"].decode(payload, scale)

    def error(kernel: torch.Tensor, reference: torch.Tensor = own) -> float:
        return probe_linear(lambda x: _mx(x) @ kernel.t(), reference).relative_error

    assert 0.02 < error(own) < 0.035
    assert 0.03 < error(own, weight) < 0.05
    assert error(LAYOUTS["mxfp8"].decode(payload, other_scale)) > 0.4
    sized = weight * torch.exp(0.5 * _normal(3, 512, 32)).repeat_interleave(32, 1)
    p, s = LAYOUTS["mxfp8"].encode(sized)
    permuted = LAYOUTS["mxfp8"].decode(p, s[:, torch.randperm(32)])
    assert error(permuted, LAYOUTS["mxfp8"].decode(p, s)) > 0.25
    assert error(weight.roll(256, 0), weight) > 1
    assert error(_mx(_normal(9, 512, 1024)), weight) > 1  # never written: unrelated
    assert error(_mx(_normal(9, 512, 1024)), _mx(_normal(9, 512, 1024))) < 0.04  # self-consistent


def test_expert_probe_healthy_and_swapped() -> None:
    gate_up, down = _normal(0, 1024, 512) / 512**0.5, _normal(1, 512, 512) / 512**0.5

    def kernel(weights: torch.Tensor):
        def apply(x: torch.Tensor) -> torch.Tensor:
            gate, up = (_mx(x) @ _mx(weights).t()).chunk(2, -1)
            return _mx(torch.nn.functional.silu(gate) * up) @ _mx(down).t()

        return apply

    assert 0.03 < probe_expert(kernel(gate_up), gate_up, down).relative_error < 0.08
    assert not probe_expert(kernel(gate_up.roll(512, 0)), gate_up, down).ok


def test_effective_weight_reads_through_the_layer() -> None:
    """Identity rows through a quantised kernel give the weight it holds, bit for bit."""
    weight = _mx(_normal(0, 64, 96))
    assert torch.equal(effective_weight(lambda x: _mx(x) @ weight.t(), 96, block=32), weight)


def test_movement_coefficient() -> None:
    """1 when an update is served, 0 when not, 1/2 in between; sees what a norm of 0.25 cannot."""
    before = _normal(0, 256, 256)
    after = before + 0.02 * _normal(1, 256, 256)
    for share in (0.0, 0.5, 1.0):
        served = _mx(before + share * (after - before))
        assert probe_linear(lambda x, w=served: _mx(x) @ w.t(), after).ok
        c, error = movement_coefficient(lambda x, w=served: _mx(x) @ w.t(), before, after)
        assert abs(c - share) < 5 * error < 0.2
    c, error = movement_coefficient(lambda x: x @ before.t(), before, before)
    assert math.isnan(c)
    assert error == math.inf


def test_nan_never_passes_a_probe() -> None:
    weight = _normal(0, 8, 8)
    assert not probe_linear(lambda x: x @ weight.t() * float("nan"), weight).ok
    assert relative_error(torch.tensor([float("nan")]), torch.ones(1)) == math.inf
    assert relative_error(torch.ones(1), torch.zeros(1)) == math.inf
    assert relative_error(torch.zeros(1), torch.zeros(1)) == 0


# -- the small checks on their own ---


@pytest.mark.parametrize(
    ("steps", "ok"),
    [
        ([], None),
        ([RolloutStep(0, 0.01, 0.2)] * 2, True),
        ([RolloutStep(1, 0.01, 0.2)], False),
        ([RolloutStep(0, 1.01, 0.2)], False),
        ([RolloutStep(0, float("nan"), 0.2)], False),
        ([RolloutStep(0, 0.0, 1.0)], True),
        ([RolloutStep(0, 0.0, 1.0)] * 2, False),
        ([RolloutStep(0, 0.0, 1.0), RolloutStep(0, 0.0, 0.9), RolloutStep(0, 0.0, 1.0)], True),
    ],
)
def test_rollout_sentinel(steps: list[RolloutStep], ok: bool | None) -> None:
    assert checks.rollout_sentinel(steps).ok is ok


def test_a_check_without_anything_to_look_at_is_unobserved() -> None:
    """Never a pass: no hit in the cache, no filled scale, no quantised layer, no layer at all."""
    rows = torch.zeros(2, 3)
    assert checks.prefix_cache(0, rows, rows, 0).ok is None
    assert checks.prefix_cache(1, rows * float("nan"), rows, 0).ok is None
    assert checks.unwritten_scales({}, 0).ok is None
    assert checks.set_audit(frozenset(), frozenset()).ok is None
    assert checks.dense_self_probe([]).ok is None
    assert checks.expert_probe([]).ok is None
    assert checks.live_dtype({}, {}).ok is None
    assert checks.incoming_dtype({"a": "x"}, {"b": "x"}).ok is None
    assert checks.zero_change_push(rows * float("nan"), rows).ok is None


def test_a_cache_that_is_still_hit_fails_even_when_the_numbers_agree() -> None:
    rows = torch.zeros(2, 3)
    assert checks.prefix_cache(1, rows, rows, 0).ok is True
    assert checks.prefix_cache(1, rows, rows, 1).ok is False
    assert checks.prefix_cache(1, rows + 1e-6, rows, 0).ok is False


def test_versions_must_grow_to_the_pushed_one() -> None:
    assert checks.version_check(1, 2, 2).ok
    for before, after, pushed in ((1, 1, 2), (2, 2, 2), (1, 3, 2), (3, 2, 2)):
        assert not checks.version_check(before, after, pushed).ok


def test_canary_needs_motion_and_restoration() -> None:
    state = {"w": torch.eye(4)}
    x = torch.ones(2, 4)

    def push(factor: float) -> None:
        state["w"] = torch.eye(4) * factor

    assert checks.canary_push(push, lambda: x @ state["w"]).ok
    assert not checks.canary_push(lambda _: None, lambda: x).ok  # acknowledged, not applied
    state["w"] = torch.eye(4)
    assert not checks.canary_push(lambda f: push(2.0), lambda: x @ state["w"]).ok  # never restored
    assert not checks.canary_push(push, lambda: torch.zeros(2, 4)).ok  # a dead layer proves nothing


def test_a_withheld_push_must_be_noticed() -> None:
    assert checks.withheld_push(True, "r").ok
    assert not checks.withheld_push(False, "r").ok


def test_derived_scales_are_what_the_kernel_reads() -> None:
    """The simulation's point: damaging the swizzled copy changes the layer, not the parameters."""
    scheme = scheme_by_name("mxfp8")
    engine = SimulatedEngine(scheme, adapter(5))
    engine.start(export_push(initial_master(0), scheme, 1))
    layer = DENSE_LAYERS[0]
    x = _normal(0, 4, 128)
    before, read = engine.linear(layer)(x), engine.read_back()
    engine.captured[f"{layer}.weight_scale.swizzled"] += 1
    assert torch.allclose(engine.linear(layer)(x), before * 2)
    assert all(torch.equal(read[n], v) for n, v in engine.read_back().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e7])
def test_a_rotary_table_in_the_engines_dtype_is_right_and_another_base_is_not(
    dtype: torch.dtype, theta: float
) -> None:
    """A live table holds rounded cosines and sines. What rounding explains is no finding; a base
    10 % off, positions scaled by 1.25 and a zeroed table are."""
    from mismatch_audit.weights.buffers import check_buffer, inverse_frequencies
    from mismatch_audit.weights.families import Geometry

    geometry = Geometry(head_dim=128, rope={"theta": theta})
    wanted = inverse_frequencies(geometry)
    assert wanted is not None

    def read(frequencies: torch.Tensor) -> torch.Tensor:
        cos, sin = frequencies.cos().to(dtype).float(), frequencies.sin().to(dtype).float()
        return torch.atan2(sin, cos)

    assert check_buffer("inv_freq", read(wanted), geometry).healthy
    other = inverse_frequencies(Geometry(head_dim=128, rope={"theta": 1.1 * theta}))
    assert not check_buffer("inv_freq", read(other), geometry).healthy
    assert not check_buffer("inv_freq", read(wanted / 1.25), geometry).healthy
    assert not check_buffer("inv_freq", torch.zeros_like(wanted), geometry).healthy
