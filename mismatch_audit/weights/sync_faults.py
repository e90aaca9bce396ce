"""The menu of weight-sync faults, each one switch in the simulated trainer or engine."""

from __future__ import annotations

from dataclasses import dataclass

from mismatch_audit.weights.schemes import Scheme, scheme_by_name
from mismatch_audit.weights.simulated_model import adapter, initial_master, updated
from mismatch_audit.weights.simulated_push import export_push
from mismatch_audit.weights.sync_audit import PushAudit, audit_push, start_engine

# One push's worth of change. Small on purpose: probes with a limit of 0.25 cannot see it.
UPDATE = 0.01


@dataclass(frozen=True)
class SyncFault:
    """flag: the switch. named: what the cause must contain. schemes: where it can exist.

    named: alternatives are separated by "|". fill: whether scales are marked before the push.
    first: the push follows a start from dummy weights (else from the previous step's weights).
    at_start: the fault is in the engine's layout, not in one push. side: who is at fault.
    """

    flag: str
    title: str
    named: str
    first: bool = False
    at_start: bool = False
    side: str = "engine"
    fill: bool = True
    schemes: tuple[str, ...] = ("bf16", "mxfp8", "block_fp8", "channel_int8")

    def is_named(self, cause: str) -> bool:
        """Whether a cause names this fault."""
        return any(word in cause for word in self.named.split("|"))


_QUANTISED = ("mxfp8", "block_fp8", "channel_int8")
MENU: tuple[SyncFault, ...] = (
    SyncFault("skipped_layer", "skipped layer", "skipped layer"),
    SyncFault(
        "stale_copy",
        "stale derived copy (swizzled scales), dense",
        "stale derived copy",
        first=True,
        schemes=("mxfp8",),
    ),
    SyncFault(
        "stale_expert_copy",
        "stale derived copy, experts",
        "stale derived copy",
        first=True,
        schemes=("mxfp8",),
    ),
    SyncFault("transpose", "transposed weight", "transposed", side="trainer"),
    SyncFault("gate_up_swap", "gate and up swapped in the fused tensor", "swapped", at_start=True),
    SyncFault("qk_swap", "q and k swapped in the fused tensor", "swapped", at_start=True),
    SyncFault(
        "shard_stale",
        "one tensor-parallel shard stale",
        "shard stale",
        schemes=("bf16", "mxfp8", "channel_int8"),
    ),
    SyncFault("live_dtype", "live dtype changed by the push", "live dtype"),
    SyncFault(
        "incoming_dtype", "incoming dtype is not the live one", "incoming dtype", side="trainer"
    ),
    SyncFault(
        "missing_scale", "scale never sent", "missing scale", side="trainer", schemes=_QUANTISED
    ),
    SyncFault("nan_scale", "NaN in a sent scale", "NaN", side="trainer", schemes=_QUANTISED),
    SyncFault(
        "missing_scale",
        "scale never sent, scales not marked",
        "stale",
        side="trainer",
        fill=False,
        schemes=_QUANTISED,
    ),
    SyncFault(
        "never_written",
        "layer never written (dummy weights kept), scales not marked",
        "unrelated values",
        first=True,
        fill=False,
    ),
    SyncFault(
        "wrong_rounding",
        "wrong rounding in the export",
        "wrong rounding|truncated",
        side="trainer",
    ),
    SyncFault(
        "scale_rounding",
        "scales rounded up instead of down",
        "quantizer mismatch",
        side="trainer",
        schemes=("mxfp8",),
    ),
    SyncFault(
        "unscaled_cast", "cast without a scale", "unscaled cast", side="trainer", schemes=("mxfp8",)
    ),
    SyncFault(
        "permuted_scales",
        "scales permuted",
        "permuted",
        side="trainer",
        schemes=("mxfp8", "channel_int8"),
    ),
    SyncFault(
        "unquantised_layer",
        "engine keeps a layer unquantised",
        "quantise different layers",
        at_start=True,
        schemes=_QUANTISED,
    ),
    SyncFault("zeroed_rope", "RoPE buffer zeroed", "zeroed"),
    SyncFault("untied_head", "tied head untied, not synced", "untied head", at_start=True),
    SyncFault("stale_prefix_cache", "prefix cache kept after the push", "stale prefix cache"),
    SyncFault("version_without_load", "version bumped without a load", "without a load"),
    SyncFault("not_applied", "acknowledged, not applied", "acknowledged, not applied"),
    SyncFault("partial_push", "partial push", "partial push"),
    SyncFault("adapter_off", "LoRA off after the push", "adapter off"),
    SyncFault("storage_moved", "storage moved under a captured graph", "other memory"),
    SyncFault("echoed_read_back", "read-back echoes the push, nothing loaded", "other memory"),
    SyncFault("blended_copy", "derived router copy blended with its old value", "not repeatable"),
    SyncFault("eos_lost", "stop tokens lost with the reload", "rollouts are broken"),
)


def _scheme(name: str) -> Scheme | None:
    return None if name == "bf16" else scheme_by_name(name)


def run_fault(fault: SyncFault | None, scheme_name: str) -> PushAudit:
    """Injects one fault (None: the clean twin) and audits the push."""
    scheme = _scheme(scheme_name)
    update = adapter(seed=5)
    before = initial_master(seed=1 if fault is not None and fault.first else 0)
    master = updated(initial_master(seed=0), UPDATE, seed=2)
    flags = frozenset({fault.flag}) if fault is not None else frozenset()
    in_engine = fault is not None and fault.side == "engine"
    at_start = flags if fault is not None and fault.at_start else frozenset()
    later = flags if in_engine and not at_start else frozenset()
    engine = start_engine(scheme, update, before, at_start, later)
    exported = export_push(
        master, scheme, 2, flags if fault is not None and not in_engine else frozenset()
    )
    return audit_push(engine, master, update, exported, fill=fault.fill if fault else True)
