"""What a blessing says: an in-toto Statement v1 whose subject is a set of weights.

Its predicate (``urn:mismatch-audit:blessing:v1``) binds what was audited: contract, both programs,
prompts, verdicts, report, and from when until when it holds.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    model_validator,
)

from mismatch_audit.gate.strict import Malformed, canonical, parse_canonical

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "urn:mismatch-audit:blessing:v1"
TENSORS: Final = "mismatch-audit-tensors-v1"
"""Digest of the served tensors, whatever their files (``weights/manifest.py``)."""
FILES: Final = "mismatch-audit-files-v1"
"""Digest of the weight files that the audit loaded (``identity.weights_digest``)."""
MAX_LIFETIME = timedelta(days=366)
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Time = Annotated[str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
Text = Annotated[str, StringConstraints(min_length=1, max_length=300)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Subject(_Strict):
    """The weights. digest: by the two names above."""

    name: Text
    digest: dict[Literal["mismatch-audit-tensors-v1", "mismatch-audit-files-v1"], Digest]


class ContractBinding(_Strict):
    name: Text
    digest: Digest


class VerdictRow(_Strict):
    """A clause on a slice. What is no PASS is a violation that somebody answers for in the
    contract, or lacks evidence on a slice that the contract calls optional."""

    clause: Text
    slice: Text
    metric: Text
    verdict: Literal["PASS", "ACKNOWLEDGED", "INCONCLUSIVE", "UNOBSERVED"]
    optional: bool = False

    @model_validator(mode="after")
    def _is_let_through(self) -> Self:
        if self.verdict not in ("PASS", "ACKNOWLEDGED") and not self.optional:
            raise ValueError(f"{self.verdict} is not blessed")
        return self


class Tool(_Strict):
    name: Literal["mismatch-audit"] = "mismatch-audit"
    version: Text


class Programs(_Strict):
    """Facts of both programs as the audit read them back from them."""

    reference: Annotated[dict[str, JsonValue], Field(min_length=1)]
    engine: Annotated[dict[str, JsonValue], Field(min_length=1)]


class Predicate(_Strict):
    schema_version: Literal["1"] = "1"
    contract: ContractBinding
    programs: Programs
    prompts: Digest
    """Of the encoded prompts."""
    settings: Digest
    """Of the run's settings."""
    config: Digest
    """Of the checkpoint's config, tokenizer and generation files."""
    report: Digest
    """SHA-256 of report.json."""
    verdict: Literal["PASS"]
    verdicts: Annotated[list[VerdictRow], Field(min_length=1)]
    issued: Time
    expires: Time
    tool: Tool

    @property
    def window(self) -> tuple[datetime, datetime]:
        """(from, until), aware, UTC."""
        return read_time(self.issued), read_time(self.expires)

    @model_validator(mode="after")
    def _window_is_sane(self) -> Self:
        start, end = self.window
        if not any(row.verdict == "PASS" for row in self.verdicts):
            raise ValueError("no clause passed")
        if not start < end <= start + MAX_LIFETIME:
            raise ValueError(f"expires not within {MAX_LIFETIME.days} days after it was issued")
        return self


class Statement(_Strict):
    kind: Literal["https://in-toto.io/Statement/v1"] = Field(STATEMENT_TYPE, alias="_type")
    predicate_type: Literal["urn:mismatch-audit:blessing:v1"] = Field(
        PREDICATE_TYPE, alias="predicateType"
    )
    subject: Annotated[list[Subject], Field(min_length=1, max_length=1)]
    predicate: Predicate

    @property
    def tensors(self) -> str:
        """Digest of the blessed tensors."""
        return self.subject[0].digest["mismatch-audit-tensors-v1"]

    @model_validator(mode="after")
    def _both_digests(self) -> Self:
        if set(self.subject[0].digest) != {TENSORS, FILES}:
            raise ValueError("the subject lacks a digest")
        return self


def read_time(text: str) -> datetime:
    """Aware UTC time. Raises ValueError for a day that does not exist."""
    return datetime.strptime(text, TIME_FORMAT).replace(tzinfo=UTC)


def write_time(when: datetime) -> str:
    """UTC, whole seconds."""
    return when.astimezone(UTC).strftime(TIME_FORMAT)


def encode(statement: Statement) -> bytes:
    """The payload of an envelope."""
    return canonical(statement.model_dump(mode="json", by_alias=True))


def decode(payload: bytes) -> Statement:
    """Raises Malformed: not JSON, another spelling, another schema, a field amiss."""
    document = parse_canonical(payload)
    _check_schema(document)
    try:
        statement = Statement.model_validate(document)
    except (ValidationError, ValueError) as error:
        raise Malformed("malformed_statement", _first(error)) from None
    if encode(statement) != payload:  # a default was filled in, so a field was missing
        raise Malformed("malformed_statement", "a field is missing")
    return statement


def _check_schema(document: Any) -> None:
    if not isinstance(document, dict):
        raise Malformed("malformed_statement", "not a statement")
    predicate = document.get("predicate")
    version = predicate.get("schema_version") if isinstance(predicate, dict) else None
    for name, value, known in (
        ("_type", document.get("_type"), STATEMENT_TYPE),
        ("predicateType", document.get("predicateType"), PREDICATE_TYPE),
        ("schema_version", version, "1"),
    ):
        if value != known:
            said = str(value)[:60]
            raise Malformed("unknown_schema", f"{name} is {said!r}; this program reads {known!r}")


def _first(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)[:200]
    item = error.errors()[0]
    place = ".".join(str(part) for part in item["loc"]) or "the statement"
    return f"{place}: {item['msg']}"[:200]
