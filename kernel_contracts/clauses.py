"""One model per kind of clause. A clause is one promise on a metric over slices."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from kernel_contracts.vocabulary import (
    METRIC_WORDS,
    NumericalMetric,
    Path,
    Probe,
    RuntimeMetric,
    StatisticalMetric,
    Weight,
)

CEILING_FACTOR = 5.0
"""Default a-priori upper end of a per-prompt value, in units of the limit."""

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.\-]*$", max_length=80)]
Names = Annotated[tuple[Name, ...], Field(strict=False, min_length=1)]
"""A list in YAML. Read-only, so that a contract's digest stays true."""

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, lt=1)]


class Strict(BaseModel):
    """Unknown keys, wrong types and non-finite numbers are errors; instances never change."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


def mistake(field: str, message: str) -> PydanticCustomError:
    """An error of a whole clause that points at one of its fields.

    The text travels as a value, so that braces in it are never taken for a placeholder.
    """
    return PydanticCustomError("clause", "{text}", {"text": message, "field": field})


class _Clause(Strict):
    id: Name
    """Name of the clause in reports and escalation rules. Unique in the contract."""
    description: str = ""
    """Why the clause is there, and where its limit comes from."""


class NumericalClause(_Clause):
    """Safety of single tokens: how often a value is beyond a threshold, or a count.

    A supremum over all contexts cannot be certified by sampling, and a raw maximum grows with the
    sample, so a numerical clause says: at most ``share`` of the tokens exceed ``exceeds``.
    """

    metric: NumericalMetric
    """What is measured on every row."""
    exceeds: Annotated[float, Field(ge=0)] | None = None
    """Threshold for a token's value, in the metric's unit."""
    share: Share | None = None
    """Limit on the share of tokens above ``exceeds`` (mean over prompts of each prompt's share)."""
    limit: Annotated[int, Field(ge=0)] | None = None
    """Limit on a count (metric nonfinite); counted exactly, with no confidence bound."""
    path: Path = "both"
    """Rows that count: decode, prefill, or both (default)."""
    slices: Names = ("all",)
    """Slices that must keep the promise, each by itself."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if self.metric == "nonfinite":
            if self.exceeds is not None or self.share is not None:
                raise mistake(
                    "exceeds" if self.exceeds is not None else "share",
                    "nonfinite is a count: give `limit: 0`, not exceeds and share",
                )
            if self.limit is None:
                raise mistake("metric", "nonfinite needs a limit, as a rule `limit: 0`")
        elif self.limit is not None:
            raise mistake(
                "limit",
                f"a limit on the largest {self.metric} would depend on the sample's size: give "
                "`exceeds` and `share` here, or promise the mean in a statistical clause",
            )
        elif self.exceeds is None or self.share is None:
            known = "share" if self.exceeds is None and self.share is not None else "exceeds"
            absent = "exceeds" if self.exceeds is None else "share"
            if self.exceeds is None and self.share is None:
                raise mistake("metric", f"{self.metric} needs both `exceeds` and `share`")
            raise mistake(known, f"`{known}` needs `{absent}` beside it")
        return self


class _BoundedMean(_Clause):
    """A mean of per-prompt values in [floor, ceiling], and a limit on the prompts above it."""

    limit: Positive | None = None
    """Greatest mean allowed, in the metric's unit."""
    warn: Positive | None = None
    """Level that is reported as a warning before the promise is broken; at most the limit (at
    least ``at_least`` where high is good)."""
    ceiling: Positive | None = None
    """A-priori upper end of a prompt's value: values above it count as the ceiling in the mean, and
    ``tail`` limits how many prompts may be there. Default: 1 for rates, else 5 times the limit
    (counted from the metric's floor). A lower ceiling needs fewer prompts."""

    def _check_mean(self, metric: str) -> None:
        target = self.target
        if target is None:
            return
        word = METRIC_WORDS[metric]
        if word.natural_ceiling is not None and target >= word.natural_ceiling:
            raise mistake(
                "limit",
                f"{metric} is never above {word.natural_ceiling:g}: "
                f"a limit of {target:g} promises nothing",
            )
        if target <= word.floor:
            raise mistake(
                "limit",
                f"{metric} is never below {word.floor:g}: a limit of {target:g} cannot be kept",
            )
        if self.ceiling is not None:
            if not word.bounded_mean:
                raise mistake("ceiling", f"{metric} is not a mean over prompts and has no ceiling")
            if self.ceiling <= target:
                raise mistake(
                    "ceiling",
                    f"the ceiling {self.ceiling:g} must be above the mean's limit {target:g}",
                )
            if word.natural_ceiling is not None and self.ceiling > word.natural_ceiling:
                raise mistake("ceiling", f"{metric} is never above {word.natural_ceiling:g}")
        if not word.at_least and self.warn is not None and self.warn > target:
            raise mistake("warn", f"warn {self.warn:g} is above the limit {target:g}")

    @property
    def target(self) -> float | None:
        """What the certified mean must not exceed."""
        return self.limit


class StatisticalClause(_BoundedMean):
    """A promise on a mean over prompts."""

    metric: StatisticalMetric
    """What is measured on every token."""
    at_least: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Least value allowed, for a metric where high is good (ess_ratio)."""
    slices: Names = ("all",)
    """Slices that must keep the promise, each by itself."""
    path: Path = "decode"
    """Rows that count. Rollouts are drawn on the decode path, hence the default."""
    weight: Weight = "prompt"
    """prompt: mean over prompts of each prompt's mean. token: sum over tokens divided by their
    number, so that long responses count more."""
    tail: Share = 0.05
    """Limit on the share of prompts above the ceiling (Clopper-Pearson). Unused where the ceiling
    is the metric's natural one."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        word = METRIC_WORDS[self.metric]
        if word.at_least:
            if self.limit is not None:
                raise mistake("limit", f"high is good for {self.metric}: give `at_least`")
            if self.at_least is None:
                raise mistake("metric", f"{self.metric} needs `at_least`")
            if self.warn is not None and self.warn < self.at_least:
                raise mistake("warn", f"warn {self.warn:g} is below at_least {self.at_least:g}")
        elif self.at_least is not None:
            raise mistake("at_least", f"low is good for {self.metric}: give `limit`")
        elif self.limit is None:
            raise mistake("metric", f"{self.metric} needs a `limit`")
        if not word.bounded_mean and "tail" in self.model_fields_set:
            raise mistake("tail", f"{self.metric} is not a mean over prompts and has no tail")
        self._check_mean(self.metric)
        return self

    @property
    def target(self) -> float | None:
        """Limit of the certified mean; for ess_ratio that of the mean of w^2, 1 / at_least."""
        return self.limit if self.at_least is None else 1.0 / self.at_least

    @property
    def floor(self) -> float:
        """Least value that a prompt can have."""
        return METRIC_WORDS[self.metric].floor

    @property
    def upper_end(self) -> float:
        """The ceiling in force: given, natural, or 5 times the limit. inf: not a bounded mean."""
        return _upper_end(self.metric, self.target, self.ceiling)

    @property
    def needs_tail(self) -> bool:
        """False where no prompt can be above the ceiling."""
        return _needs_tail(self.metric, self.ceiling)


class RuntimeClause(_BoundedMean):
    """A promise that the engine agrees with itself when only its execution changes."""

    probe: Probe
    """prefill_decode: the same rows on both paths. batch_invariance: a lone request against the
    same one in a batch. order: another order of requests. repetition: the same again."""
    metric: RuntimeMetric = "kl"
    """kl (default), abs_dlp of the token, or flip_rate."""
    limit: Positive
    """Greatest mean allowed, in the metric's unit."""
    tail: Share = 0.15
    """Limit on the share of prompts above the ceiling. Wider than elsewhere: probes see few
    prompts (0.15 takes 19, 0.05 takes 59)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._check_mean(self.metric)
        return self

    @property
    def floor(self) -> float:
        """Least value that a prompt can have."""
        return METRIC_WORDS[self.metric].floor

    @property
    def upper_end(self) -> float:
        """The ceiling in force: given, natural, or 5 times the limit."""
        return _upper_end(self.metric, self.limit, self.ceiling)

    @property
    def needs_tail(self) -> bool:
        """False where no prompt can be above the ceiling."""
        return _needs_tail(self.metric, self.ceiling)


class ObservabilityClause(_Clause):
    """How much must be seen before a verdict counts. Missing evidence is never a pass."""

    min_prompts: Annotated[int, Field(ge=1)] = 1
    """Prompts with at least one row in the slice."""
    max_missing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of rows in which a required column may be null."""
    require: Annotated[tuple[Name, ...], Field(strict=False)] = (
        "engine_logprob",
        "reference_logprob",
    )
    """Columns of the token table that must be there."""
    slices: Names = ("all",)
    """Slices that must be seen, each by itself."""


Clause = NumericalClause | StatisticalClause | RuntimeClause | ObservabilityClause


def _upper_end(metric: str, target: float | None, ceiling: float | None) -> float:
    word = METRIC_WORDS[metric]
    if ceiling is not None:
        return ceiling
    if word.natural_ceiling is not None:
        return word.natural_ceiling
    if not word.bounded_mean or target is None:
        return float("inf")
    return word.floor + CEILING_FACTOR * (target - word.floor)


def _needs_tail(metric: str, ceiling: float | None) -> bool:
    word = METRIC_WORDS[metric]
    if not word.bounded_mean:
        return False
    return word.natural_ceiling is None or (ceiling is not None and ceiling < word.natural_ceiling)
