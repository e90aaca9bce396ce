"""Progress: in a log a stage's begin and end and little between; a reader says how far it is."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from mismatch_audit.cli.progress import progress_display
from mismatch_audit.rollouts.formats import ReadOptions, open_sources

ROOT = Path(__file__).parents[1]


def test_a_log_gets_the_first_and_the_last_line_of_a_stage() -> None:
    out = io.StringIO()
    with progress_display(Console(file=out)) as tell:
        for done in range(1001):
            tell("prompts", done, 1000)
        tell("verdicts", 1, 1)
    lines = [line.split("] ")[1] for line in out.getvalue().splitlines()]
    assert lines == [
        "prompts through both: 0/1000",
        "prompts through both: 1000/1000",
        "verdicts: 1/1",
    ]


def test_plain_readers_say_how_much_of_the_file_is_behind_them(tmp_path: Path) -> None:
    """Shares only rise, and end with the whole file."""
    import pyarrow.parquet as pq

    sample = ROOT / "samples" / "rollouts" / "plain" / "rollouts.parquet"
    rows = pq.read_table(sample)
    jsonl = tmp_path / "rollouts.jsonl"
    rows.to_pandas().to_json(jsonl, orient="records", lines=True)
    for path in (sample, jsonl):
        (source,), _ = open_sources([path], "plain", ReadOptions(batch_tokens=200))
        assert source.bytes_done is not None
        seen = [source.bytes_done()]
        for _ in source.batches:
            seen.append(source.bytes_done())
        assert seen[0] == 0
        assert seen == sorted(seen)
        assert seen[-1] == path.stat().st_size
