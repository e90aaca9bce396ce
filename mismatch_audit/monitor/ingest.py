"""Mirrored traffic -> re-scored tokens -> verdicts per slice, and evidence for promotion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kernel_contracts.contract import Contract
from kernel_contracts.errors import InputError
from kernel_contracts.loading import contract_digest, load_contract
from kernel_contracts.promotion import Promotion
from mismatch_audit import identity
from mismatch_audit.monitor.frames import ScoredRow, tables
from mismatch_audit.monitor.ingest_folder import JUDGED, IngestFolder
from mismatch_audit.monitor.ingest_report import report_of
from mismatch_audit.monitor.observe import observable_clauses, observe
from mismatch_audit.monitor.sampled import sampled_contract
from mismatch_audit.monitor.survey import Choice, Survey, choose, chosen_rows, expand, survey
from mismatch_audit.monitor.traffic import TrafficRow, TrafficStage
from mismatch_audit.monitor.usable import Fit, groups, unit_of, why_unusable
from mismatch_audit.prepare import now
from mismatch_audit.promotion.evidence import Batch, Counted, JudgedUnit
from mismatch_audit.promotion.history import Subject, rules_of
from mismatch_audit.promotion.stages import Assessment
from mismatch_audit.promotion.store import PromotionStore
from mismatch_audit.reports.record import Record

BATCH = 64
"""Requests scored, judged and written together: what a killed run repeats."""

Progress = Callable[[str, int, int], None]


class Scorer(Protocol):
    """A reference that scores served tokens (`rescore.Rescorer`)."""

    facts: dict[str, Any]

    def fit(self, weights_version: int | str | None) -> Fit: ...

    def score(self, rows: list[TrafficRow]) -> tuple[list[ScoredRow], dict[str, str]]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class IngestSettings:
    """What an ingest is told; see `audit ingest --help`."""

    logs: list[Path]
    contract: Path
    out: Path
    stage: TrafficStage | None = None
    build: str | None = None
    weights_version: str | None = None
    store: str | None = None
    skip_bad: bool = False
    actor: str = "audit ingest"


@dataclass
class IngestResult:
    """record: of everything that the folder holds.  repeated: requests met that it held before.
    counted, assessment, subject: of the store, None without one."""

    record: Record
    repeated: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    counted: Counted | None = None
    assessment: Assessment | None = None
    subject: Subject | None = None

    @property
    def exit_code(self) -> int:
        """1 where the store rolled back; else the report's."""
        if self.counted is not None and self.counted.rolled_back_to is not None:
            return 1
        return self.record.exit_code


def ingest(
    settings: IngestSettings, load: Callable[[], Scorer], progress: Progress
) -> IngestResult:
    """Re-score what is new in the logs, judge all that the folder holds, store the evidence.

    load: loads the reference; called once everything else has been checked. Raises InputError for
    a bad line, a choice that is needed, a folder of another ingest, a store where the build is not
    at the log's stage.
    """
    started = now()
    contract = load_contract(settings.contract)
    files = expand(settings.logs)
    seen = survey(files, skip_bad=settings.skip_bad, stage=settings.stage, build=settings.build)
    choice = choose(
        seen,
        stage=settings.stage,
        build=settings.build,
        weights_version=settings.weights_version,
        weights_promised="weights" in contract.pair.same,
    )
    names = contract.promotion.rule(choice.stage).clauses if contract.promotion else None
    judged = sampled_contract(contract, names)
    if settings.store is not None:
        PromotionStore(settings.store, create=False).close()  # is it there?
    progress("load", 0, 1)
    scorer = load()
    try:
        progress("load", 1, 1)
        identity.check_facts(
            "reference", dict(contract.pair.reference), scorer.facts, str(settings.contract)
        )
        folder = IngestFolder(settings.out, _spec(contract, choice, scorer.facts))
        with _Sink(settings, contract, choice, scorer.facts) as sink:
            result = _run(settings, contract, choice, files, seen, scorer, folder, sink, progress)
            sink.finish(result)
    finally:
        scorer.close()
    looks = int((folder.run.cached_json("looks") or {"looks": 0})["looks"]) + 1
    folder.run.cache_json("looks", {"looks": looks})
    progress("verdicts", 0, 1)
    result.record = report_of(contract, judged, choice, scorer.facts, folder, seen, looks, started)
    progress("verdicts", 1, 1)
    return result


def _spec(contract: Contract, choice: Choice, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "ingest": 1,
        "contract": contract_digest(contract),
        "choice": asdict(choice),
        "reference": {k: facts.get(k) for k in ("weights", "dtype", "attention")},
    }


def _run(
    settings: IngestSettings, contract: Contract, choice: Choice, files: list[Path], seen: Survey,
    scorer: Scorer, folder: IngestFolder, sink: _Sink, progress: Progress,
) -> IngestResult:  # fmt: skip
    result = IngestResult(record=None)  # type: ignore[arg-type]
    fit = scorer.fit(choice.weights_version)
    done, total = 0, seen.builds[choice.build]
    met: set[str] = set()
    rows = chosen_rows(files, choice, skip_bad=settings.skip_bad)
    for batch in _batches(rows):
        done += len(batch)
        fresh = []
        for row in batch:
            if row.request_id in folder.seen or row.request_id in met:
                result.repeated += 1
            else:
                met.add(row.request_id)
                fresh.append(row)
        if fresh:
            _one_batch(contract, fit, fresh, scorer, folder, sink, result)
        progress("traffic", done, total)
    if not folder.seen:
        raise InputError("the logs hold no request of the chosen stage and build")
    return result


def _one_batch(
    contract: Contract, fit: Fit, fresh: list[TrafficRow], scorer: Scorer, folder: IngestFolder,
    sink: _Sink, result: IngestResult,
) -> None:  # fmt: skip
    unusable = {r.request_id: why for r in fresh if (why := why_unusable(r, fit)) is not None}
    scored, bad = scorer.score([r for r in fresh if r.request_id not in unusable])
    unusable |= bad
    # The store first: a run killed in between scores these again, and the store knows them.
    sink.count(scored, unusable, {r.request_id: r for r in fresh})
    folder.write(tables(contract, scored)[0], scored, unusable)
    result.outcomes.update(unusable.values())
    result.outcomes[JUDGED] += len(scored)


def _batches(rows: Iterator[TrafficRow]) -> Iterator[list[TrafficRow]]:
    """About `BATCH` rows, never cut inside a run of rows of one prompt."""
    batch: list[TrafficRow] = []
    for group in groups(rows, unit_of):
        if batch and len(batch) + len(group) > BATCH:
            yield batch
            batch = []
        batch += group
    if batch:
        yield batch


class _Sink:
    """Evidence for the store, or nowhere."""

    def __init__(
        self, settings: IngestSettings, contract: Contract, choice: Choice, facts: dict[str, Any]
    ) -> None:
        self.contract, self.stage, self.actor = contract, choice.stage, settings.actor
        self.store: PromotionStore | None = None
        self.counted = Counted(stage=choice.stage)
        if settings.store is None:
            return
        rules: Promotion = rules_of(contract)
        self.clauses = observable_clauses(contract, rules.rule(choice.stage).clauses)
        self.cap = rules.max_response_tokens
        self.store = PromotionStore(settings.store, create=False)
        found = self.store.subject(contract, choice.build, str(facts["weights"]))
        if found is None:
            self.store.close()
            raise InputError(
                f"{choice.build} was never started under this contract with these weights",
                where=self.store.database.shown,
                fix=f"audit promote advance --contract {settings.contract} --build {choice.build} "
                "--report RUN",
            )
        self.subject = found

    def __enter__(self) -> _Sink:
        return self

    def __exit__(self, *_: object) -> None:
        if self.store is not None:
            self.store.close()

    def count(
        self, scored: list[ScoredRow], unusable: dict[str, str], rows: dict[str, TrafficRow]
    ) -> None:
        """Hand a batch over; once the stage has ended, the rest belongs to no stage."""
        if self.store is None:
            return
        units, extra = _units(self.contract, self.clauses, scored, rows, self.cap)
        batch = Batch(self.stage, units, {**unusable, **extra})
        self.counted.add(self.store.record(self.subject, batch, actor=self.actor))

    def finish(self, result: IngestResult) -> None:
        """What the store says in the end."""
        if self.store is None:
            return
        result.counted, result.subject = self.counted, self.subject
        result.assessment = self.store.assessment(self.subject)[1]


def _units(
    contract: Contract, clauses: list[Any], scored: list[ScoredRow], rows: dict[str, TrafficRow],
    cap: int,
) -> tuple[list[JudgedUnit], dict[str, str]]:  # fmt: skip
    """Judged prompts in their order, and requests of prompts that are longer than the contract's
    cap (which weights by tokens rest on)."""
    weighted = any(c.weighted for c in clauses)
    by_unit: dict[str, list[ScoredRow]] = {}
    for row in scored:
        by_unit.setdefault(row.unit, []).append(row)
    long = {
        row.request_id: "more response tokens than the contract's cap"
        for group in by_unit.values()
        if weighted and sum(r.n_tokens for r in group) > cap
        for row in group
    }
    kept = [row for row in scored if row.request_id not in long]
    units = [
        JudgedUnit(
            unit,
            {r.request_id: (_canonical(rows[r.request_id]), r.n_tokens) for r in by_unit[unit]},
            observations,
        )
        for unit, observations in observe(contract, clauses, kept).items()
    ]
    return units, long


def _canonical(row: TrafficRow) -> str:
    """Times that sort as texts."""
    return row.moment.isoformat(timespec="microseconds")
