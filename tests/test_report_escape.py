"""Model output, prompt ids and names from files reach every report. Each place has one function
that makes text harmless there; each is checked by a reader of that format, and the same check
finds the raw text harmful, so that it could fail."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from report_fixtures import HOSTILE

from mismatch_audit.reports.escape import (
    csv_cell,
    harmless_line,
    log_lines,
    markdown,
    markdown_line,
    shortened,
    visible,
    workflow_data,
    workflow_property,
)

TEXTS = st.text(st.characters(codec=None), max_size=60) | st.sampled_from(HOSTILE)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def _rendered(source: str) -> _Tags:
    """GitHub's rules: raw HTML allowed, tables, strikethrough and bare links on."""
    renderer = MarkdownIt("gfm-like", {"html": True, "linkify": False})
    reader = _Tags()
    reader.feed(renderer.render(source))
    reader.close()
    return reader


@given(TEXTS)
def test_visible_text_is_one_line_without_control_or_hidden_characters(text: str) -> None:
    shown = visible(text)
    assert len(shown.splitlines()) <= 1
    hidden = {unicodedata.category(c) for c in shown} & {"Cc", "Cs", "Zl", "Zp"}
    assert not hidden
    assert not set(shown) & set("\u202a\u202e\u2066\u2069\u200f\u200b\ufeff\x1b\x9b")
    assert visible(shown) == shown


def test_visible_text_keeps_what_people_read() -> None:
    for text in ("naïve café", "東京 首都", "नमस्ते", "👩‍👩‍👧", "a  b", "{'x': 1}"):
        assert visible(text) == text
    assert visible("a\n\tb\x1b[0m\u202e") == "a⏎⇥b␛[0m⟨U+202E⟩"


@given(TEXTS)
def test_markdown_renders_to_the_text_itself_and_to_no_markup(text: str) -> None:
    """In a paragraph, a list and a table's cell: no tag but those, and the text comes back."""
    escaped = markdown(text)
    assert "\n" not in escaped
    plain = visible(text)
    assert set(_rendered(f"x {escaped} y").found) == {"p"}
    assert set(_rendered(f"1. {markdown_line(text)} z").found) == {"ol", "li"}
    table = _rendered(f"| a |\n| --- |\n| x {escaped} y |\n")
    assert table.found.count("td") == 1
    assert set(table.found) == {"table", "thead", "tr", "th", "tbody", "td"}
    words = "".join(table.text.replace("\u200b", "").split())
    assert words == "".join(f"ax{plain}y".split())


@pytest.mark.parametrize(
    "text", ["<b>x</b>", "**x**", "`x`", "[x](http://y)", "~~x~~", "a | b", "![x](http://y)"]
)
def test_the_check_of_markdown_finds_raw_text_harmful(text: str) -> None:
    table = _rendered(f"| a | b |\n| --- | --- |\n| x {text} y |\n")
    extra = set(table.found) - {"table", "thead", "tr", "th", "tbody", "td"}
    assert extra or "| b" not in table.text


def test_markdown_makes_no_mention_reference_or_link() -> None:
    """Hosts look for these after rendering, so an escape of the source is no help."""
    shown = _rendered(markdown("@team #12 https://evil.example www.evil.example")).text
    assert not re.search(r"@\w|#\d|://\w|www\.\w", shown)


@given(TEXTS)
def test_workflow_text_decodes_to_itself_and_holds_no_line_of_its_own(text: str) -> None:
    """The runner splits output into lines, then decodes: a line must never begin inside."""
    data, prop = workflow_data(text), workflow_property(text)
    assert len(data.splitlines()) <= 1
    assert len(prop.splitlines()) <= 1
    assert not set(prop) & set(":,")
    decoded = data.replace("%0D", "\r").replace("%0A", "\n").replace("%25", "%")
    assert "".join(map(visible, decoded)) == visible(text)


def test_workflow_text_encodes_the_percent_sign_first() -> None:
    assert workflow_data("50%0A\n") == "50%250A%0A"
    assert workflow_property("a:b,c%\r") == "a%3Ab%2Cc%25%0D"


def test_a_log_line_is_never_a_command() -> None:
    for line in ("::error::x", "  ::stop-commands::t", "x ##[error]y", "##[add-mask]a"):
        shown = harmless_line(line)
        assert not shown.lstrip().startswith("::")
        assert "##[" not in shown
        assert len(shown) == len(line)
    assert harmless_line("a::b [x] # y") == "a::b [x] # y"


@given(TEXTS)
def test_a_csv_cell_is_read_back_as_one_text_that_is_no_formula(text: str) -> None:
    stream = io.StringIO()
    csv.writer(stream).writerow(["a", csv_cell(text), "b"])
    (cells,) = csv.reader(io.StringIO(stream.getvalue()))
    assert len(cells) == 3
    assert cells[1].lstrip()[:1] not in {"=", "+", "-", "@", "＝", "＋", "－", "＠", "\t", "\r"}
    assert cells[1].removeprefix("'") == visible(text).removeprefix("'")


@given(st.lists(TEXTS, max_size=4))
def test_log_lines_are_as_many_as_their_parts_and_xml_holds_them(parts: list[str]) -> None:
    """XML 1.0 has no place for most control characters: a parser refuses them."""
    text = log_lines(parts)
    assert len(text.split("\n")) == max(1, len(parts))
    assert not any(line.lstrip().startswith("::") for line in text.split("\n"))
    element = ET.Element("a", {"b": visible("".join(parts))})
    element.text = text
    again = ET.fromstring(ET.tostring(element, encoding="utf-8"))
    assert (again.text or "") == text
    assert again.attrib["b"] == visible("".join(parts))


def test_shortened_text_keeps_the_end_that_matters() -> None:
    assert shortened("abcdef", 4) == "abc…"
    assert shortened("abcdef", 4, tail=True) == "…def"
    assert shortened("abcd", 4) == "abcd"
