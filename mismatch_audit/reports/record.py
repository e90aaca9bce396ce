"""The record of one audit: ``report.json``, canonical and versioned; every report shows it."""

from __future__ import annotations

import json
import os
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from kernel_contracts.errors import InputError
from kernel_contracts.measurement import EXIT_CODES, overall
from mismatch_audit.reports.escape import COMMAND_MARK
from mismatch_audit.reports.rollout_rows import (
    CheckRow,
    Rollouts,
    RolloutSource,
    SliceRow,
    StepRow,
)
from mismatch_audit.reports.rows import (
    AuditVerdict,
    Chain,
    ChainRow,
    ContractRef,
    Counts,
    Facts,
    Finding,
    FlipBin,
    Identities,
    MeasurementRow,
    PositionBin,
    ProbabilityBin,
    ProbeRow,
    Scatter,
    StrictModel,
    Views,
    WorstToken,
    plain,
)

__all__ = [
    "REPORT_NAME",
    "SCHEMA_VERSION",
    "Chain",
    "ChainRow",
    "CheckRow",
    "ContractRef",
    "Counts",
    "Finding",
    "FlipBin",
    "Identities",
    "MeasurementRow",
    "PositionBin",
    "ProbabilityBin",
    "ProbeRow",
    "Record",
    "RolloutSource",
    "Rollouts",
    "Scatter",
    "SliceRow",
    "StepRow",
    "Views",
    "WorstToken",
    "load_record",
    "record_json_schema",
    "record_text",
    "save_record",
    "write_schema",
]

SCHEMA_VERSION: Final = "1.0"
"""A reader takes its own version and no other."""

REPORT_NAME = "report.json"
SCHEMA_PATH = Path(__file__).with_name("report.schema.json")


class Record(StrictModel):
    """One audit. Raises pydantic's ValidationError where it contradicts itself: a PASS over a
    clause that did not pass, an exit code of another verdict."""

    schema_version: Literal["1.0"] = SCHEMA_VERSION
    verdict: AuditVerdict
    exit_code: int
    started: str
    finished: str
    contract: ContractRef
    identities: Identities
    counts: Counts
    measurements: list[MeasurementRow]
    findings: list[Finding] = Field(default_factory=list)
    chain: list[Chain] = Field(default_factory=list)
    views: Views = Field(default_factory=Views)
    actions: list[Facts] = Field(default_factory=list)
    """What the contract's escalation policy asks for."""
    gradient: list[Facts] = Field(default_factory=list)
    """Measured policy-gradient bias per slice, with the effect of each correction."""
    rollouts: Rollouts | None = None
    """Only of recorded rollouts: sources, statistics, slices, steps and checks."""
    environment: Facts = Field(default_factory=dict)
    digests: Facts = Field(default_factory=dict)
    timings: dict[str, float] = Field(default_factory=dict)

    _plain = field_validator("environment", "digests", "actions", "gradient", mode="before")(plain)

    @field_validator("started", "finished")
    @classmethod
    def _is_time(cls, text: str) -> str:
        if datetime.fromisoformat(text).tzinfo is None:
            raise ValueError("a time without its zone")
        return text

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.exit_code != EXIT_CODES[self.verdict]:
            raise ValueError(f"exit code {self.exit_code} is not that of {self.verdict}")
        worst = overall(self.measurements)  # type: ignore[arg-type]
        if self.verdict == "PASS" and worst != "PASS":
            raise ValueError(f"verdict PASS, but the worst clause is {worst}")
        return self


def record_json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of report.json, as published in ``report.schema.json``."""
    schema = Record.model_json_schema(mode="serialization")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": f"mismatch-audit report {SCHEMA_VERSION}",
    }


def record_text(record: Record) -> str:
    """The record as JSON text. Same record, same bytes."""
    document = record.model_dump(mode="json")
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    return text.replace(COMMAND_MARK, "#\\u0023[") + "\n"


def save_record(record: Record, path: Path) -> None:
    """Write report.json, whole or not at all. Raises InputError when it cannot be written."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        temporary = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(record_text(record))
                stream.flush()
                os.fsync(stream.fileno())
            temporary.chmod(0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot write it: {error.strerror or error}",
            where=str(path),
            fix="free some space or give another folder; the tables of the run are kept",
        ) from error


def load_record(path: Path) -> Record:
    """Read a report.json, or the one in a run's folder.

    Raises InputError when there is none, when it is damaged, or of another schema version.
    """
    file = path / REPORT_NAME if path.is_dir() else path
    try:
        document = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse)
    except FileNotFoundError as error:
        unfinished = path.is_dir() and (path / "run.json").exists()
        raise InputError(
            "this run has no report yet" if unfinished else "no report here",
            where=str(file),
            fix="finish it with `audit run ... --resume`" if unfinished else "give a run's folder",
        ) from error
    except (OSError, ValueError) as error:
        raise InputError(f"not readable as a report: {error}", where=str(file)) from error
    _check_version(document, file)
    try:
        return Record.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the report"
        raise InputError(
            f"{place}: {first['msg']} ({error.error_count()} mistakes in all)",
            where=str(file),
            fix="write it again with `audit run ... --resume`; reports are not edited by hand",
        ) from error


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _check_version(document: Any, file: Path) -> None:
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version == SCHEMA_VERSION:
        return
    if not isinstance(version, str):
        raise InputError(
            "not a report of mismatch-audit: no schema_version",
            where=str(file),
            fix="give a run's folder or its report.json",
        )
    raise InputError(
        f"schema version {version}; this program reads {SCHEMA_VERSION}",
        where=str(file),
        fix="use the mismatch-audit that wrote it, or run the audit again",
    )


def write_schema(path: Path = SCHEMA_PATH) -> None:
    """Publish the JSON Schema anew, after the models changed."""
    text = json.dumps(record_json_schema(), indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
