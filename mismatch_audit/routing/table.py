"""The routing table: a strict, versioned document. Rules are read in order, the first that a
request meets (or cannot be shown not to meet) sends it away from the engine.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kernel_contracts.errors import InputError
from kernel_contracts.expressions import Both, Condition
from kernel_contracts.predicates import PredicateError, parse
from mismatch_audit.routing.features import level_of, never_known

SCHEMA: Final = "mismatch-audit/routes/v1"
REFERENCE: Final = "reference"
"""The name of the program that may answer everything."""

MAX_BYTES = 4 << 20

Name = Annotated[str, Field(min_length=1, max_length=200)]
SliceName = Annotated[str, Field(min_length=1, max_length=10_000)]
EngineName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Number = Annotated[float | None, Field(allow_inf_nan=False)]
Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE", "UNOBSERVED", "UNSOUND"]
Level = Literal["request", "decode"]


class _Strict(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True
    )


class Digested(_Strict):
    """A document that the table was made from."""

    name: Name
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ReportRef(_Strict):
    """The audit that speaks about an engine."""

    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    verdict: Name
    finished: Name
    prompts: Annotated[int, Field(ge=0)]


class Policy(_Strict):
    """When a slice that failed may come back."""

    passes_to_return: Annotated[int, Field(ge=1, le=1000)] = 3
    """Passes in a row, each of another audit."""
    return_at: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Or at once, when every upper bound is within this share of its limit."""


class Rule(_Strict):
    """Requests that the engine may not answer."""

    slice: SliceName
    """The slice that it covers, as in the report; ``unseen ...`` for what was never measured."""
    when: Annotated[str, Field(min_length=1, max_length=8000)]
    """A condition on metadata, position, context_length (known before the request) and on
    engine_margin and the like (known in decode)."""
    also: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=8000)]], Field(max_length=500)
    ]
    """Further conditions that must hold too; of a slice with more values than one text admits."""
    to: EngineName
    """Who answers instead; the reference where that engine may not either."""
    level: Level
    """When the condition is known. Before decode, a condition that needs it counts as met."""
    mapping: Literal["exact", "counterpart", "parent"]
    """exact: the slice itself.  counterpart: the reference's margin became the engine's, with the
    drift as safety.  parent: a part of the slice is not known at request time and was left out, so
    all around it falls back too."""
    reason: Annotated[str, Field(max_length=2000)] = ""

    @model_validator(mode="after")
    def _routable(self) -> Self:
        try:
            condition = self.condition()
        except PredicateError as error:
            raise ValueError(f"when: {error.message}") from None
        unknown = never_known(condition)
        if unknown:
            raise ValueError(f"when: {', '.join(unknown)} is not known at request time")
        if level_of(condition) != self.level:
            raise ValueError(f"level: {self.when!r} is known at the level {level_of(condition)}")
        return self

    def condition(self) -> Condition:
        """All of it, parsed."""
        parts = [parse(text) for text in (self.when, *self.also)]
        return parts[0] if len(parts) == 1 else Both(tuple(parts))


class SliceState(_Strict):
    """Where a slice stands. held: it failed and has not yet earned its way back.  passes: audits
    in a row that it passed."""

    slice: SliceName
    to: EngineName
    verdict: Verdict
    held: bool
    passes: Annotated[int, Field(ge=0)]
    share: Share | None
    """Of the audit's prompts."""
    reason: Annotated[str, Field(max_length=2000)] = ""


class Rerouted(_Strict):
    """Share of the audit's prompts that leaves the engine, between two bounds where the report
    alone does not say how slices overlap."""

    lower: Share
    upper: Share
    basis: Literal["prompts", "slices"]


class MixtureBound(_Strict):
    """A mean over all traffic, the re-routed part counted as exact. confidence: of the bound."""

    metric: Name
    before: Number
    bound: Number
    unit: str
    confidence: Share
    method: Name
    detail: Annotated[str, Field(max_length=2000)] = ""


class EngineRoutes(_Strict):
    """One engine build: the audit that speaks about it, and what it may not answer."""

    name: EngineName
    identity: dict[Name, str]
    report: ReportRef
    contract: Digested
    rules: Annotated[list[Rule], Field(max_length=1000)]
    slices: Annotated[list[SliceState], Field(max_length=5000)]
    rerouted: Rerouted
    mixture: list[MixtureBound]
    notes: list[str]

    @field_validator("name")
    @classmethod
    def _no_reference(cls, name: str) -> str:
        if name == REFERENCE:
            raise ValueError("an engine cannot be called 'reference'")
        return name


class RoutingTable(_Strict):
    """Engines in the order of preference: a request goes to the first that may answer it, or to the
    reference."""

    schema_version: Annotated[Literal["mismatch-audit/routes/v1"], Field(alias="schema")]
    created: Name
    reference: dict[Name, str]
    """Facts of the reference that every engine was compared with."""
    policy: Policy
    engines: Annotated[list[EngineRoutes], Field(min_length=1, max_length=16)]

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        names = [engine.name for engine in self.engines]
        if len(set(names)) != len(names):
            raise ValueError("engines: a name is given twice")
        return self

    def engine(self, name: str) -> EngineRoutes | None:
        """The engine of that name."""
        return next((e for e in self.engines if e.name == name), None)


def routes_json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **RoutingTable.model_json_schema(by_alias=True),
        "title": SCHEMA,
    }


def table_digest(table: RoutingTable) -> str:
    """SHA-256 (hex) of the canonical JSON."""
    document = table.model_dump(mode="json", by_alias=True)
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def save_routes(table: RoutingTable, path: Path) -> None:
    """Write JSON, or YAML by the suffix; whole or not at all, since a proxy may be watching."""
    document = table.model_dump(mode="json", by_alias=True)
    if path.suffix in (".yaml", ".yml"):
        from kernel_contracts.yaml_source import write_yaml

        text = write_yaml(document)
    else:
        text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"cannot write: {error.strerror or error}", where=str(path)) from error


def load_routes(path: Path) -> RoutingTable:
    """Read a table. Raises InputError for a file that is none, naming the first wrong field."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES >> 20} MB")
        document = _parsed(raw.decode("utf-8"), path)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"not readable as a routing table: {error}", where=str(path)) from error
    version = document.get("schema") if isinstance(document, dict) else None
    if version != SCHEMA:
        raise InputError(
            f"schema {version!r}; this program reads {SCHEMA}",
            where=str(path),
            fix="write it with `audit routes RUN --out FILE`",
        )
    try:
        return RoutingTable.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the table"
        raise InputError(
            f"{place}: {first['msg']} ({error.error_count()} mistakes in all)",
            where=str(path),
            fix="write it again with `audit routes`; `audit routes --schema` lists every field",
        ) from None


def _parsed(text: str, path: Path) -> Any:
    if path.suffix not in (".yaml", ".yml"):
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
    from kernel_contracts.yaml_source import YamlMistake, read_yaml

    try:
        source = read_yaml(text)
    except YamlMistake as error:
        raise ValueError(f"line {error.line}: {error.message}") from None
    if source.mistakes:
        line, mistake = source.mistakes[0]
        raise ValueError(f"line {line}: {mistake.message}")
    return source.data


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A key given twice would let two readers see two tables."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found
