"""Checks of meaning on recorded rollouts: each names one cause, with evidence and a fix."""

from __future__ import annotations

from mismatch_audit.rollouts.checks.base import Check, CheckResult

__all__ = ["Check", "CheckResult", "all_checks"]


def all_checks() -> list[Check]:
    """New checks, ready for one log."""
    from mismatch_audit.rollouts.checks.plumbing import Aggregation, CopiedColumn, MissingLogprobs

    return [CopiedColumn(), MissingLogprobs(), Aggregation()]
