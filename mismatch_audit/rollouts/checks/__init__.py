"""Checks of meaning on recorded rollouts: each names one cause, with evidence and a fix.

checks = all_checks()
for batch in source: [check.update(batch) for check in checks]
results = explain([r for check in checks for r in check.finish(header)])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mismatch_audit.rollouts.checks.base import Check, CheckResult
from mismatch_audit.rollouts.checks.ranking import explain

if TYPE_CHECKING:
    from mismatch_audit.rollouts.checks.tokens import Tokenizer

__all__ = ["Check", "CheckResult", "all_checks", "explain"]


def all_checks(tokenizer: Tokenizer | None = None) -> list[Check]:
    """New checks, ready for one log, which share one bounded sample of its prompts.

    tokenizer: of the model, for the round trip of decode and encode; without it that check is
    unobserved.
    """
    from mismatch_audit.rollouts.checks import (
        alignment,
        corrections,
        engine_state,
        level,
        plumbing,
        positions,
        sampling,
        strata_checks,
        support,
        tokens,
        turns,
        weights,
    )
    from mismatch_audit.rollouts.checks.sample import Sample

    sample = Sample()
    return [
        tokens.TokenIds(),
        tokens.RoundTrip(sample, tokenizer),
        alignment.ShiftedLogprobs(sample),
        alignment.ZeroLogprobs(),
        alignment.LossOnUnsampled(),
        plumbing.CopiedColumn(),
        plumbing.MissingLogprobs(),
        sampling.Temperature(sample),
        sampling.RescoreTemperature(sample),
        support.Truncation(sample),
        support.RepetitionPenalty(sample),
        corrections.PolicyVersions(),
        engine_state.EngineAge(),
        engine_state.PrefixCache(),
        engine_state.EncoderCache(),
        engine_state.Resume(),
        weights.InitialModel(),
        weights.WeightSync(),
        strata_checks.LeftPadding(),
        strata_checks.Routing(),
        strata_checks.MicroBatch(),
        strata_checks.TrainerNoise(),
        strata_checks.Engine(),
        strata_checks.Environment(),
        positions.PositionGrowth(sample),
        positions.LastToken(sample),
        positions.HeavyTail(sample),
        tokens.EndOfSequence(),
        tokens.TurnSeparator(sample),
        turns.PrefixExtension(),
        corrections.AppliedWeights(sample),
        corrections.RatioForm(),
        plumbing.Aggregation(),
        level.Level(),
    ]
