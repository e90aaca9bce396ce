"""What a live engine applies against the cast of the master, bit by bit."""

from __future__ import annotations

from pathlib import Path

from kernel_contracts.errors import NotComparableError
from mismatch_audit.weights.compare import CompareOptions, compare_sides
from mismatch_audit.weights.findings import WeightReport
from mismatch_audit.weights.live.base import LiveEngine
from mismatch_audit.weights.sides import Side, open_side

_SAME = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "intermediate_size", "vocab_size")  # fmt: skip


def check_comparable(master: Side, engine: LiveEngine) -> None:
    """Raises NotComparableError when the engine serves a model of another shape."""
    ours, theirs = master.checkpoint.config, engine.facts().get("config") or {}
    differ = [
        f"{key} {ours[key]} against {theirs[key]}"
        for key in _SAME
        if key in ours and key in theirs and ours[key] != theirs[key]
    ]
    if differ:
        raise NotComparableError(
            f"the engine serves another model: {', '.join(differ)}",
            where=engine.spec,
            fix="start it with a checkpoint of the trainer's model",
        )


def compare_live(
    master: Side, engine: LiveEngine, folder: Path, previous: Side | None = None,
    options: CompareOptions | None = None,
) -> WeightReport:  # fmt: skip
    """What the engine applies now against the cast of the master, tensor by tensor."""
    check_comparable(master, engine)
    served = open_side(engine.read_back(folder), peer=master.checkpoint)
    served.label = engine.spec
    master.unsigned_zeros = True
    try:
        report = compare_sides(master, served, previous, options or CompareOptions())
    finally:
        master.unsigned_zeros = False
    for name in getattr(engine, "unread", ()):
        report.unread.append(name)
        report.notes.append(f"{name}: stored in a format that cannot be read back here")
    for name in getattr(engine, "off_scale", ()):
        report.notes.append(f"{name}: the kernel applies another scale than its parameter holds")
    if saturating := getattr(engine, "saturating", ()):
        report.notes.append(
            f"{len(saturating)} layers: the int8 kernel saturates sums of large products on this "
            f"machine, so that it is not linear: {saturating[0]}"
        )
    return report
