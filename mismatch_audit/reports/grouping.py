"""Rows of the verdict table: grouped by clause, and the passing many of a clause folded."""

from __future__ import annotations

from dataclasses import dataclass

from mismatch_audit.reports.notation import plural, quantity
from mismatch_audit.reports.record import Record
from mismatch_audit.reports.rows import MeasurementRow

FOLD_ABOVE = 40
"""Rows that a terminal or a comment still shows in full."""


@dataclass(frozen=True)
class ClauseGroup:
    """A clause and its rows to show. folded: what was left out, in words, or nothing."""

    clause: str
    rows: list[MeasurementRow]
    folded: str = ""


def clause_groups(record: Record, *, fold_above: int = FOLD_ABOVE) -> list[ClauseGroup]:
    """Clauses in the record's order. Beyond ``fold_above`` rows in all, of each clause only what
    did not pass, what warns, the slice ``all``, and the pass nearest its limit are kept."""
    groups: dict[str, list[MeasurementRow]] = {}
    shown = [row for row in record.measurements if not unseen(row)]
    for row in shown:
        groups.setdefault(row.clause, []).append(row)
    if len(shown) <= fold_above:
        return [ClauseGroup(clause, rows) for clause, rows in groups.items()]
    return [_folded(clause, rows) for clause, rows in groups.items()]


def unseen(row: MeasurementRow) -> bool:
    """An optional slice without evidence: told in a list of its own."""
    return row.optional and row.verdict == "UNOBSERVED"


def not_observed(record: Record) -> dict[str, list[str]]:
    """Why -> optional slices that have no evidence for that reason."""
    found: dict[str, list[str]] = {}
    for row in record.measurements:
        if unseen(row):
            names = found.setdefault(row.detail or "no rows", [])
            if row.slice not in names:
                names.append(row.slice)
    return found


def _folded(clause: str, rows: list[MeasurementRow]) -> ClauseGroup:
    quiet = [r for r in rows if r.verdict == "PASS" and not r.warn and r.slice != "all"]
    if len(quiet) <= 2:
        return ClauseGroup(clause, rows)
    nearest = max(quiet, key=_nearness)
    hidden = [r for r in quiet if r is not nearest]
    kept = [r for r in rows if not any(r is h for h in hidden)]
    highest = max(hidden, key=_nearness)
    bound = "" if highest.upper is None else f", upper bounds to {quantity(highest, highest.upper)}"
    return ClauseGroup(clause, kept, f"{plural(len(hidden), 'more slice')}: PASS{bound}")


def _nearness(row: MeasurementRow) -> float:
    """Upper bound over limit: how close a pass is."""
    if row.upper is None or not row.limit:
        return 0.0
    return row.upper / row.limit
