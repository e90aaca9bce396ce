"""The contract: clauses over slices, bound to a pair of programs, with what follows a verdict.

``Contract`` is a plain frozen pydantic model; ``kernel_contracts.loading`` reads and writes files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from kernel_contracts.clauses import (
    Clause,
    Name,
    NumericalClause,
    ObservabilityClause,
    RuntimeClause,
    StatisticalClause,
    Strict,
)
from kernel_contracts.cross_checks import cross_check
from kernel_contracts.definitions import (
    Acknowledgement,
    Budget,
    EscalationRule,
    Pair,
    SliceDefinition,
    When,
)
from kernel_contracts.promotion import Promotion
from kernel_contracts.vocabulary import Fault

__all__ = [
    "SCHEMA",
    "SECTIONS",
    "Acknowledgement",
    "Budget",
    "Clause",
    "Contract",
    "EscalationRule",
    "NumericalClause",
    "ObservabilityClause",
    "Pair",
    "Promotion",
    "RuntimeClause",
    "SliceDefinition",
    "StatisticalClause",
    "When",
]

SCHEMA = "kernel-contracts/v1"
SECTIONS = ("numerical", "statistical", "runtime", "observability")


class Contract(Strict):
    """What is promised about a pair of programs that evaluate one policy."""

    schema_version: Literal["kernel-contracts/v1"] = Field(alias="schema")
    """Version of this language."""
    name: Name
    """Name of the contract in reports."""
    description: str = ""
    """What it is for, and where its limits come from."""
    pair: Pair = Field(default_factory=Pair)
    """The two programs that it binds."""
    slices: dict[Name, SliceDefinition] = Field(default_factory=lambda: {"all": SliceDefinition()})
    """Named subsets of rows. ``all`` is always there."""
    numerical: Annotated[tuple[NumericalClause, ...], Field(strict=False)] = ()
    """Safety of single tokens: how often a threshold may be exceeded."""
    statistical: Annotated[tuple[StatisticalClause, ...], Field(strict=False)] = ()
    """Means over prompts, certified by one-sided confidence bounds."""
    runtime: Annotated[tuple[RuntimeClause, ...], Field(strict=False)] = ()
    """Agreement of the engine with itself under another execution."""
    observability: Annotated[tuple[ObservabilityClause, ...], Field(strict=False)] = ()
    """How much must be seen before a verdict counts."""
    budget: Budget = Field(default_factory=Budget)
    """What the job can bear."""
    escalation: Annotated[tuple[EscalationRule, ...], Field(strict=False)] = ()
    """What is done about a verdict, in order: the first rule that matches decides."""
    acknowledge: Annotated[tuple[Acknowledgement, ...], Field(strict=False)] = ()
    """Known violations that are let through until a day."""
    promotion: Promotion | None = None
    """What each stage from an audit to full traffic must show (docs/promotion.md)."""
    tolerates: Annotated[tuple[Fault, ...], Field(strict=False)] = ()
    """Faults of the self-test's menu that the contract bears by design (docs/selftest.md)."""
    alpha: Annotated[float, Field(gt=0, le=0.5)] = 0.05
    """Error probability of a verdict: of a false PASS, and of a false FAIL, of one clause on one
    slice."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of every random choice in judging, so that a verdict can be repeated."""

    @field_validator("slices")
    @classmethod
    def _with_all(cls, slices: dict[str, SliceDefinition]) -> dict[str, SliceDefinition]:
        return slices if "all" in slices else {"all": SliceDefinition(), **slices}

    @model_validator(mode="after")
    def _refers_to_itself(self) -> Self:
        wrong = cross_check(self.document())
        if wrong:
            text = "; ".join(f"{m.field}: {m.message}" for m in wrong)
            raise PydanticCustomError("cross", "{text}", {"text": text})
        return self

    def clauses(self) -> Iterator[Clause]:
        """Every clause, section by section, in the document's order."""
        yield from self.numerical
        yield from self.statistical
        yield from self.runtime
        yield from self.observability

    def clause(self, name: str) -> Clause:
        """The clause of that id. Raises KeyError."""
        for clause in self.clauses():
            if clause.id == name:
                return clause
        raise KeyError(name)

    def section_of(self, clause: Clause) -> str:
        """numerical, statistical, runtime or observability."""
        return next(s for s in SECTIONS if clause in getattr(self, s))

    def document(self) -> dict[str, Any]:
        """The resolved document as plain data, keys as in the file: every default filled in, the
        ceiling in force too, and no ceiling or tail where a clause has none."""
        document = self.model_dump(mode="json", by_alias=True)
        for section in ("statistical", "runtime"):
            for clause, written in zip(getattr(self, section), document[section], strict=True):
                if math.isfinite(clause.upper_end):
                    written["ceiling"] = clause.upper_end
                if not clause.needs_tail:
                    del written["tail"]
        for name in (
            "acknowledge",
            "promotion",
            "tolerates",
        ):  # absent, so that earlier digests stay true
            if not document[name]:
                del document[name]
        for definition in document["slices"].values():
            if not definition["optional"]:
                del definition["optional"]
        return document
