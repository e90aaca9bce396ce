"""The mirrored-traffic log: strict, streaming, whole lines whatever happens to its writers."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest
from traffic_fixtures import fake_rows, write_log

from kernel_contracts.errors import InputError
from mismatch_audit.monitor import traffic
from mismatch_audit.monitor.traffic import (
    ReadCounts,
    TrafficRow,
    TrafficWriter,
    lines_of,
    read_traffic,
    rotated_files,
)

ROW = json.loads(fake_rows(1)[0].model_dump_json())


def test_a_log_round_trips_through_rotation(tmp_path: Path) -> None:
    """Every row once and in order, over all rotated files."""
    log = write_log(tmp_path / "t.jsonl", fake_rows(50), max_bytes=4000)
    files = rotated_files(log)
    assert len(files) > 3
    assert all(f.stat().st_size <= 4000 for f in files)
    assert [r for f in files for r in read_traffic(f)] == fake_rows(50)


WRONG = [
    ({"engine_logprobs": [0.7] * 12}, "engine_logprobs.0"),
    ({"engine_logprobs": [-1.0] * 11}, "11 values for 12 response tokens"),
    ({"engine_logprobs": [float("nan")] * 12}, "engine_logprobs"),
    ({"time": "2026-01-01 00:00:00"}, "not RFC 3339 in UTC"),
    ({"time": "2026-01-01T00:00:00+02:00"}, "not RFC 3339 in UTC"),
    ({"time": None}, "time"),
    ({"stage": "offline"}, "stage"),
    ({"prompt_token_ids": []}, "prompt_token_ids"),
    ({"prompt_token_ids": [1.5]}, "prompt_token_ids"),
    ({"response_token_ids": [-1] * 12}, "response_token_ids"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"metadata": {"a": {"b": 1}}}, "metadata"),
    ({"metadata": {"a": "b" * 257}}, "metadata"),
    ({"schema_version": "mismatch-audit/traffic/v2"}, "schema_version"),
    ({"extra": 1}, "extra"),
    ({"request_id": ""}, "request_id"),
]


@pytest.mark.parametrize(("change", "field"), WRONG, ids=[f"{i}" for i in range(len(WRONG))])
def test_a_wrong_line_is_told_with_file_and_line(
    tmp_path: Path, change: dict[str, object], field: str
) -> None:
    """And skipped only when asked, and then counted."""
    log = tmp_path / "t.jsonl"
    log.write_text("\n".join(map(json.dumps, [ROW, {**ROW, **change}, ROW])) + "\n")
    with pytest.raises(InputError) as told:
        list(read_traffic(log))
    assert f"{log}:2" in str(told.value)
    assert field in str(told.value)
    counts = ReadCounts()
    assert len(list(read_traffic(log, skip_bad=True, counts=counts))) == 2
    assert (counts.rows, counts.bad) == (2, 1)
    assert field in counts.first_bad


@pytest.mark.parametrize("name", sorted(ROW))
def test_every_field_is_required_but_metadata(tmp_path: Path, name: str) -> None:
    """A missing field is not a default: null says unknown."""
    log = tmp_path / "t.jsonl"
    log.write_text(json.dumps({k: v for k, v in ROW.items() if k != name}) + "\n")
    if name == "metadata":
        assert len(list(read_traffic(log))) == 1
    else:
        with pytest.raises(InputError, match=name):
            list(read_traffic(log))


def test_unknown_log_probs_are_null(tmp_path: Path) -> None:
    """Of one token, or of all."""
    for value in (None, [None, *[-1.0] * 11]):
        row = TrafficRow.model_validate_json(json.dumps({**ROW, "engine_logprobs": value}))
        log = write_log(tmp_path / f"{value is None}.jsonl", [row])
        assert list(read_traffic(log)) == [row]


def test_lines_are_bounded_and_a_torn_last_line_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory stays bounded on a file without newlines; offsets lead back to a torn line."""
    log = tmp_path / "t.jsonl"
    log.write_bytes(b"short\n" + b"x" * 50 + b"\n" + b"ok\n" + b"to")
    lines = list(lines_of(log, max_line=20))
    assert [line.data for line in lines] == [b"short\n", None, b"ok\n"]
    assert (lines[-1].start, lines[-1].end) == (57, 60)
    with log.open("ab") as stream:
        stream.write(b"rn\n")
    assert [line.data for line in lines_of(log, offset=60)] == [b"torn\n"]
    monkeypatch.setattr(traffic, "MAX_LINE", 100)
    with TrafficWriter(tmp_path / "w.jsonl") as writer, pytest.raises(InputError, match="bytes"):
        writer.write(fake_rows(1)[0])


def _write(path: str, first: int) -> None:
    write_log(Path(path), fake_rows(40, first=first), max_bytes=20_000)


def test_writers_do_not_mix_lines(tmp_path: Path) -> None:
    """Four processes, one log, rotation in the middle."""
    log = tmp_path / "t.jsonl"
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=_write, args=(str(log), 100 * i)) for i in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    ids = [r.request_id for f in rotated_files(log) for r in read_traffic(f)]
    assert sorted(ids) == sorted(f"r{100 * i + j}" for i in range(4) for j in range(40))


def test_a_writer_cuts_off_what_a_killed_one_left(tmp_path: Path) -> None:
    """Else its next line would be joined to half a line, and both lost."""
    log = write_log(tmp_path / "t.jsonl", fake_rows(2))
    with log.open("ab") as stream:
        stream.write(b'{"schema_version": "mism')
    write_log(log, fake_rows(1, first=2))
    assert list(read_traffic(log)) == fake_rows(3)


def test_old_files_go_when_asked(tmp_path: Path) -> None:
    """keep: rotated files that stay; their numbers go on rising."""
    log = write_log(tmp_path / "t.jsonl", fake_rows(60), max_bytes=3000, keep=2)
    names = [p.name for p in rotated_files(log)]
    assert len(names) == 3
    assert names[-1] == "t.jsonl"
    assert int(names[0].rpartition(".")[2]) > 2
    assert os.path.exists(f"{log}.lock")
