"""The parts of a contract that are not clauses: the pair, slices, budget, escalation rules."""

from __future__ import annotations

import itertools
import math
from datetime import date
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from kernel_contracts.clauses import Name, Positive, Share, Strict, mistake
from kernel_contracts.expressions import to_text
from kernel_contracts.predicates import PredicateError, parse
from kernel_contracts.vocabulary import Action, VerdictWord

MAX_SLICES = 200
"""Slices that one definition may give: more is a mistake in the column, not a contract."""

_SCALAR = {"type": ["string", "number", "boolean", "null"]}


def _fact(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise PydanticCustomError("fact", "a fact is a text, a number, true, false or null")


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _where(text: str) -> str:
    try:
        return to_text(parse(text))
    except PredicateError as error:
        raise PydanticCustomError("where", "{text}", {"text": str(error)}) from None


def _edges(edges: tuple[float, ...]) -> tuple[float, ...]:
    if any(b <= a for a, b in itertools.pairwise(edges)):
        raise PydanticCustomError("edges", "edges must rise from left to right")
    return edges


Fact = Annotated[Any, BeforeValidator(_fact), WithJsonSchema(_SCALAR)]
ColumnName = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^`\n]+$")]
Edges = Annotated[tuple[float, ...], Field(strict=False, min_length=2), AfterValidator(_edges)]
Columns = Annotated[
    tuple[ColumnName, ...],
    BeforeValidator(_listed),
    Field(strict=False, min_length=1, max_length=8),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
            ]
        }
    ),
]


class Pair(Strict):
    """The two programs that the contract binds. A fact that differs makes it another pair, and the
    audit NOT_COMPARABLE."""

    reference: dict[Name, Fact] = Field(default_factory=dict)
    """Facts of the training-side program, for example dtype: float32."""
    engine: dict[Name, Fact] = Field(default_factory=dict)
    """Facts of the serving-side program, for example program: vllm."""
    same: Annotated[tuple[Name, ...], Field(strict=False)] = ("weights", "tokenizer")
    """Facts that must be known and equal on both sides."""


class SliceDefinition(Strict):
    """A named subset of rows. Empty: all rows. Several keys combine: of the rows where ``where``
    holds, one slice per value of ``by`` and per bin."""

    where: Annotated[str, AfterValidator(_where)] | None = None
    """A condition on columns, for example "reference_margin <= 0.5 and not flip"."""
    by: Columns | None = None
    """A column, or a list of columns: one slice per value."""
    bins: Annotated[dict[ColumnName, Edges], Field(min_length=1, max_length=4)] | None = None
    """Edges per column: one slice per interval, closed on the left; the last also on the right."""
    optional: bool = False
    """Only a FAIL on it counts. Where a column is not there, or its rows are too few to decide,
    that is reported and the verdict stands on the other slices."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        bins = math.prod(len(edges) - 1 for edges in (self.bins or {}).values())
        if bins > MAX_SLICES:
            raise mistake("bins", f"gives {bins} slices; at most {MAX_SLICES}")
        return self

    @property
    def selects_all(self) -> bool:
        """True for the empty definition."""
        return self.where is None and self.by is None and self.bins is None

    @property
    def grouping(self) -> tuple[str, ...]:
        """Columns that split the rows: those of ``by``, then those of ``bins``."""
        return (*(self.by or ()), *(self.bins or {}))


class Budget(Strict):
    """What the training or serving job can bear. Limits are derived from it, never from the engine
    under test."""

    reward_range: Positive | None = None
    """Largest minus smallest reward of a rollout."""
    reward_drift: Positive | None = None
    """Change of the expected reward, between the two programs, that can be borne."""
    horizon: Annotated[int, Field(ge=1)] | None = None
    """Response tokens over which the reward budget must hold."""
    flip_budget: Share | None = None
    """Share of greedy tokens that may change."""
    bias_budget: Positive | None = None
    """Policy-gradient bias that can be borne. As the limit of a clause: relative to the measured
    gradient's norm. As a limit on the drift (``audit contract derive``): relative to the largest
    natural gradient that advantages up to the bound allow, which needs no gradient to be known."""
    score_norm: Positive | None = None
    """Upper bound of a token's score norm, for bias bounds in parameter space."""
    advantage_bound: Positive | None = None
    """Upper bound of the absolute advantage."""
    tis_threshold: Annotated[float, Field(ge=1)] | None = None
    """Threshold of the truncated importance weights that the trainer applies."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.reward_drift is not None:
            for name in ("reward_range", "horizon"):
                if getattr(self, name) is None:
                    raise mistake("reward_drift", f"needs `{name}` beside it")
        return self


def _day(value: Any) -> Any:
    """YAML reads 2027-01-31 as a date, JSON as a text."""
    if isinstance(value, str):
        try:
            return date.fromisoformat(value)
        except ValueError:
            raise PydanticCustomError("day", "a day is written 2027-01-31") from None
    return value


Line = Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\n]*\S[^\n]*$")]


class Acknowledgement(Strict):
    """A violation that is known and let through, visibly, until a day."""

    clause: Name
    """The clause that is broken."""
    slice: ColumnName | None = None
    """Only on this slice: a definition (any of its slices), or one slice such as domain=code."""
    who: Line
    """Who answers for it."""
    why: Line
    """Why it is borne."""
    until: Annotated[date, BeforeValidator(_day)]
    """The last day on which it holds."""


class When(Strict):
    """The verdicts that a rule answers. What is left out matches everything."""

    verdict: VerdictWord
    """The verdict; WARN is a kept promise beyond its warning level."""
    clause: Name | None = None
    """Only of this clause."""
    slice: ColumnName | None = None
    """Only on this slice: a definition (any of its slices), or one slice such as domain=code."""


class EscalationRule(Strict):
    """What is done about a verdict. Rules are read in order: the first that matches a verdict
    decides about it."""

    when: When
    """Which verdicts."""
    action: Action
    """log, sample_more, route, quarantine, mask, skip_step, hold_push, stop, block or rollback."""
    to: str | None = None
    """Where to route, for example reference; or which version to roll back to."""
    slice: ColumnName | None = None
    """Rows that the action is about. Default: those of the verdict."""
    description: str = ""
    """Why."""

    @model_validator(mode="after")
    def _target(self) -> Self:
        if self.action == "route" and self.to is None:
            raise mistake("action", "route needs `to`, for example `to: reference`")
        if self.to is not None and self.action not in ("route", "rollback"):
            raise mistake("to", f"{self.action} goes nowhere: only route and rollback take `to`")
        if self.slice is not None and self.action not in _SLICE_ACTIONS:
            raise mistake("slice", f"{self.action} is about the whole run, not about a slice")
        return self


_SLICE_ACTIONS = ("log", "sample_more", "route", "quarantine", "mask")
