"""What an audit of recorded rollouts gave, as the canonical record."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any

import numpy as np

from kernel_contracts.escalation import actions_of
from kernel_contracts.loading import contract_digest
from kernel_contracts.measurement import EXIT_CODES, Measurement, overall
from kernel_contracts.slices import Slice
from mismatch_audit.reports.record import (
    CheckRow,
    ContractRef,
    Counts,
    Finding,
    Identities,
    MeasurementRow,
    PositionBin,
    ProbabilityBin,
    Record,
    Rollouts,
    RolloutSource,
    Scatter,
    SliceRow,
    Views,
)
from mismatch_audit.rollouts.checks.base import CheckResult
from mismatch_audit.rollouts.judge import judged, step_rows
from mismatch_audit.rollouts.run import Audited, Read, facts, semantic_error

_SEVERITIES = ("error", "warning", "note")
_HEADER_FACTS = (
    "model", "tokenizer_digest", "vocab_size", "tied_head", "position_type", "trainer_dtype",
    "engine_dtype", "engine_version", "correction",
)  # fmt: skip


def record_of(audited: Audited, started: str, finished: str, max_rows: int = 0) -> Record:
    """Judge what was read and write it down. The stream's files are given back."""
    began = perf_counter()
    stream, contract = audited.stream, audited.contract
    measurements, slices = judged(
        contract, stream, audited.lacks, missing_columns=audited.missing, max_rows=max_rows
    )
    steps, statistics = step_rows(stream), stream.statistics().as_dict()
    stream.close()
    semantic = semantic_error(audited.results)
    verdict = _verdict(audited, measurements, semantic)
    if verdict == "NOT_COMPARABLE":
        measurements = []  # identity comes before numerics: no drift is reported
    names = [Slice(s.slice, s.definition, np.empty(0, dtype=bool)) for s in slices]
    prompts = next(s.n_prompts for s in slices if s.slice == "all")
    return Record(
        verdict=verdict,  # type: ignore[arg-type]
        exit_code=EXIT_CODES[verdict],
        started=started,
        finished=finished,
        contract=ContractRef(
            name=contract.name, digest=contract_digest(contract), document=contract.document()
        ),
        identities=Identities(**facts(audited.reads)),
        counts=Counts(prompts=prompts, sequences=stream.sequences, tokens=stream.sampled),
        measurements=[MeasurementRow.of(m) for m in measurements],
        findings=_findings(audited.results),
        actions=[asdict(a) for a in actions_of(contract, measurements, names)],
        views=_views(audited, slices),
        rollouts=Rollouts(
            sources=[*map(_source, audited.reads), *_unopened(audited)],
            statistics=statistics,
            slices=slices,
            steps=steps,
            staleness=audited.staleness,
            checks=[
                CheckRow(
                    code=r.code, title=r.title, status=r.status, severity=r.severity,
                    detail=r.detail,
                )
                for r in audited.results
            ],
        ),
        environment=_environment(),
        timings={k: round(v, 3) for k, v in {**audited.seconds,
                                              "verdicts": perf_counter() - began}.items()},
    )  # fmt: skip


def _verdict(
    audited: Audited, measurements: Sequence[Measurement], semantic: CheckResult | None
) -> str:
    """docs/rollouts.md, "Verdicts": a semantic error, any other error, then the clauses."""
    if semantic is not None:
        return "NOT_COMPARABLE"
    verdict = overall(list(measurements))
    errors = any(r.status == "found" and r.severity == "error" for r in audited.results)
    if errors and verdict != "UNSOUND":
        return "FAIL"
    if audited.damaged and verdict in ("PASS", "INCONCLUSIVE"):
        return "UNOBSERVED"
    return verdict


def _findings(results: Sequence[CheckResult]) -> list[Finding]:
    """Errors first, causes before what follows from them."""
    found = [r for r in results if r.status == "found"]
    found.sort(key=lambda r: (bool(r.consequence_of), _SEVERITIES.index(r.severity)))
    rows = []
    for r in found:
        title = r.title if not r.detail else f"{r.title}: {r.detail}"
        if r.consequence_of:
            title = f"{title} (may follow from {r.consequence_of})"
        rows.append(
            Finding(
                code=r.code, title=title, severity=r.severity, evidence=r.evidence, remedy=r.remedy
            )
        )
    return rows


def _source(read: Read) -> RolloutSource:
    header = read.source.header
    return RolloutSource(
        path=str(read.source.path),
        format=header.format,
        framework=header.framework,
        why=read.why,
        sequences=read.sequences,
        tokens=read.tokens,
        facts={k: v for k in _HEADER_FACTS if (v := getattr(header, k))},
        lacks=header.lacks,
        notes=header.notes,
        error="; ".join(read.errors) or None,
    )


def _unopened(audited: Audited) -> list[RolloutSource]:
    return [
        RolloutSource(path=p.path, format="", framework="", error=str(p.error))
        for p in audited.unopened
    ]


def _views(audited: Audited, slices: Sequence[SliceRow]) -> Views:
    points = audited.stream.points
    return Views(
        kl_by_position=[
            PositionBin(lo=lo, hi=hi, n=s.n_tokens, mean=s.k3, p95=None)
            for s, lo, hi in _bins(audited, slices, "position")
        ],
        kl_by_reference_prob=[
            ProbabilityBin(lo=lo, hi=hi, n=s.n_tokens, mean=s.k3, mean_abs_dlp=s.abs_dlp)
            for s, lo, hi in _bins(audited, slices, "engine_prob")
        ],
        logprob_scatter=Scatter(reference=points[:, 2].tolist(), engine=points[:, 1].tolist()),
    )


def _bins(
    audited: Audited, slices: Sequence[SliceRow], column: str
) -> list[tuple[SliceRow, float, float]]:
    """The contract's bins of that column, those with rows."""
    for name, spec in audited.contract.slices.items():
        if spec.where is None and spec.by is None and list(spec.bins or {}) == [column]:
            edges = (spec.bins or {})[column]
            rows = [s for s in slices if s.definition == name]
            return [
                (s, lo, hi) for s, lo, hi in zip(rows, edges, edges[1:], strict=False) if s.n_tokens
            ]
    return []


def _environment() -> dict[str, Any]:
    import os

    import mismatch_audit

    return {
        "mismatch_audit": mismatch_audit.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
    }
