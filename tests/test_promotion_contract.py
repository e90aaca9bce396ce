"""The contract's promotion section: read strictly, and older contracts keep their digest."""

from __future__ import annotations

import pytest
from contract_examples import EXAMPLE

from kernel_contracts.contract_diff import diff_contracts
from kernel_contracts.errors import ContractError
from kernel_contracts.loading import check_text, contract_digest, dump_contract, parse_contract

BASE = """\
schema: kernel-contracts/v1
name: live
statistical:
  - {id: S1, metric: k3, limit: 1.0e-3}
  - {id: S2, metric: flip_rate, limit: 0.1}
"""


def test_a_contract_without_the_section_keeps_its_digest() -> None:
    """Blessings and reports name contracts by digest: it is that of before the section existed."""
    contract = parse_contract(EXAMPLE)
    assert "promotion" not in contract.document()
    assert contract_digest(contract) == (
        "84c0470ed11480a377ee0f1609692840205815bae06a653f93f77a6dbd1822b7"
    )


def test_the_section_round_trips_and_changes_the_digest() -> None:
    """Rules are part of what is promised."""
    plain = parse_contract(BASE)
    ruled = parse_contract(BASE + "promotion: {shadow: {min_prompts: 50}, weights: any}\n")
    assert ruled.promotion is not None
    assert ruled.promotion.rule("shadow").min_prompts == 50
    assert ruled.promotion.rule("canary").min_prompts == 300
    assert contract_digest(plain) != contract_digest(ruled)
    assert parse_contract(dump_contract(ruled)) == ruled
    with pytest.raises(KeyError):
        ruled.promotion.rule("offline")


CASES = [
    ("promotion: {shadow: {clauses: [S9]}}", "no clause 'S9'"),
    ("promotion: {shadow: {clauses: [S2]}}", "flip_rate, which sampled tokens do not show"),
    ("promotion: {shadow: {min_prompts: 0}}", "min_prompts"),
    ("promotion: {shadow: {max_unusable: 1.0}}", "max_unusable"),
    ("promotion: {shadows: {}}", "did you mean shadow?"),
    ("promotion: {shadow: {clauses: []}}", "clauses"),
    ("promotion: {weights: some}", "weights"),
]


@pytest.mark.parametrize(("line", "message"), CASES)
def test_each_mistake_is_told(line: str, message: str) -> None:
    """A rule that cannot be met, or is misspelt, would promote on nothing."""
    contract, problems = check_text(BASE + line + "\n", "c.yaml")
    assert contract is None
    assert message in "\n".join(map(str, problems))


def test_a_contract_that_traffic_cannot_show_anything_of_has_no_promotion() -> None:
    """Else a stage would be passed with no clause judged."""
    text = BASE.replace("  - {id: S1, metric: k3, limit: 1.0e-3}\n", "")
    with pytest.raises(ContractError, match="no clause is on a metric that sampled tokens"):
        parse_contract(text + "promotion: {}\n")


def test_diff_tells_the_direction() -> None:
    """More prompts are tighter, more unusable requests looser."""
    before = parse_contract(BASE + "promotion: {shadow: {min_prompts: 50}}\n")
    after = parse_contract(
        BASE + "promotion: {shadow: {min_prompts: 60, max_unusable: 0.2}, weights: any}\n"
    )
    found = {c.field: c.direction for c in diff_contracts(before, after)}
    assert found == {
        "promotion.shadow.min_prompts": "tighter",
        "promotion.shadow.max_unusable": "looser",
        "promotion.weights": "other",
    }
    assert [c.direction for c in diff_contracts(parse_contract(BASE), before)] == ["added"]
