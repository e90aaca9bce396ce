"""Known violations: a person answers for one, until a day, and the contract's own file says so.

An acknowledged FAIL becomes ACKNOWLEDGED: shown everywhere, with who, why and until when, and no
reason to stop a job. After its last day it counts as nothing, and the row says that it expired.
Missing evidence cannot be acknowledged: nobody can answer for what was not seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date

from kernel_contracts.definitions import Acknowledgement
from kernel_contracts.measurement import Measurement

__all__ = ["acknowledge"]


def acknowledge(
    known: Sequence[Acknowledgement],
    measurements: Sequence[Measurement],
    definition: Mapping[str, str],
    today: date,
) -> list[Measurement]:
    """The measurements, each FAIL that an entry answers for turned into ACKNOWLEDGED.

    definition: slice -> the definition that it comes from.  today: entries hold through their last
    day. Where several entries fit, the one that holds longest decides.
    """
    return [_answered(known, m, definition, today) for m in measurements]


def _answered(
    known: Sequence[Acknowledgement], m: Measurement, definition: Mapping[str, str], today: date
) -> Measurement:
    if m.verdict != "FAIL":
        return m
    places = (None, m.slice, definition.get(m.slice))
    fitting = [a for a in known if a.clause == m.clause and a.slice in places]
    if not fitting:
        return m
    entry = max(fitting, key=lambda a: a.until)
    if entry.until < today:
        said = f"the acknowledgement by {entry.who} expired on {entry.until}"
        return replace(m, detail=_joined(m.detail, said))
    said = f"acknowledged by {entry.who} until {entry.until}: {entry.why}"
    return replace(m, verdict="ACKNOWLEDGED", detail=_joined(said, m.detail))


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
