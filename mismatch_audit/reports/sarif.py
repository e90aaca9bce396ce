"""The record as SARIF 2.1.0, for code-scanning views: one result per broken promise and finding."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Any

from mismatch_audit.reports.advice import WORDS, against_limit, summary
from mismatch_audit.reports.escape import COMMAND_MARK, visible
from mismatch_audit.reports.notation import clause_title, fact, interval
from mismatch_audit.reports.record import Record
from mismatch_audit.reports.rows import Finding, MeasurementRow

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
CONTRACT_FILE = "contract.yaml"
"""The copy of the contract in the run's folder: code scanning asks for a file."""

_LEVELS = {
    "FAIL": "error",
    "UNSOUND": "error",
    "UNOBSERVED": "warning",
    "ACKNOWLEDGED": "warning",
    "INCONCLUSIVE": "warning",
    "PASS": "note",
}


def render_sarif(record: Record) -> str:
    """JSON text. Passing clauses give no result, unless they warn."""
    rules: dict[str, dict[str, Any]] = {}
    results = []
    for row in record.measurements:
        rules.setdefault(visible(row.clause), _clause_rule(row))
        if row.verdict != "PASS" or row.warn:
            results.append(_measurement_result(record, row))
    for finding in record.findings:
        rules.setdefault(visible(finding.code), _finding_rule(finding))
        results.append(_finding_result(record, finding))
    if record.verdict != "PASS" and not any(r["level"] != "note" for r in results):
        rules.setdefault(record.verdict, {"id": record.verdict, "name": "AuditVerdict"})
        results.append(_result(record, record.verdict, "error", summary(record), ""))
    names = list(rules)
    for result in results:
        result["ruleIndex"] = names.index(result["ruleId"])
    run = {
        "tool": {"driver": _driver(record, list(rules.values()))},
        "invocations": [_invocation(record)],
        "automationDetails": {"id": f"mismatch-audit/{visible(record.contract.name)}/"},
        "columnKind": "unicodeCodePoints",
        "results": results,
        "properties": {"verdict": record.verdict, "contractDigest": record.contract.digest},
    }
    document = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    return text.replace(COMMAND_MARK, "#\\u0023[") + "\n"


def _driver(record: Record, rules: list[dict[str, Any]]) -> dict[str, Any]:
    driver: dict[str, Any] = {"name": "mismatch-audit", "rules": rules}
    version = record.environment.get("mismatch_audit")
    if isinstance(version, str):
        driver["version"] = version
    return driver


def _invocation(record: Record) -> dict[str, Any]:
    def utc(text: str) -> str:
        return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    return {
        "executionSuccessful": True,
        "exitCode": record.exit_code,
        "exitCodeDescription": WORDS[record.verdict],
        "startTimeUtc": utc(record.started),
        "endTimeUtc": utc(record.finished),
    }


def _clause_rule(row: MeasurementRow) -> dict[str, Any]:
    return {
        "id": visible(row.clause),
        "name": f"{row.section.capitalize()}Clause",
        "shortDescription": {"text": _plain(f"{row.clause}: {clause_title(row)}")},
        "properties": {"section": row.section},
    }


def _finding_rule(finding: Finding) -> dict[str, Any]:
    return {
        "id": visible(finding.code),
        "name": "Finding",
        "shortDescription": {"text": _plain(finding.code)},
        "help": {"text": _plain(finding.remedy)},
    }


def _measurement_result(record: Record, row: MeasurementRow) -> dict[str, Any]:
    parts = [f"{WORDS[row.verdict]}{' (warn)' * row.warn}: {row.clause} on {row.slice}: "
             f"{against_limit(row)}, bounds {interval(row)}, {row.n_prompts} prompts"]  # fmt: skip
    if row.detail:
        parts.append(row.detail)
    level = "warning" if row.warn and row.verdict == "PASS" else _LEVELS[row.verdict]
    level = level if row.decides else "note"
    result = _result(record, row.clause, level, "; ".join(parts), row.slice)
    result["properties"] = {
        name: getattr(row, name)
        for name in ("verdict", "metric", "value", "lower", "upper", "limit", "noise_floor",
                     "n_prompts", "n_tokens")
    }  # fmt: skip
    return result


def _finding_result(record: Record, finding: Finding) -> dict[str, Any]:
    rows = [fact(row) for row in finding.evidence[:5]]
    text = "\n".join([f"{finding.title}. {finding.remedy}", *rows])
    return _result(record, finding.code, finding.severity, text, finding.slice or "")


def _result(record: Record, rule: str, level: str, text: str, slice_: str) -> dict[str, Any]:
    key = json.dumps([record.contract.name, rule, slice_])
    location: dict[str, Any] = {
        "physicalLocation": {
            "artifactLocation": {"uri": CONTRACT_FILE},
            "region": {"startLine": 1},
        }
    }
    if slice_:
        location["logicalLocations"] = [{"name": visible(slice_), "kind": "member"}]
    return {
        "ruleId": visible(rule),
        "level": level,
        "kind": "fail",
        "message": {"text": _plain(text)},
        "locations": [location],
        "partialFingerprints": {
            "clauseAndSlice/v1": hashlib.sha256(key.encode(errors="replace")).hexdigest()
        },
    }


def _plain(text: str) -> str:
    """A message's text: square brackets would start a link, a backslash escapes."""
    shown = "\n".join(visible(line) for line in text.split("\n"))
    return "".join(f"\\{c}" if c in "\\[]" else c for c in shown)
