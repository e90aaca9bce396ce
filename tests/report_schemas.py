"""The essential subsets of the JUnit and SARIF 2.1.0 formats, as JSON Schemas.

JUnit has no standard; this is what Jenkins', GitLab's and GitHub's readers agree on. The XML is
turned into ``{tag, attributes, children, text}`` to be checked. SARIF: the required members, the
closed vocabularies and the formats of the OASIS standard for the objects that are written.
"""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree as ET

_COUNT = {"type": "string", "pattern": r"^\d+$"}
_SECONDS = {"type": "string", "pattern": r"^\d+(\.\d+)?$"}


def _element(
    tag: str,
    attributes: dict[str, Any],
    required: list[str],
    children: dict[str, Any] | bool,
) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "tag": {"const": tag},
            "attributes": {
                "type": "object",
                "properties": attributes,
                "required": required,
                "additionalProperties": False,
            },
            "children": {"type": "array", "items": children},
            "text": {"type": "string"},
        },
        "required": ["tag", "attributes", "children"],
        "additionalProperties": False,
    }


_TEXT = {"type": "string"}
_OUTCOME = [
    _element(tag, {"message": _TEXT, "type": {"type": "string", "minLength": 1}}, ["type"], False)
    for tag in ("failure", "error")
]
_OUT = _element("system-out", {}, [], False)
_CASE = _element(
    "testcase",
    {"name": {"type": "string", "minLength": 1}, "classname": {"type": "string", "minLength": 1},
     "time": _SECONDS},
    ["name", "classname"],
    {"anyOf": [*_OUTCOME, _OUT]},
)  # fmt: skip
_PROPERTIES = _element(
    "properties",
    {},
    [],
    _element("property", {"name": _TEXT, "value": _TEXT}, ["name", "value"], False),
)
_TOTALS = {"name": _TEXT, "tests": _COUNT, "failures": _COUNT, "errors": _COUNT, "skipped": _COUNT,
           "time": _SECONDS}  # fmt: skip
_SUITE = _element(
    "testsuite",
    {
        **_TOTALS,
        "timestamp": {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d$"},
        "hostname": _TEXT,
    },
    ["name", "tests", "failures", "errors", "timestamp"],
    {"anyOf": [_PROPERTIES, _CASE]},
)
JUNIT = _element("testsuites", _TOTALS, ["tests", "failures", "errors"], _SUITE)


def xml_document(element: ET.Element) -> dict[str, Any]:
    """An XML element as plain data."""
    text = (element.text or "").strip()
    return {
        "tag": element.tag,
        "attributes": dict(element.attrib),
        "children": [xml_document(child) for child in element],
        **({"text": text} if text else {}),
    }


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


_MESSAGE = _object(["text"], text={"type": "string", "minLength": 1})
_BAG = {"type": "object"}
_UTC = {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$"}
_LOCATION = _object(
    ["physicalLocation"],
    physicalLocation=_object(
        ["artifactLocation"],
        artifactLocation=_object(["uri"], uri={"type": "string", "pattern": r"^[\w./-]+$"}),
        region=_object(["startLine"], startLine={"type": "integer", "minimum": 1}),
    ),
    logicalLocations={
        "type": "array",
        "items": _object(["name"], name=_TEXT, kind=_TEXT),
    },
)
_RULE = _object(
    ["id"], id={"type": "string", "minLength": 1}, name=_TEXT, shortDescription=_MESSAGE,
    help=_MESSAGE, properties=_BAG,
)  # fmt: skip
_RESULT = _object(
    ["ruleId", "ruleIndex", "level", "message", "locations"],
    ruleId={"type": "string", "minLength": 1},
    ruleIndex={"type": "integer", "minimum": 0},
    kind={"const": "fail"},
    level={"enum": ["none", "note", "warning", "error"]},
    message=_MESSAGE,
    locations={"type": "array", "items": _LOCATION, "minItems": 1},
    partialFingerprints={"type": "object", "additionalProperties": {"type": "string"}},
    properties=_BAG,
)
_RUN = _object(
    ["tool", "results"],
    tool=_object(
        ["driver"],
        driver=_object(
            ["name"],
            name={"type": "string", "minLength": 1},
            version=_TEXT,
            rules={"type": "array", "items": _RULE, "uniqueItems": True},
        ),
    ),
    invocations={
        "type": "array",
        "items": _object(
            ["executionSuccessful"],
            executionSuccessful={"type": "boolean"},
            exitCode={"type": "integer"},
            exitCodeDescription=_TEXT,
            startTimeUtc=_UTC,
            endTimeUtc=_UTC,
        ),
    },
    automationDetails=_object(["id"], id=_TEXT),
    columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
    results={"type": "array", "items": _RESULT},
    properties=_BAG,
)
SARIF: dict[str, Any] = {
    "type": "object",
    "properties": {
        "$schema": {"type": "string", "format": "uri"},
        "version": {"const": "2.1.0"},
        "runs": {"type": "array", "items": _RUN, "minItems": 1},
    },
    "required": ["version", "runs"],
    "additionalProperties": False,
}
