"""Statistics of recorded rollouts: definitions, merging, and what must not be hidden."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_contracts.errors import InputError
from kernel_contracts.estimators import k3, weight_summary
from mismatch_audit.rollouts import kernels
from mismatch_audit.rollouts.statistics import SequenceParts, batch_statistics, sequence_sums
from mismatch_audit.rollouts.store import SumStore


def case(seed: int = 0, rows: int = 6, width: int = 30, sd: float = 0.3):
    rng = np.random.default_rng(seed)
    q = -rng.exponential(1, (rows, width))
    p = q + rng.normal(0, sd, q.shape)
    mask = np.arange(width) < rng.integers(5, width, rows)[:, None]
    return q, p, mask


def test_every_number_is_its_definition():
    """Each field against its formula written out with numpy, on lengths that differ, so that the
    two averages differ too."""
    q, p, m = case()
    d = p - q
    tokens = d[m]
    of = [(d[i][m[i]], q[i][m[i]], p[i][m[i]]) for i in range(len(q))]
    s = batch_statistics(q, p, m)

    def seq(f):
        return np.mean([f(*one) for one in of])

    expected = {
        "tokens": m.sum(),
        "sequences": 6,
        "k1": -tokens.mean(),
        "k1_seq_mean": seq(lambda d, q, p: -d.mean()),
        "k2": (tokens**2).mean() / 2,
        "k3": (np.exp(tokens) - 1 - tokens).mean(),
        "k3_seq_mean": seq(lambda d, q, p: (np.exp(d) - 1 - d).mean()),
        "abs_dlp": np.abs(tokens).mean(),
        "abs_dlp_seq_mean": seq(lambda d, q, p: np.abs(d).mean()),
        "rms_dlp": np.sqrt((tokens**2).mean()),
        "mult_prob_error": np.exp(np.abs(tokens)).mean(),
        "mult_prob_error_seq_mean": seq(lambda d, q, p: np.exp(np.abs(d)).mean()),
        "abs_dp": np.abs(np.exp(p) - np.exp(q))[m].mean(),
        "ppl_trainer": seq(lambda d, q, p: np.exp(-p.mean())),
        "ppl_sampler": seq(lambda d, q, p: np.exp(-q.mean())),
        "log_ppl_diff": seq(lambda d, q, p: q.mean() - p.mean()),
        "log_ppl_abs_diff": seq(lambda d, q, p: abs(q.mean() - p.mean())),
        "ppl_ratio": seq(lambda d, q, p: np.exp(q.mean() - p.mean())),
        "chi2_token": (np.exp(tokens) ** 2).mean() - 1,
        "chi2_seq_product": seq(lambda d, q, p: np.exp(2 * d.sum())) - 1,
        "chi2_seq_geometric": seq(lambda d, q, p: np.exp(2 * d.mean())) - 1,
        "ess_token": weight_summary(tokens).ess_share,
        "ess_seq": weight_summary([one[0].sum() for one in of]).ess_share,
        "ratio_mean": np.exp(tokens).mean(),
        "ratio_min": np.exp(tokens).min(),
        "ratio_max": np.exp(tokens).max(),
        "ratio_p99": np.quantile(np.exp(tokens), 0.99),
        "outside_0.5_2": np.mean((np.exp(tokens) < 0.5) | (np.exp(tokens) > 2)),
    }
    got = s.as_dict()
    assert got["k3"] != pytest.approx(got["k3_seq_mean"], rel=1e-3)
    assert {k: got[k] for k in expected} == pytest.approx(expected, rel=1e-9)


def test_tiny_differences_keep_their_digits():
    """fp32 against fp32 differs by 1e-6: w - 1 - ln w would be rounding noise there."""
    rng = np.random.default_rng(1)
    q = -rng.exponential(1, (4, 500))
    p = q + rng.normal(0, 1e-6, q.shape)
    s = batch_statistics(q, p, np.ones_like(q, dtype=bool))
    assert s.k3 == pytest.approx(float(np.mean(k3((p - q).ravel()))), rel=1e-9)
    assert 0 < s.k3 < 1e-11


def test_missing_and_infinite_values_are_counted_and_never_replaced():
    """A NaN is missing, an infinity is non-finite, and neither moves a mean."""
    q, p, m = case()
    clean = batch_statistics(q, p, m).as_dict()
    q2, p2, m2 = (np.pad(a, ((0, 0), (0, 2))) for a in (q, p, m))
    q2[0, -1], p2[1, -1] = np.nan, -np.inf
    m2[0, -1] = m2[1, -1] = True
    got = batch_statistics(q2, p2, m2).as_dict()
    assert (got["missing"], got["nonfinite"]) == (1, 1)
    same = [k for k in clean if k not in ("missing", "nonfinite")]
    assert {k: got[k] for k in same} == pytest.approx({k: clean[k] for k in same})


def test_no_tokens_is_nan_not_zero():
    """An empty batch has no mismatch to report; a zero would read as a perfect one."""
    q, p, m = case()
    got = batch_statistics(q, p, np.zeros_like(m))
    assert got.tokens == got.sequences == 0
    assert np.isnan([got.k1, got.k3, got.abs_dlp, got.ess_token, got.ess_seq, got.ppl_ratio]).all()


def test_effective_sample_size_is_of_raw_weights():
    """A broken pair, whose weights a trainer clamps to its cap, has ESS near 0, not near 1."""
    rng = np.random.default_rng(2)
    q = -rng.exponential(1, (20, 50))
    p = q + rng.normal(0, 4, q.shape)
    m = np.ones_like(q, dtype=bool)
    clamped = np.clip(np.exp(p - q), 0, 2.0)
    assert clamped.mean() ** 2 / (clamped**2).mean() > 0.4
    assert batch_statistics(q, p, m).ess_token < 0.02


def test_long_sequences_do_not_overflow():
    """A product of ratios beyond float64 is infinite, and the ESS is still a share."""
    q = np.full((3, 4000), -1.0)
    p = q + np.array([[0.5], [0.5], [-0.5]])
    s = batch_statistics(q, p, np.ones_like(q, dtype=bool))
    assert s.chi2_seq_product == np.inf
    assert s.ess_seq == pytest.approx(2 / 3)


@given(st.integers(1, 12), st.integers(0, 2**32 - 1), st.floats(1e-7, 3.0), st.integers(1, 11))
@settings(max_examples=40, deadline=None)
def test_parts_of_a_batch_add_up_to_the_whole(rows, seed, sd, at):
    """Merging is exact however a log is cut, up to the order of additions."""
    q, p, m = case(seed, rows, 25, sd)
    edges = np.arange(rows + 1) * 25
    sums = sequence_sums(q.ravel(), p.ravel(), m.ravel(), edges)
    whole = SequenceParts.of(sums).statistics(0, 0, {}, {}).as_dict()
    cut = SequenceParts.of(sums[:at]) + SequenceParts.of(sums[at:])
    assert cut.statistics(0, 0, {}, {}).as_dict() == pytest.approx(whole, rel=1e-9, nan_ok=True)


def test_flat_arrays_and_padded_ones_agree():
    """[B, T] with a mask, and [N] with offsets, are two spellings of one batch."""
    q, p, m = case()
    lengths = m.sum(axis=1)
    flat = batch_statistics(
        q[m], p[m], np.ones(m.sum(), dtype=bool), np.concatenate([[0], np.cumsum(lengths)])
    )
    assert flat.as_dict() == pytest.approx(batch_statistics(q, p, m).as_dict())
    with pytest.raises(InputError, match="shapes differ"):
        batch_statistics(q, p[:, 1:], m)
    with pytest.raises(InputError, match="partition"):
        batch_statistics(q[m], p[m], np.ones(m.sum(), dtype=bool), [0, 3])


@given(st.integers(0, 2**32 - 1), st.integers(1, 400), st.integers(5, 300))
@settings(max_examples=30, deadline=None)
def test_the_store_spills_and_still_adds_exactly(seed, rows, limit):
    """Sums per slice and prompt do not depend on how often the buffer was merged or written out."""
    rng = np.random.default_rng(seed)
    store = SumStore(2, limit=limit)
    expected: dict[tuple[int, int], np.ndarray] = {}
    for _ in range(5):
        ids = rng.integers(0, 4, rows).astype(np.int32)
        keys = rng.integers(0, 9, rows).astype(np.uint64)
        values = rng.integers(0, 100, (rows, 2)).astype(np.float64)
        store.add(ids, keys, values)
        for i, k, v in zip(ids, keys, values, strict=True):
            expected[int(i), int(k)] = expected.get((int(i), int(k)), 0) + v
    for ids in ([0], [1], [2, 3]):
        keys, sums = store.slice(ids)
        assert (np.diff(keys.astype(np.int64)) > 0).all()
        assert {int(k): tuple(v) for k, v in zip(keys, sums, strict=True)} == {
            k: tuple(sum(v for (i, kk), v in expected.items() if kk == k and i in ids))
            for k in {k for (i, k) in expected if i in ids}
        }
    store.close()


def test_the_features_have_the_names_that_the_columns_say():
    """The order of the compiled kernel's columns is the order of FEATURES."""
    out = np.empty(kernels.N_FEATURES + 2)
    q, p = np.log(0.5), np.log(0.25)
    kernels.features(q, p, np.array([0.5, 0.9]), out)
    by_name = dict(zip(kernels.FEATURES, out, strict=False))
    d = p - q
    assert by_name == pytest.approx(
        {
            "rows": 1, "dlp": d, "abs_dlp": -d, "dlp2": d * d, "k3": 0.5 - 1 - d, "w2": 0.25,
            "mult": 2.0, "abs_dp": 0.25, "sampler_logprob": q, "missing": 0, "nonfinite": 0,
        }
    )  # fmt: skip
    assert list(out[-2:]) == [1.0, 0.0]
