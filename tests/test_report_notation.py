"""One notation for numbers in every projection: enough digits to compare, few enough to read, and
never a rounded number that says something else (0.000 for a small one, 100 % for almost all)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_fixtures import identities, row

from mismatch_audit.reports.identity_table import all_rows, identity_rows
from mismatch_audit.reports.notation import (
    clause_title,
    duration,
    fact,
    interval,
    limit,
    number,
    percent,
    plural,
    probability,
    quantity,
    short_digest,
    times,
)
from mismatch_audit.reports.rows import Identities, MeasurementRow


def _row(**changes: object) -> MeasurementRow:
    return MeasurementRow.model_validate(row(**changes))


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0"), (1.4e-3, "1.4e-3"), (-2.04e-7, "-2.0e-7"), (0.0123, "0.0123"),
     (0.00996, "0.00996"), (1.234, "1.23"), (123.4, "123"), (999.6, "1,000"), (12345.6, "12,346"),
     (7455193.0, "7.5e6"), (math.inf, "inf")],
)  # fmt: skip
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0 %"), (0.0301, "3.0 %"), (2.1e-4, "0.021 %"), (1e-7, "1.0e-5 %"),
     (0.1234, "12.3 %"), (1.0, "100 %"), (0.9996, "100 %"), (0.994, "99.4 %")],
)  # fmt: skip
def test_percentages(value: float | None, text: str) -> None:
    assert percent(value) == text


@given(st.floats(-1e12, 1e12, allow_nan=False))
def test_a_number_is_within_five_percent_of_its_text(value: float) -> None:
    """Two significant digits or more; what is not zero never reads as zero."""
    read = float(number(value).replace(",", ""))
    assert abs(read - value) <= 0.05 * abs(value)
    assert (read == 0) == (value == 0)


@given(st.floats(0, 1, allow_nan=False))
def test_a_probability_is_within_its_last_digit(value: float) -> None:
    read = float(probability(value))
    assert abs(read - value) <= max(0.0005001, 0)
    assert (read == 0) == (value == 0)


def test_a_limit_is_written_as_a_person_would() -> None:
    assert limit(_row(limit=2.0e-3)) == "≤ 2e-3"
    assert limit(_row(limit=3.3e-4)) == "≤ 3.3e-4"
    assert limit(_row(limit=1.05, unit="x")) == "≤ 1.05"
    assert limit(_row(limit=0.05, metric="flip_rate", unit="")) == "≤ 5 %"
    assert limit(_row(limit=0.9, metric="ess_ratio", unit="")) == "≥ 0.9"
    assert limit(_row(limit=None)) == "–"
    assert limit(_row(limit=0.0)) == "≤ 0"


def test_intervals_and_values_follow_their_unit() -> None:
    assert interval(_row()) == "[1.1e-3, 1.8e-3]"
    assert interval(_row(metric="flip_rate", unit="", lower=0.01, upper=0.04)) == "[1.0, 4.0 %]"
    assert interval(_row(value=3.0, lower=3.0, upper=3.0)) == "exact"
    assert interval(_row(lower=None, upper=None)) == "–"
    assert interval(_row(lower=1e-3, upper=math.inf)) == "[1.0e-3, –]"
    ratio = _row(metric="mult_prob_error", unit="x", value=1.0402)
    assert quantity(ratio, ratio.value) == "1.0402"
    assert clause_title(_row(unit="share of tokens > 1", metric="drift", path="both")) == (
        "logit drift, share of tokens > 1, decode and prefill"
    )


def test_small_texts() -> None:
    assert plural(1, "prompt") == "1 prompt"
    assert plural(1200, "prompt") == "1,200 prompts"
    assert [duration(s) for s in (0.42, 12.0, 185.0, 7440.0)] == [
        "0.4 s", "12 s", "3 min 5 s", "2 h 4 min"
    ]  # fmt: skip
    assert times(3.71) == "3.71x"
    assert times(11826.0) == "1.2e4x"
    assert short_digest("sha256:" + "ab" * 32) == "abababababab"
    assert short_digest("not a digest") == "not a digest"
    assert fact({"a": [1, True, None], "b": {}}) == "a=1, yes, –, b=none"


def test_an_unknown_fact_is_no_difference_but_a_known_other_one_is() -> None:
    """The fault looked for: a mark where nothing is known, or none where weights differ."""
    facts = identities()
    facts["engine"].pop("vocab_size")
    facts["engine"]["weights"] = "f" * 64
    rows = {r.name: r for r in identity_rows(Identities.model_validate(facts))}
    assert not rows["vocabulary"].differs
    assert rows["weights"].differs
    assert not rows["tokenizer"].differs


def test_every_fact_is_in_the_whole_table_and_the_usual_ones_not_in_the_short_one() -> None:
    facts = identities()
    facts["engine"] |= {"cache_dtype": "auto", "tensor_parallel": 1, "batch_invariant": "0"}
    facts["engine"]["model"] = "/cache/models--org--name/snapshots/0123abcd"
    usual = Identities.model_validate(facts)
    assert "KV cache asked" not in {
        r.name for r in identity_rows(Identities.model_validate(identities()))
    }
    short = {r.name for r in identity_rows(usual)}
    assert "quantization" not in short
    assert not short & {"KV cache asked", "tensor parallel", "batch invariant"}
    assert next(r for r in identity_rows(usual) if r.name == "model").engine == "org/name"
    assert {"padding", "torch", "head_check"} <= {r.name for r in all_rows(usual)}
    facts["engine"] |= {"cache_dtype": "fp8", "tensor_parallel": 2, "batch_invariant": "1"}
    short = {r.name for r in identity_rows(Identities.model_validate(facts))}
    assert short >= {"KV cache asked", "tensor parallel", "batch invariant"}
