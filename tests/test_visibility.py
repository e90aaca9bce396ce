"""How much of a step is served: formulas against direct counts, and the four exports' promises.

Rounding to nearest from a start on the grid serves almost nothing of a small step; a dither serves
all of it on average at the same byte cost; fresh noise serves it at a higher one. fp32 masters
delay, bf16 masters lose. Each statement is checked on numbers that are counted independently.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_contracts.errors import InputError
from mismatch_audit.weights.binary import BinaryState, FlipLog, audit_binary, replay
from mismatch_audit.weights.grids import (
    GRIDS,
    changed_bytes,
    float_step,
    grid_by_name,
    pack_bits,
)
from mismatch_audit.weights.memory import memory_side
from mismatch_audit.weights.rounding import nearest, ordered
from mismatch_audit.weights.served_loss import mean_loss, serve_in_place
from mismatch_audit.weights.stochastic import Noise, stochastic
from mismatch_audit.weights.visibility import measure_visibility
from mismatch_audit.weights.visibility_report import Movement, VisibilityReport

NAME = "model.layers.0.mlp.up_proj.weight"


def _normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


START = (_normal(0, 256, 256) * 0.05).bfloat16().float()  # a run starts from a bf16 checkpoint
STEP = 1e-6 * _normal(1, 256, 256).sign()


def _measure(
    before: torch.Tensor, after: torch.Tensor, cast: str = "bf16", origin=None, **options
) -> VisibilityReport:
    sides = [memory_side("x", {NAME: value}, {}) for value in (before, after)]
    first = memory_side("o", {NAME: origin}, {}) if origin is not None else None
    return measure_visibility(*sides, grid_by_name(cast), first, threads=1, **options)


def test_a_small_step_is_hardly_visible_and_the_dither_shows_all_of_it() -> None:
    """The phenomenon in one tensor: 0.4% of a step per weight, |d| / step."""
    overall = _measure(START, START + STEP).overall.to_dict()
    assert overall["moved_share"] == 1
    assert overall["visible_share"] < 0.03
    assert overall["gain"] < 0.05
    exports = overall["exports"]
    assert exports["nearest"]["gain"] < 0.3
    for name in ("dither", "stochastic"):
        assert abs(exports[name]["gain"] - 1) < 0.15
    assert exports["stochastic"]["bytes_changed_per_push"] > (
        2 * exports["dither"]["bytes_changed_per_push"]
    )
    # the dither costs what rounding to nearest costs in the long run: |d| / step per push
    predicted = overall["predicted_visible_share"]
    assert exports["dither"]["visible_share_per_push"] == pytest.approx(predicted, rel=0.15)


def test_numbers_equal_direct_counts() -> None:
    report = _measure(START, START + STEP, pushes=3)
    item = report.overall
    after = START + STEP
    seen = START.bfloat16() != after.bfloat16()
    assert item.visible == int(seen.sum())
    assert item.on_grid == item.weights == START.numel()
    served, moved = (after.bfloat16().float() - START).double(), (after - START).double()
    assert item.movement.gain == pytest.approx(float((served * moved).sum() / (moved**2).sum()))
    step = torch.exp2(torch.floor(torch.log2(START.abs().double())) - 7)
    wanted = float((moved.abs() / step).clamp_max(1).mean())
    assert item.predicted / item.weights == pytest.approx(wanted, rel=1e-6)
    lag = (step / (2 * moved.abs())).flatten().sort()[0]
    for q, value in item.lag_quantiles().items():
        exact = float(lag[round(int(q[1:]) / 100 * len(lag))])
        assert value == pytest.approx(exact, rel=0.10)  # bins of 1/8 octave
    hidden = ~seen & (moved != 0)
    assert item.delayed == int(hidden.sum())
    share = float((moved[hidden] ** 2).sum() / (moved**2).sum())
    assert report.to_dict()["overall"]["delayed_energy_share"] == pytest.approx(share)


def test_predicted_is_right_where_phases_are_uniform() -> None:
    """E[visible] = mean min(1, |d| / step) for masters that are not on the grid."""
    before = _normal(2, 512, 512) * 0.05
    for size in (1e-5, 1e-4, 1e-3):
        overall = _measure(before, before + size * _normal(3, 512, 512).sign(), pushes=1).overall
        assert overall.visible / overall.predicted == pytest.approx(1, abs=0.05)


def test_gain_from_the_origin_grows_while_the_push_stays_invisible() -> None:
    """After many steps the served copy has caught up: the updates were delayed, not lost."""
    gains = []
    for steps in (1, 100, 1000, 10000):
        now = START + steps * STEP
        report = _measure(now - STEP, now, origin=START, pushes=1)
        gains.append(report.overall.from_origin.gain)
        assert report.fate == "delayed"
    assert gains[0] < 0.05
    assert gains == sorted(gains)
    assert abs(gains[-1] - 1) < 0.02


def test_a_bf16_master_loses_what_it_cannot_hold() -> None:
    """Whatever its container: bf16 values in fp32 are a bf16 master."""
    after = (START + STEP).bfloat16()
    for make in (lambda x: x, lambda x: x.float()):
        report = _measure(make(START.bfloat16()), make(after))
        assert report.master == "bf16"
        assert report.fate == "lost"
        assert report.overall.moved < 0.03 * report.overall.weights
    assert _measure(START, START + STEP).fate == "delayed"


def test_an_unchanged_master_is_silent() -> None:
    """No step: nothing visible, no gain to speak of, no bytes under nearest and dither."""
    report = _measure(START, START)
    assert report.overall.visible == report.overall.moved == 0
    assert math.isnan(report.overall.movement.gain)
    assert report.overall.lag_quantiles() == {}
    for export in ("nearest", "dither", "feedback"):
        assert report.overall.exports[export].bytes_changed == 0
    off_grid = _measure(START + STEP, START + STEP)
    assert off_grid.overall.exports["dither"].bytes_changed == 0
    assert off_grid.overall.exports["stochastic"].bytes_changed > 0


def test_feedback_keeps_the_running_mean_of_the_served_weight() -> None:
    """Error feedback on the level: after n pushes the mean of the served copies is the master's."""
    w = START[:4] + 0.3 * float_step(START[:4], 7, 2.0**-133)
    state, total = torch.zeros_like(w), torch.zeros_like(w, dtype=torch.float64)
    for _ in range(200):
        wanted = w + state
        q = nearest(wanted, torch.bfloat16).float()
        state, total = wanted - q, total + q.double()
    step = float_step(w, 7, 2.0**-133).double()
    assert float(((total / 200 - w.double()).abs() / step).max()) < 0.01


@pytest.mark.parametrize("cast", ["bf16", "fp16"])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_steps_are_the_gap_to_the_next_number(cast: str, seed: int) -> None:
    """Counted on the bit patterns, through subnormals and powers of two."""
    grid = GRIDS[cast]
    dtype = torch.bfloat16 if cast == "bf16" else torch.float16
    scale = torch.exp2(torch.randint(-20, 10, (64,), generator=torch.Generator().manual_seed(seed)))
    values = (_normal(seed, 64) * scale).to(dtype)[None]
    up = (values.abs().view(torch.int16) + 1).view(dtype)
    finite = torch.isfinite(up.float())
    step = grid.step(values.float(), values.float().abs().max())
    assert step is not None
    assert torch.equal((up.float() - values.float().abs())[finite], step[finite])


def test_scaled_grids_are_unbiased_under_dithering() -> None:
    """Mean over seeds of the served copy is the master, within the scale's range."""
    w = _normal(5, 32, 64)
    for name in ("fp8", "mxfp8", "bf16", "fp16"):
        grid, amax = GRIDS[name], w.abs().max()
        step = grid.step(w, amax)
        assert step is not None
        total = torch.zeros_like(w, dtype=torch.float64)
        for seed in range(200):
            total += grid.served(w, amax, stochastic(NAME, 0, Noise(seed))).values.double()
        error = (total / 200 - w.double()) / step.double()
        if name == "mxfp8":  # elements above 448 scales saturate under floor scales
            top = w.view(32, 2, 32).abs().amax(2, keepdim=True).expand(32, 2, 32).reshape(32, 64)
            error = error[w.abs() < 0.85 * top]
        assert float(error.mean().abs()) < 0.01
        assert float(error.abs().max()) < 0.2


def test_vectors_are_served_in_bf16_whatever_the_cast() -> None:
    tensors = {NAME: START, "model.norm.weight": START[0]}
    moved = {name: value + 1e-3 for name, value in tensors.items()}
    report = measure_visibility(
        memory_side("a", tensors, {}), memory_side("b", moved, {}), GRIDS["mxfp8"], threads=1
    )
    norm = report.tensors["model.norm.weight"]
    assert norm.visible == int((START[0].bfloat16() != (START[0] + 1e-3).bfloat16()).sum())


def test_wrong_pairs_are_input_errors() -> None:
    with pytest.raises(InputError, match="differ"):
        _measure(START, START[:100])
    with pytest.raises(InputError, match="no weight in common"):
        measure_visibility(
            memory_side("a", {"a.weight": START}, {}),
            memory_side("b", {"b.weight": START}, {}),
            GRIDS["bf16"],
        )
    with pytest.raises(InputError, match="unknown cast"):
        grid_by_name("int4")


def test_bytes_are_counted_byte_by_byte() -> None:
    grid, amax = GRIDS["bf16"], torch.tensor(1.0)
    one = grid.served(torch.tensor([[1.0, 2.0]]), amax, nearest)
    other = grid.served(torch.tensor([[1.0078125, -2.0]]), amax, nearest)
    assert changed_bytes(one, other) == 2  # the low byte of the first, the high byte of the second
    assert changed_bytes(one, one) == 0


def test_movement_adds_up() -> None:
    s, d = _normal(0, 100), _normal(1, 100)
    whole, parts = Movement(), Movement()
    whole.add(s, d)
    for i in range(0, 100, 7):
        part = Movement()
        part.add(s[i : i + 7], d[i : i + 7])
        parts.merge(part)
    assert parts.gain == pytest.approx(whole.gain)
    assert parts.cosine == pytest.approx(whole.cosine)
    rest = (s - whole.gain * d).double()
    assert whole.noise == pytest.approx(float(rest.norm() / d.double().norm()), rel=1e-5)


# -- binary weights with a residual ---


def _run(bits: int, pushes: int, size: float, dithered: bool, seed: int = 0):
    weights = _normal(seed, 40, 50)
    state = BinaryState.start(weights, bits)
    before, log = state.clone(), FlipLog()
    true = torch.where(state.positive, 0.5, -0.5).double()
    for push in range(pushes):
        update = size * _normal(seed + push + 1, 40, 50)
        true = true + update.double()
        uniform = torch.rand(40, 50, generator=torch.Generator().manual_seed(push)).double()
        log.append(state.step(update, uniform if dithered else None))
    return before, state, log, true


def test_binary_clean_run_is_explained_by_its_log() -> None:
    before, after, log, _ = _run(6, 30, 0.1, True)
    updated = torch.ones(40, 50, dtype=torch.bool)
    report = audit_binary(before, after, log, pack_bits(after.positive), updated)
    assert report.problems == []
    assert log.flips > 0
    assert report.flips_per_weight == log.flips / 2000
    assert report.dead_share < 0.1
    assert torch.equal(replay(before.positive, log.steps), after.positive)


def test_binary_faults_are_counted() -> None:
    """A served bit, a forgotten step of the log, a stuck residual, a saturated one."""
    before, after, log, _ = _run(6, 30, 0.1, True)
    updated = torch.ones(40, 50, dtype=torch.bool)
    bits = pack_bits(after.positive)
    bits[3] ^= 0b00010001
    assert audit_binary(before, after, log, bits, updated).unequal_signs == 2
    shorter = FlipLog(log.steps[:-1])
    wrong = audit_binary(before, after, shorter, pack_bits(after.positive), updated)
    assert wrong.replay_mismatches == len(log.steps[-1]) > 0
    assert len(wrong.problems) == 1
    # updates below half a unit, rounded to nearest, never arrive: all residuals are dead
    b, a, dead_log, _ = _run(2, 30, 0.02, False)
    assert audit_binary(b, a, dead_log, pack_bits(a.positive), updated).dead_share > 0.9
    b, a, alive_log, _ = _run(2, 30, 0.02, True)
    assert audit_binary(b, a, alive_log, pack_bits(a.positive), updated).dead_share < 0.8
    # updates away from zero push the residual against its bound
    state = BinaryState.start(torch.ones(40, 50), 4)
    for _ in range(20):
        state.step(torch.full((40, 50), 0.2))
    full = audit_binary(BinaryState.start(torch.ones(40, 50), 4), state, FlipLog(),
                        pack_bits(state.positive), updated)  # fmt: skip
    assert full.saturated_share == 1.0


def test_error_diffusion_keeps_the_sum_until_it_saturates() -> None:
    """sign / 2 + residual / 2^bits is the start plus every update, up to the rounding of each."""
    state = BinaryState.start(_normal(0, 100, 100), 8)
    true = torch.where(state.positive, 0.5, -0.5).double()
    free = torch.ones(100, 100, dtype=torch.bool)
    generator = torch.Generator().manual_seed(1)
    for push in range(20):
        update = 0.05 * _normal(push + 1, 100, 100)
        true = true + update.double()
        state.step(update, torch.rand(100, 100, generator=generator).double())
        free &= (state.residual > -state.half) & (state.residual < state.half - 1)
    value = torch.where(state.positive, 0.5, -0.5) + state.residual.double() / 256
    error = (value - true)[free]
    assert int(free.sum()) > 9000
    assert abs(float(error.mean())) < 5 * 0.5 / 256 * (20 / len(error)) ** 0.5
    assert float(error.abs().max()) < 20 / 256


def test_binary_input_errors() -> None:
    before, after, log, _ = _run(6, 3, 0.1, True)
    everything = torch.ones(40, 50, dtype=torch.bool)
    with pytest.raises(InputError, match="served bytes"):
        audit_binary(before, after, log, torch.zeros(3, dtype=torch.uint8), everything)
    with pytest.raises(InputError, match="leaves the tensor"):
        replay(before.positive, [torch.tensor([5000])])
    with pytest.raises(InputError, match="twice"):
        replay(before.positive, [torch.tensor([1, 1])])
    with pytest.raises(InputError, match="not supported"):
        BinaryState.start(torch.ones(2), 12)


def test_binary_grid_counts_flips_not_scales() -> None:
    """A change of the row's scale alone is no visible update; a changed sign is one bit."""
    w = _normal(0, 8, 64)
    grid = GRIDS["binary"]
    one = grid.served(w, w.abs().max(), nearest)
    assert not bool(one.changed(grid.served(w * 1.5, w.abs().max(), nearest)).any())
    flipped = w.clone()
    flipped[2, 5] *= -1
    other = grid.served(flipped, w.abs().max(), nearest)
    assert int(one.changed(other).sum()) == 1
    assert changed_bytes(one, other) == 1
    assert torch.equal(one.values.abs()[:, 0], w.abs().mean(1))


# -- served loss ---


class _Bigram(torch.nn.Module):
    """Logits are a row of a table: the loss is known in closed form."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(_normal(0, 16, 16))

    def forward(self, tokens: torch.Tensor):
        return type("Out", (), {"logits": self.table[tokens]})()


def test_mean_loss_and_serving_in_place() -> None:
    model, prompts = _Bigram(), [[1, 2, 3, 4], [5, 6]]
    rows = torch.log_softmax(model.table.detach().double(), -1)
    wanted = -(rows[1, 2] + rows[2, 3] + rows[3, 4] + rows[5, 6]) / 4
    assert mean_loss(model, prompts) == pytest.approx(float(wanted))
    original = model.table.detach().clone()
    serve_in_place(model, GRIDS["bf16"], "nearest")
    assert torch.equal(model.table.detach(), original.bfloat16().float())
    other = _Bigram()
    serve_in_place(other, GRIDS["bf16"], "dither", seed=3)
    assert int((ordered(other.table.detach().bfloat16()).int()
                - ordered(original.bfloat16()).int()).abs().max()) == 1  # fmt: skip
    with pytest.raises(InputError):
        mean_loss(model, [])
    with pytest.raises(InputError):
        mean_loss(model, [[1]])
