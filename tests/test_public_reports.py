"""Every public report in the table is named by its cause, and its clean twin stays quiet.

One argument: a fixture applies the mechanism that the report found (which weights were served,
what was written down) to a policy whose logits are known, so the symptom follows from it and
nothing in a check can have been fitted to it. The page docs/public-reports.md is generated from
these cases (benchmarks/public_reports.py); the last test keeps it honest.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from public_report_cases import REPORTS, Report, outcome, table, twin_results
from rollout_fixtures import found

from mismatch_audit.rollouts.schema import REQUIRED

PAGE = Path(__file__).resolve().parent.parent / "docs" / "public-reports.md"


@pytest.mark.parametrize("report", REPORTS, ids=lambda r: r.id)
def test_the_named_cause_leads(report: Report) -> None:
    """The finding at the top is the report's cause; where the log cannot show it, the check says
    UNOBSERVED with the column that it needs."""
    results = outcome(report)
    if report.unseen:
        unobserved = {r.code: r for r in results if r.status == "unobserved"}
        assert report.code in unobserved
        if report.drops:
            for column in report.drops:
                assert column in unobserved[report.code].detail
        assert report.code not in found(results, notes=True)
        return
    names = found(results, notes=True)
    assert names, "nothing was found"
    assert names[0] == report.code
    lead = results[0]
    assert lead.evidence
    assert lead.remedy
    assert not lead.consequence_of


@pytest.mark.parametrize("report", REPORTS, ids=lambda r: r.id)
def test_the_clean_twin_is_quiet(report: Report) -> None:
    """The same recipe without the fault gives no error and no warning."""
    assert found(twin_results(report)) == []


@pytest.mark.parametrize(
    "report",
    [r for r in REPORTS if not r.unseen and not set(r.needs) & set(REQUIRED)],
    ids=lambda r: r.id,
)
def test_without_its_column_the_check_is_unobserved(report: Report) -> None:
    """Taking away what a check needs gives UNOBSERVED that names the column, never clean."""
    from mismatch_audit.rollouts.checks import all_checks

    lacking = report.faulty_without_needs()
    checks = [c for c in all_checks() if set(report.needs) & set(c.needs)]
    for batch in lacking.batches():
        for check in checks:
            check.update(batch)
    assert checks
    for check in checks:
        for result in check.finish(lacking.header):
            assert result.status == "unobserved"
            assert any(f"needs {name}" in result.detail for name in report.needs)


def test_reports_that_share_a_code_share_a_check() -> None:
    """A code is given by one check only, and every code in the table is one that a check gives."""
    given: dict[str, set[str]] = {}
    for report in REPORTS:
        for result in outcome(report):
            given.setdefault(result.code, set()).add(result.status)
    assert {r.code for r in REPORTS} <= set(given)


def test_the_page_shows_what_the_cases_give() -> None:
    """docs/public-reports.md is what benchmarks/public_reports.py writes today."""
    assert table() in PAGE.read_text(), "run: python benchmarks/public_reports.py"
