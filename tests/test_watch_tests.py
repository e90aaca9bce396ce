"""The sequential tests behind watch and promotion: what they are fed with, and what they say."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kernel_contracts.confidence import mean_test
from kernel_contracts.errors import InputError
from kernel_contracts.loading import parse_contract
from mismatch_audit.monitor.frames import ScoredRow
from mismatch_audit.monitor.observe import LARGEST, observable_clauses, observe
from mismatch_audit.monitor.sampled import not_judged, sampled_contract
from mismatch_audit.monitor.trackers import BLOCK, Book, Plan, Tracker

TEXT = """\
schema: kernel-contracts/v1
name: tests
slices:
  domain: {by: domain}
  hard: {by: language, where: difficulty > 2}
  sure: {bins: {reference_prob: [0, 0.5, 1]}}
numerical:
  - {id: N1, metric: abs_dlp, exceeds: 0.1, share: 0.05, path: both}
  - {id: N2, metric: drift, exceeds: 1.0, share: 0.05}
statistical:
  - {id: S1, metric: k3, limit: 1.0e-3, slices: [all, sure]}
  - {id: S2, metric: mult_prob_error, limit: 1.1, slices: [domain, hard]}
  - {id: S3, metric: ess_ratio, at_least: 0.9, warn: 0.95}
  - {id: S4, metric: k3, limit: 1.0e-2, weight: token}
  - {id: S5, metric: flip_rate, limit: 0.1}
  - {id: S6, metric: k3, limit: 1.0e-2, path: prefill}
"""
CONTRACT = parse_contract(TEXT)
CLAUSES = observable_clauses(CONTRACT)
PLAN = Plan(0.05, 100, 64)


def row(index: int, noise: float = 0.05, tokens: int = 20, **metadata: str | float) -> ScoredRow:
    random = np.random.default_rng([9, index])
    q = -random.exponential(1.0, tokens)
    p = {"reference_logprob": q + noise * random.standard_normal(tokens)}
    return ScoredRow(f"u{index}", f"r{index}", tuple(range(tokens)), 4, q, p, metadata)


def test_values_are_the_metrics_own() -> None:
    """By hand: means over the prompt's tokens above the metric's floor, slice by slice."""
    one = row(1, domain="code", language="de", difficulty=3)
    d = one.reference["reference_logprob"] - one.engine_logprob
    found = observe(CONTRACT, CLAUSES, [one])["u1"]
    sure = np.exp(one.reference["reference_logprob"]) >= 0.5
    k3 = np.expm1(d) - d
    assert found["N1"]["all"] == (pytest.approx(np.mean(np.abs(d) > 0.1)), 20)
    assert found["S1"]["all"] == (pytest.approx(k3.mean()), 20)
    assert found["S1"]["reference_prob[0.5,1]"] == (pytest.approx(k3[sure].mean()), sure.sum())
    assert found["S2"]["domain=code"] == (pytest.approx(np.exp(np.abs(d)).mean() - 1), 20)
    assert set(found["S2"]) == {"domain=code", "hard:language=de"}
    assert found["S3"]["all"] == (pytest.approx(np.exp(2 * d).mean()), 20)
    assert set(found) == {"N1", "S1", "S2", "S3", "S4"}
    with_others = observe(CONTRACT, CLAUSES, [row(0), one, row(2, domain="x")])["u1"]
    assert with_others == found


def test_a_token_that_the_reference_excludes_is_as_bad_as_can_be() -> None:
    """Infinite, so clipped at the ceiling and above the tail's; it must not be dropped."""
    one = row(1)
    one.reference["reference_logprob"][3] = -np.inf
    found = observe(CONTRACT, CLAUSES, [one])["u1"]
    assert found["S1"]["all"][0] > 1e28
    assert found["S1"]["all"][0] <= LARGEST
    book = Book(CONTRACT, CLAUSES, PLAN)
    book.update(json.loads(json.dumps(found)))
    (standing,) = [s for s in book.standings() if (s.clause, s.slice) == ("S1", "all")]
    assert standing.clipped == 1


def test_the_wealth_is_that_of_the_fixed_sample_test() -> None:
    """After exactly as many prompts as the stakes are tuned to, Tracker and mean_test agree."""
    clause = next(c for c in CLAUSES if c.id == "S1")
    values = np.random.default_rng(0).exponential(2e-3, 100)
    tracker = Tracker(clause, PLAN)
    for value in values:
        tracker.update(float(value), 20)
    mean = mean_test(values, limit=1e-3, ceiling=5e-3, alpha=0.05, side="above")
    above = (values > 5e-3).astype(float)
    tail = mean_test(above, limit=0.05, ceiling=1.0, alpha=0.05, side="above")
    assert tracker.p_fail == pytest.approx(min(1.0, 2 * min(mean.p_value, tail.p_value)))


def test_a_pass_is_not_shown_after_the_traffic_drifted() -> None:
    """It was certain once; with the mean beyond its limit it is open again, then broken."""
    clause = next(c for c in CLAUSES if c.id == "S1")
    book, seen = Book(CONTRACT, [clause], PLAN), []
    for value in [1e-4] * 200 + [2.5e-3] * 400:
        book.update({"S1": {"all": (value, 20)}})
        verdict = next(s.verdict for s in book.standings() if s.slice == "all")
        if not seen or seen[-1] != verdict:
            seen.append(verdict)
    assert seen == ["INCONCLUSIVE", "PASS", "INCONCLUSIVE", "FAIL"]


def test_weights_by_token_and_inverted_metrics() -> None:
    """S4 counts tokens, S3 is told as an effective sample size."""
    book = Book(CONTRACT, CLAUSES, PLAN)
    rows = [row(i, tokens=5 + i % 30, domain="a", language="b", difficulty=3) for i in range(120)]
    for one in observe(CONTRACT, CLAUSES, rows).values():
        book.update(one)
    standings = {(s.clause, s.slice): s for s in book.standings()}
    d = np.concatenate([r.reference["reference_logprob"] - r.engine_logprob for r in rows])
    k3 = np.expm1(d) - d
    assert standings["S4", "all"].estimate == pytest.approx(k3.mean(), rel=1e-6)
    assert standings["S4", "all"].verdict == "PASS"
    assert standings["S3", "all"].limit == pytest.approx(0.9)
    assert 0.97 < (standings["S3", "all"].estimate or 0) <= 1.0
    assert not standings["S3", "all"].warn
    assert standings["S1", "all"].verdict == "FAIL"


def test_what_was_never_seen_is_unobserved() -> None:
    """Fixed slices, and definitions that traffic brought no slice of, each by itself."""
    book = Book(CONTRACT, CLAUSES, PLAN)
    assert {(s.clause, s.slice) for s in book.standings() if s.verdict == "UNOBSERVED"} == {
        ("N1", "all"), ("S1", "all"), ("S1", "reference_prob[0,0.5)"),
        ("S1", "reference_prob[0.5,1]"), ("S2", "domain"), ("S2", "hard"), ("S3", "all"),
        ("S4", "all"),
    }  # fmt: skip
    book.update(observe(CONTRACT, CLAUSES, [row(1, domain="code")])["u1"])
    unseen = {(s.clause, s.slice) for s in book.standings() if s.verdict == "UNOBSERVED"}
    assert unseen == {("S2", "hard")}


def test_new_slices_share_alpha_in_blocks() -> None:
    """The first eight are adjusted by 2 x 8 at most, the next sixteen by 4 x 16."""
    clause = [c for c in CLAUSES if c.id == "S2"]
    book = Book(CONTRACT, clause, PLAN)
    for number in range(BLOCK + 1):
        book.update({"S2": {f"domain={number}": (0.05, 10)}})
    family = book.families["S2"]
    for name in (f"domain={0}", f"domain={BLOCK}"):
        tracker = Tracker(clause[0], PLAN)
        for _ in range(12):
            tracker.update(0.5, 10)
        family.trackers[name] = tracker
    raw = tracker.p_fail
    assert raw < 1e-4
    adjusted = family.adjusted()
    assert adjusted["domain=0"] == pytest.approx(2 * BLOCK * raw)
    assert adjusted[f"domain={BLOCK}"] == pytest.approx(4 * 2 * BLOCK * raw)


def test_a_state_of_other_limits_or_clauses_is_refused() -> None:
    """Evidence against another promise is none against this."""
    book = Book(CONTRACT, CLAUSES, PLAN)
    book.update(observe(CONTRACT, CLAUSES, [row(1, domain="code")])["u1"])
    state = json.loads(json.dumps(book.to_dict()))
    again = Book(CONTRACT, CLAUSES, PLAN)
    again.restore(state)
    assert again.to_dict() == book.to_dict()
    other = parse_contract(TEXT.replace("limit: 1.0e-3", "limit: 1.1e-3"))
    with pytest.raises(InputError, match="other limits"):
        Book(other, observable_clauses(other), PLAN).restore(state)
    with pytest.raises(InputError, match="does not"):
        Book(CONTRACT, CLAUSES[:1], PLAN).restore(state)
    del state["S1"]["all"]["above"]
    with pytest.raises(InputError, match="damaged"):
        Book(CONTRACT, CLAUSES, PLAN).restore(state)


def test_the_sampled_part_of_a_contract() -> None:
    """Only what sampled tokens can show; told what is left out; nothing left is an error."""
    part = sampled_contract(CONTRACT)
    assert [c.id for c in part.clauses()] == ["N1", "S1", "S2", "S3", "S4"]
    assert not_judged(CONTRACT, part) == ["N2", "S5", "S6"]
    assert part.name == "tests-sampled"
    assert [c.id for c in sampled_contract(CONTRACT, ["S3"]).clauses()] == ["S3"]
    with pytest.raises(InputError, match="S5 cannot be judged"):
        sampled_contract(CONTRACT, ["S5"])
    with pytest.raises(InputError, match="no clause can be judged"):
        sampled_contract(
            parse_contract(
                "schema: kernel-contracts/v1\nname: x\n"
                "statistical: [{id: S, metric: flip_rate, limit: 0.1}]\n"
            )
        )
