"""The report of an ingest: what the folder's requests show, and what they cannot."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pandas as pd

from kernel_contracts.contract import Contract
from kernel_contracts.escalation import actions_of
from kernel_contracts.loading import contract_digest
from kernel_contracts.measurement import EXIT_CODES, Measurement, overall
from kernel_contracts.promotion import Promotion
from kernel_contracts.slices import resolve
from kernel_contracts.verdict import Evidence, judge
from mismatch_audit.monitor.frames import with_metadata
from mismatch_audit.monitor.ingest_folder import JUDGED, IngestFolder
from mismatch_audit.monitor.sampled import not_judged
from mismatch_audit.monitor.survey import Choice, Survey
from mismatch_audit.prepare import now
from mismatch_audit.reports.record import (
    ContractRef,
    Counts,
    Finding,
    Identities,
    MeasurementRow,
    Record,
)


def report_of(
    contract: Contract, judged: Contract, choice: Choice, facts: dict[str, Any],
    folder: IngestFolder, seen: Survey, looks: int, started: str,
) -> Record:  # fmt: skip
    """Judge all that the folder holds by the sampled part of the contract."""
    from mismatch_audit.assemble import environment

    tokens, requests = folder.tokens(), folder.requests()
    kept = requests[requests["outcome"] == JUDGED]
    metadata = dict(zip(kept["request_id"], map(json.loads, kept["metadata"]), strict=True))
    tokens = with_metadata(judged, tokens, metadata)
    prompts = pd.DataFrame({"prompt_id": kept["prompt_id"].unique()})
    cap = contract.promotion.max_response_tokens if contract.promotion else 4096
    evidence = Evidence(tokens=tokens, prompts=prompts, max_rows=cap)
    rule = (contract.promotion or Promotion()).rule(choice.stage)
    share = 1 - len(kept) / len(requests) if len(requests) else 1.0
    measurements = _withheld(judge(judged, evidence), share, rule.max_unusable)
    verdict = overall(measurements)
    return Record(
        verdict=verdict,
        exit_code=EXIT_CODES[verdict],
        started=started,
        finished=now(),
        contract=ContractRef(
            name=judged.name, digest=contract_digest(judged), document=judged.document()
        ),
        identities=Identities(
            reference=facts,
            engine={
                "build": choice.build,
                "stage": choice.stage,
                "weights_version": choice.weights_version,
            },
        ),
        counts=Counts(prompts=len(prompts), sequences=len(kept), tokens=len(tokens)),
        measurements=[MeasurementRow.of(m) for m in measurements],
        findings=_findings(contract, judged, requests, seen, looks, share, rule.max_unusable),
        actions=[
            asdict(a) for a in actions_of(judged, measurements, resolve(judged, tokens, prompts))
        ],
        environment={**environment(), "source": "mirrored traffic"},
        digests={
            "whole_contract": contract_digest(contract),
            "reference_weights": facts.get("weights"),
        },
    )


def _withheld(rows: list[Measurement], share: float, allowed: float) -> list[Measurement]:
    """Too many requests that cannot be judged: the rest may not stand for the traffic."""
    if share <= allowed:
        return rows
    why = f"{share:.1%} of the requests could not be judged, {allowed:.1%} are allowed"
    return [
        replace(m, verdict="UNOBSERVED", detail=why) if m.verdict == "PASS" else m for m in rows
    ]


def _findings(
    contract: Contract, judged: Contract, requests: pd.DataFrame, seen: Survey, looks: int,
    share: float, allowed: float,
) -> list[Finding]:  # fmt: skip
    found = []
    reasons = requests["outcome"][requests["outcome"] != JUDGED].value_counts()
    if len(reasons):
        found.append(
            Finding(
                code="UNUSABLE_REQUESTS",
                title=f"{int(reasons.sum())} of {len(requests)} requests could not be judged",
                severity="warning" if share > allowed else "note",
                evidence=[{"reason": str(r), "requests": int(n)} for r, n in reasons.items()],
                remedy="Mirror requests at temperature 1 without top_p or top_k, with the "
                "log-probs of every token and the weights' version.",
            )
        )
    if seen.counts.bad:
        found.append(
            Finding(
                code="BAD_LINES",
                title=f"{seen.counts.bad} lines of the log are no requests and were skipped",
                severity="warning",
                evidence=[{"first": seen.counts.first_bad}],
                remedy="Mend the writer; run without --skip-bad to stop at the first one.",
            )
        )
    if left := not_judged(contract, judged):
        found.append(
            Finding(
                code="NOT_JUDGED",
                title=f"Not judged on traffic: {', '.join(left)}",
                severity="note",
                remedy="Full rows do not travel with traffic; `audit run` judges these clauses.",
            )
        )
    if contract.pair.engine:
        found.append(
            Finding(
                code="ENGINE_NOT_READ_BACK",
                title="The engine's facts rest on its build's name: "
                + ", ".join(sorted(contract.pair.engine)),
                severity="note",
                remedy="They were read back when the build was audited; keep builds immutable.",
            )
        )
    if looks > 1:
        found.append(
            Finding(
                code="REPEATED_LOOK",
                title=f"This folder was judged {looks} times as it grew",
                severity="note",
                remedy="These bounds hold for one look. Decide by the promotion store or by "
                "`audit watch`, whose tests may be looked at as often as you like.",
            )
        )
    return found
