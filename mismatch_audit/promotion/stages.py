"""Stages, legal moves between them, and what a stage has shown so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from kernel_contracts.errors import InputError
from kernel_contracts.promotion import STAGES, Stage, StageRule
from mismatch_audit.monitor.trackers import Standing

ACTIONS = ("start", "advance", "rollback")


def after(stage: Stage) -> Stage | None:
    """The next stage; None after full."""
    at = STAGES.index(stage)
    return STAGES[at + 1] if at + 1 < len(STAGES) else None


def violation_target(stage: Stage, rule: StageRule) -> Stage:
    """Where a broken promise takes a build that is at a live stage."""
    return "offline" if rule.on_violation == "offline" else STAGES[STAGES.index(stage) - 1]


def illegal(action: str, from_stage: str | None, to_stage: str) -> str | None:
    """Why a decision is not a legal move, or None."""
    if to_stage not in STAGES or (from_stage is not None and from_stage not in STAGES):
        return f"unknown stage {to_stage if to_stage not in STAGES else from_stage!r}"
    if action == "start":
        return None if from_stage is None and to_stage == "offline" else "a start leads to offline"
    if from_stage is None:
        return f"{action} before the start"
    step = STAGES.index(to_stage) - STAGES.index(from_stage)
    if action == "advance":
        return None if step == 1 else f"advance from {from_stage} to {to_stage}"
    if action == "rollback":
        return None if step < 0 else f"rollback from {from_stage} to {to_stage}"
    return f"unknown action {action!r}"


@dataclass(frozen=True)
class Exposure:
    """What a stage has seen. hours: from the first judged request to the last."""

    prompts: int = 0
    tokens: int = 0
    requests: int = 0
    unusable: int = 0
    first: str | None = None
    last: str | None = None

    @property
    def hours(self) -> float:
        if self.first is None or self.last is None:
            return 0.0
        span = datetime.fromisoformat(self.last) - datetime.fromisoformat(self.first)
        return span.total_seconds() / 3600

    @property
    def unusable_share(self) -> float:
        seen = self.requests + self.unusable
        return self.unusable / seen if seen else 0.0

    def lacks(self, rule: StageRule) -> list[str]:
        """What the rule asks for beyond this, in words."""
        missing = []
        if self.prompts < rule.min_prompts:
            missing.append(f"{self.prompts} prompts of {rule.min_prompts}")
        if self.tokens < rule.min_tokens:
            missing.append(f"{self.tokens} tokens of {rule.min_tokens}")
        if self.hours < rule.min_hours:
            missing.append(f"{self.hours:.2f} hours of {rule.min_hours:g}")
        if self.unusable_share > rule.max_unusable:
            missing.append(
                f"{self.unusable_share:.1%} of the requests could not be judged, "
                f"{rule.max_unusable:.1%} are allowed"
            )
        return missing

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "hours": round(self.hours, 4)}


@dataclass(frozen=True)
class Assessment:
    """Where a stage stands. verdict: FAIL if a promise is broken, PASS if every promise was shown
    to be kept and the exposure suffices, UNOBSERVED or INCONCLUSIVE else."""

    stage: Stage
    verdict: str
    exposure: Exposure
    standings: Sequence[Standing]
    lacks: list[str] = field(default_factory=list)

    @property
    def failing(self) -> list[Standing]:
        return [s for s in self.standings if s.verdict == "FAIL"]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: what a decision keeps as its evidence."""
        return {
            "stage": self.stage,
            "verdict": self.verdict,
            "exposure": self.exposure.to_dict(),
            "clauses": [s.to_dict() for s in self.standings],
            "lacks": self.lacks,
        }


def assess(
    stage: Stage, rule: StageRule, exposure: Exposure, standings: Sequence[Standing]
) -> Assessment:
    """A live stage against its rule. No clause at all is UNOBSERVED, never a pass."""
    lacks = exposure.lacks(rule)
    for s in standings:
        if s.verdict == "UNOBSERVED":
            lacks.append(f"{s.clause} on {s.slice}: nothing observed")
        elif s.verdict == "INCONCLUSIVE":
            lacks.append(f"{s.clause} on {s.slice}: undecided after {s.n} prompts")
    verdicts = {s.verdict for s in standings}
    if "FAIL" in verdicts:
        verdict = "FAIL"
    elif (
        not standings
        or not exposure.prompts
        or "UNOBSERVED" in verdicts
        or exposure.unusable_share > rule.max_unusable
    ):
        verdict = "UNOBSERVED"
    elif lacks:
        verdict = "INCONCLUSIVE"
    else:
        verdict = "PASS"
    return Assessment(stage, verdict, exposure, standings, lacks)


def check_stage(name: str) -> Stage:
    """Raises InputError for a word that is no stage."""
    if name not in STAGES:
        raise InputError(f"no stage {name!r}", fix=f"stages: {', '.join(STAGES)}")
    found: Stage = name
    return found
