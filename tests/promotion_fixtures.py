"""A small contract with promotion rules, judged prompts made up from a seed, a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kernel_contracts.contract import Contract
from kernel_contracts.loading import contract_digest, parse_contract
from mismatch_audit.promotion.evidence import Batch, JudgedUnit

TEXT = """\
schema: kernel-contracts/v1
name: live
slices:
  domain: {by: domain}
numerical:
  - {id: N0, metric: nonfinite, limit: 0}
statistical:
  - {id: S1, metric: k3, limit: 1.0e-2, ceiling: 5.0e-2, tail: 0.2}
  - {id: S2, metric: k3, limit: 2.0e-2, ceiling: 6.0e-2, tail: 0.4, slices: [domain]}
promotion:
  shadow: {min_prompts: 60, min_tokens: 600}
  canary: {min_prompts: 60, on_violation: previous}
  full: {min_prompts: 60}
"""
BUILD, WEIGHTS = "registry/engine@sha256:1", "a" * 64


def contract(text: str = TEXT) -> Contract:
    return parse_contract(text)


def judged(index: int, mean: float, *, prefix: str = "r", tokens: int = 12) -> JudgedUnit:
    """A prompt whose k3 is exponential with a mean; the same index gives the same prompt."""
    value = float(np.random.default_rng([7, index]).exponential(mean))
    domain = ("code", "math")[index % 2]
    time = f"2026-01-01T{index // 3600 % 24:02d}:{index // 60 % 60:02d}:{index % 60:02d}.000000Z"
    return JudgedUnit(
        f"{prefix}{index}",
        {f"{prefix}{index}": (time, tokens)},
        {"S1": {"all": (value, tokens)}, "S2": {f"domain={domain}": (value, tokens)}},
    )


def batch(stage: Any, start: int, count: int, mean: float = 2e-3, **options: Any) -> Batch:
    return Batch(stage, [judged(i, mean, **options) for i in range(start, start + count)])


def write_report(
    folder: Path, of: Contract, *, verdict: str = "PASS", finished: str | None = None,
    weights: str = WEIGHTS,
) -> Path:  # fmt: skip
    """A report.json as an audit would leave it."""
    from mismatch_audit.prepare import now
    from mismatch_audit.reports.record import ContractRef, Counts, Identities, Record, save_record

    codes = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}
    row: dict[str, Any] = {
        "clause": "S1", "slice": "all", "metric": "k3", "section": "statistical", "value": 1e-3,
        "lower": 0.0, "upper": 2e-3, "limit": 1e-2, "n_prompts": 80, "n_tokens": 800,
        "verdict": verdict,
    }  # fmt: skip
    record = Record.model_validate(
        {
            "verdict": verdict, "exit_code": codes[verdict], "started": now(),
            "finished": finished or now(),
            "contract": ContractRef(
                name=of.name, digest=contract_digest(of), document=of.document()
            ).model_dump(),
            "identities": Identities(
                reference={"weights": weights}, engine={"weights": weights, "dtype": "bfloat16"}
            ).model_dump(),
            "counts": Counts(prompts=80, sequences=80, tokens=800).model_dump(),
            "measurements": [row],
        }
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save_record(record, folder / "report.json")
    json.loads((folder / "report.json").read_text())
    return folder
