"""A contract, judged while a trainer runs: one step in, a decision out. Knows no trainer.

monitor = Monitor(load_contract("contract.yaml"), every=50, out=Path("runs/live"))
decision = monitor.observe(batch, step=12)     # batch: mismatch_audit.trainers.step
logger.log(decision.metrics)
if decision.asks("stop"): ...
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kernel_contracts.contract import Contract
from kernel_contracts.errors import InputError
from kernel_contracts.measurement import Measurement, overall
from kernel_contracts.slices import resolve
from mismatch_audit.reports.rows import Finding
from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.schema import Header
from mismatch_audit.trainers.decision import ACTIONS, Decision, decide
from mismatch_audit.trainers.evidence import Evidence
from mismatch_audit.trainers.frame import columns_of, token_frame
from mismatch_audit.trainers.recording import record_step

log = logging.getLogger("mismatch_audit.trainers")

LOGGED = (
    "abs_dlp", "k1", "k3", "mult_prob_error", "ess_token", "ess_seq", "ratio_min", "ratio_mean",
    "ratio_max", "log_ppl_diff", "missing", "nonfinite", "tokens",
)  # fmt: skip
"""Of ``rollouts.statistics``, what goes into a trainer's log as ``mismatch/...``."""

_CODES = {"PASS": 0.0, "INCONCLUSIVE": 1.0, "UNOBSERVED": 2.0, "FAIL": 3.0, "UNSOUND": 4.0,
          "NOT_COMPARABLE": 4.0}  # fmt: skip


@dataclass
class Monitor:
    """Judges one step after another.

    contract: promises on sampled tokens (``k3``, ``abs_dlp``, ``mult_prob_error``, ``ess_ratio``,
    ``nonfinite``); what a sampled token cannot show is UNOBSERVED. every: steps between two reports
    in ``out`` (``report.json``, ``report.html``); a first FAIL is reported at once. record: folder
    for the observed sequences, which ``audit rollouts`` reads. actions: those of the contract's
    escalation that may be taken; others become ``warn``. strict: an error of the monitor's own is
    raised; otherwise it is logged, counted, and its step is UNOBSERVED. max_rows: most tokens of a
    prompt in a step (its rollouts times the longest completion), for clauses weighted by token.
    header: what holds for the whole run. Memory does not grow with the steps.
    """

    contract: Contract
    every: int = 50
    out: Path | None = None
    record: Path | None = None
    actions: Collection[str] = ACTIONS
    strict: bool = False
    max_rows: int | None = None
    header: Header = field(default_factory=Header)
    rank: int = 0
    prefix: str = "mismatch/"

    def __post_init__(self) -> None:
        from mismatch_audit.rollouts.checks import all_checks

        unknown = set(self.actions) - set(ACTIONS)
        if unknown:
            raise InputError(
                f"no action {', '.join(sorted(unknown))}", where="actions",
                fix=f"any of {', '.join(ACTIONS)}",
            )  # fmt: skip
        if self.every < 1:
            raise InputError(f"every {self.every} steps", where="every", fix="give 1 or more")
        self._checks = all_checks()
        self._columns = columns_of(self.contract)
        self.started = time.time()
        self.findings: dict[tuple[str, str], Finding] = {}
        self.errors, self._recorded, self._part = 0, -1, 0
        self.counts = {"sequences": 0, "tokens": 0, "prompts": 0}
        self.release()

    def release(self) -> None:
        """Forget the evidence and start anew, for example after a fault was mended."""
        self.evidence = Evidence(self.contract, self.max_rows)
        self._failed: set[tuple[str, str]] = set()
        self.measurements: list[Measurement] = self.evidence.measurements()

    def observe(self, batch: TokenBatch, *, step: int) -> Decision:
        """Judge one step. Never raises unless ``strict``."""
        started = time.perf_counter()
        try:
            decision = self._observe(batch, step)
        except Exception as error:
            if self.strict:
                raise
            return self.not_observed(step, error, batch.n_sequences)
        seconds = time.perf_counter() - started
        return _with(decision, {f"{self.prefix}seconds": seconds})

    def observe_from(self, make: Callable[[], TokenBatch], *, step: int) -> Decision:
        """Read a step and judge it. One that cannot be read is not observed; it raises where
        ``strict``."""
        try:
            batch = make()
        except Exception as error:
            if self.strict:
                raise
            return self.not_observed(step, error)
        return self.observe(batch, step=step)

    def not_observed(self, step: int, error: BaseException | str, n_sequences: int = 0) -> Decision:
        """Count a step that could not be read: it is UNOBSERVED, and the run cannot PASS."""
        why = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else error
        log.warning("mismatch-audit: step %d is unobserved: %s", step, why)
        self.errors += 1
        self.evidence.fail_step()
        self.measurements = self.evidence.measurements()
        self.add_finding(
            Finding(
                code="MONITOR_ERROR",
                title="A step could not be read by the monitor",
                severity="warning",
                evidence=[{"step": step, "error": why[:500], "errors_so_far": self.errors}],
                remedy="attach with strict=True to see the traceback; until then the run is not a "
                "PASS",
            )
        )
        metrics = {f"{self.prefix}unobserved": 1.0, f"{self.prefix}errors": float(self.errors)}
        return Decision(
            step, (), np.zeros(n_sequences, dtype=bool), (), metrics, self.verdict, error=why
        )

    def _observe(self, batch: TokenBatch, step: int) -> Decision:
        if self.record is not None:
            self._part = self._part + 1 if step == self._recorded else 0
            self._recorded = step
            record_step(self.record, batch, self.header, step, self.rank, self._part)
        metrics = self._metrics(batch)
        for check in self._checks:
            check.update(batch)
        frame = token_frame(batch, self._columns)
        self.counts["sequences"] += batch.n_sequences
        self.counts["tokens"] += len(frame)
        self.counts["prompts"] += int(frame["prompt_id"].nunique())
        slices = self.evidence.add(frame)
        self.measurements = self.evidence.measurements()
        definitions = {
            m.slice: self.evidence.definition.get(m.slice, m.slice) for m in self.measurements
        }
        actions, reasons, masked = decide(
            self.contract, self.measurements, frame, slices, definitions, batch.n_sequences,
            self.actions,
        )  # fmt: skip
        for reason in reasons:
            log.warning("mismatch-audit: step %d: %s", step, reason)
        failed = {(m.clause, m.slice) for m in self.measurements if m.verdict == "FAIL"}
        new = failed - self._failed
        self._failed |= failed
        metrics |= self._verdict_metrics(actions, masked)
        if self.out is not None and (new or (self.evidence.steps % self.every) == 0):
            self.report()
        return Decision(step, actions, masked, reasons, metrics, self.verdict)

    def _metrics(self, batch: TokenBatch) -> dict[str, float]:
        both = batch.has("sampler_logprob") and batch.has("trainer_logprob")
        metrics = {f"{self.prefix}unobserved": float(not both)}
        if both:
            from mismatch_audit.rollouts.statistics import batch_statistics  # numba: see trl_engine

            found = batch_statistics(
                batch.tokens("sampler_logprob"), batch.tokens("trainer_logprob"), batch.sampled,
                batch.offsets,
            ).as_dict()  # fmt: skip
            metrics |= {
                f"{self.prefix}{name}": float(found[name])
                for name in LOGGED
                if math.isfinite(float(found[name]))
            }
        return metrics

    def _verdict_metrics(self, actions: tuple[str, ...], masked: Any) -> dict[str, float]:
        found = {
            f"{self.prefix}verdict": _CODES[self.verdict],
            f"{self.prefix}errors": float(self.errors),
            f"{self.prefix}masked_sequences": float(masked.sum()),
        }
        for action in ACTIONS:
            found[f"{self.prefix}action/{action}"] = float(action in actions)
        for m in self.measurements:
            if m.p_fail is not None:
                # log10 of the evidence against the promise: 1.3 is significance at 5 %
                found[f"{self.prefix}evidence/{m.clause}/{m.slice}"] = -math.log10(
                    max(m.p_fail, 1e-300)
                )
        return found

    def bad_sequences(self, batch: TokenBatch) -> Any:
        """``[S]`` bool: sequences that break a promise which the contract masks for. Judges alone:
        nothing is counted."""
        frame = token_frame(batch, self._columns)
        return decide(
            self.contract, self.measurements, frame,
            resolve(self.contract, frame, names=["all"]), {"all": "all"}, batch.n_sequences,
            self.actions,
        )[2]  # fmt: skip

    def add_finding(self, finding: Finding) -> None:
        """A cause found elsewhere (a weight hook). One of each code and clause is kept, the first,
        with up to 20 rows of evidence."""
        key = (finding.code, finding.clause or "")
        old = self.findings.get(key)
        if old is not None:
            rows = [*old.evidence, *finding.evidence][:20]
            finding = old.model_copy(update={"evidence": rows})
        self.findings[key] = finding

    def causes(self) -> list[Finding]:
        """Every cause named so far: of the weight hooks, then of the checks of the rollouts."""
        from mismatch_audit.trainers.report import findings_of

        return [*self.findings.values(), *findings_of(copy.deepcopy(self._checks), self.header)]

    @property
    def verdict(self) -> str:
        """Of the contract on the steps so far; a cause that a weight hook named is a FAIL. Cheap:
        ``judged`` asks the checks of the rollouts too."""
        return _with_causes(overall(self.measurements), self.findings.values())

    def judged(self) -> tuple[str, list[Finding]]:
        """(verdict, causes) of everything seen so far: what a report says."""
        causes = self.causes()
        return _with_causes(overall(self.measurements), causes), causes

    def try_report(self) -> None:
        """``report``, whose error is logged and counted unless ``strict``."""
        try:
            self.report()
        except Exception as error:
            if self.strict:
                raise
            self.errors += 1
            log.warning("mismatch-audit: the report was not written: %s", error)

    def report(self) -> Any:
        """The record of the run so far; written where ``out`` says, whole or not at all."""
        from mismatch_audit.trainers.report import live_record, write_live_report

        record = live_record(self)
        if self.out is not None and self.rank == 0:
            write_live_report(record, self.out)
        return record


def _with_causes(verdict: str, causes: Iterable[Finding]) -> str:
    """A named cause is a violation, also where too few prompts were seen to measure its effect."""
    broken = any(cause.severity == "error" for cause in causes)
    return "FAIL" if broken and verdict != "UNSOUND" else verdict


def _with(decision: Decision, more: Mapping[str, float]) -> Decision:
    from dataclasses import replace

    return replace(decision, metrics={**decision.metrics, **more})
