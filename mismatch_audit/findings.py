"""Coded causes: what the numbers and the facts say went wrong, with evidence and a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from kernel_contracts.measurement import Measurement
from kernel_contracts.verdict import Evidence
from mismatch_audit.identity import no_op_requests
from mismatch_audit.reports.record import Finding


def find(
    facts: dict[str, dict[str, Any]], evidence: Evidence, measurements: Sequence[Measurement]
) -> list[Finding]:
    """Every finding, errors first."""
    found = [
        *_nonfinite(evidence.tokens),
        *_certified_flips(evidence.tokens),
        *_below_floor(measurements),
        *_route(facts["engine"]),
        *_rounded_copy(facts["engine"]),
        *_no_op(facts["engine"]),
        *_batch_variant(evidence.probes),
    ]
    order = ("error", "warning", "note")
    return sorted(found, key=lambda f: order.index(f.severity))


def _rows(frame: pd.DataFrame, columns: list[str], count: int = 5) -> list[dict[str, Any]]:
    return [
        {str(k): (v.item() if hasattr(v, "item") else v) for k, v in row.items()}
        for row in frame[columns].head(count).to_dict("records")
    ]


def _nonfinite(tokens: pd.DataFrame) -> list[Finding]:
    bad = tokens[tokens["nonfinite"] > 0]
    if bad.empty:
        return []
    return [
        Finding(
            code="NONFINITE",
            title=f"{len(bad)} rows with NaN or infinite logits",
            severity="error",
            evidence=_rows(bad, ["prompt_id", "position", "path", "nonfinite"]),
            remedy="Look at the engine's log and at the weights of the last layers; nothing else "
            "in this report counts for those rows.",
        )
    ]


def _certified_flips(tokens: pd.DataFrame) -> list[Finding]:
    """A flip where the margin exceeds the drift cannot be: the table is wrong."""
    bad = tokens[tokens["flip"] & (tokens["reference_margin"] > tokens["drift"])]
    if bad.empty:
        return []
    return [
        Finding(
            code="CERTIFICATE",
            title=f"{len(bad)} greedy flips where the margin is larger than the drift",
            severity="error",
            evidence=_rows(bad, ["prompt_id", "position", "reference_margin", "drift"]),
            remedy="Report this: the comparison contradicts itself.",
        )
    ]


def _below_floor(measurements: Sequence[Measurement]) -> list[Finding]:
    low = [
        m
        for m in measurements
        if m.noise_floor and m.value is not None and 0 < m.value < m.noise_floor
    ]
    return [
        Finding(
            code="BELOW_FLOOR",
            title=f"{m.clause} on {m.slice}: {m.metric} is below the noise floor",
            severity="note",
            evidence=[{"value": m.value, "noise_floor": m.noise_floor}],
            remedy="A program differs from itself by as much: do not read this as drift.",
            clause=m.clause,
            slice=m.slice,
        )
        for m in low
    ]


def _route(engine: dict[str, Any]) -> list[Finding]:
    if engine.get("route") != "engine_logits":
        return []
    return [
        Finding(
            code="HEAD_ROUTE",
            title="the engine's head could not be re-applied; rows come from its own logits",
            severity="note",
            evidence=[{"largest_difference_nats": engine.get("head_check")}],
            remedy="None needed: the slower route was used for every row.",
        )
    ]


def _rounded_copy(engine: dict[str, Any]) -> list[Finding]:
    share = engine.get("unrepresentable_weights") or 0.0
    if share == 0.0:
        return []
    return [
        Finding(
            code="ROUNDED_COPY",
            title=f"{share:.1%} of the weights change when rounded to {engine.get('dtype')}",
            severity="warning",
            evidence=[{"share": share, "dtype": engine.get("dtype")}],
            remedy="A rounded copy is another policy: part of the drift is rounding of weights, "
            "not the kernel. Serve float32, or put the exported copy on both sides, to tell apart.",
        )
    ]


def _no_op(engine: dict[str, Any]) -> list[Finding]:
    return [
        Finding(
            code="NO_OP_SETTING",
            title=f"a requested engine setting changed nothing: {text}",
            severity="warning",
            evidence=[{"requested": engine.get("requested", {})}],
            remedy="The engine is not what its command line says: check its support.",
        )
        for text in no_op_requests(engine.get("requested", {}), engine)
    ]


def _batch_variant(probes: pd.DataFrame) -> list[Finding]:
    if probes.empty:
        return []
    rows = probes[probes["probe"] == "batch_invariance"]
    mean = float(rows["kl"].mean()) if len(rows) else 0.0
    if mean <= 1e-6:  # fp32 kernels differ by about 1e-11 here
        return []
    return [
        Finding(
            code="BATCH_VARIANT",
            title=f"a lone request is served from other numbers than a batched one (KL {mean:.2g})",
            severity="note",
            evidence=[{"prompts": len(rows), "mean_kl": mean}],
            remedy="Kernels depend on the batch. Use a batch-invariant mode where the engine has "
            "one, or audit at the batch sizes that you serve.",
        )
    ]
