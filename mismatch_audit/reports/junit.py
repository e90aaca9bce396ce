"""The record as JUnit XML: one test case per clause and slice.

FAIL is a failure, ACKNOWLEDGED a skip. INCONCLUSIVE, UNOBSERVED and UNSOUND are errors: the check
could not be made, and a reader of JUnit must not take that for a pass, nor for a skip.
"""

from __future__ import annotations

from datetime import UTC, datetime
from xml.etree import ElementTree as ET

from mismatch_audit.reports.advice import against_limit, summary
from mismatch_audit.reports.escape import COMMAND_MARK, log_lines, visible
from mismatch_audit.reports.notation import clause_title, interval, limit, number, quantity
from mismatch_audit.reports.record import Record
from mismatch_audit.reports.rows import MeasurementRow


def render_junit(record: Record) -> str:
    """XML text. Control characters, which XML cannot hold, are shown as pictures."""
    cases = [_case(record, row) for row in record.measurements]
    if record.verdict != "PASS" and all(
        r.verdict in ("PASS", "ACKNOWLEDGED") or not r.decides for r in record.measurements
    ):
        cases.append(_whole(record))
    failures = sum(case.find("failure") is not None for case in cases)
    errors = sum(case.find("error") is not None for case in cases)
    totals = {
        "tests": str(len(cases)),
        "failures": str(failures),
        "errors": str(errors),
        "skipped": str(sum(case.find("skipped") is not None for case in cases)),
        "time": f"{_seconds(record):.3f}",
    }
    root = ET.Element("testsuites", {"name": "mismatch-audit", **totals})
    started = datetime.fromisoformat(record.started).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")
    suite = ET.SubElement(
        root,
        "testsuite",
        {"name": visible(record.contract.name), **totals, "timestamp": started,
         "hostname": "localhost"},
    )  # fmt: skip
    properties = ET.SubElement(suite, "properties")
    for name, value in _properties(record).items():
        ET.SubElement(properties, "property", {"name": name, "value": visible(value)})
    suite.extend(cases)
    ET.indent(root, " ")
    body = ET.tostring(root, encoding="unicode").replace(COMMAND_MARK, "#&#35;[")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _seconds(record: Record) -> float:
    started, finished = (datetime.fromisoformat(t) for t in (record.started, record.finished))
    return max(0.0, (finished - started).total_seconds())


def _properties(record: Record) -> dict[str, str]:
    return {
        "verdict": record.verdict,
        "exit_code": str(record.exit_code),
        "contract_digest": record.contract.digest,
        "prompts": str(record.counts.prompts),
        "tokens": str(record.counts.tokens),
        "reference": _program(record, "reference"),
        "engine": _program(record, "engine"),
    }


def _program(record: Record, side: str) -> str:
    facts = getattr(record.identities, side)
    known = [facts.get(name) for name in ("program", "version", "dtype")]
    return " ".join(str(value) for value in known if value is not None)


_TAGS = {"FAIL": "failure", "ACKNOWLEDGED": "skipped"}


def _case(record: Record, row: MeasurementRow) -> ET.Element:
    case = ET.Element(
        "testcase",
        {
            "classname": visible(f"{record.contract.name}.{row.section}"),
            "name": visible(f"{row.clause} on {row.slice}"),
            "time": "0",
        },
    )
    if row.verdict != "PASS":
        tag = _TAGS.get(row.verdict, "error") if row.decides else "skipped"
        message = against_limit(row) + (f"; {row.detail}" if row.detail else "")
        found = ET.SubElement(case, tag, {"type": row.verdict, "message": visible(message)})
        found.text = _numbers(row)
    else:
        ET.SubElement(case, "system-out").text = _numbers(row)
    return case


def _numbers(row: MeasurementRow) -> str:
    lines = [
        f"measures: {clause_title(row)}",
        f"value: {quantity(row, row.value)}",
        f"bounds: {interval(row)} {row.method}".rstrip(),
        f"limit: {limit(row)}",
        f"noise floor: {number(row.noise_floor)}",
        f"evidence: {row.n_prompts} prompts, {row.n_tokens} tokens",
    ]
    if row.warn:
        lines.append("above the warning level")
    return log_lines([*lines, *([row.detail] if row.detail else [])])


def _whole(record: Record) -> ET.Element:
    """The audit's own verdict, where no clause carries it."""
    case = ET.Element(
        "testcase",
        {"classname": visible(record.contract.name), "name": "audit", "time": "0"},
    )
    tag = "failure" if record.verdict == "FAIL" else "error"
    found = ET.SubElement(case, tag, {"type": record.verdict, "message": visible(summary(record))})
    found.text = log_lines([summary(record), *(f"{f.code}: {f.title}" for f in record.findings)])
    return case
