"""The contract's rules for promotion: what each stage must show before the next one, written down
before the evidence is seen.

Stages: offline (an audit), shadow (mirrored traffic), canary (a share of the traffic), full.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from kernel_contracts.clauses import Names, Strict

Stage = Literal["offline", "shadow", "canary", "full"]
STAGES: tuple[Stage, ...] = get_args(Stage)
LIVE_STAGES: tuple[Stage, ...] = STAGES[1:]

SAMPLED_METRICS = frozenset({"abs_dlp", "k3", "mult_prob_error", "ess_ratio"})
"""What the log-probs of the sampled tokens alone can show: no full rows travel with traffic."""


class StageRule(Strict):
    """What a stage with live traffic must show, and what ends it."""

    min_prompts: Annotated[int, Field(ge=1)] = 300
    """Prompts that must have been judged; the sequential tests are tuned to it."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Response tokens that must have been judged."""
    min_hours: Annotated[float, Field(ge=0)] = 0.0
    """Hours of traffic, from the first judged request to the last."""
    max_unusable: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Largest share of requests that could not be judged (no log-probs, truncated sampling)."""
    clauses: Names | None = None
    """Clauses that must hold. Default: every clause that sampled tokens can show."""
    on_violation: Literal["offline", "previous"] = "offline"
    """Where a broken promise takes the build back to."""


class Promotion(Strict):
    """Rules of the three stages with live traffic."""

    shadow: StageRule = Field(default_factory=StageRule)
    """Mirrored requests; clients get another build's answers."""
    canary: StageRule = Field(default_factory=StageRule)
    """A share of the clients gets this build's answers."""
    full: StageRule = Field(default_factory=StageRule)
    """All clients do; the tests go on, and a broken promise takes the build back."""
    weights: Literal["same", "any"] = "same"
    """same: the evidence is of one set of weights, and others start over. any: of the build,
    whatever weights it serves."""
    max_response_tokens: Annotated[int, Field(ge=1)] = 4096
    """A-priori cap on the response tokens of one prompt, for clauses weighted by tokens."""

    def rule(self, stage: str) -> StageRule:
        """The rule of shadow, canary or full. Raises KeyError."""
        if stage not in LIVE_STAGES:
            raise KeyError(stage)
        rule: StageRule = getattr(self, stage)
        return rule
