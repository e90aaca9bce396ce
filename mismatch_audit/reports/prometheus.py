"""The record as Prometheus metrics (text format 0.0.4), for a textfile collector or a push.

A number that is not known gives no sample: an absent series can be alerted on, a 0 would lie.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import get_args

from mismatch_audit.reports.escape import harmless_line, visible
from mismatch_audit.reports.record import Record
from mismatch_audit.reports.rows import AuditVerdict, MeasurementRow

Labels = dict[str, str]
Sample = tuple[Labels, float]

_NUMBERS = {
    "value": "Estimate, in the metric's unit.",
    "lower": "Lower confidence bound.",
    "upper": "Upper confidence bound.",
    "limit": "What the contract allows.",
    "noise_floor": "The metric of a program against itself.",
    "n_prompts": "Prompts that the row rests on.",
    "n_tokens": "Tokens that the row rests on.",
}
_VERDICTS = ("PASS", "ACKNOWLEDGED", "FAIL", "INCONCLUSIVE", "UNOBSERVED", "UNSOUND")


def render_prometheus(record: Record) -> str:
    """Gauges, one family after another. Times are those of the audit, not of the scrape."""
    contract = {"contract": record.contract.name}
    rows = _labelled(record)
    families: list[str] = [
        _family("info", "What was audited; always 1.", [(_info(record), 1.0)]),
        _family(
            "verdict",
            "1 for the audit's verdict, 0 for the others.",
            [
                ({**contract, "verdict": v}, float(v == record.verdict))
                for v in get_args(AuditVerdict)
            ],
        ),
        _family("exit_code", "Exit code of the audit.", [(contract, float(record.exit_code))]),
        _family("started_timestamp_seconds", "Unix time.", [(contract, _time(record.started))]),
        _family("finished_timestamp_seconds", "Unix time.", [(contract, _time(record.finished))]),
        _family(
            "stage_seconds",
            "Time of each stage.",
            [({**contract, "stage": name}, value) for name, value in record.timings.items()],
        ),
        *(
            _family(name, f"Number of {name} in the audit.", [(contract, float(value))])
            for name, value in record.counts.model_dump().items()
        ),
        _family(
            "findings",
            "Findings by severity.",
            [
                ({**contract, "severity": s}, float(sum(f.severity == s for f in record.findings)))
                for s in ("error", "warning", "note")
            ],
        ),
        _family(
            "clause_verdict",
            "1 for the verdict of a clause on a slice, 0 for the others.",
            [
                ({**labels, "verdict": v}, float(v == row.verdict))
                for labels, row in rows
                for v in _VERDICTS
            ],
        ),
        _family(
            "clause_warn",
            "1 where a value is above the warning level.",
            [(labels, float(row.warn)) for labels, row in rows],
        ),
        *(
            _family(f"clause_{name.removeprefix('n_')}", text, _known(rows, name))
            for name, text in _NUMBERS.items()
        ),
    ]
    return "".join(families)


def _info(record: Record) -> Labels:
    labels = {"contract": record.contract.name, "contract_digest": record.contract.digest}
    for side in ("reference", "engine"):
        facts = getattr(record.identities, side)
        for name in ("program", "version", "dtype", "weights"):
            labels[f"{side}_{name}"] = str(facts.get(name) or "")
    return labels


def _labelled(record: Record) -> list[tuple[Labels, MeasurementRow]]:
    """Each row with its labels; a repeated set would make the whole text invalid, so it is
    numbered."""
    seen: dict[tuple[str, ...], int] = {}
    found = []
    for row in record.measurements:
        labels = {
            "contract": record.contract.name,
            "section": row.section,
            "clause": row.clause,
            "slice": row.slice,
            "metric": row.metric,
            "path": row.path,
        }
        key = tuple(map(_label, labels.values()))
        seen[key] = seen.get(key, 0) + 1
        if seen[key] > 1:
            labels["row"] = str(seen[key])
        found.append((labels, row))
    return found


def _known(rows: Iterable[tuple[Labels, MeasurementRow]], name: str) -> list[Sample]:
    values = [(labels, getattr(row, name)) for labels, row in rows]
    return [(labels, float(value)) for labels, value in values if value is not None]


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _family(name: str, text: str, samples: Iterable[Sample]) -> str:
    full = f"mismatch_audit_{name}"
    lines = [f"# HELP {full} {text}", f"# TYPE {full} gauge"]
    for labels, value in samples:
        pairs = ",".join(f'{key}="{_label(value_)}"' for key, value_ in labels.items())
        lines.append(f"{full}{{{pairs}}} {value!r}")
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    """Backslash, quote and newline are escaped by the format; the rest is made visible."""
    return harmless_line(visible(text)).replace("\\", "\\\\").replace('"', '\\"')
