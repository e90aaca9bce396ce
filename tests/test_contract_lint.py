"""Doubts about valid contracts: each fires on its case, and not on a clean control beside it."""

from __future__ import annotations

import math

import pytest
from contract_examples import EXAMPLE

from kernel_contracts.loading import check_text

CLEAN = """\
schema: kernel-contracts/v1
name: clean
slices:
  undecided: {where: reference_margin <= 0.5}
  confidence: {bins: {reference_prob: [0, 0.5, 1]}}
numerical:
  - {id: N1, metric: drift, exceeds: 1.0, share: 0.05}
  - {id: N2, metric: nonfinite, limit: 0}
statistical:
  - {id: S1, metric: kl_engine_reference, limit: 2.0e-3, slices: [all, confidence]}
  - {id: S2, metric: flip_rate, limit: 0.05, slices: [all, undecided]}
runtime:
  - {id: R1, probe: order, limit: 2.0e-3}
observability:
  - {id: O1, min_prompts: 60}
budget: {reward_range: 1.0, reward_drift: 0.25, horizon: 60, flip_budget: 0.05, tis_threshold: 2.0}
escalation:
  - {when: {verdict: FAIL, clause: S1}, action: log}
  - {when: {verdict: FAIL}, action: block}
"""


def doubts(document: str, prompts: int | None = None) -> list[tuple[int, str, str]]:
    contract, problems = check_text(document, "c.yaml", prompts)
    assert contract is not None, problems
    assert {p.severity for p in problems} <= {"warning"}
    return [(p.line, p.field, p.message) for p in problems]


def test_a_clean_contract_raises_no_doubt() -> None:
    """Control for every case below."""
    assert doubts(CLEAN) == []
    assert doubts(CLEAN, prompts=60) == []


CASES = [
    ("share: 0.05", "share: 0.01", 7, "numerical[0].share", "needs at least 299 prompts"),
    ("limit: 0.05, slices", "limit: 0.01, slices", 11, "statistical[1].limit", "299 prompts"),
    ("2.0e-3, slices", "2.0e-3, tail: 0.01, slices", 10, "statistical[0].tail", "299 prompts"),
    ("2.0e-3, slices", "2.0e-3, ceiling: 0.2, slices", 10, "statistical[0].limit", "299 prompts"),
    ("limit: 0.05, slices", "limit: 0.05, tail: 0.1, slices", 11, "statistical[1].tail", "unused"),
    ("slices: [all, undecided]", "slices: [all]", 4, "slices.undecided", "no clause or rule"),
    ("reference_margin <= 0.5", "reference_margn <= 0.5", 4, "slices.undecided.where",
     "no column of the token table"),
    ("reference_margin <= 0.5", "path > 0.5", 4, "slices.undecided.where",
     "compares text with number"),
    ("reference_margin <= 0.5", "flip == 'yes'", 4, "slices.undecided.where",
     "compares boolean with text"),
    ("[0, 0.5, 1]", "[0.1, 0.5, 1]", 5, "slices.confidence.bins.reference_prob", "in no slice"),
    ("[0, 0.5, 1]", "[0, 0.5, 0.99]", 5, "slices.confidence.bins.reference_prob", "in no slice"),
    ("tis_threshold: 2.0", "tis_threshold: 2.8", 16, "budget.tis_threshold", "no-op"),
    ("horizon: 60", "horizon: 70", 10, "statistical[0].limit", "looser than the budget"),
    ("flip_budget: 0.05", "flip_budget: 0.04", 11, "statistical[1].limit", "flip budget is 0.04"),
    ("reward_drift: 0.25", "reward_drift: 1.0", 16, "budget.reward_drift", "promises nothing"),
    ("metric: nonfinite, limit: 0", "metric: tv, exceeds: 0.5, share: 0.05", 1, "",
     "nothing is promised about non-finite"),
    ("observability:\n  - {id: O1, min_prompts: 60}\n", "", 1, "", "no observability clause"),
    ("verdict: FAIL, clause: S1", "verdict: FAIL", 19, "escalation[1].when", "earlier rule"),
]  # fmt: skip


@pytest.mark.parametrize(("clean", "doubtful", "line", "field", "message"), CASES)
def test_each_doubt_is_told_at_its_line_alone(
    clean: str, doubtful: str, line: int, field: str, message: str
) -> None:
    """One change to the clean contract raises one doubt."""
    assert CLEAN.count(clean) == 1 or clean == "verdict: FAIL"
    found = doubts(CLEAN.replace(clean, doubtful))
    assert [(n, f) for n, f, _ in found] == [(line, field)], found
    assert message in found[0][2]


def test_the_number_of_prompts_asked_about_beats_the_contracts_own() -> None:
    """300 prompts certify 1%; 20 certify almost nothing here, and are fewer than O1 asks for."""
    assert doubts(CLEAN.replace("share: 0.05", "share: 0.01"), prompts=300) == []
    fields = [f for _, f, _ in doubts(CLEAN, prompts=20)]
    assert fields == [
        "numerical[0].share",
        "statistical[0].tail",
        "statistical[1].limit",
        "observability[0].min_prompts",
    ]


def test_the_example_says_what_it_cannot_certify() -> None:
    """The documented example asks for 1% with 60 prompts, and keeps a slice only to look at."""
    assert [f for _, f, _ in doubts(EXAMPLE)] == ["slices.confidence", "numerical[0].share"]


@pytest.mark.parametrize("threshold", [2.0, 2.7, math.e - 1e-9])
def test_a_truncation_below_the_largest_certified_weight_is_no_doubt(threshold: float) -> None:
    """w <= e^drift: only a threshold from e^1 on never truncates where N1 holds."""
    assert doubts(CLEAN.replace("tis_threshold: 2.0", f"tis_threshold: {threshold!r}")) == []


@pytest.mark.parametrize("drift", [0.05, 0.1, 0.25, 0.5, 0.8])
def test_a_limit_that_the_budget_bears_is_no_doubt(drift: float) -> None:
    """Where the warning starts, the bound on the reward drift is the budget itself: of a sequence's
    TV, min(sqrt(T k / 2), sqrt(1 - e^(-T k))), for the largest k that is not warned about."""
    horizon = 60

    def told(limit: float) -> bool:
        changed = CLEAN.replace("reward_drift: 0.25", f"reward_drift: {drift}")
        return bool(doubts(changed.replace("limit: 2.0e-3, slices", f"limit: {limit!r}, slices")))

    low, high = 1e-9, 1.0
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if told(middle) else (middle, high)
    bound = min(math.sqrt(horizon * low / 2), math.sqrt(-math.expm1(-horizon * low)))
    assert bound == pytest.approx(drift, rel=1e-6)
