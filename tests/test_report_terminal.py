"""The terminal report: whole against golden files, within its width at every width, readable
without colour and without UTF-8, and deaf to what a model writes to terminals and CI logs."""

from __future__ import annotations

import re
import unicodedata

import pytest
from report_fixtures import HOSTILE, hostile, identities, many_slices, measurements, record, row
from report_golden import FOLDER, GOLDEN, terminal
from rich.cells import cell_len

from mismatch_audit.reports.advice import WORDS, next_steps, summary
from mismatch_audit.reports.record import Record

VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE", "UNOBSERVED", "NOT_COMPARABLE")
SUBJECTS: dict[str, Record] = {
    **{v: record(v) for v in VERDICTS},
    "many": many_slices(),
    "hostile": hostile(),
}
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("name", [n for n in GOLDEN if n.startswith("terminal")])
def test_golden(name: str) -> None:
    """Any change of a single character is seen (and wanted, or not)."""
    assert GOLDEN[name]() == (FOLDER / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_no_line_is_wider_than_the_terminal_or_a_hundred_columns(name: str, width: int) -> None:
    """But the last, whose paths must stay whole."""
    lines = terminal(SUBJECTS[name], width).splitlines()
    too_wide = [line for line in lines[:-1] if cell_len(line) > min(width, 100)]
    assert not too_wide


@pytest.mark.parametrize("name", SUBJECTS)
def test_colour_adds_colour_only(name: str) -> None:
    """Every word and symbol is there without it; and the only codes are ours."""
    plain, coloured = terminal(SUBJECTS[name]), terminal(SUBJECTS[name], color=True)
    assert "\x1b[" in coloured
    assert _ESCAPES.sub("", coloured) == plain


@pytest.mark.parametrize("verdict", VERDICTS)
def test_verdict_exit_code_and_paths_are_said(verdict: str) -> None:
    subject = record(verdict)
    lines = terminal(subject).splitlines()
    assert WORDS[verdict] in lines[0]
    assert subject.contract.name in lines[0]
    assert lines[-1] == (f"runs/x/report.json, runs/x/report.html   exit code {subject.exit_code}")


def test_hostile_text_sends_nothing_to_the_terminal_and_no_command_to_a_log() -> None:
    """Control characters, bidirectional overrides, rich's markup, and the two marks by which a CI
    runner knows a command."""
    text = terminal(hostile())
    bad = {c for c in text if unicodedata.category(c) in {"Cc", "Cf", "Zl", "Zp"}} - {"\n"}
    assert not bad
    assert "[bold red]markup[/]" in text
    assert not any(line.lstrip().startswith("::") for line in text.splitlines())
    assert "##[" not in terminal(record(findings=[
        {"code": "##[error]x", "title": "::error::x", "severity": "note", "remedy": "::y::"}
    ]))  # fmt: skip
    assert any("\x1b" in t for t in HOSTILE)


def test_a_terminal_without_utf8_is_spared() -> None:
    """Symbols have stand-ins, other scripts question marks; the words stay."""
    text = terminal(record("FAIL"), encoding="ascii")
    assert text.isascii()
    assert "x FAIL" in text
    assert "+ PASS" in text
    assert [len(a) for a in text.splitlines()] == [
        len(b) for b in terminal(record("FAIL")).splitlines()
    ]


def test_many_slices_fold_and_hide_nothing_that_did_not_pass() -> None:
    """The fault looked for: a failing slice folded away with the passing ones."""
    text = terminal(many_slices(60))
    assert "topic=059" in text
    assert "topic=058" in text
    assert "57 more slices: PASS" in text
    assert len(text.splitlines()) < 100
    small = terminal(many_slices(30))
    assert "more slices: PASS" not in small
    assert all(f"topic={i:03d}" in small for i in range(30))


def test_a_name_too_long_for_its_column_is_shown_whole() -> None:
    name = "domain=a very long name of a slice that no column holds"
    assert name in terminal(record(measurements=[row(slice=name, verdict="FAIL")]))


def test_differing_identities_are_marked_and_equal_ones_are_not() -> None:
    facts = identities()
    assert "≠ 91ab02cd91ab" not in terminal(record())
    facts["engine"]["weights"] = "91ab02cd" * 8
    text = terminal(record(identities=facts))
    assert "≠ 91ab02cd91ab" in text
    assert "push them again" in text


def test_the_next_step_follows_from_the_verdict() -> None:
    """One step at least for every outcome, and the one that its cause asks for."""
    assert all(next_steps(record(v)) for v in VERDICTS)
    assert any("14 more prompts" in s for s in next_steps(record("INCONCLUSIVE")))
    assert any("gradient was not measured" in s for s in next_steps(record("UNOBSERVED")))
    assert next_steps(record("NOT_COMPARABLE")) == ["Serve the same checkpoint."]
    assert any("route to reference" in s for s in next_steps(record("FAIL")))
    assert any("head_dtype: float32" in s for s in next_steps(record("FAIL")))
    alone = next_steps(record("FAIL", actions=[]))
    assert any("route domain=multilingual to the reference" in s for s in alone)


def test_ablations_follow_from_what_the_engine_says_it_runs() -> None:
    facts = identities()
    facts["engine"] |= {"kv_cache_dtype": ["fp8"], "head_dtype": "float32"}
    steps = " ".join(next_steps(record(identities=facts)))
    assert "kv_cache_dtype=auto" in steps
    assert "head_dtype: float32" not in steps
    failing_probe = row(clause="R1", slice="probe batch_invariance", section="runtime",
                        metric="kl", verdict="FAIL")  # fmt: skip
    steps = " ".join(next_steps(record(measurements=[failing_probe])))
    assert "batch-invariant" in steps
    counted = row(clause="N1", metric="nonfinite", section="numerical", verdict="FAIL")
    assert "Non-finite" in " ".join(next_steps(record(measurements=[counted])))


def test_the_summary_counts_what_the_record_holds() -> None:
    told = summary(record())
    assert f"{len(measurements())} checks" in told
    assert "1 FAIL" in told
    assert "S2 on domain=multilingual" in told
