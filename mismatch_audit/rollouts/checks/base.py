"""What a check of recorded rollouts is: it reads every batch once, then says what it saw."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.schema import Header

Status = Literal["clean", "found", "unobserved"]
Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class CheckResult:
    """One check's answer.

    code: of the finding, e.g. ``SHIFTED_LOGPROBS``.  status: ``unobserved`` where the source lacks
    what the check needs (``detail`` says which column and how to record it); it never counts as
    clean.  evidence: rows of plain values, worst first.  remedy: what to change or run.
    priority: where several causes explain the same symptom the highest is the named one, and the
    others say ``consequence_of`` which code (set by ``explain``).
    """

    code: str
    title: str
    status: Status
    severity: Severity = "error"
    detail: str = ""
    evidence: list[dict[str, Any]] = field(default_factory=list)
    remedy: str = ""
    priority: int = 0
    consequence_of: str = ""


class Check(Protocol):
    """A check in streaming form. Memory must not grow with the number of tokens: keep sums, or a
    bounded sample of sequences."""

    code: str
    needs: tuple[str, ...]
    """Columns of the sequence table without which it is ``unobserved``."""

    def update(self, batch: TokenBatch) -> None: ...

    def finish(self, header: Header) -> list[CheckResult]: ...
