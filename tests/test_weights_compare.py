"""Every fault of a served checkpoint is found and named; clean copies in any layout are quiet.

Each case damages one clean copy and states the fault that must be named, and nothing else may be
said. The clean twins run through the same code in every layout. A fault that no exact hypothesis
explains must still be found (exit 1), whatever it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
    write_sharded,
)

from kernel_contracts.errors import InputError
from mismatch_audit.weights.buffers import inverse_frequencies
from mismatch_audit.weights.compare import CompareOptions, compare_sides
from mismatch_audit.weights.families import geometry_of
from mismatch_audit.weights.findings import CODES, HEALTHY, REMEDIES, Fault, WeightReport
from mismatch_audit.weights.memory import memory_side
from mismatch_audit.weights.rounding import WRONG_ROUNDINGS, nearest, ordered, toward_zero
from mismatch_audit.weights.sides import open_side
from mismatch_audit.weights.stochastic import Noise, stochastic
from mismatch_audit.weights.tally import plain, tally_rows

OLD = llama_weights()
MASTER = step(OLD)
CLEAN, STALE = cast(MASTER), cast(OLD)
Q = "model.layers.1.self_attn.q_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"


def run(
    served: Tensors | list[Tensors],
    master: Tensors = MASTER,
    config=LLAMA,
    served_config=None,
    previous: Tensors | None = None,
    **options,
) -> WeightReport:
    return compare_sides(
        memory_side("trainer", master, config),
        memory_side("served", served, served_config or config),
        memory_side("previous", previous, config) if previous is not None else None,
        CompareOptions(threads=1, **options),
    )


def faults(report: WeightReport) -> list[Fault]:
    return [finding.fault for finding in report.findings]


CLEAN_TWINS: dict[str, tuple[Tensors, Tensors | list[Tensors], dict]] = {
    "unfused": (MASTER, CLEAN, LLAMA),
    "fused": (MASTER, fused(CLEAN), LLAMA),
    "two ranks": (MASTER, shard(CLEAN, 2), LLAMA),
    "four ranks, fused": (MASTER, [fused(own) for own in shard(CLEAN, 4)], LLAMA),
    "experts stacked": (moe_weights(), stack_experts(fused(cast(moe_weights()))), MOE),
    "experts in an engine": (moe_weights(), stack_experts(fused(cast(moe_weights())), True), MOE),
    "gpt2": (gpt2_weights(), cast(gpt2_weights()), GPT2),
    "fp16": (MASTER, cast(MASTER, torch.float16), LLAMA),
    "fp32": (MASTER, MASTER, LLAMA),
    "bf16 master served in fp32": (CLEAN, {n: v.float() for n, v in CLEAN.items()}, LLAMA),
}


@pytest.mark.parametrize("twin", CLEAN_TWINS)
def test_clean_twins_are_quiet(twin: str) -> None:
    master, served, config = CLEAN_TWINS[twin]
    report = run(served, master, config)
    assert report.exit_code == 0
    assert report.findings == []
    assert all(r.fault is Fault.EQUAL and r.differing == 0 for r in report.reports)
    assert report.compared == len(report.reports) > 0


def test_from_files_as_from_memory(tmp_path: Path) -> None:
    """Sharded files, an index, both thread counts: the same verdict and numbers."""
    left = open_side(write_sharded(tmp_path / "a", MASTER))
    right = open_side(write(tmp_path / "b", {**CLEAN, Q: STALE[Q]}, None), peer=left.checkpoint)
    for threads in (1, 2):
        report = compare_sides(left, right, options=CompareOptions(threads=threads))
        assert faults(report) == [Fault.STALE]
        assert report.to_dict()["counts"]["differing"] == int((CLEAN[Q] != STALE[Q]).sum())


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Tensors]:
    return lambda: {**CLEAN, name: make(CLEAN[name])}


def _interleaved(q: torch.Tensor) -> torch.Tensor:
    """Four heads of 16 rows: split halves to interleaved rotary pairs."""
    return q.view(4, 2, 8, 64).transpose(1, 2).reshape(64, 64)


def _order(n: int) -> torch.Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))


FAULTS: dict[str, tuple[Callable[[], Tensors | list[Tensors]], Fault]] = {
    "stale tensor": (put(Q, lambda _: STALE[Q]), Fault.STALE),
    "zeroed": (put(Q, torch.zeros_like), Fault.ZEROED),
    "half zeroed": (put(Q, lambda q: torch.cat([q[:32], torch.zeros(32, 64).bfloat16()])),
                    Fault.ZEROED),
    "one NaN": (put(Q, lambda q: q.index_fill(0, torch.tensor(3), float("nan"))), Fault.NONFINITE),
    "infinity": (put(Q, lambda q: q.index_fill(1, torch.tensor(3), float("inf"))),
                 Fault.NONFINITE),
    "unwritten": (
        put(Q, lambda q: torch.full(q.shape, -1, dtype=torch.int16).view(torch.bfloat16)),
        Fault.UNWRITTEN,
    ),
    "transposed square": (put(Q, lambda q: q.t().contiguous()), Fault.TRANSPOSED),
    "transposed": (put(UP, lambda u: u.t().contiguous()), Fault.TRANSPOSED),
    "wrong shape": (put(UP, lambda u: u[:100].contiguous()), Fault.SHAPE),
    "gate and up swapped": (lambda: fused(CLEAN, reverse=True), Fault.SWAPPED),
    "another layer's": (put(Q, lambda _: CLEAN[Q.replace("layers.1", "layers.2")]), Fault.SWAPPED),
    "row halves": (put(Q, lambda q: q.roll(32, 0)), Fault.HALVES),
    "column halves": (put(Q, lambda q: q.roll(32, 1)), Fault.HALVES),
    "rotary pairs": (put(Q, _interleaved), Fault.ROTARY),
    "rows permuted": (put(Q, lambda q: q[_order(64)]), Fault.PERMUTED),
    "columns permuted": (put(Q, lambda q: q[:, _order(64)]), Fault.PERMUTED),
    "elements permuted": (put(Q, lambda q: q.reshape(-1)[_order(4096)].view(64, 64)),
                          Fault.PERMUTED),
    "doubled": (put(Q, lambda q: q * 2), Fault.SCALED),
    "scaled a little": (put(Q, lambda q: q * 1.03), Fault.SCALED),
    "rows scaled": (put(Q, lambda q: q * torch.linspace(0.5, 2, 64)[:, None].bfloat16()),
                    Fault.SCALED),
    "fp16 among bf16": (put(UP, lambda _: MASTER[UP].half()), Fault.DTYPE),
    "integer": (put(UP, lambda _: MASTER[UP].to(torch.int32)), Fault.DTYPE),
    "missing": (lambda: {n: v for n, v in CLEAN.items() if n != UP}, Fault.MISSING),
    "extra": (lambda: {**CLEAN, "model.layers.0.foo.weight": CLEAN[Q]}, Fault.EXTRA),
    "unrelated": (put(Q, lambda _: cast(llama_weights(5))[Q]), Fault.UNRELATED),
    "skipped layer": (
        lambda: {n: STALE[n] if "layers.1." in n else v for n, v in CLEAN.items()},
        Fault.SKIPPED_LAYER,
    ),
    "partial push": (
        lambda: {
            n: v if any(x in n for x in ("embed", "layers.0")) else STALE[n]
            for n, v in CLEAN.items()
        },
        Fault.PARTIAL_PUSH,
    ),
    "nothing pushed": (lambda: STALE, Fault.NOTHING_PUSHED),
    "one shard, gathered": (put(UP, lambda u: torch.cat([u[:64], STALE[UP][64:]])),
                            Fault.SHARD_STALE),
    "one column shard, gathered": (
        put(UP, lambda u: torch.cat([STALE[UP][:, :32], u[:, 32:]], 1)),
        Fault.SHARD_STALE,
    ),
    "one rank's tensor": (
        lambda: [shard(CLEAN, 2)[0], {**shard(CLEAN, 2)[1], UP: shard(STALE, 2)[1][UP]}],
        Fault.SHARD_STALE,
    ),
    "one rank's copy of a norm": (
        lambda: [shard(CLEAN, 2)[0],
                 {**shard(CLEAN, 2)[1], "model.norm.weight": STALE["model.norm.weight"]}],
        Fault.UNSYNCED_RANK,
    ),
    "truncated": (lambda: {n: toward_zero(v, torch.bfloat16) for n, v in MASTER.items()},
                  Fault.ROUNDING),
    "stochastic": (put(Q, lambda _: stochastic("q", 0, Noise(1))(MASTER[Q], torch.bfloat16)),
                   Fault.ROUNDING),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_and_named(name: str) -> None:
    make, wanted = FAULTS[name]
    report = run(make())
    assert report.exit_code == 1
    assert set(faults(report)) == {wanted} or (
        # norm gains outside the layers may keep a finding of their own
        wanted in (Fault.PARTIAL_PUSH, Fault.NOTHING_PUSHED) and faults(report)[0] is wanted
    )
    for finding in report.findings:
        assert finding.code == CODES[finding.fault]
        assert finding.evidence
        assert finding.tensors


def test_every_fault_has_a_code_and_a_remedy() -> None:
    named = set(Fault) - HEALTHY
    assert set(CODES) == set(REMEDIES) == named
    assert len(set(CODES.values())) == len(CODES)


@pytest.mark.parametrize("rounding", [n for n in WRONG_ROUNDINGS if n != "via_bf16"])
def test_wrong_roundings_are_told_apart(rounding: str) -> None:
    """All but exact ties: half_away needs them, so one weight of the matrix is a tie."""
    master = MASTER[Q].clone()
    master[0, 0] = 1.0 + 2.0**-8
    served = {Q: WRONG_ROUNDINGS[rounding](master, torch.bfloat16)}
    report = run(served, {Q: master})
    assert faults(report) == [Fault.ROUNDING]
    assert report.findings[0].evidence["rounding"] == rounding


def test_an_update_smaller_than_a_step_is_stale_and_not_a_rounding() -> None:
    """A learning rate of 1e-6 moves 0.4% of the bf16 copy by one step each: 99.6% equal, stale."""
    older = {Q: MASTER[Q] - 1e-6 * MASTER[Q].sign()}
    report = run(cast(older), {Q: MASTER[Q]})
    assert faults(report) == [Fault.STALE]
    assert report.reports[0].differing < 0.03 * report.reports[0].elements
    proven = run(cast(older), {Q: MASTER[Q]}, previous=older)
    assert "bit for bit" in proven.findings[0].evidence["equals"]


def test_a_single_differing_element_is_no_evidence_of_a_rounding() -> None:
    """A norm gain of which one element moved by a step: any double rounding fits by chance."""
    for place in range(8):
        old = (1 + 0.1 * llama_weights(3)["model.norm.weight"]).bfloat16().float()
        new = old.clone()
        new[place] += 0.6 * 2.0**-7
        report = run({"model.norm.weight": old.bfloat16()}, {"model.norm.weight": new})
        assert faults(report) == [Fault.STALE]
        assert report.reports[0].differing == 1


def test_nan_in_the_master_too_is_still_a_fault() -> None:
    master = {Q: MASTER[Q].index_fill(0, torch.tensor(0), float("nan"))}
    report = run(cast(master), master)
    assert faults(report) == [Fault.NONFINITE]
    assert report.reports[0].evidence["in_master_too"]


def test_the_demanded_cast_is_checked() -> None:
    """Values equal to an fp16 cast are no excuse when bf16 was promised."""
    report = run(cast(MASTER, torch.float16), cast="bf16")
    assert faults(report) == [Fault.DTYPE]
    assert run(CLEAN, cast="bf16").exit_code == 0
    with pytest.raises(InputError, match="unknown cast"):
        run(CLEAN, cast="int3")


def test_two_half_formats_never_match_silently() -> None:
    """bf16 master, fp16 served: values in range are equal, and the double cast is still named."""
    assert faults(run(cast(CLEAN, torch.float16), CLEAN)) == [Fault.DTYPE]


TIED = {**LLAMA, "tie_word_embeddings": True}
EMBED = "model.embed_tokens.weight"


def _headless(weights: Tensors) -> Tensors:
    return {n: v for n, v in weights.items() if n != "lm_head.weight"}


def test_tied_heads() -> None:
    """A side without a head serves its embedding: equal is quiet, a stale head is named."""
    assert run(_headless(CLEAN), _headless(MASTER), TIED).exit_code == 0
    synced = {**_headless(CLEAN), "lm_head.weight": CLEAN[EMBED]}
    assert run(synced, _headless(MASTER), TIED).exit_code == 0
    stale = {**_headless(CLEAN), "lm_head.weight": STALE[EMBED]}
    assert faults(run(stale, _headless(MASTER), TIED)) == [Fault.UNTIED]
    # the trainer untied its head and the engine ties it
    assert faults(run(_headless(CLEAN), MASTER)) == [Fault.UNTIED]
    tied = {**MASTER, "lm_head.weight": MASTER[EMBED]}
    assert run(_headless(CLEAN), tied).exit_code == 0


def test_a_padded_vocabulary_is_compared_without_its_padding() -> None:
    padding = torch.zeros(32, 64).bfloat16()
    served = {**CLEAN, EMBED: torch.cat([CLEAN[EMBED], padding])}
    report = run(served)
    assert report.exit_code == 0
    assert any("32 padding rows" in note for note in report.notes)
    served[EMBED] = torch.cat([STALE[EMBED], padding])
    assert faults(run(served)) == [Fault.STALE]


def test_rotary_buffers_are_checked_against_their_formula() -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    table = inverse_frequencies(geometry_of(LLAMA))
    assert table is not None
    assert table[0] == 1
    assert run({**CLEAN, name: table}).exit_code == 0
    assert faults(run({**CLEAN, name: torch.zeros(8)})) == [Fault.ZEROED]
    assert faults(run({**CLEAN, name: table * 1.5})) == [Fault.BUFFER]
    assert faults(run({**CLEAN, name: table[:4]})) == [Fault.SHAPE]
    assert faults(run({**CLEAN, name: table * float("nan")})) == [Fault.NONFINITE]


def test_nothing_in_common_is_no_pass() -> None:
    report = run({"other.weight": CLEAN[Q]}, {"this.weight": MASTER[Q]})
    assert report.exit_code == 3
    assert report.compared == 0


def test_reports_are_plain_json() -> None:
    import json

    document = run({**CLEAN, Q: torch.full_like(CLEAN[Q], float("nan"))}).to_dict()
    text = json.dumps(document, allow_nan=False)
    assert json.loads(text)["findings"][0]["code"] == "W105"


# -- the inner loop against its plain definition -------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 30),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]),
    flips=st.integers(0, 20),
    seed=st.integers(0, 2**31),
)
def test_tally_equals_its_definition(
    rows: int, columns: int, dtype: torch.dtype, flips: int, seed: int
) -> None:
    """Counts, ulps and norms of the block-wise kernel against one-line whole-tensor formulas."""
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(rows, columns, generator=generator)
    expected = nearest(master, dtype)
    served = expected.clone()
    flat = served.view(-1).view(torch.uint8)
    for _ in range(flips):
        place = int(torch.randint(len(flat), (1,), generator=generator))
        flat[place] ^= 1 << int(torch.randint(6, (1,), generator=generator))
    tally = tally_rows(plain(master), plain(served), (0, rows))
    e, s = expected.double(), served.double()
    finite = torch.isfinite(s)
    bits_e, bits_s = ordered(expected).long(), ordered(served).long()
    assert tally.elements == rows * columns
    assert tally.differing == int((bits_e != bits_s).sum())
    assert tally.max_ulp == int((bits_e - bits_s).abs().max())
    assert tally.nonfinite_served == int((~finite).sum())
    if tally.differing and bool(finite.all()):
        wanted = float((s - e).norm() / e.norm())
        assert tally.relative_error == pytest.approx(wanted, rel=1e-4, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([torch.bfloat16, torch.float16]))
def test_roundings_bracket_the_value(seed: int, dtype: torch.dtype) -> None:
    """down <= value <= up, one step apart or equal; nearest is one of the two."""
    values = torch.randn(200, generator=torch.Generator().manual_seed(seed)) * 10
    values[:4] = torch.tensor([0.0, -0.0, 1.0, 2.0**-16])
    low, high = WRONG_ROUNDINGS["down"](values, dtype), WRONG_ROUNDINGS["up"](values, dtype)
    assert bool((low.float() <= values).all())
    assert bool((high.float() >= values).all())
    assert int((ordered(high).int() - ordered(low).int()).max()) <= 1
    near = nearest(values, dtype)
    assert bool(((near == low) | (near == high)).all())
    truncated, away = toward_zero(values, dtype), WRONG_ROUNDINGS["away_from_zero"](values, dtype)
    assert bool((truncated.float().abs() <= values.abs()).all())
    assert bool((away.float().abs() >= values.abs()).all())


def test_ranks_on_disk(tmp_path: Path) -> None:
    """The rank that is stale is named from files too."""
    served = [shard(CLEAN, 2)[0], {**shard(CLEAN, 2)[1], UP: shard(STALE, 2)[1][UP]}]
    report = compare_sides(
        open_side(write(tmp_path / "a", MASTER)), open_side(write_ranks(tmp_path / "b", served))
    )
    assert report.findings[0].evidence["rank"] == 1
    assert report.findings[0].tensors == (UP,)
