"""A first pass over traffic logs: every line is checked, and who made it, before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_contracts.errors import InputError
from mismatch_audit.monitor.traffic import (
    ReadCounts,
    TrafficRow,
    TrafficStage,
    read_traffic,
    rotated_files,
)
from mismatch_audit.reports.escape import visible

ANY = "any"


@dataclass(frozen=True)
class Choice:
    """Which rows are meant. weights_version: None takes any, and rows that do not tell."""

    stage: TrafficStage
    build: str
    weights_version: int | str | None


@dataclass
class Survey:
    """What logs hold: rows by stage, build and weights version."""

    counts: ReadCounts = field(default_factory=ReadCounts)
    stages: Counter[TrafficStage] = field(default_factory=Counter)
    builds: Counter[str] = field(default_factory=Counter)
    versions: Counter[int | str | None] = field(default_factory=Counter)


def expand(logs: Sequence[Path]) -> list[Path]:
    """Each log with its rotated files, oldest first. Raises InputError where there is none."""
    found: dict[Path, None] = {}
    for log in logs:
        files = rotated_files(log)
        if not files:
            raise InputError("no such log", where=str(log), fix="give a traffic log (JSON lines)")
        found.update(dict.fromkeys(files))
    return list(found)


def survey(
    files: Sequence[Path], *, skip_bad: bool, stage: str | None, build: str | None
) -> Survey:
    """Read everything once. Raises InputError for a bad line unless skip_bad."""
    found = Survey()
    for file in files:
        for row in read_traffic(file, skip_bad=skip_bad, counts=found.counts):
            found.stages[row.stage] += 1
            if stage is None or row.stage == stage:
                found.builds[row.engine_build] += 1
                if build is None or row.engine_build == build:
                    found.versions[row.weights_version] += 1
    return found


def choose(
    found: Survey,
    *,
    stage: TrafficStage | None,
    build: str | None,
    weights_version: str | None,
    weights_promised: bool,
) -> Choice:
    """One stage, one build, one set of weights: the only ones there, or those asked for.

    weights_promised: the contract binds the weights, so that a log that does not tell them cannot
    be taken without saying so. Raises InputError where a choice is needed and was not made.
    """
    if not found.counts.rows:
        raise InputError("the logs hold no request", fix="give logs with at least one line")
    stage = stage or _only("stages", list(found.stages), "--stage")
    if not found.builds:
        raise InputError(
            f"no request of stage {stage}", fix=f"stages there: {', '.join(sorted(found.stages))}"
        )
    build = build or _only("engine builds", list(found.builds), "--build")
    if not found.versions:
        raise InputError(
            f"no request of build {build}",
            fix=f"builds there: {visible(', '.join(sorted(found.builds)))}",
        )
    if weights_version is not None:
        return Choice(stage, build, _version(weights_version, found))
    told = [v for v in found.versions if v is not None]
    if told:
        return Choice(stage, build, _only("weights versions", told, "--weights-version"))
    if weights_promised:
        raise InputError(
            "the log does not tell which weights answered, and the contract binds them",
            fix=f"write weights_version, or take them on trust with --weights-version {ANY}",
        )
    return Choice(stage, build, None)


def _only(what: str, values: list[Any], option: str) -> Any:
    if len(values) > 1:
        shown = visible(", ".join(sorted(map(str, values))[:8]))
        raise InputError(f"the log holds several {what}: {shown}", fix=f"choose one with {option}")
    return values[0]


def _version(text: str, found: Survey) -> int | str | None:
    if text == ANY:
        return None
    for version in found.versions:
        if version is not None and str(version) == text:
            return version
    shown = visible(", ".join(sorted(str(v) for v in found.versions)[:8]))
    raise InputError(f"no request of weights version {text}", fix=f"versions there: {shown}")


def chosen_rows(files: Sequence[Path], choice: Choice, *, skip_bad: bool) -> Iterator[TrafficRow]:
    """The rows of the choice; those of other weights too, which are then told as unusable."""
    for file in files:
        for row in read_traffic(file, skip_bad=skip_bad):
            if row.stage == choice.stage and row.engine_build == choice.build:
                yield row
