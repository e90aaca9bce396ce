"""The comparison says of each row what exact arithmetic says, whatever the dtype, chunking, drift.

The oracle writes the definitions down naively with 50 digits (mpmath), so it shares neither the
centred forms nor the rounding of the code under test. Each property has a fault that it catches.
"""

from __future__ import annotations

import subprocess
import sys

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_contracts.divergence import compare_rows
from kernel_contracts.errors import InputError, NotComparableError
from mismatch_audit.compare import (
    COLUMNS,
    Head,
    capabilities,
    compare_hidden,
    compare_logits,
    log_probs_of,
    torch_rows,
)
from mismatch_audit.compare.rows import choose_route
from mismatch_audit.tokens import COMPARED

FLOATS = [c for c in COLUMNS if c not in ("engine_top1", "reference_top1", "flip", "nonfinite")]
SQUARES = ("kl_engine_reference", "kl_reference_engine", "chi2", "logit_var")


def oracle(z_p, z_q, target, eta=1e-6):
    """The definitions, with 50 digits and no care."""
    with mpmath.workdps(50):
        sides = []
        for row in (z_p, z_q):
            z = [mpmath.mpf(float(v)) for v in row]
            total = mpmath.log(mpmath.fsum(mpmath.exp(v) for v in z))
            sides.append([v - total for v in z])
        logp, logq = sides
        p, q = [mpmath.exp(v) for v in logp], [mpmath.exp(v) for v in logq]
        every = range(len(p))
        nucleus = [v for v in every if p[v] >= eta or q[v] >= eta]
        d = [logp[v] - logq[v] for v in every]
        mean = mpmath.fsum(q[v] * d[v] for v in every)
        want = {
            "kl_engine_reference": -mean,
            "kl_reference_engine": mpmath.fsum(p[v] * d[v] for v in every),
            "tv": mpmath.fsum(abs(p[v] - q[v]) for v in every) / 2,
            "chi2": mpmath.fsum(q[v] * (p[v] / q[v] - 1) ** 2 for v in every),
            "drift": max(d[v] for v in nucleus) - min(d[v] for v in nucleus),
            "tail_mass": max(
                mpmath.fsum(side[v] for v in every if v not in set(nucleus)) for side in (p, q)
            ),
            "logit_var": mpmath.fsum(q[v] * (d[v] - mean) ** 2 for v in every),
            "entropy": -mpmath.fsum(p[v] * logp[v] for v in every),
            "engine_logprob": logq[target],
            "reference_logprob": logp[target],
            "engine_top1_logprob": max(logq),
            "reference_top1_logprob": max(logp),
            "engine_margin": sorted(logq)[-1] - sorted(logq)[-2],
            "reference_margin": sorted(logp)[-1] - sorted(logp)[-2],
        }
        want = {name: float(value) for name, value in want.items()}
    want["reference_top1"] = int(np.argmax(np.asarray(z_p, dtype=np.float64)))
    want["engine_top1"] = int(np.argmax(np.asarray(z_q, dtype=np.float64)))
    want["flip"] = want["reference_top1"] != want["engine_top1"]
    want["nonfinite"] = 0
    return want


def logits(rows, vocab, drift, seed=0, dtype=torch.float32, scale=4.0):
    g = torch.Generator().manual_seed(seed)
    z_p = torch.randn(rows, vocab, generator=g) * scale
    z_q = (z_p + drift * torch.randn(rows, vocab, generator=g)).to(dtype)
    return z_p, z_q, torch.randint(0, vocab, (rows,), generator=g)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("drift", [1e-3, 0.05, 1.0, 6.0])
def test_every_column_agrees_with_fifty_digits(dtype, drift):
    """All columns, on rows from nearly equal to unrelated. Faults: see the next tests.

    A log-ratio x held in fp32 is off by x / 2^24, hence chi2, which has e^x, by that share: it
    passes 1e-6 where ratios pass e^8.
    """
    z_p, z_q, ids = logits(6, 301, drift, dtype=dtype)
    got = compare_logits(z_p, z_q, ids)
    assert set(got) == set(COLUMNS) >= set(COMPARED)
    for t in range(6):
        want = oracle(z_p[t], z_q[t].double(), int(ids[t]))
        for name in COLUMNS:
            rel = 1e-6 * max(1.0, want["drift"] / 8) if name == "chi2" else 1e-6
            absolute = 0.0 if name in SQUARES else 2e-7
            assert got[name][t].item() == pytest.approx(want[name], rel=rel, abs=absolute), name


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(-9, 0), st.integers(2, 90))
def test_no_cancellation_at_tiny_drift(seed, exponent, vocab):
    """Relative error 1e-6 down to a drift of 4e-6, KL 1e-12 (control: the next test)."""
    g = torch.Generator().manual_seed(seed)
    z_p = torch.randint(-64, 64, (1, vocab), generator=g).float() / 8
    step = max(2.0**-18, 2.0 ** round(exponent * np.log2(10.0)))
    z_q = z_p + step * torch.randint(-3, 4, (1, vocab), generator=g).float()
    got = compare_logits(z_p, z_q, torch.zeros(1, dtype=torch.int64))
    want = oracle(z_p[0], z_q[0], 0)
    for name in SQUARES:
        assert got[name][0].item() == pytest.approx(want[name], rel=1e-6, abs=1e-15), name


@pytest.mark.parametrize("drift", [1e-5, 1e-3, 0.1])
def test_agrees_with_the_float64_yardstick_at_full_size(drift):
    """A real vocabulary's width, where fp32 sums are longest."""
    z_p, z_q, ids = logits(4, 49152, drift)
    got = compare_logits(z_p, z_q, ids)
    want = compare_rows(z_p.numpy(), z_q.numpy(), token_ids=ids.numpy())
    for name in COLUMNS:
        rtol, atol = (1e-6, 0.0) if name in SQUARES else (1e-6, 2e-7)
        np.testing.assert_allclose(got[name].numpy(), want[name], rtol, atol, err_msg=name)


def test_the_naive_sum_would_fail_that_test():
    """Control: sum p (log p - log q) in fp32 misses KL = 1e-9 by more than 100 %."""
    z_p, z_q, ids = logits(8, 4096, 3e-5)
    logp, logq = torch.log_softmax(z_p, -1), torch.log_softmax(z_q, -1)
    naive = (logq.exp() * (logq - logp)).sum(-1)
    got = compare_logits(z_p, z_q, ids)["kl_engine_reference"]
    assert ((naive - got).abs() / got).max() > 1.0


def test_identical_rows_are_exactly_zero():
    z, _, ids = logits(4, 1000, 0.0)
    got = compare_logits(z, z.clone(), ids)
    for name in ("kl_engine_reference", "kl_reference_engine", "tv", "chi2", "drift", "logit_var"):
        assert (got[name] == 0).all(), name
    assert not got["flip"].any()


def test_a_common_shift_changes_nothing_but_the_logits():
    """softmax is blind to it, so every column is. Fault: an lse taken of one side twice."""
    z_p, z_q, ids = logits(5, 800, 0.1)
    a, b = compare_logits(z_p, z_q, ids), compare_logits(z_p, z_q + 32.0, ids)
    for name in FLOATS:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)


def test_rows_without_overlap_stay_finite():
    """p(v) underflows where q puts its mass: KL is the logit gap and nothing is NaN."""
    z_p, z_q = torch.zeros(1, 64), torch.zeros(1, 64)
    z_p[0, 3], z_q[0, 9] = 200.0, 200.0
    got = compare_logits(z_p, z_q, torch.tensor([9]))
    assert got["kl_engine_reference"][0].item() == pytest.approx(200.0, rel=1e-6)
    assert got["tv"][0].item() == pytest.approx(1.0)
    assert got["chi2"][0].item() == pytest.approx(float(np.exp(200.0)), rel=1e-4)
    assert got["reference_logprob"][0].item() == pytest.approx(-200.0)
    assert not any(got[name].isnan().any() for name in FLOATS)


def test_ties_take_the_lowest_index_and_margin_zero():
    z_p, z_q = torch.zeros(2, 5000), torch.zeros(2, 5000)
    z_p[:, [4999, 17, 2600]] = 3.0
    z_q[0, [2600, 4000]] = 3.0
    z_q[1, 17] = 3.0
    got = compare_logits(z_p, z_q.bfloat16(), torch.tensor([0, 0]))
    assert got["reference_top1"].tolist() == [17, 17]
    assert got["engine_top1"].tolist() == [2600, 17]
    assert got["reference_margin"].tolist() == [0.0, 0.0]
    assert got["engine_margin"].tolist() == [0.0, 3.0]
    assert got["flip"].tolist() == [True, False]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", [0, 1])
def test_non_finite_logits_are_counted_and_never_replaced(bad, side):
    """One bad logit spoils its row, says so, and leaves the neighbours as they were."""
    pair = list(logits(3, 2000, 0.05)[:2])
    ids = torch.tensor([1, 2, 3])
    clean = compare_logits(*pair, ids)
    pair[side] = pair[side].clone()
    pair[side][1, [5, 1999]] = bad
    got = compare_logits(*pair, ids)
    assert got["nonfinite"].tolist() == [0, 2, 0]
    for name in FLOATS:
        assert got[name][1].isnan(), name
        assert torch.equal(got[name][[0, 2]], clean[name][[0, 2]]), name
    assert got["engine_top1"][1] == got["reference_top1"][1] == -1
    assert not got["flip"][1]


def test_the_nucleus_threshold_rules_drift_and_tail():
    """A big drift on a token of mass 1e-9 counts at eta = 0 and not at 1e-6."""
    z_p = torch.zeros(1, 8)
    z_p[0, 7] = -20.0
    z_q = z_p.clone()
    z_q[0, 7] = -25.0
    ids = torch.tensor([0])
    assert compare_logits(z_p, z_q, ids)["drift"].item() == pytest.approx(0.0, abs=1e-6)
    assert compare_logits(z_p, z_q, ids, eta=0.0)["drift"].item() == pytest.approx(5.0, rel=1e-6)
    assert compare_logits(z_p, z_q, ids)["tail_mass"].item() == pytest.approx(
        float(np.exp(-20) / (7 + np.exp(-20))), rel=1e-5
    )


def heads(vocab=1000, width=32, seed=0):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocab, width, generator=g) / 2
    return weight, torch.randn(18, width, generator=g), torch.randint(0, vocab, (18,), generator=g)


@pytest.mark.parametrize("max_bytes", [512 << 20, 1 << 20, 40_000])
def test_chunks_over_rows_and_vocabulary_change_nothing(max_bytes):
    """Whole, row by row, and in slices of the vocabulary: one answer.

    Up to the fp32 matmul's own rounding, which depends on its shape: an ulp of a logit (1e-6 at 8
    to 16) on either side, so 4e-6 in margins and log-probs.
    """
    weight, hidden, ids = heads()
    reference, engine = Head(weight), Head(weight.bfloat16(), softcap=30.0)
    want = compare_logits(reference.logits(hidden), engine.logits(hidden), ids)
    got = compare_hidden(hidden, reference, hidden.bfloat16(), engine, ids, max_bytes=max_bytes)
    for name in COLUMNS:
        torch.testing.assert_close(got[name], want[name], rtol=2e-5, atol=4e-6, msg=name)


def test_a_wrong_head_is_seen():
    """Control of the test above: weights rounded to bf16 move KL by far more."""
    weight, hidden, ids = heads()
    same = compare_hidden(hidden, Head(weight), hidden, Head(weight), ids)
    rounded = compare_hidden(hidden, Head(weight), hidden, Head(weight.bfloat16().float()), ids)
    assert same["kl_engine_reference"].max() == 0
    assert rounded["kl_engine_reference"].mean() > 1e-5


def test_one_side_alone_agrees_with_the_pair():
    weight, hidden, ids = heads()
    head = Head(weight)
    pair = compare_hidden(hidden, head, hidden, head, ids)
    one = log_probs_of(hidden, head, ids, max_bytes=1 << 18)
    for name in ("logprob", "margin", "top1", "top1_logprob"):
        torch.testing.assert_close(one[name], pair[f"reference_{name}"], rtol=1e-5, atol=4e-6)
    torch.testing.assert_close(one["entropy"], pair["entropy"], rtol=1e-5, atol=4e-6)


def test_no_rows_give_empty_columns():
    weight, _, _ = heads()
    none = torch.empty(0, 32)
    got = compare_hidden(none, Head(weight), none, Head(weight), torch.empty(0, dtype=torch.int64))
    assert set(got) == set(COLUMNS)
    assert all(len(column) == 0 for column in got.values())


def test_bad_input_says_what_is_wrong():
    z, _, ids = logits(3, 10, 0.1)
    with pytest.raises(InputError, match="do not pair up"):
        compare_logits(z, z[:2], ids)
    with pytest.raises(InputError, match="vocabulary"):
        compare_logits(z, z, ids + 10)
    with pytest.raises(NotComparableError, match="engine's 9"):
        compare_logits(z, z[:, :9], ids)
    with pytest.raises(InputError, match="threshold"):
        compare_logits(z, z, ids, eta=1.5)
    with pytest.raises(InputError, match="float"):
        compare_logits(z, z.long(), ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_routes_give_the_same_comparison(dtype, monkeypatch):
    """The numba kernel, plain torch in its place where numba is missing, and torch in slices."""
    z_p, z_q, ids = logits(5, 3000, 0.2, dtype=dtype)

    def cut(z):
        return lambda: [(a, z[:, a : a + 700]) for a in range(0, 3000, 700)]

    assert choose_route(z_p.device, z_p.dtype, z_q.dtype).name == "numba"
    fast = compare_logits(z_p, z_q, ids)
    monkeypatch.setattr("mismatch_audit.compare.rows.loads", lambda module: False)
    assert choose_route(z_p.device, z_p.dtype, z_q.dtype).name == "torch"
    slow = compare_logits(z_p, z_q, ids)
    sliced = torch_rows.compare(cut(z_p), cut(z_q), ids, eta=1e-6)
    for name in COLUMNS:
        torch.testing.assert_close(fast[name], slow[name], rtol=1e-6, atol=3e-7, msg=name)
        torch.testing.assert_close(sliced[name], slow[name], rtol=1e-9, atol=1e-12, msg=name)


def test_a_numba_that_does_not_load_is_said(monkeypatch):
    """It refuses, for one, a numpy that is too new: the audit goes on, and says why it is slow."""

    def refuse(name):
        raise ImportError("numba needs an older numpy")

    monkeypatch.setattr("importlib.import_module", refuse)
    capabilities.loads.cache_clear()
    try:
        with pytest.warns(UserWarning, match="needs an older numpy"):
            assert not capabilities.loads("numba")
    finally:
        capabilities.loads.cache_clear()
    assert not capabilities.loads("a_module_that_does_not_exist")


def test_threads_do_not_change_a_bit():
    """Rows are shared out over threads; each summed alike. Fault: a row left out."""
    z_p, z_q, ids = logits(7, 2000, 0.1, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 9):
            torch.set_num_threads(threads)
            results.append(compare_logits(z_p, z_q, ids))
    finally:
        torch.set_num_threads(before)
    for name in COLUMNS:
        assert all(torch.equal(results[0][name], other[name]) for other in results[1:]), name


MEMORY = """
import torch
from mismatch_audit.compare import Head, compare_hidden

def resident(key):
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return int(lines[key].split()[0]) * 1024

def run(rows, bound):
    hidden = torch.randn(rows, 8)
    ids = torch.zeros(rows, dtype=torch.int64)
    compare_hidden(hidden, head, hidden, head, ids, max_bytes=bound)

torch.set_num_threads(1)
head = Head(torch.randn(60000, 8))
run(8, 4 << 20)
open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
before = resident("VmRSS")
run(640, {bound})
print(resident("VmHWM") - before)
"""


@pytest.mark.parametrize(("bound", "within"), [(4 << 20, True), (1 << 30, False)])
def test_extra_memory_stays_within_the_bound(bound, within):
    """640 rows x 60000 tokens are 300 MB of logits; 4 MB suffice (and 6 MB of slack for results
    and allocator). Control: under a loose bound the peak is higher, so the measure can see it."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY.format(bound=bound)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) <= 10 << 20) == within, done.stdout
