"""The audit's report as evidence for leaving the stage offline."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from kernel_contracts.errors import InputError
from mismatch_audit.reports.record import REPORT_NAME, load_record


@dataclass(frozen=True)
class OfflineEvidence:
    """What a report.json says, and its SHA-256."""

    sha256: str
    verdict: str
    contract_digest: str
    weights: str
    finished: str
    engine: dict[str, Any]

    @classmethod
    def of(cls, path: Path) -> OfflineEvidence:
        """path: a run's folder or its report.json. Raises InputError as `load_record` does."""
        record = load_record(path)
        file = path / REPORT_NAME if path.is_dir() else path
        facts = record.identities.engine
        return cls(
            sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
            verdict=record.verdict,
            contract_digest=record.contract.digest,
            weights=str(facts.get("weights") or ""),
            finished=record.finished,
            engine={k: facts[k] for k in ("program", "version", "dtype") if k in facts},
        )

    def check(self, digest: str, weights: str) -> None:
        """Raises InputError where the report is of another contract or of other weights."""
        if self.contract_digest != digest:
            raise InputError(
                f"the report is of contract {self.contract_digest[:12]}, not of {digest[:12]}",
                fix="judge the run by this contract: audit judge RUN --contract FILE",
            )
        if weights not in ("any", self.weights):
            raise InputError(
                f"the report is of weights {self.weights[:12] or 'unknown'}, not of {weights[:12]}",
                fix="audit the weights that are to be served",
            )

    def finished_after(self, time: str) -> bool:
        """Whether the audit ended after a time."""
        return datetime.fromisoformat(self.finished) > datetime.fromisoformat(time)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dict(self.__dict__)
