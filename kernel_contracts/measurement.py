"""What judging gives: one measurement per clause and slice, with its verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["PASS", "ACKNOWLEDGED", "FAIL", "INCONCLUSIVE", "UNOBSERVED", "UNSOUND"]
"""ACKNOWLEDGED: a FAIL that somebody answers for (``kernel_contracts.acknowledge``)."""

Overall = Literal["PASS", "FAIL", "INCONCLUSIVE", "UNOBSERVED", "UNSOUND"]
"""Of a whole audit."""

SEVERITY: tuple[Verdict, ...] = (
    "UNSOUND",
    "FAIL",
    "UNOBSERVED",
    "INCONCLUSIVE",
    "ACKNOWLEDGED",
    "PASS",
)
"""Worst first: an audit is as good as its worst measurement."""

EXIT_CODES: dict[str, int] = {
    "PASS": 0,
    "FAIL": 1,
    "INCONCLUSIVE": 3,
    "UNOBSERVED": 3,
    "UNSOUND": 4,
    "NOT_COMPARABLE": 4,
}


@dataclass(frozen=True)
class Measurement:
    """A clause on a slice.

    value: estimate in ``unit``; lower, upper: one-sided confidence bounds at the contract's alpha;
    None where there is nothing to say.  noise_floor: the same metric of a program against itself.
    method: how the bounds were made.  p_fail: p-value of "the promise is kept", Holm-adjusted over
    the clause's slices (None for exact counts).  clipped: prompts above the ceiling; the bounds are
    of the clipped mean, so with any, ``upper`` bounds the promise and not the true mean.
    detail: one line for people.  optional: on a slice whose definition says so: only a FAIL counts.
    """

    clause: str
    slice: str
    metric: str
    section: str
    value: float | None
    lower: float | None
    upper: float | None
    limit: float | None
    n_prompts: int
    n_tokens: int
    verdict: Verdict
    method: str = ""
    detail: str = ""
    unit: str = ""
    path: str = ""
    noise_floor: float | None = None
    warn: bool = False
    p_fail: float | None = None
    clipped: int = 0
    optional: bool = False


def overall(measurements: list[Measurement]) -> Overall:
    """The audit's verdict: the worst of all. Nothing measured is UNOBSERVED, never a pass; known
    violations stop no pass, nor does evidence that an optional slice lacks."""
    counted = [
        m for m in measurements if not (m.optional and m.verdict in ("UNOBSERVED", "INCONCLUSIVE"))
    ]
    if all(m.optional for m in counted):
        counted = measurements
    if not counted:
        return "UNOBSERVED"
    worst = min((m.verdict for m in counted), key=SEVERITY.index)
    return "PASS" if worst == "ACKNOWLEDGED" else worst
