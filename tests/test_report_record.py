"""The record is the one source of every report: it must survive a round trip unchanged, say what
JSON cannot, refuse to contradict itself, and be refused when it is of another make. The published
schema must be the one that the models have."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from pydantic import ValidationError
from report_fixtures import document, hostile, many_slices, record, row

from kernel_contracts.errors import InputError
from kernel_contracts.measurement import Measurement
from mismatch_audit.reports.record import (
    SCHEMA_PATH,
    MeasurementRow,
    Record,
    load_record,
    record_json_schema,
    record_text,
    save_record,
)

VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE", "UNOBSERVED", "NOT_COMPARABLE")
SAMPLES = [*(record(v) for v in VERDICTS), many_slices(), hostile()]


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    """What is read is what was written, and the same record gives the same bytes."""
    for i, subject in enumerate(SAMPLES):
        path = tmp_path / f"{i}.json"
        save_record(subject, path)
        assert load_record(path) == subject
        assert record_text(load_record(path)) == path.read_text(encoding="utf-8")


def test_the_published_schema_is_the_models_own() -> None:
    """A change of the models without ``write_schema()`` leaves readers with a wrong schema."""
    published = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))
    assert published == record_json_schema()
    jsonschema.Draft202012Validator.check_schema(published)


def test_every_record_obeys_the_published_schema_and_a_damaged_one_does_not() -> None:
    schema = jsonschema.Draft202012Validator(json.loads(SCHEMA_PATH.read_text(encoding="utf-8")))
    for subject in SAMPLES:
        schema.validate(json.loads(record_text(subject)))
    for spoil in ({"verdict": "OK"}, {"extra": 1}, {"counts": {"prompts": 1}}):
        damaged = json.loads(record_text(record())) | spoil
        assert list(schema.iter_errors(damaged)), spoil


def test_non_finite_numbers_are_said_and_never_written() -> None:
    """null where the number was, its name in ``detail``; no NaN or Infinity token in the text."""
    odd = row(value=math.nan, upper=math.inf, lower=np.float32(-math.inf), verdict="FAIL",
              detail="kept")  # fmt: skip
    subject = record(
        measurements=[odd],
        environment={"x": math.nan, "y": [math.inf, {"z": np.float64(-math.inf)}]},
        findings=[{"code": "X", "title": "t", "severity": "note", "remedy": "",
                   "evidence": [{"kl": math.nan}]}],
    )  # fmt: skip
    written = subject.measurements[0]
    assert (written.value, written.lower, written.upper) == (None, None, None)
    assert written.detail == ("kept; value is not a number; lower is infinite; upper is infinite")
    assert subject.environment == {"x": "nan", "y": ["inf", {"z": "-inf"}]}
    assert subject.findings[0].evidence == [{"kl": "nan"}]

    def refuse(word: str) -> None:
        raise AssertionError(word)

    json.loads(record_text(subject), parse_constant=refuse)


def test_numpy_scalars_and_the_judges_own_rows_are_taken_as_they_are() -> None:
    measured = Measurement(
        clause="S1", slice="all", metric="tv", section="statistical", value=np.float64(0.1),
        lower=None, upper=np.float32(0.5), limit=1, n_prompts=np.int64(3), n_tokens=4,
        verdict="PASS", warn=np.bool_(True),
    )  # fmt: skip
    taken = MeasurementRow.of(measured)
    assert (taken.value, taken.upper, taken.n_prompts, taken.warn) == (0.1, 0.5, 3, True)
    assert type(taken.n_prompts) is int


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "PASS", "exit_code": 0},  # over a failing row
        {"exit_code": 0},  # of another verdict
        {"verdict": "PASS", "exit_code": 0, "measurements": []},  # nothing measured is no pass
        {"started": "yesterday"},
        {"started": "2025-03-01T10:00:00"},  # no zone
        {"unknown": 1},
        {"measurements": [row(n_prompts="126")]},  # strict: no text for a number
        {"measurements": [row(verdict="OK")]},
        {"views": {"logprob_scatter": {"reference": [0.0], "engine": []}}},
        {"views": {"logprob_scatter": {"reference": [0.0] * 2001, "engine": [0.0] * 2001}}},
    ],
)
def test_a_record_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    record()
    with pytest.raises(ValidationError):
        Record.model_validate(document() | change)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not readable"),
        ("[]", "no schema_version"),
        ("{}", "no schema_version"),
        ('{"schema_version": "2.0"}', "schema version 2.0; this program reads 1.0"),
        ('{"schema_version": "1.0"}', "Field required"),
        ('{"schema_version": "1.0", "timings": {"a": NaN}}', "NaN is not JSON"),
    ],
)
def test_a_file_of_another_make_is_refused_with_its_path(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "report.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=said) as caught:
        load_record(tmp_path)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_missing_report_says_whether_the_run_is_unfinished(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no report here"):
        load_record(tmp_path / "nowhere")
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="no report yet") as caught:
        load_record(tmp_path)
    assert "--resume" in str(caught.value)


def test_a_failed_write_keeps_the_old_report_and_leaves_no_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: the disk fills up as the new report is flushed."""
    path = tmp_path / "report.json"
    save_record(record("PASS"), path)
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left"):
        save_record(record("FAIL"), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]
    monkeypatch.undo()
    save_record(record("FAIL"), path)
    assert load_record(path).verdict == "FAIL"
