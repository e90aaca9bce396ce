"""The policy-gradient bias where people read it: in the terminal and in Markdown, with no end where
there is none, and absent where nothing was measured."""

from __future__ import annotations

from report_fixtures import record
from report_golden import terminal

from mismatch_audit.reports import render

ROWS = [
    {"slice": "all", "estimator": "none", "relative_bias": 0.113, "lower": 0.0, "upper": None,
     "bias_to_noise_upper": 0.0612, "harmless_batch": 267.0, "variance_ratio": 1.0},
    {"slice": "all", "estimator": "token TIS 2", "relative_bias": 0.0, "lower": 0.0, "upper": 0.21,
     "bias_to_noise_upper": 0.0, "harmless_batch": None, "variance_ratio": 1.04},
    {"slice": "domain=code", "estimator": "none", "relative_bias": None, "lower": 0.0,
     "upper": None, "bias_to_noise_upper": None, "harmless_batch": 0.0, "variance_ratio": None},
    {"slice": "domain=code", "estimator": "token TIS 2", "relative_bias": 9.9, "lower": 0.0},
]  # fmt: skip


def test_both_reports_show_every_correction_on_the_whole_and_the_plain_bias_on_slices() -> None:
    """An upper end that does not exist is `no end`; a bias of which nothing is known, a dash."""
    shown = record("PASS").model_copy(update={"gradient": ROWS})
    for text in (terminal(shown), render(shown, "markdown")):
        assert "POLICY GRADIENT" in text.upper()
        lines = [line for line in text.splitlines() if "0.113" in line]
        assert len(lines) == 1
        assert "no end" in lines[0]
        assert "267 prompts" in lines[0]
        assert "0.0612" in lines[0]
        assert "token TIS 2" in text
        assert "any batch" in text
        assert "9.9" not in text  # a correction on a slice is in the HTML report


def test_nothing_measured_shows_nothing() -> None:
    assert "POLICY GRADIENT" not in terminal(record("PASS"))
    assert "Policy gradient" not in render(record("PASS"), "markdown")


def test_a_narrow_terminal_keeps_its_width() -> None:
    shown = record("PASS").model_copy(update={"gradient": ROWS})
    text = terminal(shown, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "≤ 0.0612" in text
    assert "267 prompts" not in text  # the last column gave way, whole


def test_one_target_a_slice() -> None:
    """The same estimator against a second target would read as a contradiction."""
    twice = [{**ROWS[0], "target": "sequence weights"},
             {**ROWS[0], "target": "token weights", "relative_bias": 0.777}]  # fmt: skip
    text = terminal(record("PASS").model_copy(update={"gradient": twice}))
    assert "0.113" in text
    assert "0.777" not in text
