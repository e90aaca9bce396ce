"""The float64 yardstick against 60-digit arithmetic, identities, and rows that mean nothing.

The argument: every fast kernel is judged by these functions, so they are judged by arithmetic that
cannot cancel (mpmath), from drifts of 1e-12 to ones that overflow; then by what must hold of any
pair; then by rows with NaN, infinities and truncated supports, which must never look like numbers.
"""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_contracts import divergence as dv
from kernel_contracts.errors import InputError

FLOATS = ("kl_engine_reference", "kl_reference_engine", "tv", "chi2", "drift", "tail_mass",
          "logit_var", "entropy", "engine_margin", "reference_margin", "engine_top1_logprob",
          "reference_top1_logprob")  # fmt: skip


def exact(z_p, z_q, eta=dv.NUCLEUS):
    """The same quantities in 60 digits from the definitions, with no thought given to rounding."""
    with mpmath.workdps(60):
        z_p, z_q = [mpmath.mpf(float(v)) for v in z_p], [mpmath.mpf(float(v)) for v in z_q]
        sum_p, sum_q = mpmath.fsum(map(mpmath.exp, z_p)), mpmath.fsum(map(mpmath.exp, z_q))
        p, q = [mpmath.exp(v) / sum_p for v in z_p], [mpmath.exp(v) / sum_q for v in z_q]
        x = [mpmath.log(a / b) for a, b in zip(p, q, strict=True)]
        mean = mpmath.fsum(b * v for b, v in zip(q, x, strict=True))
        kept = [v for a, b, v in zip(p, q, x, strict=True) if a >= eta or b >= eta]
        out = [i for i, (a, b) in enumerate(zip(p, q, strict=True)) if a < eta and b < eta]
        top_p, top_q = sorted(z_p)[-2:], sorted(z_q)[-2:]
        result = {
            "kl_engine_reference": -mean,
            "kl_reference_engine": mpmath.fsum(a * v for a, v in zip(p, x, strict=True)),
            "tv": mpmath.fsum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
            "chi2": mpmath.fsum((a - b) ** 2 / b for a, b in zip(p, q, strict=True)),
            "drift": max(kept) - min(kept),
            "tail_mass": max(mpmath.fsum(p[i] for i in out), mpmath.fsum(q[i] for i in out)),
            "logit_var": mpmath.fsum(b * (v - mean) ** 2 for b, v in zip(q, x, strict=True)),
            "entropy": -mpmath.fsum(a * mpmath.log(a) for a in p),
            "engine_margin": top_q[1] - top_q[0],
            "reference_margin": top_p[1] - top_p[0],
            "engine_top1_logprob": mpmath.log(max(q)),
            "reference_top1_logprob": mpmath.log(max(p)),
        }
        return {name: float(value) for name, value in result.items()}


@pytest.mark.parametrize("size", [1e-12, 1e-8, 1e-5, 1e-3, 0.04, 1.0, 8.0, 200.0])
def test_every_column_agrees_with_60_digits(size):
    """Relative 1e-6 of KL at a drift of 1e-8, where 16-digit inputs themselves allow about 1e-8."""
    rng = np.random.default_rng(3)
    for vocab in (2, 7, 300):
        # Logits on a binary grid: the difference of both sides is then exact in float64.
        z_q = np.round(rng.normal(0, 4, vocab) * 2**10) / 2**10
        z_p = z_q + rng.normal(0, size, vocab)
        got = dv.compare_rows(z_p, z_q)
        want = exact(z_p, z_q)
        for name in FLOATS:
            # Of a row with one certain token, 1 - p is only known to the rounding of 1.
            floor = 1e-15 if name == "entropy" or name.endswith("top1_logprob") else 1e-40
            assert got[name] == pytest.approx(want[name], rel=1e-6, abs=floor), (name, vocab)


def test_the_plain_sum_would_fail_where_ours_holds():
    """The fault that the stable form guards against: sum q (log q - log p) at a drift of 1e-8."""
    rng = np.random.default_rng(0)
    z_q = np.round(rng.normal(0, 2, 50) * 1024) / 1024
    z_p = z_q + 1e-8 * rng.normal(0, 1, 50)
    truth = exact(z_p, z_q)["kl_engine_reference"]
    logp, logq = dv.log_softmax(z_p), dv.log_softmax(z_q)
    plain = (np.exp(logq) * (logq - logp)).sum()
    assert abs(plain / truth - 1) > 0.1
    assert dv.kl_divergence(z_q, z_p) == pytest.approx(truth, rel=1e-6)


rows = (
    st.integers(0, 2**32 - 1)
    .map(np.random.default_rng)
    .map(
        lambda rng: (lambda v, s: (rng.normal(0, 3, (4, v)), rng.normal(0, 3, (4, v)) * s))(
            int(rng.integers(2, 30)), 10.0 ** rng.uniform(-6, 1)
        )
    )
)


@settings(max_examples=150, deadline=None)
@given(rows)
def test_what_holds_of_any_pair(pair):
    """Shifts change nothing, both directions mirror each other, and the usual orderings hold."""
    z_q, noise = pair
    z_p = z_q + noise
    row = dv.compare_rows(z_p, z_q, eta=0.0)
    shifted = dv.compare_rows(z_p + 3.0, z_q - 1.0, eta=0.0)
    mirror = dv.compare_rows(z_q, z_p, eta=0.0)
    for name in ("kl_engine_reference", "tv", "chi2", "drift", "logit_var"):
        np.testing.assert_allclose(row[name], shifted[name], rtol=1e-4, atol=1e-13)
    np.testing.assert_allclose(row["kl_engine_reference"], mirror["kl_reference_engine"], rtol=1e-9)
    np.testing.assert_allclose(row["tv"], mirror["tv"], rtol=1e-9)
    np.testing.assert_allclose(row["drift"], mirror["drift"], rtol=1e-9)
    jeffreys = row["kl_engine_reference"] + row["kl_reference_engine"]
    assert (jeffreys <= row["drift"] * row["tv"] * (1 + 1e-9)).all()
    assert (np.log1p(row["chi2"]) >= row["kl_reference_engine"] * (1 - 1e-9)).all()
    assert (dv.bhattacharyya(z_p, z_q) >= 1 - row["tv"] - 1e-12).all()
    np.testing.assert_allclose(dv.hockey_stick(z_p, z_q, np.ones(4)), row["tv"], rtol=1e-6,
                               atol=1e-15)  # fmt: skip
    assert (row["tail_mass"] == 0).all()


@settings(max_examples=50, deadline=None)
@given(rows)
def test_single_functions_are_the_columns(pair):
    z_q, noise = pair
    z_p = z_q + noise
    row = dv.compare_rows(z_p, z_q)
    singles = {
        "kl_engine_reference": dv.kl_divergence(z_q, z_p),
        "kl_reference_engine": dv.kl_divergence(z_p, z_q),
        "tv": dv.total_variation(z_p, z_q),
        "chi2": dv.chi_squared(z_p, z_q),
        "drift": dv.drift(z_p, z_q),
        "tail_mass": dv.tail_mass(z_p, z_q),
        "logit_var": dv.logit_variance(z_p, z_q),
        "entropy": dv.entropy(z_p),
        "reference_margin": dv.margin(z_p),
        "engine_top1": dv.top1(z_q),
    }
    for name, value in singles.items():
        np.testing.assert_array_equal(value, row[name], err_msg=name)


def test_equal_rows_have_exactly_no_drift():
    z = np.random.default_rng(1).normal(0, 5, (3, 1000))
    row = dv.compare_rows(z, z)
    for name in ("kl_engine_reference", "kl_reference_engine", "tv", "chi2", "drift", "logit_var"):
        assert (row[name] == 0).all(), name
    assert not row["flip"].any()


def test_a_shifted_row_is_the_same_distribution():
    """A constant added to all logits of one side is no drift (a power of two, so it is exact)."""
    z = np.round(np.random.default_rng(1).normal(0, 5, 100) * 256) / 256
    row = dv.compare_rows(z + 4.0, z)
    assert row["drift"] == 0
    assert row["kl_engine_reference"] < 1e-29


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["reference", "engine", "both"])
def test_nonfinite_rows_are_counted_and_have_no_metrics(value, side):
    """One bad value on a row of three: that row is NaN throughout, its neighbours are untouched."""
    rng = np.random.default_rng(2)
    z_p, z_q = rng.normal(0, 1, (3, 9)), rng.normal(0, 1, (3, 9))
    clean = dv.compare_rows(z_p, z_q, token_ids=np.zeros(3, int))
    bad_p, bad_q = z_p.copy(), z_q.copy()
    if side in ("reference", "both"):
        bad_p[1, 4] = value
    if side in ("engine", "both"):
        bad_q[1, 4] = value
    row = dv.compare_rows(bad_p, bad_q, token_ids=np.zeros(3, int))
    assert row["nonfinite"].tolist() == [0, 2 if side == "both" else 1, 0]
    for name in (*FLOATS, "engine_logprob", "reference_logprob"):
        assert np.isnan(row[name]).tolist() == [False, True, False], name
        np.testing.assert_array_equal(row[name][[0, 2]], clean[name][[0, 2]])
    assert row["engine_top1"][1] == row["reference_top1"][1] == -1
    assert not row["flip"][1]


def test_truncated_support_follows_the_definitions():
    """p on {0, 1, 2}, q on {0, 1}: KL(q||p) = ln(1/(1 - p_2)) ; what divides by q is infinite."""
    inf = np.inf
    p = np.log([0.5, 0.3, 0.2])
    z_p, z_q = np.array([*p, -inf]), np.array([p[0], p[1], -inf, -inf])
    row = dv.compare_rows(z_p, z_q, truncated=True)
    assert row["nonfinite"] == 0
    assert row["kl_engine_reference"] == pytest.approx(np.log(1 / 0.8))
    assert row["tv"] == pytest.approx(0.2)
    assert row["kl_reference_engine"] == inf
    assert row["chi2"] == inf
    assert row["drift"] == inf
    assert dv.chi_squared(z_q, z_p) == pytest.approx(1 / 0.8 - 1)
    assert dv.logit_variance(z_q, z_p) == inf
    assert dv.logit_variance(z_p, z_q) == pytest.approx(0, abs=1e-30)
    same = dv.compare_rows(z_q, z_q, truncated=True)
    assert same["drift"] == same["kl_engine_reference"] == same["logit_var"] == 0
    one = dv.compare_rows([0.0, -inf], [0.0, -inf], truncated=True)
    assert one["reference_margin"] == inf
    assert one["entropy"] == 0
    empty = dv.compare_rows([-inf, -inf], [0.0, -inf], truncated=True)
    assert empty["nonfinite"] == 2
    assert np.isnan(empty["tv"])


def test_ties_go_to_the_lowest_index_and_have_no_margin():
    row = dv.compare_rows([1.0, 2.0, 2.0], [1.0, 2.0, 2.5])
    assert (row["reference_top1"], row["engine_top1"], row["flip"]) == (1, 2, True)
    assert row["reference_margin"] == 0


def test_the_nucleus_decides_what_drift_sees():
    """A token at 1e-9 on both sides, moved by 5 nats: drift only if eta lets it in."""
    z_q = np.log([0.6, 0.4 - 1e-9, 1e-9])
    z_p = z_q + np.array([0.0, 0.0, 5.0])
    assert dv.drift(z_p, z_q) == pytest.approx(0, abs=1e-9)
    assert dv.drift(z_p, z_q, eta=0.0) == pytest.approx(5)
    assert dv.tail_mass(z_p, z_q) == pytest.approx(np.exp(5) * 1e-9, rel=1e-5)
    assert np.isnan(dv.drift(z_p, z_q, eta=0.9))  # nobody in the nucleus: no evidence, not zero


def test_the_race_formula_agrees_with_racing():
    """20,000 simulated races with shared exponentials; a shared uniform would differ far more."""
    rng = np.random.default_rng(5)
    p, q = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    clocks = rng.exponential(size=(20_000, 6))
    rate = ((clocks / p).argmin(1) != (clocks / q).argmin(1)).mean()
    want = dv.race_disagreement(np.log(p), np.log(q))
    assert abs(rate - want) < 4 * np.sqrt(want * (1 - want) / 20_000)
    assert dv.race_disagreement(np.log(p), np.log(p)) == pytest.approx(0, abs=1e-15)


@given(st.floats(-50, 50).filter(lambda x: abs(x) > 1e-100))
def test_expm1_minus_to_full_precision(x):
    with mpmath.workdps(300):
        want = float(mpmath.expm1(mpmath.mpf(x)) - mpmath.mpf(x))
    assert dv.expm1_minus(x) == pytest.approx(want, rel=1e-13, abs=0)


def test_long_inputs_go_in_chunks_and_keep_their_shape(monkeypatch):
    rng = np.random.default_rng(4)
    z_p, z_q = rng.normal(0, 1, (2, 5, 11)), rng.normal(0, 1, (2, 5, 11))
    whole = dv.compare_rows(z_p, z_q)
    monkeypatch.setattr(dv, "_CHUNK", 33)
    parts = dv.compare_rows(z_p, z_q)
    for name, value in whole.items():
        assert value.shape == (2, 5)
        np.testing.assert_array_equal(value, parts[name])
    assert dv.compare_rows(np.empty((0, 7)), np.empty((0, 7)))["tv"].shape == (0,)


@pytest.mark.parametrize(
    ("p", "q", "options"),
    [
        ([1.0, 2.0], [1.0, 2.0, 3.0], {}),
        ([], [], {}),
        ([1.0], [2.0], {"eta": 1.0}),
        ([1.0, 2.0], [1.0, 2.0], {"token_ids": [0, 1]}),
        ([[1.0, 2.0]], [[1.0, 2.0]], {"token_ids": [2]}),
        (["a"], ["b"], {}),
    ],
)
def test_inputs_that_do_not_fit_are_refused(p, q, options):
    with pytest.raises(InputError):
        dv.compare_rows(p, q, **options)
