"""Many slices: each procedure equals its definition by brute force and keeps its rate under
dependence; the uncorrected test is the fault that does not."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import false_discovery_control, norm

from kernel_contracts.confidence import benjamini_yekutieli, e_bh, holm, intersection_union
from kernel_contracts.errors import InputError

p_lists = st.lists(st.floats(0, 1), min_size=1, max_size=7)


@given(p_lists, st.floats(0.01, 0.3))
def test_holm_is_the_closed_bonferroni_test(p, alpha):
    """A hypothesis falls iff every intersection that holds it falls by Bonferroni."""
    closed = [
        all(
            min(p[j] for j in (*rest, i)) * (len(rest) + 1) <= alpha
            for size in range(len(p))
            for rest in combinations([j for j in range(len(p)) if j != i], size)
        )
        for i in range(len(p))
    ]
    assert holm(p, alpha).rejected.tolist() == closed


@given(p_lists)
def test_benjamini_yekutieli_is_scipys(p):
    ours = benjamini_yekutieli(p, 0.05).adjusted
    np.testing.assert_allclose(ours, false_discovery_control(p, method="by"), atol=1e-12)


@given(st.lists(st.floats(-5, 12), min_size=1, max_size=8), st.floats(0.01, 0.3))
def test_e_bh_is_its_definition(log_e, alpha):
    """The k largest fall for the largest k with k e_(k) / K >= 1 / alpha."""
    e, count = np.exp(log_e), len(log_e)
    top = np.sort(e)[::-1]
    fits = [k for k in range(1, count + 1) if k * top[k - 1] / count * alpha >= 1]
    expected = e >= top[max(fits) - 1] if fits else np.zeros(count, bool)
    near = [abs(k * top[k - 1] / count * alpha - 1) < 1e-9 for k in range(1, count + 1)]
    if not any(near):
        assert e_bh(log_e, alpha).rejected.tolist() == expected.tolist()


@given(p_lists, st.randoms())
def test_order_of_slices_does_not_matter(p, random):
    order = list(range(len(p)))
    random.shuffle(order)
    for procedure in (holm, benjamini_yekutieli):
        a, b = procedure(p, 0.05), procedure([p[i] for i in order], 0.05)
        np.testing.assert_allclose(a.adjusted[order], b.adjusted)


@given(p_lists)
def test_adjusted_values_are_ordered_and_never_smaller(p):
    for procedure in (holm, benjamini_yekutieli):
        found = procedure(p, 0.05)
        assert np.all(found.adjusted >= np.array(p) - 1e-15)
        assert np.all(found.adjusted <= 1)
        assert np.array_equal(found.rejected, found.adjusted <= 0.05)


def test_false_alarms_over_dependent_slices():
    """12 null slices that share prompts (correlation 0.3).  Fault: testing each at 5 % raises a
    false alarm in over 25 % of audits.  Control: Holm in at most 5 % (plus noise)."""
    rng = np.random.default_rng(0)
    z = np.sqrt(0.3) * rng.standard_normal((4000, 1)) + np.sqrt(0.7) * rng.standard_normal(
        (4000, 12)
    )
    p = norm.sf(z)
    assert np.mean((p <= 0.05).any(1)) > 0.25
    assert np.mean([holm(row, 0.05).rejected.any() for row in p]) <= 0.05 + 0.01


def test_real_alarms_come_through():
    p = [1e-5, 0.6, 0.2, 1e-4, 0.9]
    for procedure in (holm, benjamini_yekutieli):
        assert procedure(p, 0.05).rejected.tolist() == [True, False, False, True, False]
    assert e_bh([8.0, -1.0, 0.0, 7.0, 0.5], 0.05).rejected.tolist() == [1, 0, 0, 1, 0]


def test_infinite_evidence_is_accepted():
    """A limit of zero that is broken gives an infinite e-value and p = 0."""
    assert e_bh([np.inf, 0.0], 0.05).rejected.tolist() == [True, False]
    assert e_bh([np.inf, 0.0], 0.05).adjusted[0] == 0.0
    assert holm([0.0, 1.0], 0.05).adjusted.tolist() == [0.0, 1.0]


def test_release_needs_every_slice():
    """The largest p-value decides, uncorrected; a release over nothing shows nothing."""
    assert intersection_union([0.01, 0.04, 0.03]) == 0.04
    assert intersection_union([]) == 1.0


def test_no_hypotheses_no_rejections():
    for procedure in (holm, benjamini_yekutieli, e_bh):
        assert procedure([], 0.05).rejected.size == 0


@pytest.mark.parametrize("bad", [[np.nan], [1.2], [-0.1], [[0.1]]])
def test_an_unobserved_slice_is_no_p_value(bad):
    """A NaN must not sort to one end and pass silently."""
    for procedure in (holm, benjamini_yekutieli):
        with pytest.raises(InputError):
            procedure(bad, 0.05)
    with pytest.raises(InputError):
        intersection_union(bad)
    with pytest.raises(InputError):
        e_bh([np.nan], 0.05)
