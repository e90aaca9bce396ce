"""Staleness of recorded rollouts, as the rows that the terminal and the page show."""

from __future__ import annotations

from typing import Any

from mismatch_audit.reports.notation import NOTHING, number, percent
from mismatch_audit.reports.rows import Facts

__all__ = ["LAG_HEAD", "PART_HEAD", "lag_rows", "part_rows", "staleness_notes"]

LAG_HEAD = ("lag", "tokens", "mean |d|", "q90 |d|", "KL(q‖p)", "TV", "outside clip", "ESS / n",
            "reward drift ≤")  # fmt: skip
"""d is log p - log q. reward drift: bound over the longest response, in ranges of the reward."""

PART_HEAD = ("lag", "tokens", "kernel error, mean |·|", "policy lag, mean |·|", "share of the lag")
"""Where the engine scored the tokens again at the trainer's weights: log p - log q taken apart."""

_LAGS = 12


def lag_rows(staleness: Facts) -> list[list[str]]:
    """A row a lag in weight updates, fresh first."""
    return [
        [
            str(row.get("lag")),
            f"{int(row.get('tokens') or 0):,}",
            _number(row.get("mean_abs_log_ratio")),
            _number(row.get("q90_abs_log_ratio")),
            _number(row.get("kl_engine_reference")),
            _number(row.get("tv")),
            percent(_real(row.get("share_outside_clip"))),
            _number(row.get("ess_raw")),
            _drift(row.get("bounds")),
        ]
        for row in _dicts(staleness.get("lags"))[:_LAGS]
    ]


def part_rows(staleness: Facts) -> list[list[str]]:
    """A row a lag of the split into kernel error and policy lag; empty without a re-scoring."""
    return [
        [
            str(row.get("lag")),
            f"{int(row.get('tokens') or 0):,}",
            _number(row.get("mean_abs_implementation_error")),
            _number(row.get("mean_abs_policy_lag")),
            percent(_real(row.get("share_of_policy_lag"))),
        ]
        for row in _dicts(staleness.get("decomposition"))[:_LAGS]
    ]


def staleness_notes(staleness: Facts) -> list[str]:
    """The change point over steps, and what the log could not say."""
    notes = []
    trend = staleness.get("trend")
    if isinstance(trend, dict) and isinstance(change := trend.get("change"), dict):
        notes.append(_change(change))
    unobserved = staleness.get("unobserved")
    if isinstance(unobserved, dict):
        notes += [f"{name} unobserved: {why}" for name, why in unobserved.items()]
    return notes


def _change(change: dict[str, Any]) -> str:
    """The trend's change point in words."""
    if "unobserved" in change:
        return f"change over the steps unobserved: {change['unobserved']}"
    level = f"the level of the first steps is {_number(change.get('baseline'))}"
    if change.get("alarm") is None:
        return f"no change over the steps: {level}, the alarm is at {_number(change.get('limit'))}"
    still = "and still is" if change.get("still") else "and has come back since"
    return (
        f"the level rose at step {change.get('since')} (alarm at step {change.get('alarm')}): "
        f"{level}, then {_number(change.get('times_baseline'))} times that, {still}"
    )


def _drift(bounds: Any) -> str:
    found = [b for b in _dicts(bounds) if b.get("response") == "longest"]
    if not found:
        return NOTHING
    if found[0].get("vacuous"):
        return "VACUOUS"
    return _number(found[0].get("reward_drift_over_range"))


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _real(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _number(value: Any) -> str:
    return number(_real(value))
