"""Differences between contracts: found whatever the layout, and classed by what they ask."""

from __future__ import annotations

import pytest
from contract_examples import EXAMPLE

from kernel_contracts.contract_diff import diff_contracts
from kernel_contracts.loading import parse_contract


def changes(before: str, after: str) -> list[tuple[str, str]]:
    found = diff_contracts(parse_contract(before), parse_contract(after))
    return [(c.field, c.direction) for c in found]


ESS = EXAMPLE.replace(
    "metric: policy_gradient_bias, limit: 0.05", "metric: ess_ratio, at_least: 0.3, warn: 0.5"
)

CASES = [
    ("limit: 0.10", "limit: 0.08", [("S2.limit", "tighter")]),
    ("limit: 0.10", "limit: 0.2", [("S2.limit", "looser")]),
    ("warn: 1.0e-3", "warn: 2.0e-3", [("S1.warn", "looser")]),
    (", warn: 1.0e-3", "", [("S1.warn", "removed")]),
    ("limit: 2.0e-3, warn", "limit: 4.0e-3, warn", [("S1.limit", "looser")]),
    ("limit: 2.0e-3, warn", "limit: 2.0e-3, ceiling: 0.02, warn", [("S1.ceiling", "other")]),
    ("share: 0.01", "share: 0.005", [("N1.share", "tighter")]),
    ("exceeds: 1.0", "exceeds: 2.0", [("N1.exceeds", "looser")]),
    ("min_prompts: 60", "min_prompts: 80", [("O1.min_prompts", "tighter")]),
    ("max_missing: 0.0", "max_missing: 0.1", [("O1.max_missing", "looser")]),
    (", weights_version]", "]", [("O1.require", "looser")]),
    ("slices: [all, domain]", "slices: [domain, all]", []),
    ("slices: [all, domain]", "slices: [all]", [("S1.slices", "looser")]),
    ("slices: [undecided]", "slices: [undecided, all]", [("S2.slices", "tighter")]),
    ("slices: [undecided]", "slices: [all]", [("S2.slices", "other")]),
    ("metric: flip_rate", "metric: tv", [("S2.metric", "other")]),
    ("metric: flip_rate, limit: 0.10", "metric: tv, limit: 0.01",
     [("S2.limit", "other"), ("S2.metric", "other")]),
    ("  - {id: R1, probe: batch_invariance, limit: 2.0e-3}\n", "", [("R1", "removed")]),
    ("id: R1", "id: R3", [("R1", "removed"), ("R3", "added")]),
    ("dtype: bfloat16", "dtype: float16", [("pair.engine.dtype", "other")]),
    ("program: vllm, ", "", [("pair.engine.program", "removed")]),
    ("reference_margin <= 0.5", "reference_margin <= 0.4", [("slices.undecided", "other")]),
    ("  confidence: {bins: {reference_prob: [0, 0.01, 0.1, 0.5, 0.9, 1]}}\n", "",
     [("slices.confidence", "removed")]),
    ("reward_drift: 0.5", "reward_drift: 0.1", [("budget.reward_drift", "tighter")]),
    ("horizon: 64}", "horizon: 64, flip_budget: 0.1}", [("budget.flip_budget", "added")]),
    ("action: block}", "action: stop}", [("escalation[1]", "other")]),
    ("name: smollm2", "name: smollm3", [("name", "other")]),
    ("budget:", "alpha: 0.01\nbudget:", [("alpha", "tighter")]),
    ("budget:", "alpha: 0.05\nseed: 0\nbudget:", []),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected"), CASES)
def test_each_change_is_classed(old: str, new: str, expected: list[tuple[str, str]]) -> None:
    """One change, one line; a default spelt out or another order of slices is none."""
    assert old in EXAMPLE
    assert changes(EXAMPLE, EXAMPLE.replace(old, new, 1)) == expected


@pytest.mark.parametrize(("old", "new", "expected"), CASES)
def test_the_way_back_is_the_opposite(old: str, new: str, expected: list[tuple[str, str]]) -> None:
    """What is tighter one way is looser the other: no change can be laundered by its direction."""
    opposite = {"tighter": "looser", "looser": "tighter", "added": "removed", "removed": "added"}
    back = changes(EXAMPLE.replace(old, new, 1), EXAMPLE)
    assert sorted(back) == sorted((f, opposite.get(d, d)) for f, d in expected)


def test_a_higher_floor_is_tighter() -> None:
    """For a metric where high is good, limit and warning turn round."""
    assert changes(ESS, ESS.replace("at_least: 0.3", "at_least: 0.4")) == [
        ("S3.at_least", "tighter")
    ]
    assert changes(ESS, ESS.replace("warn: 0.5", "warn: 0.4")) == [("S3.warn", "looser")]


def test_order_of_clauses_and_sections_is_no_change() -> None:
    """Clauses are known by their ids."""
    lines = EXAMPLE.splitlines(keepends=True)
    i = next(n for n, line in enumerate(lines) if "id: S1" in line)
    swapped = [*lines[:i], lines[i + 1], lines[i], *lines[i + 2 :]]
    assert changes(EXAMPLE, "".join(swapped)) == []
