"""From a stream's sums to verdicts and to the tables of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kernel_contracts.clauses import NumericalClause
from kernel_contracts.contract import Contract
from kernel_contracts.measurement import Measurement
from kernel_contracts.sums import PromptTotals, SumSlice, judge_sums
from mismatch_audit.reports.record import SliceRow, StepRow
from mismatch_audit.rollouts import kernels as k
from mismatch_audit.rollouts.slices import Found, why_absent
from mismatch_audit.rollouts.stream import Stream

FloatArray = NDArray[np.float64]

METRICS = {
    "abs_dlp": k.ABS_DLP,
    "k3": k.K3,
    "mult_prob_error": k.MULT,
    "ess_ratio": k.W2,
    "abs_dp": k.ABS_DP,
}
"""The contract's metrics that the sampled token's log-probs give, and the sum that each needs."""


def thresholds(contract: Contract) -> list[float]:
    """Thresholds of |log p - log q| that the contract's numerical clauses name."""
    return [
        c.exceeds
        for c in contract.numerical
        if isinstance(c, NumericalClause) and c.metric == "abs_dlp" and c.exceeds is not None
    ]


def judged(
    contract: Contract,
    stream: Stream,
    lacks: Mapping[str, str],
    *,
    missing_columns: Mapping[str, float],
    max_rows: int = 0,
) -> tuple[list[Measurement], list[SliceRow]]:
    """Verdicts of every clause, and the statistics of every slice.

    lacks: column -> why the sources have none.  missing_columns: column of the token table -> share
    of sampled tokens without a value, over the whole log.  max_rows: see ``judge_sums``.
    """
    both = [
        _slice(contract, stream, found, lacks, missing_columns) for found in stream.plan.found()
    ]
    both = _without_empty_bins(contract, both)
    views, rows = [view for view, _ in both], [row for _, row in both]
    with ThreadPoolExecutor(2) as pool:  # numpy lets go of the interpreter on long arrays
        found = judge_sums(
            contract, views, total_rows=stream.sampled, max_rows=max_rows, each=pool.map
        )
    return found, rows


def _without_empty_bins(
    contract: Contract, both: list[tuple[SumSlice, SliceRow]]
) -> list[tuple[SumSlice, SliceRow]]:
    """Of an optional definition, the slices with rows; without any, one that says why."""
    kept = []
    for name, spec in contract.slices.items():
        mine = [pair for pair in both if pair[1].definition == name]
        seen = [pair for pair in mine if pair[1].n_tokens]
        if spec.optional and seen:
            mine = seen
        elif spec.optional and len(mine) > 1:
            view, row = mine[0]
            mine = [(replace(view, name=name), row.model_copy(update={"slice": name}))]
        kept += mine
    return kept


def _slice(
    contract: Contract,
    stream: Stream,
    found: Found,
    lacks: Mapping[str, str],
    missing_columns: Mapping[str, float],
) -> tuple[SumSlice, SliceRow]:
    _, sums = stream.store.slice(found.ids)
    total = sums.sum(axis=0) if len(sums) else np.zeros(stream.width)
    all_rows = int(total[[k.ROWS, k.MISSING, k.NONFINITE]].sum())
    definition = found.definition
    why = "" if all_rows else (why_absent(definition, lacks) or "no rows")
    unknown = definition.nulls + sum(sorted(definition.absent.values())[-1:])
    share = 1 - total[k.ROWS] / all_rows if all_rows else 1.0
    missing = {"engine_logprob": float(share), "reference_logprob": float(share)}
    if found.name == "all":
        missing |= missing_columns
    infinite = int(total[k.NONFINITE])
    view = SumSlice(
        name=found.name,
        definition=definition.name,
        totals=lambda: _totals(stream, found.ids),
        n_prompts=len(sums),
        n_rows=all_rows,
        why=why,
        unknown=unknown,
        missing=missing,
        nonfinite=(infinite, infinite),
    )
    row = SliceRow(
        slice=found.name,
        definition=definition.name,
        n_prompts=len(sums),
        n_tokens=all_rows,
        missing=int(total[k.MISSING]),
        nonfinite=infinite,
        unknown=unknown,
        why=why,
        **_means(total),
    )
    return view, row


def _means(total: FloatArray) -> dict[str, float | None]:
    rows = float(total[k.ROWS])
    if not rows:
        return {}
    mean = total / rows
    return {
        "abs_dlp": float(mean[k.ABS_DLP]),
        "k1": float(-mean[k.DLP]),
        "k3": float(mean[k.K3]),
        "mult_prob_error": float(mean[k.MULT]),
        "abs_dp": float(mean[k.ABS_DP]),
        "ess_token": float((mean[k.K3] + 1 + mean[k.DLP]) ** 2 / mean[k.W2]),
    }


def _totals(stream: Stream, ids: Sequence[int]) -> PromptTotals:
    _, sums = stream.store.slice(ids)
    usable = sums[:, k.ROWS].astype(np.int64)
    return PromptTotals(
        usable=usable,
        rows=usable + (sums[:, k.MISSING] + sums[:, k.NONFINITE]).astype(np.int64),
        sums={name: sums[:, at] for name, at in METRICS.items()},
        above={
            ("abs_dlp", float(limit)): sums[:, k.N_FEATURES + j]
            for j, limit in enumerate(stream.thresholds)
        },
    )


def step_rows(stream: Stream) -> list[StepRow]:
    """One row a training step, in their order."""
    rows = []
    for step, parts in sorted(stream.by_step.items()):
        s = parts.statistics(np.nan, np.nan, {}, {})
        rows.append(
            StepRow(
                step=step,
                sequences=s.sequences,
                n_tokens=s.tokens,
                abs_dlp=finite(s.abs_dlp),
                k3=finite(s.k3),
                ess_token=finite(s.ess_token),
                log_ppl_diff=finite(s.log_ppl_diff),
            )
        )
    return rows


def finite(value: float) -> float | None:
    """None for NaN and infinities, which a record does not hold."""
    return float(value) if np.isfinite(value) else None
