"""A known violation is let through by name, until its day, and never in silence."""

from __future__ import annotations

from datetime import date

import numpy as np
import pandas as pd
import pytest
from report_fixtures import record

from kernel_contracts.contract import Contract
from kernel_contracts.errors import ContractError
from kernel_contracts.escalation import actions_of
from kernel_contracts.loading import contract_digest, parse_contract
from kernel_contracts.measurement import Measurement, overall
from kernel_contracts.slices import resolve
from kernel_contracts.verdict import Evidence, judge
from mismatch_audit.reports import render

BASE = """
schema: kernel-contracts/v1
name: t
slices: {domain: {by: domain}}
statistical:
  - {id: S1, metric: flip_rate, limit: 0.2, ceiling: 1.0, slices: [domain]}
  - {id: S2, metric: flip_rate, limit: 0.9, ceiling: 1.0}
observability: [{id: O1, min_prompts: 5, require: [flip]}]
escalation: [{when: {verdict: FAIL}, action: block}]
"""
ENTRY = """
acknowledge:
  - {clause: S1, slice: domain=code, who: Ada, why: new kernel ships soon, until: 2026-12-31}
"""


def evidence(worse: str = "code") -> Evidence:
    """Two domains of 60 prompts; every second greedy token flips in the worse one."""
    ids = [f"{d}-{i}" for d in ("code", "chat") for i in range(60)]
    frame = pd.DataFrame(
        {
            "prompt_id": np.repeat(ids, 8),
            "path": "decode",
            "flip": np.tile([True, False] * 4, len(ids)),
        }
    )
    frame.loc[~frame["prompt_id"].str.startswith(worse), "flip"] = False
    prompts = pd.DataFrame({"prompt_id": ids, "domain": [i.split("-")[0] for i in ids]})
    return Evidence(tokens=frame, prompts=prompts, max_rows=8)


def judged(text: str, day: date, worse: str = "code") -> tuple[Contract, list[Measurement]]:
    contract = parse_contract(text)
    return contract, judge(contract, evidence(worse), today=day)


def rows(found: list[Measurement]) -> dict[tuple[str, str], Measurement]:
    return {(m.clause, m.slice): m for m in found}


def test_an_entry_turns_its_fail_into_a_visible_pass_until_its_last_day() -> None:
    """On the last day it holds; the day after, the very same evidence fails and says why."""
    _, before = judged(BASE, date(2026, 12, 1))
    assert overall(before) == "FAIL"
    contract, held = judged(BASE + ENTRY, date(2026, 12, 31))
    row = rows(held)["S1", "domain=code"]
    assert row.verdict == "ACKNOWLEDGED"
    assert row.detail.startswith("acknowledged by Ada until 2026-12-31: new kernel ships soon")
    assert overall(held) == "PASS"
    slices = resolve(contract, evidence().tokens, evidence().prompts)
    assert actions_of(contract, held, slices) == []
    _, after = judged(BASE + ENTRY, date(2027, 1, 1))
    row = rows(after)["S1", "domain=code"]
    assert row.verdict == "FAIL"
    assert "acknowledgement by Ada expired on 2026-12-31" in row.detail
    assert overall(after) == "FAIL"


def test_an_entry_covers_its_own_clause_and_slice_only() -> None:
    """The same violation in another domain is not what Ada answers for."""
    _, found = judged(BASE + ENTRY, date(2026, 12, 1), worse="chat")
    assert rows(found)["S1", "domain=chat"].verdict == "FAIL"
    assert overall(found) == "FAIL"


def test_nobody_can_answer_for_what_was_not_seen() -> None:
    """Missing evidence stays UNOBSERVED whatever is acknowledged."""
    contract = parse_contract(BASE + ENTRY)
    blind = evidence()
    blind.tokens["flip"] = None
    found = judge(contract, blind, today=date(2026, 12, 1))
    assert {m.verdict for m in found if m.clause == "S1"} == {"UNOBSERVED"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("clause: S9", "no clause 'S9'"),
        ("slice: domian=code", "no slice 'domian=code'"),
        ("until: soon", "a day is written 2027-01-31"),
        ("who: ' '", "who"),
        ("whom: Ada", "whom"),
    ],
)
def test_a_wrong_entry_is_an_error_that_names_its_field(change: str, message: str) -> None:
    key = change.split(":")[0]
    fields = {"clause": "S1", "slice": "all", "who": "Ada", "why": "x", "until": "2026-12-31"}
    fields.pop(key, None)
    text = ", ".join([*(f"{k}: {v}" for k, v in fields.items()), change])
    with pytest.raises(ContractError, match=message):
        parse_contract(f"{BASE}\nacknowledge: [{{{text}}}]")


def test_the_entry_is_part_of_the_digest_and_absent_where_there_is_none() -> None:
    """A blessing of the strict contract does not cover the one with an exception."""
    plain, known = parse_contract(BASE), parse_contract(BASE + ENTRY)
    assert "acknowledge" not in plain.document()
    assert contract_digest(plain) != contract_digest(known)


def test_every_report_shows_it() -> None:
    """A pass with a known violation reads as one, in each format."""
    base = record("PASS")
    first = base.measurements[0].model_copy(
        update={"verdict": "ACKNOWLEDGED", "detail": "acknowledged by Ada until 2026-12-31: x"}
    )
    shown = base.model_copy(update={"measurements": [first, *base.measurements[1:]]})
    for name in ("html", "markdown", "junit", "sarif", "github", "csv", "json", "prometheus"):
        text = render(shown, name)
        assert "ACKNOWLEDGED" in text, name
        if name not in ("prometheus",):
            assert "Ada" in text, name
