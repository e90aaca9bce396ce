"""The HTML report shows the record, the whole record, and runs nothing.

Argument: every element on the page is one that the template wrote, whatever text the record holds,
so no text can act; every control character is visible; nothing refers to another place; and what
the charts place on an axis is where the numbers of the record put it.
"""

from __future__ import annotations

import math
import re
import unicodedata
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_fixtures import HOSTILE, hostile, many_slices, record, row, views

from mismatch_audit.reports import charts
from mismatch_audit.reports.escape import visible
from mismatch_audit.reports.html import render_html
from mismatch_audit.reports.record import Record
from mismatch_audit.reports.rows import FlipBin, MeasurementRow, PositionBin
from mismatch_audit.reports.svg import Scale, scale_of, tag, tick_text

VOID = {"meta", "br", "img", "link", "input", "hr"}
VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE", "UNOBSERVED", "NOT_COMPARABLE")


class Page(HTMLParser):
    """Elements, attributes and text of a page; raises where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        if self.open:
            raise ValueError(f"never closed: {self.open}")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            raise ValueError(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text.append(data)

    @property
    def words(self) -> str:
        return "\n".join(self.text)

    def names(self) -> set[str]:
        return {name for name, _ in self.elements}


def dangers(page: Page) -> list[str]:
    """Whatever could run, load or leave."""
    found = sorted(page.names() & {"script", "img", "iframe", "object", "link", "base"})
    for name, attributes in page.elements:
        for key, value in attributes.items():
            if key.startswith("on") or key in {"src", "style", "srcset", "action", "xlink:href"}:
                found.append(f"{name} {key}")
            if key == "href" and not (value or "").startswith("#"):
                found.append(f"{name} href={value}")
    return found


def every_record() -> list[Record]:
    return [*(record(v) for v in VERDICTS), many_slices(), hostile()]


@pytest.mark.parametrize("one", every_record(), ids=lambda r: r.verdict)
def test_the_page_is_well_formed_and_needs_no_network(one: Record) -> None:
    """Tags match; nothing is loaded or run, and a policy in the page forbids it besides."""
    text = render_html(one)
    page = Page(text)
    assert dangers(page) == []
    assert not re.search(r"@import|url\(", text[: text.index("</style>")])
    policy = [a["content"] for n, a in page.elements if a.get("http-equiv")]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
    assert text.startswith("<!doctype html>")
    assert text == render_html(one)


def test_hostile_text_adds_no_element_and_stays_readable() -> None:
    """The page of a hostile record has the elements of a benign one; its texts are all there."""
    page = Page(render_html(hostile()))
    assert page.names() <= Page(render_html(record())).names()
    for text in HOSTILE:
        assert visible(text) in page.words


def test_no_control_character_reaches_the_page() -> None:
    """Nor bidirectional overrides or lone surrogates: those are shown by number."""
    worst = [{**views()["worst_tokens"][0], "token": "\ud800 \u202e \x1b[0m \x00"}]
    for text in (render_html(hostile()), render_html(record(views=views(worst)))):
        bad = {c for c in text if unicodedata.category(c) in {"Cc", "Cf", "Cs"} and c != "\n"}
        assert bad == set()
        text.encode("utf-8")


def test_the_check_for_dangers_sees_them() -> None:
    """Each kind of hostile text, unescaped, is caught by the checks above."""
    page = render_html(hostile())
    assert dangers(Page("<p><script></script></p>")) == ["script"]
    assert dangers(Page('<p onclick="x"></p>')) == ["p onclick"]
    assert dangers(Page('<a href="javascript:alert(1)"></a>'))
    with pytest.raises(ValueError, match="closes nothing"):
        Page(page.replace("&lt;/td&gt;&lt;/table&gt;", "</td></table>", 1))


def test_every_chart_is_named_described_and_valid_xml() -> None:
    """A reader who does not see a chart is told its title and its numbers."""
    text = render_html(record())
    found = re.findall(r"<svg.*?</svg>", text, flags=re.S)
    assert len(found) > len(record().measurements)
    for svg in found:
        root = ElementTree.fromstring(svg)
        assert root.get("role") == "img"
        assert [child.tag for child in root[:2]] == ["title", "desc"]
        assert root[0].text
        assert root[1].text
    assert "0 to 0.05: 41.0 % of 161 tokens" in text


def test_structure_for_assistive_technology_and_phones() -> None:
    """Language, viewport, one first heading, scoped headers, anchors that exist, scroll boxes."""
    for one in every_record():
        page = Page(render_html(one))
        attributes = [a for _, a in page.elements]
        assert ("html", {"lang": "en"}) in page.elements
        assert any(a.get("name") == "viewport" for a in attributes)
        assert sum(name == "h1" for name, _ in page.elements) == 1
        assert all("scope" in a for name, a in page.elements if name == "th")
        ids = [a["id"] for a in attributes if "id" in a]
        links = [a["href"] for name, a in page.elements if name == "a"]
        assert len(ids) == len(set(ids))
        assert {link[1:] for link in links if link} <= set(ids)
        boxes = [a for a in attributes if (a.get("class") or "").startswith("scroll")]
        assert all(a.get("tabindex") == "0" and a.get("aria-label") for a in boxes)


def test_the_page_says_what_the_record_says() -> None:
    """Each row's verdict in words, the exit code, every worst token, finding and timing."""
    one = record()
    words = Page(render_html(one)).words
    for verdict in ("FAIL", "PASS", "INCONCLUSIVE", "UNOBSERVED"):
        expected = sum(m.verdict == verdict for m in one.measurements) + (verdict == "FAIL")
        assert len(re.findall(rf"^ {verdict}$", words, flags=re.M)) == expected
    assert "exit code 1" in words
    assert "VACUOUS" in words
    assert "bound is infinite" in words
    for finding in one.findings:
        assert finding.remedy in words
    for token in one.views.worst_tokens:
        assert token.prompt_id in words
    assert "1 min 36 s" in words


def test_not_comparable_puts_the_cause_first_and_reports_no_drift() -> None:
    """Findings come before the programs, once; there is no verdict table and no chart."""
    text = render_html(record("NOT_COMPARABLE"))
    assert text.count('id="findings"') == 1
    assert text.index('id="findings"') < text.index('id="programs"')
    assert "<svg" not in text
    assert 'id="verdicts"' not in text
    shown = render_html(record())
    assert shown.index('id="findings"') > shown.index('id="verdicts"')


def test_many_slices_are_folded_and_still_all_there() -> None:
    """The failing slice is in the first table; every slice is in the full one."""
    text = render_html(many_slices(60))
    first, full = text.split("All 61 rows")
    assert "topic=059" in first
    assert "topic=010" not in first
    assert all(f">topic={i:03d}</th>" in full for i in range(60))


def test_missing_numbers_are_said() -> None:
    """NaN is null in the record; the page shows a dash, the reason, and draws no dot."""
    bad = row(value=math.nan, lower=None, upper=None, verdict="UNOBSERVED")
    text = render_html(record("UNOBSERVED", measurements=[bad]))
    assert "value is not a number" in text
    assert "m-UNOBSERVED" not in text[text.index("</style>") :]
    assert "m-PASS" in render_html(record("PASS", measurements=[row()]))


def test_gradient_rows_are_a_table_of_whatever_they_name() -> None:
    """Columns are the union; a cosine just under 1 does not read as 1."""
    rows = [{"slice": "all", "cosine": 0.9996}, {"slice": "math", "bias": "nan"}]
    words = Page(render_html(record(gradient=rows))).words
    assert all(text in words for text in ("cosine", "bias", "0.9996", "nan"))
    assert "Policy gradient" not in Page(render_html(record())).words


def measurement(**changes: object) -> MeasurementRow:
    return MeasurementRow(**row(**changes))


def places(svg: str) -> dict[str, float]:
    """Percentages of the limit, the dot and the interval's end."""
    at = {}
    for name, kind, key in (("limit", "limit", "x1"), ("dot", "dot", "cx"),
                            ("end", "interval", "x2"), ("start", "interval", "x1")):  # fmt: skip
        for element in ElementTree.fromstring(svg):
            if (element.get("class") or "").split(" ")[0] == kind:
                at[name] = float(element.get(key, "").rstrip("%"))
    return at


@given(
    limit=st.floats(1e-6, 1e3),
    ratios=st.lists(st.floats(1e-9, 1e6), min_size=3, max_size=3).map(sorted),
)
def test_a_strip_lies_on_the_side_of_the_limit_that_its_numbers_do(
    limit: float, ratios: list[float]
) -> None:
    """Whatever the axis: at most the limit is never drawn beyond it, nor the other way."""
    lower, value, upper = (limit * r for r in ratios)
    one = measurement(limit=limit, lower=lower, value=value, upper=upper)
    at = places(charts.strip(one, charts.limit_scale([one])))
    assert 0 <= at["start"] <= at["dot"] <= at["end"] <= 100
    for place, number in (("start", lower), ("dot", value), ("end", upper)):
        if number <= limit:
            assert at[place] <= at["limit"]
        else:
            assert at[place] >= at["limit"]


def test_ratios_are_measured_from_one() -> None:
    """A ratio of 1.04 under a limit of 1.05 uses four fifths of its room, not 99 %; an effective
    sample share of 0.98 over a limit of 0.96 uses half."""
    scale = Scale(0.01, 10.0, log=True)
    ratio = measurement(unit="x", value=1.04, lower=1.035, upper=1.046, limit=1.05)
    share = measurement(metric="ess_ratio", value=0.98, lower=0.97, upper=0.99, limit=0.96)
    for one, expected in ((ratio, 0.8), (share, 0.5)):
        at = places(charts.strip(one, scale))
        assert at["dot"] == pytest.approx(100 * scale.at(expected), abs=0.02)
        assert at["start"] < at["dot"] < at["end"] < at["limit"]


def test_no_strip_where_a_multiple_of_the_limit_means_nothing() -> None:
    """A limit of zero, or nothing measured."""
    scale = Scale(0.1, 10.0, log=True)
    assert charts.strip(measurement(limit=0.0), scale) == ""
    assert charts.strip(measurement(value=None), scale) == ""
    assert charts.strip(measurement(), scale) != ""


@given(st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=30))
def test_a_scale_holds_its_values_in_order_with_ticks_inside(values: list[float]) -> None:
    """Every value fits below the top; more is never lower; there are ticks, all inside."""
    scale = scale_of(values)
    ordered = [scale.at(v) for v in sorted(values)]
    assert ordered == sorted(ordered)
    assert 0 <= ordered[0] <= ordered[-1] < 1
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 12
    assert all(scale.low <= t * 1.000001 and t <= scale.high * 1.000001 for t in ticks)
    assert scale.log == (max(values) > 50 * min(values))


def test_ticks_say_no_more_than_they_mean() -> None:
    expected = {0.0: "0", 1e-3: "1e-3", 2e-3: "2e-3", 0.5: "0.5", 40.0: "40"}
    assert {value: tick_text(value) for value in expected} == expected


def test_binned_charts_keep_order_and_open_ends() -> None:
    """A higher rate is drawn higher; the last bin has no end; a bin without a rate is left out."""
    bins = [
        FlipBin(lo=0.0, hi=0.1, n=100, rate=0.4, lower=0.3, upper=0.5),
        FlipBin(lo=0.1, hi=1.0, n=100, rate=0.1, lower=0.05, upper=0.2),
        FlipBin(lo=1.0, hi=None, n=0, rate=None, lower=None, upper=None),
        FlipBin(lo=1.0, hi=None, n=50, rate=0.0, lower=0.0, upper=0.06),
    ]
    root = ElementTree.fromstring(charts.flip_rate(bins))
    heights = [float(c.get("cy", "")) for c in root.iter("circle")]
    assert len(heights) == 3
    assert heights == sorted(heights)
    edges = [t.text for t in root.iter("text") if t.get("class") == "axis mid"]
    assert edges[:4] == ["0", "0.1", "1", "∞"]
    assert charts.flip_rate([]) == ""


def test_positions_are_joined_in_order() -> None:
    """Two lines of n - 1 segments through the bins' middles."""
    bins = [
        PositionBin(lo=10.0 * i, hi=10.0 * i + 10, n=5, mean=1e-3 * (i + 1), p95=4e-3)
        for i in range(4)
    ]
    root = ElementTree.fromstring(charts.kl_by_position(bins))
    mean = [e for e in root.iter("line") if e.get("class") == "track ink"]
    assert [e.get("x1") for e in mean] == ["12.5%", "37.5%", "62.5%"]
    assert all(float(e.get("y2", "")) < float(e.get("y1", "")) for e in mean)


def test_svg_text_and_attributes_are_escaped() -> None:
    made = tag("text", '<b>"&\x1b', class_='a"><script>')
    root = ElementTree.fromstring(made)
    assert root.text == '<b>"&␛'
    assert root.get("class") == 'a"><script>'


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_every_text_colour_is_readable_in_both_schemes() -> None:
    """4.5 to 1 on every background that text stands on; ``--faint`` draws lines only and would
    not pass for text."""
    css = render_html(record())
    schemes = [dict(re.findall(r"--(\w+): (#\w{6})", block))
               for block in re.findall(r":root \{(.*?)\}", css, flags=re.S)[:2]]  # fmt: skip
    assert len(schemes) == 2
    for scheme in schemes:
        for ink in ("ink", "muted", "pass", "fail", "open", "none"):
            for ground in ("page", "card", "wash"):
                assert contrast(scheme[ink], scheme[ground]) >= 4.5, (ink, ground)
        assert contrast(scheme["faint"], scheme["wash"]) < 4.5
    assert not re.search(r"[ ;{]color: var\(--faint\)", css)


def test_a_full_page_stays_small() -> None:
    """2,000 points and 500 rows: under 1 MB, to open on a phone."""
    one = many_slices(500)
    points = [-0.01 * i for i in range(2000)]
    full = record(
        measurements=[m.model_dump() for m in one.measurements],
        views={**views(), "logprob_scatter": {"reference": points, "engine": points}},
    )
    assert len(render_html(full).encode()) < 1_000_000
