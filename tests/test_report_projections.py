"""Markdown, JUnit, SARIF, GitHub annotations, Prometheus and CSV are read back by a reader of each
format: every measurement is in each, nothing reads as a pass that is none, no unknown number
becomes a number, and hostile text changes no structure."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import jsonschema
import pytest
from markdown_it import MarkdownIt
from report_fixtures import hostile, many_slices, measurements, record, row
from report_golden import FOLDER, GOLDEN
from report_schemas import JUNIT, SARIF, xml_document

from mismatch_audit.reports import FORMATS, render
from mismatch_audit.reports.github import PER_LEVEL, announce, render_github_annotations
from mismatch_audit.reports.record import Record

VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE", "UNOBSERVED", "NOT_COMPARABLE")
SUBJECTS: dict[str, Record] = {
    **{v: record(v) for v in VERDICTS},
    "UNSOUND": record("UNSOUND", measurements=[row()]),
    "many": many_slices(),
    "hostile": hostile(),
}
TEXT_FORMATS = [name for name in FORMATS if name != "html"]


@pytest.mark.parametrize("name", [n for n in GOLDEN if not n.startswith("terminal")])
def test_golden(name: str) -> None:
    assert GOLDEN[name]() == (FOLDER / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("format", TEXT_FORMATS)
def test_a_projection_is_pure_and_no_line_of_it_commands_a_ci_runner(
    name: str, format: str
) -> None:
    """Same record, same text; it can be encoded; only the GitHub projection holds commands."""
    text = render(SUBJECTS[name], format)
    assert text == render(SUBJECTS[name].model_copy(deep=True), format)
    assert text.endswith("\n")
    text.encode()
    assert "##[" not in text
    if format != "github":
        assert not any(line.lstrip().startswith("::") for line in text.splitlines())


# JUnit


@pytest.mark.parametrize("name", SUBJECTS)
def test_junit_obeys_its_schema_and_its_totals_are_true(name: str) -> None:
    root = ET.fromstring(render(SUBJECTS[name], "junit"))
    jsonschema.validate(xml_document(root), JUNIT)
    cases = root.findall(".//testcase")
    for element in (root, root[0]):
        assert int(element.attrib["tests"]) == len(cases)
        assert int(element.attrib["failures"]) == len(root.findall(".//failure"))
        assert int(element.attrib["errors"]) == len(root.findall(".//error"))


@pytest.mark.parametrize("name", SUBJECTS)
def test_junit_is_green_exactly_when_the_audit_passes(name: str) -> None:
    """Missing evidence and a contract that failed its self-test must not show as green."""
    root = ET.fromstring(render(SUBJECTS[name], "junit"))
    red = int(root.attrib["failures"]) + int(root.attrib["errors"])
    assert (red == 0) == (SUBJECTS[name].verdict == "PASS")
    assert int(root.attrib["tests"]) > 0


def test_the_junit_schema_finds_faults() -> None:
    good = ET.fromstring(render(record(), "junit"))
    for spoil in (
        lambda r: r.set("tests", "many"),
        lambda r: r[0].attrib.pop("timestamp"),
        lambda r: r[0][1].attrib.pop("name"),
        lambda r: r.append(ET.Element("testcase", {"name": "a", "classname": "b"})),
        lambda r: ET.SubElement(r[0][1], "skipped"),
    ):
        broken = ET.fromstring(ET.tostring(good))
        spoil(broken)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(xml_document(broken), JUNIT)


# SARIF


@pytest.mark.parametrize("name", SUBJECTS)
def test_sarif_obeys_its_schema_and_every_result_has_its_rule(name: str) -> None:
    document = json.loads(render(SUBJECTS[name], "sarif"))
    jsonschema.validate(document, SARIF)
    (run,) = document["runs"]
    ids = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(ids) == len(set(ids))
    assert all(ids[r["ruleIndex"]] == r["ruleId"] for r in run["results"])
    serious = [r for r in run["results"] if r["level"] in {"error", "warning"}]
    if SUBJECTS[name].verdict != "PASS":
        assert serious
    assert run["invocations"][0]["exitCode"] == SUBJECTS[name].exit_code


def test_sarif_levels_and_fingerprints() -> None:
    """A result keeps its fingerprint when only its numbers change: hosts match results by it."""

    def results(subject: Record) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(render(subject, "sarif"))["runs"][0]["results"]
        return found

    first = results(record(measurements=[row(verdict="FAIL")], findings=[]))
    moved = results(record(measurements=[row(verdict="FAIL", value=0.5)], findings=[]))
    other = results(record(measurements=[row(verdict="FAIL", slice="x")], findings=[]))
    assert [r["level"] for r in first] == ["error"]
    assert first[0]["partialFingerprints"] == moved[0]["partialFingerprints"]
    assert first[0]["partialFingerprints"] != other[0]["partialFingerprints"]
    assert first[0]["message"] != moved[0]["message"]
    passing = [row(), row(clause="S9", warn=True)]
    assert [r["ruleId"] for r in results(record("PASS", measurements=passing))] == ["S9"]


def test_the_sarif_schema_finds_faults() -> None:
    good = json.loads(render(record(), "sarif"))
    for path, value in (
        (("version",), "2.0"),
        (("runs", 0, "results", 0, "level"), "fatal"),
        (("runs", 0, "results", 0, "message"), {}),
        (("runs", 0, "invocations", 0, "startTimeUtc"), "2025-03-01 10:00"),
        (("runs", 0, "tool"), {}),
    ):
        broken = json.loads(json.dumps(good))
        holder: Any = broken
        for step in path[:-1]:
            holder = holder[step]
        holder[path[-1]] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, SARIF)


# GitHub

_COMMAND = re.compile(r"^::(error|warning|notice) title=([^:,]*)::(.*)$")


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_github_line_is_one_command_of_ours(name: str) -> None:
    """Each line parses by the runner's own rule, with a title and nothing else, or is plain."""
    lines = render_github_annotations(SUBJECTS[name]).splitlines()
    commands = [match for line in lines if (match := _COMMAND.match(line))]
    plain = [line for line in lines if not _COMMAND.match(line)]
    assert all(re.fullmatch(r"\d+ more of level (error|warning) in the report", p) for p in plain)
    for level in ("error", "warning"):
        assert sum(match[1] == level for match in commands) <= PER_LEVEL
    levels = {"PASS": "notice", "INCONCLUSIVE": "warning", "UNOBSERVED": "warning"}
    assert commands[0][1] == levels.get(SUBJECTS[name].verdict, "error")


def test_a_newline_in_model_output_starts_no_command() -> None:
    """The fault: ``::add-mask::`` and its like from a slice named by a model."""
    name = "x\n::stop-commands::now\r\n::error file=a,line=1::b%0A"
    text = render_github_annotations(record(measurements=[row(slice=name, verdict="FAIL")]))
    starts = [line.split("::")[1].split()[0] for line in text.splitlines()]
    assert set(starts) == {"error"}
    assert "%250A" in text


def test_announce_speaks_inside_actions_only_and_appends_to_the_summary(tmp_path: Path) -> None:
    target = tmp_path / "summary.md"
    target.write_text("before\n", encoding="utf-8")
    inside = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(target)}
    assert announce(record(), {"GITHUB_STEP_SUMMARY": str(target)}) == ""
    assert target.read_text(encoding="utf-8") == "before\n"
    assert announce(record(), inside) == render_github_annotations(record())
    assert target.read_text(encoding="utf-8") == "before\n" + render(record(), "markdown")


# Markdown


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}


@pytest.mark.parametrize("name", SUBJECTS)
def test_markdown_renders_to_the_same_tags_whatever_the_texts_are(name: str) -> None:
    reader = _Tags()
    renderer = MarkdownIt("gfm-like", {"html": True, "linkify": False})
    reader.feed(renderer.render(render(SUBJECTS[name], "markdown")))
    reader.close()
    allowed = {"h3", "h4", "p", "ol", "ul", "li", "strong", "table", "thead", "tbody", "tr", "th",
               "td", "details", "summary"}  # fmt: skip
    assert set(reader.tags) <= allowed
    assert reader.attributes <= {"style"}
    cells, rows = reader.tags.count("td"), reader.tags.count("tr")
    assert name == "NOT_COMPARABLE" or cells > rows


def test_markdown_fits_a_comment_and_shows_every_row_that_did_not_pass() -> None:
    """65,536 characters are what a comment holds. The fault: a failing slice cut off."""
    text = render(many_slices(3000), "markdown")
    assert len(text) < 65_536
    assert "topic=2999" in text
    assert "topic=2998" in text


# Prometheus

_SAMPLE = re.compile(r'^([a-z_]+)\{((?:[a-z_]+="(?:[^"\\]|\\.)*",?)*)\} (\S+)$')
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


def parse_prometheus(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Families of the text format: name -> labels -> value. Refuses what a server would refuse:
    a sample without its TYPE, a split family, a repeated series."""
    families: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    current = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            continue
        if line.startswith("# TYPE "):
            current, kind = line.removeprefix("# TYPE ").split(" ")
            assert kind == "gauge"
            assert current not in families
            families[current] = {}
            continue
        match = _SAMPLE.match(line)
        assert match, line
        assert match[1] == current
        labels = tuple(
            (k, re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), v))
            for k, v in _LABEL.findall(match[2])
        )
        assert labels not in families[current], line
        families[current][labels] = float(match[3])
    return families


@pytest.mark.parametrize("name", SUBJECTS)
def test_prometheus_text_is_read_back(name: str) -> None:
    """One verdict is 1, the exit code is the record's, every measurement has one verdict."""
    subject = SUBJECTS[name]
    families = parse_prometheus(render(subject, "prometheus"))
    verdicts = {dict(k)["verdict"]: v for k, v in families["mismatch_audit_verdict"].items()}
    assert {v for v, on in verdicts.items() if on == 1.0} == {subject.verdict}
    assert list(families["mismatch_audit_exit_code"].values()) == [subject.exit_code]
    assert sum(families["mismatch_audit_clause_verdict"].values()) == len(subject.measurements)
    assert all(math.isfinite(v) for f in families.values() for v in f.values())


def test_an_unknown_number_gives_no_sample() -> None:
    """The fault: 0, which every alert would take for a pass."""
    families = parse_prometheus(render(record(), "prometheus"))
    for key, field in (("value", "value"), ("upper", "upper"), ("noise_floor", "noise_floor")):
        known = sum(m[field] is not None for m in measurements())
        assert len(families[f"mismatch_audit_clause_{key}"]) == known
    assert len(measurements()) > known


def test_labels_escape_what_the_format_asks() -> None:
    name = 'a\\b"c'
    families = parse_prometheus(
        render(record(measurements=[row(slice=name, verdict="FAIL")] * 2), "prometheus")
    )
    (first, second) = families["mismatch_audit_clause_value"]
    assert dict(first)["slice"] == dict(second)["slice"] == name
    assert dict(second)["row"] == "2"


# CSV


@pytest.mark.parametrize("name", SUBJECTS)
def test_csv_has_a_row_a_measurement_and_numbers_in_full(name: str) -> None:
    rows = list(csv.DictReader(io.StringIO(render(SUBJECTS[name], "csv"))))
    assert len(rows) == len(SUBJECTS[name].measurements)
    for got, wanted in zip(rows, SUBJECTS[name].measurements, strict=True):
        assert None not in got
        assert got["verdict"] == wanted.verdict
        for field in ("value", "lower", "upper", "limit", "noise_floor", "p_fail"):
            number = getattr(wanted, field)
            assert (float(got[field]) if got[field] else None) == number
    texts = [v for r in rows for k, v in r.items() if k in {"clause", "slice", "detail", "unit"}]
    assert not any(v.lstrip()[:1] in set("=+-@") for v in texts if v)
