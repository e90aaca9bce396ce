"""Heads give the very bits of their programs' own arithmetic, also on the fast bf16 route."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel_contracts.errors import InputError
from mismatch_audit.compare import Head
from mismatch_audit.compare.rounded_matmul import RoundedMatmul, applies, round_rows


def operands(rows=40, vocab=9000, width=96, seed=0):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocab, width, generator=g).bfloat16()
    return weight, torch.randn(rows, width, generator=g).bfloat16()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_head_does_what_its_program_does(dtype, bias):
    """Result in the head's dtype; bias, then softcap, then scale; ``out=`` gives the same bits."""
    weight, hidden = operands(vocab=1000)
    shift = torch.linspace(-1, 1, 1000).to(dtype) if bias else None
    head = Head(weight.to(dtype), shift, scale=0.5, softcap=20.0)
    rows = hidden.to(dtype)
    want = torch.tanh(torch.nn.functional.linear(rows, head.weight, shift) / 20.0) * 20.0 * 0.5
    out = torch.empty(40, 1000, dtype=dtype)
    assert torch.equal(head.logits(rows), want)
    assert torch.equal(head.logits(rows, out=out), want)
    assert torch.equal(out, want)
    assert not torch.equal(Head(head.weight, shift).logits(rows), want)


def test_bf16_logits_are_torchs_own_bit_for_bit():
    """Whatever route the machine gets; the first rows, the last ones and a single one."""
    weight, hidden = operands(rows=150)
    want = torch.nn.functional.linear(hidden, weight)
    head = Head(weight)
    assert torch.equal(head.logits(hidden), want)
    assert torch.equal(head.logits(hidden[:1]), want[:1])
    assert torch.equal(head.logits(hidden, start=100, stop=300), want[:, 100:300])


def test_rounding_alone_is_not_enough():
    """Control: without the repair of undecided logits, some bits differ from torch's."""
    weight, hidden = operands(rows=150)
    want = torch.nn.functional.linear(hidden, weight)
    assert not torch.equal((hidden.float() @ weight.float().t()).bfloat16(), want)


def marked(y, reach, vocab=None):
    """(rounded, undecided columns) of one row."""
    n = y.shape[1]
    out = np.zeros((1, n), np.uint16)
    columns, counts = np.zeros((1, n // 16 + 1), np.int64), np.zeros(1, np.int64)
    norms = np.ones(n, np.float32)
    round_rows(y.numpy(), norms, np.array([reach], np.float32), out, 0, columns, counts, 0, 1)
    return torch.from_numpy(out).view(torch.bfloat16), columns[0, : counts[0]], counts[0]


def test_rounding_is_to_nearest_even_as_torchs():
    """Over the whole range of exponents, subnormals and exact ties included."""
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (1, 4000), generator=g, dtype=torch.int64)
    y = bits.to(torch.int32).view(torch.float32)
    y[0, :1000] = y[0, :1000].bfloat16().float() * (1 + 2.0**-8)  # ties, and near them
    y = torch.where(y.isfinite() & (y.abs() < 3e38), y, 1.0)
    rounded, _, _ = marked(y, 0.0)
    assert torch.equal(rounded, y.bfloat16())


def test_undecided_are_those_within_reach_of_a_boundary():
    """Boundaries of bf16 in [1, 2) are odd multiples of 2^-8 above 1."""
    y = torch.full((1, 700), 1.0)
    y[0, [3, 550, 699]] = 1 + 2.0**-8 + torch.tensor([1e-6, -1e-6, 3e-6])
    assert marked(y, 2e-6)[1].tolist() == [3, 550]
    assert marked(y, 4e-6)[1].tolist() == [3, 550, 699]
    assert marked(y, 1e-7)[2] == 0


def test_non_finite_or_too_many_send_the_row_to_torch():
    y = torch.full((1, 700), 1.0)
    y[0, 5] = float("nan")
    assert marked(y, 1e-6)[2] == 700 // 16 + 2
    assert marked(torch.full((1, 700), 1 + 2.0**-8), 1e-6)[2] == 700 // 16 + 2


def test_non_finite_hidden_states_pass_through():
    weight, hidden = operands()
    hidden[3, 7] = float("inf")
    hidden[5, 0] = float("nan")
    got = Head(weight).logits(hidden)
    assert torch.equal(got.isfinite(), torch.nn.functional.linear(hidden, weight).isfinite())
    assert got[5].isnan().all()


def test_a_route_whose_bits_differ_is_dropped(monkeypatch):
    """The proof on the first rows: a torch that sums otherwise keeps its own result."""
    weight, hidden = operands()
    true = torch.nn.functional.linear
    route = RoundedMatmul(weight)
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda *a: true(*a) + true(*a).abs() * 2.0**-7
    )
    route.reach = 0.0
    route(hidden)
    assert route._same is False


def test_the_route_is_only_for_slow_bf16():
    weight, _ = operands()
    assert not applies(weight.float(), None)
    assert not applies(weight, torch.zeros(9000))
    assert Head(weight.float()).workspace_bytes == 0


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="takes"):
        Head(torch.zeros(10, 4)).logits(torch.zeros(2, 5))
    with pytest.raises(InputError, match="bias"):
        Head(torch.zeros(10, 4), bias=torch.zeros(9))
    with pytest.raises(InputError, match="softcap"):
        Head(torch.zeros(10, 4), softcap=0.0)
    with pytest.raises(InputError, match="float weight"):
        Head(torch.zeros(10, 4, dtype=torch.int64))
