"""The audit of recorded rollouts: read once, count, check, judge."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from kernel_contracts.contract import Contract
from kernel_contracts.errors import InputError
from kernel_contracts.loading import load_contract
from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.checks.base import Check, CheckResult
from mismatch_audit.rollouts.columns import ALIASES
from mismatch_audit.rollouts.formats.base import Problem, ReadOptions, Source
from mismatch_audit.rollouts.judge import thresholds
from mismatch_audit.rollouts.schema import Header
from mismatch_audit.rollouts.slices import Codes
from mismatch_audit.rollouts.stream import Stream

Progress = Callable[[str, int, int], None]

DEFAULT_CONTRACT = Path(__file__).with_name("default_contract.yaml")

NOT_COMPARABLE = frozenset(
    {
        # the log-probs are not of the tokens that they stand beside
        "SHIFTED_LOGPROBS",
        "ZERO_FILLED_LOGPROBS",
        "COLUMNS_NOT_INDEPENDENT",
        # tokens and tokenizer
        "TOKEN_OUTSIDE_VOCABULARY",
        "TOKENIZER_MISMATCH",
        "RETOKENISED_TURN",
        "HISTORY_EDITED",
        "PREFIX_NOT_EXTENDED",
        # sampling semantics
        "TEMPERATURE_MISMATCH",
        "TRUNCATED_SUPPORT",
        "REPETITION_PENALTY",
        # positions
        "LEFT_PADDING",
        # weights
        "SYNC_NOT_APPLIED",
        "ENGINE_SERVES_BASE",
        "RELOAD_CORRUPTS",
    }
)
"""Findings after which the two columns are not log-probs of one policy at one token: with severity
``error`` no number is reported (exit 4). Any other ``error`` fails the audit (exit 1), since its
numbers say what they seem to say; warnings and notes change no verdict."""


@dataclass
class Read:
    """How one source was read."""

    source: Source
    why: str
    sequences: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass
class Audited:
    """All that one pass over the sources gave.

    unopened: what was no source.  results: of the checks, the named cause first.  staleness: by
    lag, split and over the steps (empty without checks).  missing: column
    of the token table -> share of sampled tokens without a value.
    """

    contract: Contract
    stream: Stream
    reads: list[Read]
    unopened: list[Problem]
    results: list[CheckResult]
    staleness: dict[str, Any]
    missing: dict[str, float]
    seconds: dict[str, float]

    @property
    def damaged(self) -> bool:
        """Something could not be read: exit 2."""
        return bool(self.unopened) or any(read.errors for read in self.reads)

    @property
    def lacks(self) -> dict[str, str]:
        """Column -> why no source has it."""
        found: dict[str, str] = {}
        for read in self.reads:
            found = {**read.source.header.lacks, **found}
        return found


def audit_sources(
    paths: Sequence[Path],
    *,
    format: str = "auto",
    contract: Path | None = None,
    options: ReadOptions | None = None,
    checks: bool = True,
    progress: Progress = lambda stage, done, total: None,
    on_sources: Callable[[list[Source], list[Problem]], None] = lambda sources, problems: None,
    transform: Callable[[TokenBatch], TokenBatch] = lambda batch: batch,
) -> Audited:
    """Read every source once. Memory stays within one batch, the store's limit and the checks'
    samples. on_sources: told what was opened, before anything is read.  transform: of each batch
    (re-scoring). Raises InputError where nothing could be opened, or the contract is no contract.
    """
    from mismatch_audit.rollouts.checks import all_checks
    from mismatch_audit.rollouts.formats import detect, open_sources
    from mismatch_audit.rollouts.staleness import Staleness

    agreed = load_contract(contract or DEFAULT_CONTRACT)
    stream = Stream(agreed, thresholds(agreed))
    sources, unopened = open_sources(paths, format, options or ReadOptions())
    if not sources:
        raise unopened[0].error if unopened else InputError("no path given")
    on_sources(sources, unopened)
    running: list[Check] = all_checks() if checks else []
    staleness = Staleness() if checks else None
    reads = [Read(source, _why(source, detect)) for source in sources]
    missing = _Missing(agreed)
    total = sum(source.bytes_total for source in sources)
    started, done = perf_counter(), 0
    told = -1

    def tell(size: int) -> None:
        nonlocal told
        if _mb(size) != told:
            told = _mb(size)
            progress(_STAGE, told, _mb(total))

    try:
        for read in reads:
            for item in _ahead(read.source, lambda b: _prepared(stream, transform(b))):
                if isinstance(item, Problem):
                    read.errors.append(str(item.error))
                    continue
                batch, codes = item
                counted = stream.start(batch, codes)
                for check in running:
                    check.update(batch)
                if staleness is not None:
                    staleness.update(batch)
                missing.update(batch)
                counted()
                read.sequences += batch.n_sequences
                read.tokens += batch.n_tokens
                tell(min(done + _guess(read, reads), total))
            done += read.source.bytes_total
            tell(done)
        results = _finish(running, reads)
    except BaseException:
        stream.close()
        raise
    # One figure: reading, counting and checking go on at the same time.
    seconds = {"read, count and check": perf_counter() - started}
    lags = staleness.finish() if staleness is not None else {}
    return Audited(agreed, stream, reads, unopened, results, lags, missing.shares(), seconds)


_STAGE = "rollouts, MB"

Prepared = tuple[TokenBatch, Codes | None]


def _prepared(stream: Stream, batch: TokenBatch) -> Prepared:
    return batch, stream.prepare(batch)


def _ahead(
    source: Source, prepare: Callable[[TokenBatch], Prepared], depth: int = 1
) -> Iterator[Prepared | Problem]:
    """The source's batches, read and put into groups by another thread while earlier ones are
    counted and checked: the two take about as long."""
    from mismatch_audit.rollouts.formats import drain

    ready: queue.Queue[Any] = queue.Queue(depth)
    stopped = threading.Event()

    def put(item: Any) -> None:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.2)
                return
            except queue.Full:
                continue

    def fill() -> None:
        try:
            for batch in drain(source, put):
                put(prepare(batch))
                if stopped.is_set():
                    return
            put(None)
        except BaseException as error:  # re-raised below, in the caller's thread
            put(error)

    reader = threading.Thread(target=fill, name="reader", daemon=True)
    reader.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        reader.join()


def _mb(size: int) -> int:
    """Whole megabytes, at least one: what a progress bar counts."""
    return max(1, round(size / 1e6))


def _guess(read: Read, reads: Sequence[Read]) -> int:
    """Bytes of a source behind what was read of it: what its reader says, else by its tokens, 8
    bytes each until another source was read whole."""
    if read.source.bytes_done is not None:
        return read.source.bytes_done()
    whole = [r for r in reads if r is not read and r.tokens]
    rate = sum(r.source.bytes_total for r in whole) / max(1, sum(r.tokens for r in whole))
    return min(read.source.bytes_total, int(read.tokens * (rate or 8)))


def _why(source: Source, detect: Callable[[Path], list[Any]]) -> str:
    found = [one for one in detect(source.path) if one.format == source.header.format]
    return found[0].why if found else ""


def _finish(running: Sequence[Check], reads: Sequence[Read]) -> list[CheckResult]:
    from mismatch_audit.rollouts.checks import explain

    header = merged_header([read.source.header for read in reads])
    return explain([result for check in running for result in check.finish(header)])


def merged_header(headers: Sequence[Header]) -> Header:
    """What all sources agree on; where they differ a fact is unknown."""
    merged = replace(headers[0], lacks=dict(headers[0].lacks), notes=list(headers[0].notes))
    for other in headers[1:]:
        for name, value in vars(other).items():
            if name in ("lacks", "notes"):
                continue
            if getattr(merged, name) != value:
                setattr(merged, name, {} if name == "correction" else _unknown(name))
        merged.lacks = {k: v for k, v in merged.lacks.items() if k in other.lacks}
        merged.notes += [note for note in other.notes if note not in merged.notes]
    return merged


def _unknown(name: str) -> Any:
    return {"framework": "several", "format": "several"}.get(name)


class _Missing:
    """Share of sampled tokens without a value, of the columns that the contract requires."""

    def __init__(self, contract: Contract) -> None:
        own = ("engine_logprob", "reference_logprob")
        names = {c for clause in contract.observability for c in clause.require}
        self.absent = dict.fromkeys(sorted(names - set(own)), 0)
        self.total = 0

    def update(self, batch: TokenBatch) -> None:
        from mismatch_audit.rollouts.columns import column

        if not self.absent:
            return
        sampled = batch.sampled
        self.total += int(sampled.sum())
        for name in self.absent:
            found = column(batch, ALIASES.get(name, name))
            if found is None:
                self.absent[name] += int(sampled.sum())
                continue
            null = found.null if found.per_token else batch.spread(found.null)
            self.absent[name] += int(np.sum(null & sampled))

    def shares(self) -> dict[str, float]:
        """A column without one value is not there at all."""
        return {
            name: count / self.total
            for name, count in self.absent.items()
            if self.total and count < self.total
        }


def semantic_error(results: Sequence[CheckResult]) -> CheckResult | None:
    """The finding that makes numbers meaningless, if any."""
    for result in results:
        bad = result.status == "found" and result.severity == "error"
        if bad and result.code in NOT_COMPARABLE and not result.consequence_of:
            return result
    return None


def facts(reads: Sequence[Read]) -> Mapping[str, dict[str, Any]]:
    """Identities of both programs, as far as the sources say."""
    header = merged_header([read.source.header for read in reads])
    return {
        "reference": _said(
            program=_named(header, "trainer"), dtype=header.trainer_dtype, model=header.model,
            tokenizer=header.tokenizer_digest, correction=header.correction or None,
        ),
        "engine": _said(
            program=_named(header, "sampler"), dtype=header.engine_dtype, model=header.model,
            tokenizer=header.tokenizer_digest, version=header.engine_version,
        ),
    }  # fmt: skip


def _named(header: Header, side: str) -> str:
    return side if header.framework in ("", "unknown") else f"{header.framework} {side}"


def _said(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
