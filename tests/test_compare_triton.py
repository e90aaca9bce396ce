"""The GPU kernel computes what the float64 yardstick computes.

Without a GPU it runs under Triton's interpreter, in a process of its own (the interpreter is chosen
when triton is imported): that tests every formula, index and mask, and neither the compiler nor the
hardware's exp. With a GPU the last test runs the compiled kernel too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from kernel_contracts.divergence import compare_rows
from mismatch_audit.compare.rows import COLUMNS, choose_route

SQUARES = ("kl_engine_reference", "kl_reference_engine", "chi2", "logit_var")
VOCABULARIES = (2, 1024, 2500)
DRIFTS = (0.0, 1e-5, 0.5, 5.0)


def case(vocab, drift, dtype, rows=2):
    g = torch.Generator().manual_seed(vocab)
    z_p = torch.randn(rows, vocab, generator=g) * 4
    z_q = (z_p + drift * torch.randn(rows, vocab, generator=g)).to(getattr(torch, dtype))
    return z_p, z_q, torch.randint(0, vocab, (rows,), generator=g)


def special():
    """Ties over blocks, rows without overlap, an empty row of NaN, one infinity, huge logits."""
    z_p, z_q, ids = case(2500, 0.1, "float32", rows=8)
    z_p[0, [2400, 17, 1300]] = 40.0
    z_q[1, [1023, 1024]] = 50.0
    z_p[2], z_q[2] = 0.0, 0.0
    z_p[2, 3], z_q[2, 9] = 200.0, 200.0
    z_p[3] = float("nan")
    z_q[4, 2499] = float("-inf")
    z_p[5, 0] = float("inf")
    z_p[6, 1], z_q[6, 1] = 3e38, -3e38
    return z_p, z_q, ids


RUN = """
import json, sys, torch
sys.path.insert(0, "tests")
from test_compare_triton import DRIFTS, VOCABULARIES, case, special
from mismatch_audit.compare import triton_kernel as kernel
results = {}
for vocab in VOCABULARIES:
    for drift in DRIFTS:
        for dtype in ("float32", "bfloat16", "float16"):
            z_p, z_q, ids = case(vocab, drift, dtype)
            got = kernel.compare(z_p, z_q, ids, eta=1e-6)
            results[f"{vocab} {drift} {dtype}"] = {k: v.tolist() for k, v in got.items()}
z_p, z_q, ids = special()
results["special"] = {k: v.tolist() for k, v in kernel.compare(z_p, z_q, ids, eta=1e-6).items()}
one = kernel.log_probs(z_p, ids)
results["one side"] = {k: v.tolist() for k, v in one.items()}
empty = kernel.compare(z_p[:0], z_q[:0], ids[:0], eta=1e-6)
results["empty"] = {k: v.tolist() for k, v in empty.items()}
json.dump(results, sys.stdout)
"""


@pytest.fixture(scope="module")
def interpreted():
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        env=dict(os.environ, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(got, want, drift=0.0):
    """chi2 holds e^x, so a share x / 2^23 is lost at log-ratio x (see test_compare)."""
    assert set(got) == set(COLUMNS)
    for name in COLUMNS:
        rtol = 2e-6 * max(1.0, drift / 8) if name == "chi2" else 2e-6
        atol = 1e-15 if name in SQUARES else 3e-7
        actual = np.asarray(got[name], dtype=np.float64)
        expected = np.asarray(want[name], dtype=np.float64)
        np.testing.assert_allclose(actual, expected, rtol, atol, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("drift", DRIFTS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_agrees_with_the_float64_yardstick(interpreted, vocab, drift, dtype):
    """Below, at and above one block; from no drift to unrelated rows; every dtype."""
    z_p, z_q, ids = case(vocab, drift, dtype)
    want = compare_rows(z_p.numpy(), z_q.float().numpy(), token_ids=ids.numpy())
    check(interpreted[f"{vocab} {drift} {dtype}"], want, drift * 8)


def test_special_rows(interpreted):
    """Ties, disjoint rows, NaN, infinities: as the yardstick says, and no row harms another."""
    z_p, z_q, ids = special()
    want = compare_rows(z_p.numpy(), z_q.numpy(), token_ids=ids.numpy())
    got = interpreted["special"]
    assert got["nonfinite"] == [0, 0, 0, 2500, 1, 1, 0, 0]
    assert got["reference_top1"][0] == 17
    assert got["engine_top1"][1] == 1023
    assert got["reference_margin"][0] == got["engine_margin"][1] == 0.0
    ordinary = [0, 1, 3, 4, 5, 7]
    check(
        {name: np.asarray(got[name])[ordinary] for name in COLUMNS},
        {name: np.asarray(want[name])[ordinary] for name in COLUMNS},
        drift=36.0,  # the planted ties at 40 and 50
    )
    assert got["kl_engine_reference"][2] == pytest.approx(200.0, rel=1e-6)
    assert got["kl_engine_reference"][6] == pytest.approx(want["kl_engine_reference"][6])
    assert got["chi2"][2] == pytest.approx(float(want["chi2"][2]), rel=1e-6)
    assert all(value == [] for value in interpreted["empty"].values())


def test_one_side_alone(interpreted):
    z_p, _, ids = special()
    logp = torch.log_softmax(z_p.double(), -1)
    got = interpreted["one side"]
    for t in (0, 1, 2, 4, 7):
        assert got["logprob"][t] == pytest.approx(logp[t, ids[t]].item(), rel=1e-6)
        assert got["top1"][t] == int(z_p[t].argmax())
        entropy = -(logp[t].exp() * logp[t]).sum().item()
        assert got["entropy"][t] == pytest.approx(entropy, rel=1e-6, abs=1e-12)
    assert got["nonfinite"] == [0, 0, 0, 2500, 0, 1, 0, 0]
    assert np.isnan(got["logprob"][3])
    assert got["top1"][3] == -1


def test_the_yardstick_would_notice_a_fault(interpreted):
    """Control: rows of another drift do not pass for these."""
    z_p, z_q, ids = case(1024, 0.5, "float32")
    want = compare_rows(z_p.numpy(), z_q.numpy() * (1 + 1e-4), token_ids=ids.numpy())
    with pytest.raises(AssertionError):
        check(interpreted["1024 0.5 float32"], want)


def test_chosen_by_capability():
    """CUDA tensors go to Triton, others never do."""
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert choose_route(cuda, torch.float32, torch.bfloat16).name == "triton"
    assert choose_route(cuda, torch.float64, torch.bfloat16).name == "torch"
    assert choose_route(cpu, torch.float32, torch.bfloat16).name == "numba"


if torch.cuda.is_available():

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("drift", DRIFTS)
    def test_on_the_gpu(drift, dtype):
        """The compiled kernel at a real vocabulary's width."""
        from mismatch_audit.compare import compare_logits

        z_p, z_q, ids = case(151936, drift, dtype)
        got = compare_logits(z_p.cuda(), z_q.cuda(), ids.cuda())
        want = compare_rows(z_p.numpy(), z_q.float().numpy(), token_ids=ids.numpy())
        check({name: column.cpu().numpy() for name, column in got.items()}, want, drift * 8)
