"""What a weight audit says: a fault per tensor, and findings with codes over all tensors.

Codes are stable: reports, gates and the documentation (docs/weights.md) refer to them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal


class Fault(StrEnum):
    """The likeliest cause of a difference. EQUAL and ROUNDING_ONLY are no faults."""

    EQUAL = "equal"
    MERGE_ROUNDING = "equal up to merge rounding"
    MISSING = "missing"
    EXTRA = "extra"
    SHAPE = "shape"
    DTYPE = "dtype mismatch"
    NONFINITE = "NaN or infinity"
    UNWRITTEN = "unwritten"
    ZEROED = "zeroed"
    STALE = "stale"
    SHARD_STALE = "shard stale"
    SWAPPED = "swapped"
    HALVES = "swapped halves"
    TRANSPOSED = "transposed"
    PERMUTED = "permuted"
    ROTARY = "rotary layout"
    SCALED = "scaled"
    ROUNDING = "wrong rounding"
    QUANTIZER = "quantizer mismatch"
    UNSCALED = "unscaled cast"
    SCALE_MISSING = "missing scale"
    UNTIED = "untied head"
    ADAPTER_OFF = "adapter not applied"
    BUFFER = "wrong buffer"
    UNRELATED = "unrelated values"
    UNSYNCED_RANK = "replicas differ"
    SKIPPED_LAYER = "skipped layer"
    PARTIAL_PUSH = "partial push"
    NOTHING_PUSHED = "nothing pushed"


HEALTHY = frozenset({Fault.EQUAL, Fault.MERGE_ROUNDING})

CODES: dict[Fault, str] = {
    Fault.MISSING: "W101",
    Fault.EXTRA: "W102",
    Fault.SHAPE: "W103",
    Fault.DTYPE: "W104",
    Fault.NONFINITE: "W105",
    Fault.UNWRITTEN: "W106",
    Fault.ZEROED: "W107",
    Fault.STALE: "W201",
    Fault.SHARD_STALE: "W202",
    Fault.SKIPPED_LAYER: "W203",
    Fault.PARTIAL_PUSH: "W204",
    Fault.NOTHING_PUSHED: "W205",
    Fault.ADAPTER_OFF: "W206",
    Fault.UNSYNCED_RANK: "W207",
    Fault.SWAPPED: "W301",
    Fault.HALVES: "W302",
    Fault.TRANSPOSED: "W303",
    Fault.PERMUTED: "W304",
    Fault.ROTARY: "W305",
    Fault.UNTIED: "W306",
    Fault.ROUNDING: "W401",
    Fault.QUANTIZER: "W402",
    Fault.UNSCALED: "W403",
    Fault.SCALE_MISSING: "W404",
    Fault.SCALED: "W405",
    Fault.BUFFER: "W501",
    Fault.UNRELATED: "W901",
}

REMEDIES: dict[Fault, str] = {
    Fault.MISSING: "check the name mapping of the push; the engine keeps its old value",
    Fault.EXTRA: "nothing updates this tensor; map it to the trainer's, or drop it",
    Fault.SHAPE: "check padding, fused layouts and config.json on both sides",
    Fault.DTYPE: "cast once, from the master, to the dtype that the engine holds",
    Fault.NONFINITE: "stop the run; find the step whose update produced it",
    Fault.UNWRITTEN: "the loader allocated this memory and never filled it",
    Fault.ZEROED: "the loader re-created this tensor and never filled it",
    Fault.STALE: "push again; if it stays, this tensor is skipped by name or by device",
    Fault.SHARD_STALE: "one rank did not receive the broadcast: check its process group",
    Fault.SKIPPED_LAYER: "this layer's names are not matched by the push",
    Fault.PARTIAL_PUSH: "the push ended early: wait for its future and check its status",
    Fault.NOTHING_PUSHED: "the push was acknowledged and not applied",
    Fault.ADAPTER_OFF: "load or merge the adapter on the serving side",
    Fault.UNSYNCED_RANK: "replicated tensors must be broadcast to every rank",
    Fault.SWAPPED: "check the order of parts in the fused tensor and the name mapping",
    Fault.HALVES: "check the order in which the fused halves are concatenated",
    Fault.TRANSPOSED: "one side stores [in, out]; transpose once, in the exporter",
    Fault.PERMUTED: "check the head order and the layout conversion of the exporter",
    Fault.ROTARY: "one side stores interleaved rotary pairs, the other split halves",
    Fault.UNTIED: "push the head too, or tie it on both sides",
    Fault.ROUNDING: "export with round to nearest, ties to even, in one step from the master",
    Fault.QUANTIZER: "use one quantiser, with one scale rounding, on both sides",
    Fault.UNSCALED: "divide by the scale before the cast, and store the scale",
    Fault.SCALE_MISSING: "push the scales with the payload",
    Fault.SCALED: "a scale was applied twice, or not at all",
    Fault.BUFFER: "buffers are no parameters: re-create or push them after a reload",
    Fault.UNRELATED: "compare the identities: another model, or a wrong name mapping",
}


@dataclass
class TensorReport:
    """One canonical tensor on both sides. relative_error: ||served - expected|| / ||expected||."""

    name: str
    fault: Fault = Fault.EQUAL
    trainer_dtype: str | None = None
    served_dtype: str | None = None
    trainer_shape: tuple[int, ...] | None = None
    served_shape: tuple[int, ...] | None = None
    elements: int = 0
    differing: int = 0
    max_ulp: int | None = None
    relative_error: float | None = None
    cosine: float | None = None
    ranks: list[int] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        return self.fault in HEALTHY

    def to_dict(self) -> dict[str, Any]:
        document = asdict(self)
        document["fault"] = self.fault.value
        return {key: plain_json(value) for key, value in document.items()}


@dataclass(frozen=True)
class Finding:
    """A coded cause. tensors: the names it covers. evidence: numbers that show it."""

    fault: Fault
    title: str
    tensors: tuple[str, ...]
    evidence: dict[str, Any] = field(default_factory=dict)
    severity: Literal["error", "warning"] = "error"

    @property
    def code(self) -> str:
        return CODES[self.fault]

    @property
    def remedy(self) -> str:
        return REMEDIES[self.fault]

    def to_dict(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "cause": self.fault.value,
            "title": self.title,
            "severity": self.severity,
            "remedy": self.remedy,
            "tensors": list(self.tensors),
            "evidence": plain_json(self.evidence),
        }


def plain_json(value: Any) -> Any:
    """JSON-ready copy: NaN and infinities become the words for them, never bare NaN."""
    if isinstance(value, dict):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


@dataclass
class WeightReport:
    """The outcome of one comparison. compared: tensors seen on both sides."""

    trainer: str
    served: str
    cast: str
    reports: list[TensorReport] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    """Served tensors that nobody could read: never a pass."""

    @property
    def compared(self) -> int:
        return sum(r.fault not in (Fault.MISSING, Fault.EXTRA) for r in self.reports)

    @property
    def exit_code(self) -> int:
        """0 equal, 1 a fault, 3 nothing to compare or something unread (never a pass)."""
        if not self.compared:
            return 3
        if any(f.severity == "error" for f in self.findings):
            return 1
        return 3 if self.unread else 0

    def to_dict(self) -> dict[str, Any]:
        elements = sum(r.elements for r in self.reports)
        return {
            "schema_version": 1,
            "kind": "weights",
            "trainer": self.trainer,
            "served": self.served,
            "cast": self.cast,
            "exit_code": self.exit_code,
            "counts": {
                "tensors": len(self.reports),
                "compared": self.compared,
                "elements": elements,
                "differing": sum(r.differing for r in self.reports),
                "unequal_tensors": sum(not r.healthy for r in self.reports),
            },
            "findings": [finding.to_dict() for finding in self.findings],
            "notes": self.notes,
            "unread": self.unread,
            "tensors": [report.to_dict() for report in self.reports],
        }
