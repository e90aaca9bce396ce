"""The committed error-rate tables belong to the benchmark's present code, keep every level that a
verdict relies on, and show each fault that they are there to show."""

import pytest
from conftest import ROOT, load_script

PAGE = ROOT / "docs" / "error-rates.md"


@pytest.fixture(scope="module")
def bench():
    return load_script(ROOT / "benchmarks" / "error_rates.py")


def committed():
    """{table title: list of rows} of the page, between the benchmark's own marks."""
    found = {}
    text = PAGE.read_text(encoding="utf-8").partition("<!-- error-rates:begin -->")[2]
    for line in text.partition("<!-- error-rates:end -->")[0].splitlines():
        if line.startswith("### "):
            title = line[4:]
            found[title] = []
        elif line.startswith("| ") and not line.startswith("| ---"):
            found[title].append([cell.strip() for cell in line.strip("|").split("|")])
    return {title: rows[1:] for title, rows in found.items()}


def test_committed_levels_are_kept():
    """Every rule that verdicts use holds its level at the worst case, and of those that they do not
    use, the faults named in the page are there to see."""
    rows = committed()["False verdicts with the truth at the limit"]
    used = [r for r in rows if r[6] == "verdicts"]
    unused = {r[0]: r for r in rows if r[6] == "nothing"}
    assert len(used) >= 9
    assert all(r[5] == "yes" for r in used)
    assert all(max(float(r[3]), float(r[4])) <= float(r[2]) + 0.027 for r in used)
    for fault in ("exact binomial on tokens, ICC 0.05", "exact binomial on tokens, ICC 0.2"):
        assert unused[fault][5] == "NO"
    peeked = unused["normal interval, a look after every prompt from the 10th"]
    assert float(peeked[4]) > 0.3


def test_committed_coverage_of_verdict_bounds():
    rows = committed()["Coverage of each one-sided bound, nominal 0.95"]
    for row in rows:
        if row[6] == "verdicts":
            assert "under" not in row[3] + row[4], row
    assert any("under" in row[4] for row in rows if row[1] == "normal")
    assert any("under" in row[4] for row in rows if row[1] == "Clopper-Pearson on tokens")


def test_the_page_was_written_by_this_code(bench):
    """A quick run has the titles and the rows, by name and size, of the page; its numbers, from
    fewer audits, are only sane."""
    rates, fresh = bench.simulate(12)
    assert all(rate.within(12) for rate in rates if rate.is_verdict)
    page = committed()
    assert [title for title, _, _ in fresh] == list(page)
    for title, _, rows in fresh:
        label = 3 if title.startswith("Coverage") else 2
        assert [r[:label] for r in rows] == [r[:label] for r in page[title]]


def test_writing_keeps_the_prose(bench, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{bench.BEGIN}\nold\n{bench.END}\nafter\n", encoding="utf-8")
    bench.write("new\n", page)
    assert page.read_text(encoding="utf-8") == f"before\n{bench.BEGIN}\nnew\n{bench.END}\nafter\n"


def test_a_broken_level_is_reported(bench):
    """Fault: a rule with 9 % false passes at 5 % is not within its level over 600 audits."""
    bad = bench.Rate("x", 100, 0.05, 0.0, 0.09, True)
    good = bench.Rate("x", 100, 0.05, 0.05, 0.02, True)
    assert not bad.within(600)
    assert good.within(600)
