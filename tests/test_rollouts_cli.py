"""``audit rollouts`` from the command line: verdicts, exit codes, damaged files, the record."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rollout_logs import jsonl, log, parquet
from typer.testing import CliRunner

from kernel_contracts.errors import InputError
from mismatch_audit.cli.app import app
from mismatch_audit.reports.record import load_record
from mismatch_audit.rollouts.formats import ReadOptions, drain, open_sources
from mismatch_audit.rollouts.run import DEFAULT_CONTRACT

SAMPLE = Path(__file__).parent.parent / "samples" / "contracts" / "rollouts.yaml"


def audit(*arguments: object):
    result = CliRunner().invoke(app, ["rollouts", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_clean_log_passes(tmp_path):
    """Exit 0, a record that loads, and what the log does not have is named, not passed over."""
    path = parquet(tmp_path / "a.parquet", log(120, sd=0.01))
    result = audit(path, "--out", tmp_path / "out")
    record = load_record(tmp_path / "out")
    assert (result.exit_code, record.verdict) == (0, "PASS"), result.output
    assert record.rollouts is not None
    unseen = {row.slice: row.why for row in record.rollouts.unseen}
    assert {"routing", "modality", "cached", "microbatch", "turn"} <= set(unseen)
    assert "routing_changed" in unseen["routing"]
    assert len({row.definition for row in record.rollouts.slices}) >= 20
    assert "NOT OBSERVED" in result.output
    assert "Compare the identities" not in result.output  # said where nothing was comparable
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
    statuses = {c.code: c.status for c in record.rollouts.checks}
    assert statuses["SHIFTED_LOGPROBS"] == "clean"
    assert statuses["ENGINE_SERVES_BASE"] == "unobserved"


def test_a_large_mismatch_fails(tmp_path):
    """0.3 nats of noise breaks the contract: exit 1, and --exit-zero reports all the same."""
    path = parquet(tmp_path / "a.parquet", log(120, sd=0.3))
    assert audit(path, "--out", tmp_path / "out", "--no-checks").exit_code == 1
    record = load_record(tmp_path / "out")
    failed = {(m.clause, m.slice) for m in record.measurements if m.verdict == "FAIL"}
    assert ("S1", "all") in failed
    assert audit(path, "--out", tmp_path / "out", "--no-checks", "--exit-zero").exit_code == 0


def test_shifted_log_probs_are_not_comparable(tmp_path):
    """Meaning comes before numbers: log-probs one token off give exit 4 and no drift at all."""
    path = parquet(tmp_path / "a.parquet", log(200, sd=0.01, shift=1))
    result = audit(path, "--out", tmp_path / "out")
    record = load_record(tmp_path / "out")
    assert (result.exit_code, record.verdict) == (4, "NOT_COMPARABLE"), result.output
    assert record.measurements == []
    assert record.findings[0].code == "SHIFTED_LOGPROBS"


def test_one_damaged_file_does_not_hide_the_others(tmp_path):
    """A JSONL file cut off in its third line: its place is named, exit 2, and the rows before it
    and the other file are audited."""
    good = parquet(tmp_path / "good.parquet", log(60, seed=1))
    bad = jsonl(tmp_path / "bad.jsonl", log(2, 2, seed=2))
    lines = bad.read_text().splitlines(keepends=True)
    bad.write_text("".join(lines[:2]) + lines[2][:200])
    result = audit(bad, good, tmp_path / "absent.jsonl", "--out", tmp_path / "out", "--no-checks")
    assert result.exit_code == 2
    assert f"{bad}:3" in result.output.replace("\n", "")
    assert "absent.jsonl" in result.output
    record = load_record(tmp_path / "out")
    assert record.rollouts is not None
    assert record.verdict != "PASS"
    read = {Path(s.path).name: s for s in record.rollouts.sources}
    assert (read["good.parquet"].sequences, read["good.parquet"].error) == (240, None)
    assert read["bad.jsonl"].sequences == 2
    assert ":3" in (read["bad.jsonl"].error or "")


def test_nothing_to_read_is_an_error(tmp_path):
    """A path that is not there: one message, nothing written as a verdict."""
    with pytest.raises(InputError, match="no such file"):
        audit(tmp_path / "absent.parquet", "--out", tmp_path / "out")
    assert not (tmp_path / "out" / "report.json").exists()


def test_only_one_side_is_unobserved(tmp_path):
    """A log without the trainer's log-probs says nothing about a mismatch: exit 3."""
    path = parquet(tmp_path / "a.parquet", log(80, drop=("trainer_logprob",)))
    result = audit(path, "--out", tmp_path / "out", "--no-checks")
    assert result.exit_code == 3, result.output


def test_jsonl_and_parquet_give_the_same_record(tmp_path):
    """Formats differ in spelling alone: same counts, same measurements, also compressed."""
    batch = log(40)
    plain = jsonl(tmp_path / "b.jsonl", batch)
    packed = tmp_path / "c.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    records = []
    for path in (parquet(tmp_path / "a.parquet", batch), plain, packed):
        audit(path, "--out", tmp_path / path.name.split(".")[0], "--no-checks")
        records.append(load_record(tmp_path / path.name.split(".")[0]))
    for other in records[1:]:
        assert other.counts == records[0].counts
        for mine, theirs in zip(records[0].measurements, other.measurements, strict=True):
            assert mine.slice == theirs.slice
            assert mine.value == pytest.approx(theirs.value)
            assert mine.upper == pytest.approx(theirs.upper)


def read(path: Path, **options):
    problems: list = []
    sources, unopened = open_sources([path], options=ReadOptions(**options))
    rows = sum(b.n_sequences for s in sources for b in drain(s, problems.append))
    return rows, [str(p.error) for p in (*unopened, *problems)]


def test_the_plain_reader_names_file_row_and_column(tmp_path):
    """Each mistake of a plain file: one message with its place; rows before it stand."""
    rows = log(3, 2).to_pylist()

    def written(change) -> Path:
        copy = json.loads(json.dumps(rows))
        change(copy[3])
        path = tmp_path / "x.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in copy))
        return path

    cases = {
        "sampler_logprob has": lambda r: r["sampler_logprob"].pop(),
        "prompt_len": lambda r: r.update(prompt_len=10_000),
        "no value for sample_id": lambda r: r.update(sample_id=None),
        "token_ids": lambda r: r["token_ids"].__setitem__(0, "word"),
    }
    for message, change in cases.items():
        count, errors = read(written(change))
        assert count == 3, message
        assert len(errors) == 1, errors
        assert "x.jsonl:4" in errors[0], errors
        assert message in errors[0]


def test_python_json_is_read_too(tmp_path):
    """NaN and Infinity, which Python writes and JSON has not, 0/1 masks and whole-number ids."""
    rows = log(3, 2).to_pylist()
    for i, row in enumerate(rows):
        row["sample_id"], row["loss_mask"] = i, [int(v) for v in row["loss_mask"]]
    rows[1]["trainer_logprob"][-1] = float("nan")
    rows[2]["trainer_logprob"][-1] = float("-inf")
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources, _ = open_sources([path])
    batches = list(sources[0].batches)
    assert sum(b.n_sequences for b in batches) == 6
    values = np.concatenate([b.tokens("trainer_logprob") for b in batches])
    assert np.isinf(values).sum() == 1
    assert batches[0].tokens("loss_mask").dtype == bool


def test_renamed_columns_and_wide_types(tmp_path):
    """--field OURS=THEIRS, doubles and large lists: converted; a column not there: named."""
    batch = log(3, 2)
    table = pa.Table.from_batches([batch]).rename_columns(
        ["prompt_length" if n == "prompt_len" else n for n in batch.schema.names]
    )
    at = table.schema.names.index("sampler_logprob")
    wide = table.column(at).cast(pa.large_list(pa.float64()))
    path = tmp_path / "x.parquet"
    pq.write_table(table.set_column(at, "sampler_logprob", wide), path)
    assert read(path)[0] == 0
    sources, _ = open_sources([path], "plain", ReadOptions(fields={"prompt_len": "prompt_length"}))
    assert sum(b.n_sequences for b in sources[0].batches) == 6
    _, problems = open_sources([path], "plain", ReadOptions(fields={"prompt_len": "plen"}))
    assert "plen" in str(problems[0].error)


def test_a_truncated_parquet_file_is_named(tmp_path):
    """Half a Parquet file: one message with the path, no traceback."""
    path = parquet(tmp_path / "x.parquet", log(20))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    count, errors = read(path)
    assert count == 0
    assert len(errors) == 1
    assert "x.parquet" in errors[0]


def test_the_packaged_contract_is_the_sample():
    """One contract, twice: in the samples for people, in the package for the command."""
    assert DEFAULT_CONTRACT.read_text() == SAMPLE.read_text()


def test_optional_slices_fail_no_build(tmp_path):
    """In JUnit and SARIF an optional slice without evidence is skipped, or a note, and no error."""
    from mismatch_audit.reports import render

    path = parquet(tmp_path / "a.parquet", log(120, sd=0.01))
    audit(path, "--out", tmp_path / "out", "--no-checks")
    record = load_record(tmp_path / "out")
    assert any(not m.decides for m in record.measurements)
    junit = render(record, "junit")
    assert 'errors="0"' in junit
    assert 'failures="0"' in junit
    levels = {r["level"] for r in json.loads(render(record, "sarif"))["runs"][0]["results"]}
    assert levels <= {"note", "warning"}
