"""The parts of a record: one strict model per kind of row.

A number that is NaN or infinite is never written as such: in a typed field it becomes null and the
row's ``detail`` says what it was; in free-form facts and evidence it becomes the word for it.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    field_validator,
    model_validator,
)

if TYPE_CHECKING:
    from kernel_contracts.measurement import Measurement

MAX_SCATTER = 2000

ClauseVerdict = Literal["PASS", "ACKNOWLEDGED", "FAIL", "INCONCLUSIVE", "UNOBSERVED", "UNSOUND"]
AuditVerdict = Literal["PASS", "FAIL", "INCONCLUSIVE", "UNOBSERVED", "UNSOUND", "NOT_COMPARABLE"]
Section = Literal["numerical", "statistical", "runtime", "observability"]
Severity = Literal["error", "warning", "note"]
Number = Annotated[float | None, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Facts = dict[str, JsonValue]


def plain(value: Any) -> Any:
    """JSON-ready copy of free-form data: NumPy scalars unpacked, tuples to lists, non-finite
    numbers to the words ``nan``, ``inf``, ``-inf``."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, BaseModel):
        return plain(value.model_dump())
    value = _scalar(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _scalar(value: Any) -> Any:
    """A NumPy or torch scalar as Python's own."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


class StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _Row(StrictModel):
    """A row with numbers, and one line of text for what they cannot say."""

    detail: str = ""

    @model_validator(mode="before")
    @classmethod
    def _say_nonfinite(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        row = {name: _scalar(value) for name, value in data.items()}
        odd = {k: v for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
        if odd:
            said = "; ".join(
                f"{name} is {'not a number' if math.isnan(v) else 'infinite'}"
                for name, v in odd.items()
            )
            row |= dict.fromkeys(odd)
            row["detail"] = f"{row['detail']}; {said}" if row.get("detail") else said
        return row


class ContractRef(StrictModel):
    """The contract that was judged. document: it, with every default filled in."""

    name: str
    digest: str
    document: Facts

    _plain = field_validator("document", mode="before")(plain)


class Identities(StrictModel):
    """Facts of both programs, read back from them."""

    reference: Facts
    engine: Facts

    _plain = field_validator("reference", "engine", mode="before")(plain)


class Counts(StrictModel):
    """What was run."""

    prompts: Count
    sequences: Count
    tokens: Count


class MeasurementRow(_Row):
    """A clause on a slice; fields as in ``kernel_contracts.measurement.Measurement``."""

    clause: str
    slice: str
    metric: str
    section: Section
    value: Number
    lower: Number
    upper: Number
    limit: Number
    n_prompts: Count
    n_tokens: Count
    noise_floor: Number = None
    method: str = ""
    verdict: ClauseVerdict
    warn: bool = False
    unit: str = ""
    path: str = ""
    p_fail: Number = None
    clipped: Count = 0
    optional: bool = False

    @property
    def decides(self) -> bool:
        """False where an optional slice lacks evidence: that is told, and stops no pass."""
        return not (self.optional and self.verdict in ("UNOBSERVED", "INCONCLUSIVE"))

    @classmethod
    def of(cls, measurement: Measurement) -> Self:
        """The row of a measurement."""
        return cls(**asdict(measurement))


class Finding(StrictModel):
    """A coded cause. evidence: rows that show it. remedy: what to change or run."""

    code: str
    title: str
    severity: Severity
    evidence: list[Facts] = Field(default_factory=list)
    remedy: str
    clause: str | None = None
    slice: str | None = None

    _plain = field_validator("evidence", mode="before")(plain)


class ChainRow(_Row):
    """One quantity of the chain. measured: its estimate; upper: its confidence bound; bound: what
    the link before it implies; slack: bound / measured; vacuous: the bound says nothing;
    useful_horizon: longest response, in tokens, for which it would."""

    quantity: str
    measured: Number
    upper: Number
    bound: Number
    slack: Number
    vacuous: bool
    useful_horizon: Number = None
    formula: str


class Chain(StrictModel):
    """The bounds of a slice, by the largest drift (sup) or by the mean KL (rms)."""

    slice: str
    route: Literal["rms", "sup"]
    rows: list[ChainRow]


class FlipBin(_Row):
    """Flips where the reference margin is in [lo, hi) nats; hi null: no upper end."""

    lo: Number
    hi: Number
    n: Count
    rate: Number
    lower: Number
    upper: Number


class PositionBin(_Row):
    """KL(q || p) at response positions [lo, hi), nats."""

    lo: Number
    hi: Number
    n: Count
    mean: Number
    p95: Number


class ProbabilityBin(_Row):
    """Tokens whose reference probability is in [lo, hi); nats."""

    lo: Number
    hi: Number
    n: Count
    mean: Number
    mean_abs_dlp: Number


class Scatter(StrictModel):
    """Log-probs of the same tokens on both sides, nats."""

    reference: list[Annotated[float, Field(allow_inf_nan=False)]] = Field(
        default_factory=list, max_length=MAX_SCATTER
    )
    engine: list[Annotated[float, Field(allow_inf_nan=False)]] = Field(
        default_factory=list, max_length=MAX_SCATTER
    )

    @model_validator(mode="after")
    def _paired(self) -> Self:
        if len(self.reference) != len(self.engine):
            raise ValueError(f"{len(self.reference)} reference points, {len(self.engine)} engine")
        return self


class WorstToken(_Row):
    """A token with a large KL, and the text that led to it. kl, margin: nats."""

    prompt_id: str
    domain: str = ""
    position: Count
    path: str
    before: str
    token: str
    reference_top: str
    engine_top: str
    reference_top_prob: Number
    engine_top_prob: Number
    reference_prob: Number
    engine_prob: Number
    kl: Number
    margin: Number
    flip: bool


class ProbeRow(_Row):
    """The engine against itself, mean over prompts."""

    probe: str
    metric: str
    value: Number
    n_prompts: Count
    n_tokens: Count


class Views(StrictModel):
    """What the charts draw. For the eye: verdicts come from ``measurements`` alone."""

    flip_by_margin: list[FlipBin] = Field(default_factory=list)
    kl_by_position: list[PositionBin] = Field(default_factory=list)
    kl_by_reference_prob: list[ProbabilityBin] = Field(default_factory=list)
    logprob_scatter: Scatter = Field(default_factory=Scatter)
    worst_tokens: list[WorstToken] = Field(default_factory=list)
    probes: list[ProbeRow] = Field(default_factory=list)
