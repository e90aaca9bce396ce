"""``audit rollouts`` as one call: read, judge, write report.json and report.html."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from kernel_contracts.errors import InputError
from mismatch_audit.reports.record import Record, save_record
from mismatch_audit.rollouts.formats.base import Problem, ReadOptions, Source
from mismatch_audit.rollouts.report import record_of
from mismatch_audit.rollouts.rescoring import Rescoring
from mismatch_audit.rollouts.run import DEFAULT_CONTRACT, Progress, audit_sources


def audit_rollouts(
    paths: Sequence[Path],
    out: Path,
    *,
    format: str = "auto",
    contract: Path | None = None,
    options: ReadOptions | None = None,
    rescore: str | None = None,
    rescore_engine: str | None = None,
    engine_dtype: str = "bfloat16",
    max_rows: int = 0,
    checks: bool = True,
    progress: Progress = lambda stage, done, total: None,
    on_sources: Callable[[list[Source], list[Problem]], None] = lambda sources, problems: None,
) -> tuple[Record, list[str]]:
    """The record, and one message for each place that could not be read.

    rescore: checkpoint that scores the tokens where the sources lack the trainer's log-probs.
    rescore_engine: checkpoint that vLLM serves in engine_dtype; see `EngineRescorer`.
    Raises InputError where nothing at all could be opened, EngineError where the engine fails.
    """
    started = _now()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder: {error.strerror}", where=str(out)) from error
    rescoring = Rescoring(
        rescore, rescore_engine, engine_dtype=engine_dtype, log=out / "engine.log"
    )

    def announce(sources: list[Source], problems: list[Problem]) -> None:
        rescoring.announce(sources)
        on_sources(sources, problems)

    try:
        audited = audit_sources(
            paths,
            format=format,
            contract=contract,
            options=rescoring.options(options or ReadOptions()),
            checks=checks,
            progress=progress,
            on_sources=announce,
            transform=rescoring.score,
        )
    finally:
        rescoring.close()
    progress("verdicts", 0, 1)
    record = record_of(audited, started, _now(), max_rows)
    progress("verdicts", 1, 1)
    shutil.copyfile(contract or DEFAULT_CONTRACT, out / "contract.yaml")
    write(record, out)
    damaged = [str(p.error) for p in audited.unopened]
    damaged += [error for read in audited.reads for error in read.errors]
    return record, damaged


def write(record: Record, out: Path) -> None:
    """``report.json`` and ``report.html``."""
    from mismatch_audit.reports.html import render_html

    save_record(record, out / "report.json")
    temporary = out / "report.html.tmp"
    temporary.write_text(render_html(record), encoding="utf-8")
    temporary.replace(out / "report.html")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
