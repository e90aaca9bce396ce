"""The section of a record that only an audit of recorded rollouts has."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from mismatch_audit.reports.rows import Count, Facts, Number, Severity, StrictModel, plain


class RolloutSource(StrictModel):
    """One dump. why: what showed its format.  facts: of its header.  lacks: column -> why it has
    none.  notes: what the reader undid or assumed.  error: where reading stopped."""

    path: str
    format: str
    framework: str
    why: str = ""
    sequences: Count = 0
    tokens: Count = 0
    facts: Facts = Field(default_factory=dict)
    lacks: dict[str, str] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)
    error: str | None = None

    _plain = field_validator("facts", mode="before")(plain)


class CheckRow(StrictModel):
    """One check that ran on every sequence. status ``unobserved``: the sources lack what it needs;
    that is never clean."""

    code: str
    title: str
    status: Literal["clean", "found", "unobserved"]
    severity: Severity
    detail: str = ""


class SliceRow(StrictModel):
    """Statistics of a slice, means over tokens. missing, nonfinite: tokens without a usable
    log-prob.  unknown: tokens that a null keeps out of all slices of the definition.  why: there
    is no row."""

    slice: str
    definition: str
    n_prompts: Count
    n_tokens: Count
    missing: Count = 0
    nonfinite: Count = 0
    unknown: Count = 0
    abs_dlp: Number = None
    k1: Number = None
    k3: Number = None
    mult_prob_error: Number = None
    abs_dp: Number = None
    ess_token: Number = None
    why: str = ""


class StepRow(StrictModel):
    """One training step, means over tokens."""

    step: int
    sequences: Count
    n_tokens: Count
    abs_dlp: Number
    k3: Number
    ess_token: Number
    log_ppl_diff: Number


class Rollouts(StrictModel):
    """What recorded rollouts showed. statistics: of the whole log, docs/rollouts.md says each
    definition.  staleness: by lag, taken apart where a re-scoring allows, and over the steps;
    empty without checks.  checks: every one that ran; what it found is among the findings."""

    sources: list[RolloutSource]
    statistics: Facts = Field(default_factory=dict)
    slices: list[SliceRow] = Field(default_factory=list)
    steps: list[StepRow] = Field(default_factory=list)
    staleness: Facts = Field(default_factory=dict)
    checks: list[CheckRow] = Field(default_factory=list)

    _plain = field_validator("statistics", "staleness", mode="before")(plain)

    @property
    def damaged(self) -> list[RolloutSource]:
        """Sources that could not be read, or not to their end."""
        return [one for one in self.sources if one.error is not None]

    @property
    def unseen(self) -> list[SliceRow]:
        """Slices without a row."""
        return [one for one in self.slices if one.why]
