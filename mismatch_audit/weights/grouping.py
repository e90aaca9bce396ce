"""From faults per tensor to findings: one cause, stated once, with the tensors it covers."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from mismatch_audit.weights.families import Family
from mismatch_audit.weights.findings import Fault, Finding, TensorReport
from mismatch_audit.weights.layout import split_layer

# What a tensor looks like that the push did not reach; scales may have been filled beforehand.
_STALE = (Fault.STALE, Fault.UNWRITTEN)
# A cause that touches at least this share of all compared elements is no single tensor's.
_NEARLY_ALL = 0.9


def layer_index(name: str, family: Family) -> int | None:
    """The layer of a canonical name; None for embeddings, the last norm and the head."""
    prefix, _ = split_layer(name, family)
    return int(re.findall(r"\d+", prefix)[0]) if prefix else None


def group(reports: list[TensorReport], family: Family) -> list[Finding]:
    """Findings of a comparison, the widest causes first. Healthy reports give none."""
    findings: list[Finding] = []
    faulty = [report for report in reports if not report.healthy]
    stale = [report for report in faulty if report.fault in _STALE]
    covered: set[str] = set()
    if stale:
        wide = _stale_findings(stale, reports, family)
        findings += wide
        covered = {name for finding in wide for name in finding.tensors}
    buckets: dict[tuple[Fault, str], list[TensorReport]] = defaultdict(list)
    for report in faulty:
        if report.name in covered:
            continue
        buckets[(report.fault, _distinguishing(report))].append(report)
    for (fault, _), members in buckets.items():
        findings.append(_finding(fault, members, family))
    wrong_dtype = [r for r in reports if "dtype_expected" in r.evidence and r.fault != Fault.DTYPE]
    if wrong_dtype:
        findings.append(_finding(Fault.DTYPE, wrong_dtype, family))
    return findings


def _leaf(name: str, family: Family) -> str:
    return re.sub(r"\.\d+\.", ".*.", split_layer(name, family)[1])


def _distinguishing(report: TensorReport) -> str:
    keep = ("rounding", "order_of", "served", "rank", "holds", "halves_of", "served_pairs")
    return repr(
        [re.sub(r"\.\d+\.", ".*.", str(report.evidence.get(key))) for key in keep]
        + [report.ranks, report.served_dtype if report.fault == Fault.DTYPE else ""]
    )


def _summary(members: list[TensorReport]) -> dict[str, Any]:
    elements = sum(r.elements for r in members)
    worst = max(members, key=lambda r: r.relative_error or 0.0)
    evidence: dict[str, Any] = {
        "tensors": len(members),
        "elements": elements,
        "differing_share": sum(r.differing for r in members) / elements if elements else 0.0,
    }
    if worst.relative_error is not None:
        evidence["worst_relative_error"] = worst.relative_error
        evidence["worst_tensor"] = worst.name
    ulps = [r.max_ulp for r in members if r.max_ulp is not None]
    if ulps:
        evidence["max_ulp"] = max(ulps)
    return {**members[0].evidence, **evidence}


def _where(members: list[TensorReport], family: Family) -> str:
    if len(members) == 1:
        return members[0].name
    leaves = list(dict.fromkeys(_leaf(report.name, family) for report in members))
    more = f" and {len(leaves) - 3} more" if len(leaves) > 3 else ""
    return f"{', '.join(leaves[:3])}{more} ({len(members)} tensors)"


def _held(members: list[TensorReport], family: Family) -> str:
    held = str(members[0].evidence.get("holds"))
    return held if len(members) == 1 else _leaf(held, family)


def _finding(fault: Fault, members: list[TensorReport], family: Family) -> Finding:
    first = members[0]
    detail = {
        Fault.SWAPPED: f"holds {_held(members, family)}",
        Fault.ROUNDING: f"rounded {first.evidence.get('rounding')}",
        Fault.QUANTIZER: f"served {first.evidence.get('served')}",
        Fault.DTYPE: f"{first.served_dtype}, expected {first.evidence.get('dtype_expected')}",
        Fault.SHAPE: f"{first.served_shape}, expected {first.trainer_shape}",
        Fault.PERMUTED: f"{first.evidence.get('order_of')} in another order",
        Fault.SHARD_STALE: f"rank {first.evidence.get('rank')} of {first.evidence.get('ranks')}",
        Fault.SCALED: f"by {first.evidence.get('factor', first.evidence.get('factor_per_row'))}",
    }.get(fault, "")
    title = f"{_where(members, family)}: {fault.value}" + (f": {detail}" if detail else "")
    return Finding(fault, title, tuple(r.name for r in members), _summary(members))


def _stale_findings(
    stale: list[TensorReport], reports: list[TensorReport], family: Family
) -> list[Finding]:
    """Nothing pushed, a partial push, skipped layers: staleness that follows the layers."""
    compared = [r for r in reports if r.fault not in (Fault.MISSING, Fault.EXTRA) and r.elements]
    total = sum(r.elements for r in compared)
    if total and sum(r.elements for r in stale) >= _NEARLY_ALL * total and len(compared) > 1:
        title = f"every weight is stale ({len(stale)} of {len(compared)} tensors): nothing pushed"
        return [Finding(Fault.NOTHING_PUSHED, title, _names(stale), _summary(stale))]
    by_layer: dict[int, list[TensorReport]] = defaultdict(list)
    stale_by_layer: dict[int, list[TensorReport]] = defaultdict(list)
    for report in compared:
        if (layer := layer_index(report.name, family)) is not None:
            by_layer[layer].append(report)
            if report.fault in _STALE:
                stale_by_layer[layer].append(report)
    whole = sorted(
        layer for layer, members in stale_by_layer.items() if _mostly(members, by_layer[layer])
    )
    if not whole or len(by_layer) < 2:
        return []
    members = [report for layer in whole for report in stale_by_layer[layer]]
    last, first = max(by_layer), min(by_layer)
    contiguous = whole == list(range(whole[0], whole[-1] + 1))
    if len(whole) > 1 and contiguous and (whole[-1] == last or whole[0] == first):
        outside = [r for r in stale if layer_index(r.name, family) is None]
        part = f"layers {whole[0]} to {whole[-1]} of {first} to {last}"
        return [
            Finding(
                Fault.PARTIAL_PUSH,
                f"{part} are stale: partial push",
                _names(members + outside),
                {"layers": [whole[0], whole[-1]], **_summary(members)},
            )
        ]
    return [
        Finding(
            Fault.SKIPPED_LAYER,
            f"layer {layer} is stale, its neighbours are not: skipped layer",
            _names(stale_by_layer[layer]),
            {"layer": layer, **_summary(stale_by_layer[layer])},
        )
        for layer in whole
    ]


def _mostly(members: list[TensorReport], layer: list[TensorReport]) -> bool:
    """Norm gains may not have moved: by elements, not by tensors."""
    moved = sum(r.elements for r in members)
    return len(members) > 1 and moved >= _NEARLY_ALL * sum(r.elements for r in layer)


def _names(reports: list[TensorReport]) -> tuple[str, ...]:
    return tuple(report.name for report in reports)
