"""Staleness where people read it: by lag, taken apart where a re-scoring allows, and its gaps."""

from __future__ import annotations

from pathlib import Path

from conftest import ROOT
from report_fixtures import record
from report_golden import terminal

from mismatch_audit.reports import render
from mismatch_audit.reports.record import Rollouts
from mismatch_audit.rollouts.run import audit_sources

LAGS = [
    {"lag": 0, "tokens": 900, "mean_abs_log_ratio": 0.016, "q90_abs_log_ratio": 0.034,
     "kl_engine_reference": 2.0e-4, "tv": 8.0e-3, "share_outside_clip": 0.0, "ess_raw": 0.9996,
     "bounds": [{"response": "longest", "vacuous": False, "reward_drift_over_range": 0.032}]},
    {"lag": 3, "tokens": 450, "mean_abs_log_ratio": 0.21, "q90_abs_log_ratio": 0.5,
     "kl_engine_reference": 0.04, "tv": 0.1, "share_outside_clip": 0.3, "ess_raw": 0.71,
     "bounds": [{"response": "longest", "vacuous": True, "reward_drift_over_range": 1.0}]},
]  # fmt: skip
PARTS = [
    {"lag": 3, "tokens": 450, "mean_abs_implementation_error": 0.017, "mean_abs_policy_lag": 0.2,
     "share_of_policy_lag": 0.93}
]  # fmt: skip


def shown(**facts: object) -> tuple[str, str]:
    """(terminal, page) of a record whose log had this staleness."""
    one = record("PASS").model_copy(
        update={"rollouts": Rollouts(sources=[], staleness=dict(facts))}
    )
    return terminal(one, 120), render(one, "html")


def test_both_reports_show_each_lag_and_both_parts() -> None:
    """A bound that says nothing is VACUOUS, and policy lag stands apart from the kernel's error."""
    for text in shown(lags=LAGS, decomposition=PARTS):
        for word in ("0.21", "VACUOUS", "0.032", "0.71", "0.017", "93.0"):
            assert word in text, word


def test_what_the_log_cannot_say_is_said() -> None:
    for text in shown(lags=[], unobserved={"decomposition": "needs rescore_logprob"}):
        assert "decomposition unobserved: needs rescore_logprob" in text


def test_nothing_is_shown_where_nothing_was_counted() -> None:
    """Without checks the pass does not count lags, and the section is absent."""
    text, page = shown()
    assert "STALENESS" not in text
    assert 'id="staleness"' not in page


def test_the_audit_of_a_log_counts_lags() -> None:
    """The sample log's versions are those of its trainer: one lag, 0, with all of its tokens."""
    path = [Path(ROOT / "samples" / "rollouts" / "plain")]
    audited = audit_sources(path)
    try:
        (row,) = audited.staleness["lags"]
        assert (row["lag"], row["tokens"]) == (0, audited.staleness["tokens"])
        assert row["tokens"] > 0
    finally:
        audited.stream.close()
    blind = audit_sources(path, checks=False)
    blind.stream.close()
    assert blind.staleness == {}
