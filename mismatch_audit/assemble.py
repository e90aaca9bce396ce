"""From evidence and verdicts to the record: chain, views, findings, environment, files."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from kernel_contracts.chain import chain_of
from kernel_contracts.escalation import actions_of
from kernel_contracts.loading import contract_digest
from kernel_contracts.measurement import EXIT_CODES, Measurement, overall
from kernel_contracts.slices import Slice, resolve
from kernel_contracts.verdict import Evidence
from mismatch_audit import views
from mismatch_audit.findings import find
from mismatch_audit.prepare import Run, now
from mismatch_audit.reports.record import (
    Chain,
    ChainRow,
    ContractRef,
    Counts,
    FlipBin,
    Identities,
    MeasurementRow,
    PositionBin,
    ProbabilityBin,
    ProbeRow,
    Record,
    Scatter,
    Views,
    WorstToken,
    save_record,
)
from mismatch_audit.rundir import digest_of


def assemble(run: Run, evidence: Evidence, measurements: Sequence[Measurement]) -> Record:
    """Everything that the report says, and nothing it could not be asked to show."""
    facts = run.folder.finished("facts")
    tokens, sequences = run.folder.tables()
    decode = tokens[tokens["path"] == "decode"]
    verdict = overall(list(measurements))
    slices = resolve(run.contract, evidence.tokens, evidence.prompts)
    return Record(
        verdict=verdict,
        exit_code=EXIT_CODES[verdict],
        started=run.started,
        finished=now(),
        contract=ContractRef(
            name=run.contract.name,
            digest=contract_digest(run.contract),
            document=run.contract.document(),
        ),
        identities=Identities(**facts),
        counts=Counts(prompts=len(run.prompts), sequences=len(sequences), tokens=len(decode)),
        measurements=[MeasurementRow.of(m) for m in measurements],
        findings=find(facts, evidence, measurements),
        actions=[asdict(a) for a in actions_of(run.contract, measurements, slices)],
        chain=_chains(run, slices, evidence, measurements),
        views=_views(run, evidence, decode, sequences),
        gradient=(run.folder.cached_json("gradient") or {}).get("rows", []),
        environment=environment(),
        digests={
            "settings": digest_of(run.folder.spec["settings"]),
            "prompts": run.folder.spec["prompts"],
            "reference_weights": facts["reference"]["weights"],
            "engine_weights": facts["engine"]["weights"],
        },
        timings={k: round(v, 3) for k, v in run.timings.items()},
    )


def _chains(
    run: Run, slices: Sequence[Slice], evidence: Evidence, measurements: Sequence[Measurement]
) -> list[Chain]:
    found = []
    for one in slices:
        links = chain_of(run.contract, one, evidence.tokens, measurements, evidence.max_rows)
        found += [
            Chain.model_validate(
                {"slice": one.name, "route": route, "rows": [ChainRow(**asdict(r)) for r in rows]}
            )
            for route, rows in links.items()
        ]
    return found


def _views(run: Run, evidence: Evidence, decode: pd.DataFrame, sequences: pd.DataFrame) -> Views:
    finite = decode[decode["nonfinite"] == 0]
    worst = views.worst_tokens(finite, sequences, evidence.prompts, run.tokenizer)
    return Views(
        flip_by_margin=[FlipBin(**r) for r in views.flip_by_margin(finite, run.contract.alpha)],
        kl_by_position=[PositionBin(**r) for r in views.kl_by_position(finite)],
        kl_by_reference_prob=[ProbabilityBin(**r) for r in views.kl_by_reference_prob(finite)],
        logprob_scatter=Scatter(**views.scatter(finite)),
        worst_tokens=[WorstToken(**r) for r in worst],
        probes=[ProbeRow(**r) for r in views.probe_means(evidence.probes)],
    )


def environment() -> dict[str, Any]:
    """The machine, as far as numbers depend on it. No user names, no secrets, no paths."""
    import torch

    import mismatch_audit

    return {
        "mismatch_audit": mismatch_audit.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def write_report(record: Record, folder: Path) -> None:
    """``report.json`` and ``report.html``."""
    from mismatch_audit.reports.html import render_html

    save_record(record, folder / "report.json")
    temporary = folder / "report.html.tmp"
    temporary.write_text(render_html(record), encoding="utf-8")
    temporary.replace(folder / "report.html")
