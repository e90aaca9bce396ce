"""The record of a live run: verdicts of the sequential tests, causes named by the checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_contracts.escalation import actions_of
from kernel_contracts.loading import contract_digest
from kernel_contracts.measurement import EXIT_CODES
from kernel_contracts.slices import Slice
from mismatch_audit.reports.record import ContractRef, Counts, Identities, MeasurementRow, Record
from mismatch_audit.reports.rows import Facts, Finding
from mismatch_audit.rollouts.schema import Header

if TYPE_CHECKING:
    from mismatch_audit.trainers.monitor import Monitor


def findings_of(checks: Sequence[Any], header: Header) -> list[Finding]:
    """What the rollout checks found, the named cause first. What follows from it is a note;
    checks that lack a column are listed in one."""
    from mismatch_audit.rollouts.checks import explain

    results = explain([r for check in checks for r in check.finish(header)])
    rows = [_finding(r) for r in results if r.status == "found"]
    unseen: list[Facts] = [
        {"check": r.code, "why": r.detail} for r in results if r.status == "unobserved"
    ]
    if unseen:
        rows.append(
            Finding(
                code="CHECKS_UNOBSERVED", title=f"{len(unseen)} checks could not be made",
                severity="note", evidence=unseen,
                remedy="record the columns that they lack, where the trainer has them",
            )
        )  # fmt: skip
    return rows


def _finding(result: Any) -> Finding:
    detail = [{"detail": result.detail}] if result.detail else []
    title, severity = result.title, result.severity
    if result.consequence_of:
        title, severity = f"{title} (follows from {result.consequence_of})", "note"
    return Finding(
        code=result.code, title=title, severity=severity,
        evidence=[*detail, *result.evidence][:20], remedy=result.remedy or "see docs/rollouts.md",
    )  # fmt: skip


def live_record(monitor: Monitor) -> Record:
    """Everything observed so far as a report.json document."""
    import platform

    import mismatch_audit

    verdict, findings = monitor.judged()
    header = asdict(monitor.header)
    definitions = monitor.evidence.definition
    slices = [Slice(n, d, _NOTHING) for n, d in definitions.items()]
    return Record(
        verdict=verdict,  # type: ignore[arg-type]
        exit_code=EXIT_CODES[verdict],
        started=datetime.fromtimestamp(monitor.started, UTC).isoformat(timespec="seconds"),
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        contract=ContractRef(
            name=monitor.contract.name,
            digest=contract_digest(monitor.contract),
            document=monitor.contract.document(),
        ),
        identities=Identities(
            reference={
                "program": header["framework"],
                "model": header["model"],
                "dtype": header["trainer_dtype"],
                "tokenizer": header["tokenizer_digest"],
            },
            engine={
                "program": "vllm" if header["engine_version"] else "unknown",
                "version": header["engine_version"],
                "dtype": header["engine_dtype"],
                "logprobs_mode": header["correction"].get("logprobs_mode"),
            },
        ),
        counts=Counts(**monitor.counts),
        measurements=[MeasurementRow.of(m) for m in monitor.measurements],
        findings=findings,
        actions=[asdict(a) for a in actions_of(monitor.contract, monitor.measurements, slices)],
        environment={
            "mismatch_audit": mismatch_audit.__version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "steps": monitor.evidence.steps,
            "unobserved_steps": monitor.evidence.failed_steps,
        },
    )


def write_live_report(record: Record, folder: Path) -> None:
    """``report.json`` and ``report.html`` in ``folder``, which is made."""
    from mismatch_audit.assemble import write_report

    folder.mkdir(parents=True, exist_ok=True)
    write_report(record, folder)


def _nothing() -> Any:
    import numpy as np

    return np.zeros(0, dtype=bool)


_NOTHING = _nothing()
