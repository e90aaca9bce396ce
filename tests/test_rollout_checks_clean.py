"""Clean logs stay quiet over many seeds and kinds, and the parts hold what they promise.

The false-alarm rate over 200 seeds a kind is measured by benchmarks/rollout_false_alarms.py; here
a few seeds of each guard against a relapse.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_fixtures import CLEAN_KINDS, Log, found, make_log

from mismatch_audit.rollouts.checks.contrasts import contrasts, fit
from mismatch_audit.rollouts.checks.sample import Sample
from mismatch_audit.rollouts.checks.series import change
from mismatch_audit.rollouts.checks.strata import Strata
from mismatch_audit.rollouts.checks.turns import classify


@pytest.mark.parametrize("kind", CLEAN_KINDS)
@pytest.mark.parametrize("seed", [11])
def test_clean_logs_raise_nothing(kind: str, seed: int) -> None:
    """No error and no warning; in the float32 kinds no note either."""
    results = make_log(seed=seed, **CLEAN_KINDS[kind]).results()
    assert found(results) == []
    assert {r.status for r in results} <= {"clean", "unobserved", "found"}


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.5])
@pytest.mark.parametrize("seed", [1, 2])
def test_siblings_give_the_temperature(temperature: float, seed: int) -> None:
    """The slope of siblings' differences is 1/T within 1%, whatever the logits are."""
    log = make_log(seed=seed, temperature=temperature, raw=True, engine_noise=0.01)
    slope = fit_of(log)
    assert slope == pytest.approx(1 / temperature, rel=0.01)


def fit_of(log: Log) -> float:
    sample = Sample()
    for batch in log.batches():
        sample.update(batch)
    pairs = contrasts(sample)
    return fit(*pairs.differences(), pairs.group).slope


def test_the_sample_is_bounded_and_does_not_depend_on_the_order() -> None:
    """Whole prompts with the smallest hashes, within the budget; the same from a shuffled log."""
    log = make_log(steps=8, prompts=12)
    kept = []
    for seed in (None, 1, 2):
        rows = list(log.rows)
        if seed is not None:  # whole prompts move
            groups = np.random.default_rng(seed).permutation(len(rows) // 4)
            rows = [rows[4 * g + k] for g in groups for k in range(4)]
        sample = Sample(budget=1500)
        for batch in Log(rows, log.header, 20).batches():
            sample.update(batch)
        assert sample.tokens <= 1500
        assert sample.tokens == sum(len(r.used) for r in sample.rows())
        kept.append(sorted({(r.group, r.scalars["step"]) for r in sample.rows()}))
    assert kept[0] == kept[1] == kept[2]
    assert len(kept[0]) > 3


def test_strata_keep_a_bounded_table() -> None:
    """Past the limit integer keys are merged pairwise, and nothing is lost."""
    strata = Strata(limit=64)
    ones = np.ones(1)
    for step in range(1000):
        strata.add(np.array([step]), np.zeros(1, dtype=int), ones, ones * step)
    assert len(strata.table) <= 64
    whole = strata.mean(*strata.table)
    assert whole.tokens == 1000
    assert whole.value == pytest.approx(499.5)
    assert strata.label(strata.order()[1]) == strata.width


def test_named_strata_keep_a_bounded_table() -> None:
    """Past the limit new names are counted together."""
    strata = Strata(limit=8)
    for i in range(50):
        name = np.array([f"environment-{i}"], dtype=object)
        strata.add(name, np.zeros(1, dtype=int), np.ones(1), np.ones(1))
    assert len(strata.table) <= 9
    assert strata.mean(*strata.table).tokens == 50


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), spread=st.floats(0.0, 2.0))
def test_standard_errors_respect_clusters(seed: int, spread: float) -> None:
    """Tokens of a prompt that share an offset: the error stays near the spread of many repeats,
    where counting tokens as independent would be off by sqrt(tokens)."""
    rng = np.random.default_rng(seed)
    estimates, errors = [], []
    for _ in range(60):
        n = rng.integers(5, 30, 60).astype(float)
        x = n * (1 + spread * rng.normal(size=60)) + rng.normal(size=60) * np.sqrt(n)
        strata = Strata()
        strata.add(np.zeros(60, dtype=int), np.arange(60), n, x)
        mean = strata.mean(0)
        estimates.append(mean.value)
        errors.append(mean.se)
    assert 0.6 < np.mean(errors) / np.std(estimates) < 1.6


def test_a_change_is_found_where_it_is() -> None:
    """A level that trebles at step 12 of 20 is dated 12; a level that stays has no change."""
    rng = np.random.default_rng(0)
    for rise, wanted in ((3.0, 12), (1.0, None)):
        strata = Strata()
        for step in range(20):
            level = rise if step >= 12 else 1.0
            x = level * rng.lognormal(0, 0.3, 30)
            strata.add(np.full(30, step), np.arange(30), np.ones(30), x)
        seen = change(strata)
        assert (seen.key if seen else None) == wanted


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_turns_are_classified(data: st.DataObject) -> None:
    """A cut-out stretch is an edit; a few tokens that became others are re-tokenisation."""
    rng = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    before = rng.permutation(10_000)[:80]  # all different: what is aligned is unambiguous
    removed = data.draw(st.integers(1, 40))
    kind, gone, added = classify(before, np.r_[before[removed:], [20_001, 20_002]])
    assert (kind, gone, added) == ("edited", removed, 0)
    gone = data.draw(st.integers(1, 6))
    new = data.draw(st.integers(1, 6))
    after = np.r_[20_000 + np.arange(new), before[gone:]]
    assert classify(before, after) == ("retokenised", gone, new)
