"""``report.json``: the one record of an audit. Every other format is a projection of it.

The JSON Schema (``report.schema.json``, beside this file) is generated from these models.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kernel_contracts.errors import InputError

SCHEMA_VERSION = "1.0"
Word = Literal["PASS", "FAIL", "INCONCLUSIVE", "UNOBSERVED", "UNSOUND"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ContractPart(_Part):
    name: str
    digest: str
    """SHA-256 of the resolved document."""
    document: dict[str, Any]


class Identities(_Part):
    reference: dict[str, Any]
    engine: dict[str, Any]


class Counts(_Part):
    prompts: int
    sequences: int
    tokens: int
    """Scored response tokens on the decode path."""


class MeasurementPart(_Part):
    """A clause on a slice (see kernel_contracts.measurement)."""

    clause: str
    slice: str
    metric: str
    section: str
    value: float | None
    lower: float | None
    upper: float | None
    limit: float | None
    n_prompts: int
    n_tokens: int
    verdict: Word
    method: str = ""
    detail: str = ""
    unit: str = ""
    path: str = ""
    noise_floor: float | None = None
    warn: bool = False
    p_fail: float | None = None


class Finding(_Part):
    """A coded cause, with the rows that show it and what to do."""

    code: str
    title: str
    severity: Literal["error", "warning", "note"]
    evidence: list[dict[str, Any]] = Field(default_factory=list)
    remedy: str = ""
    clause: str = ""
    slice: str = ""


class ChainRow(_Part):
    """One step of the chain from drift to reward and gradient."""

    quantity: str
    measured: float | None
    """Estimate on this slice; None where it is not measured."""
    upper: float | None
    """Its upper confidence bound, where there is one."""
    bound: float | None
    """What the route's bound says, from the measured drift or KL."""
    slack: float | None
    """bound / measured."""
    vacuous: bool
    """The bound is at or above the trivial one."""
    useful_horizon: float | None = None
    """Tokens up to which the bound says something."""
    formula: str = ""


class Chain(_Part):
    slice: str
    route: Literal["rms", "sup"]
    rows: list[ChainRow]


class FlipBin(_Part):
    lo: float
    hi: float | None
    n: int
    rate: float
    lower: float
    upper: float


class PositionBin(_Part):
    lo: float
    hi: float
    n: int
    mean: float
    p95: float


class ProbabilityBin(_Part):
    lo: float
    hi: float
    n: int
    mean: float
    mean_abs_dlp: float


class Scatter(_Part):
    reference: list[float] = Field(default_factory=list)
    engine: list[float] = Field(default_factory=list)


class WorstToken(_Part):
    prompt_id: str
    domain: str = ""
    position: int
    path: str
    before: str
    token: str
    reference_top: str
    engine_top: str
    reference_top_prob: float
    engine_top_prob: float
    reference_prob: float
    engine_prob: float
    kl: float
    margin: float
    flip: bool


class ProbeRow(_Part):
    probe: str
    metric: str
    value: float
    n_prompts: int
    n_tokens: int
    detail: str = ""


class Views(_Part):
    """What the report draws."""

    flip_by_margin: list[FlipBin] = Field(default_factory=list)
    kl_by_position: list[PositionBin] = Field(default_factory=list)
    kl_by_reference_prob: list[ProbabilityBin] = Field(default_factory=list)
    logprob_scatter: Scatter = Field(default_factory=Scatter)
    worst_tokens: list[WorstToken] = Field(default_factory=list)
    probes: list[ProbeRow] = Field(default_factory=list)


class Record(_Part):
    """The whole audit."""

    schema_version: Literal["1.0"] = "1.0"
    verdict: Literal["PASS", "FAIL", "INCONCLUSIVE", "UNOBSERVED", "UNSOUND", "NOT_COMPARABLE"]
    exit_code: Literal[0, 1, 2, 3, 4]
    started: str
    finished: str
    contract: ContractPart
    identities: Identities
    counts: Counts
    measurements: list[MeasurementPart]
    findings: list[Finding] = Field(default_factory=list)
    actions: list[dict[str, str]] = Field(default_factory=list)
    """What the contract's escalation policy says about these verdicts."""
    chain: list[Chain] = Field(default_factory=list)
    views: Views = Field(default_factory=Views)
    gradient: list[dict[str, Any]] = Field(default_factory=list)
    """Measured policy-gradient bias per slice and the effect of each correction."""
    environment: dict[str, Any] = Field(default_factory=dict)
    digests: dict[str, str] = Field(default_factory=dict)
    timings: dict[str, float] = Field(default_factory=dict)


def plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def record_schema() -> dict[str, Any]:
    """JSON Schema (Draft 2020-12) of ``report.json``."""
    schema = Record.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "mismatch-audit report",
    }


def save_record(record: Record, path: Path) -> None:
    """Write atomically."""
    text = json.dumps(plain(record.model_dump(mode="json")), indent=1, ensure_ascii=False)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)


def load_record(path: Path) -> Record:
    """A record from ``report.json`` or its folder.

    Raises InputError when it is missing, damaged, or of another schema version.
    """
    file = path / "report.json" if path.is_dir() else path
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            "there is no report here", where=str(file), fix="audit run ... --out " + str(path)
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"the report cannot be read: {error}", where=str(file)) from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise InputError(
            f"schema_version is {version!r}, this program reads {SCHEMA_VERSION!r}",
            where=str(file),
            fix="read it with the version of mismatch-audit that wrote it",
        )
    try:
        return Record.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(p) for p in first["loc"])
        raise InputError(f"{place}: {first['msg']}", where=str(file)) from None
