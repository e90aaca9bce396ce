"""What re-routing leaves: the share that moves, and bounds on means over all traffic.

Requests that the reference answers deviate by nothing, so with M >= 0 a mean over all traffic is
the mean of M times "the engine answered". Three bounds of it, each with its own confidence:

* that of ``all`` before re-routing, which can only fall: 1 - alpha;
* shares times bounds over the K slices of a partition, whichever are kept: 1 - K alpha;
* with the run's tables, betting on the product itself. The slices were chosen on these very
  prompts, so its 1 - alpha is that of a table fixed beforehand: of this one in the next audit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from kernel_contracts import bounds
from kernel_contracts.clauses import StatisticalClause
from kernel_contracts.confidence import by_prompt, mean_bounds
from kernel_contracts.contract import Contract
from kernel_contracts.metrics import METRICS
from kernel_contracts.vocabulary import METRIC_WORDS
from mismatch_audit.reports.rows import MeasurementRow
from mismatch_audit.routing.audited import Audited
from mismatch_audit.routing.conditions import named
from mismatch_audit.routing.matching import Facts
from mismatch_audit.routing.table import MixtureBound, Rerouted, SliceState

MIXED = ("kl_engine_reference", "tv", "flip_rate")
"""Means that add up over a mixture and are 0 where the reference answers."""

Kept = Callable[[Facts], bool]


def rerouted_prompts(audited: Audited, kept: Kept) -> Rerouted:
    """Counted with the very test that a proxy applies."""
    away = sum(not kept(facts) for facts in audited.facts.values()) / len(audited.facts)
    return Rerouted(lower=away, upper=away, basis="prompts")


def rerouted_slices(states: Sequence[SliceState], engine: str, everything: bool) -> Rerouted:
    """From shares alone: the slices that move may overlap, or not."""
    if everything:
        return Rerouted(lower=1.0, upper=1.0, basis="slices")
    away = [s.share for s in states if s.to != engine and s.slice != "all"]
    known = [share for share in away if share is not None]
    upper = 1.0 if len(known) < len(away) else min(1.0, sum(known))
    return Rerouted(lower=max(known, default=0.0), upper=upper, basis="slices")


def mixture(
    contract: Contract,
    rows: Sequence[MeasurementRow],
    states: Mapping[str, SliceState],
    engine: str,
    *,
    audited: Audited | None,
    kept: Kept,
    nothing_kept: bool,
) -> list[MixtureBound]:
    """Bounds of every mean that the contract limits over all traffic, and the reward drift that the
    KL implies. rows: of the report."""
    found: list[MixtureBound] = []
    for metric in MIXED:
        clauses = [c for c in contract.statistical if c.metric == metric and c.weight == "prompt"]
        clauses = [c for c in clauses if c.path == "decode"]
        if not clauses:
            continue
        if nothing_kept:
            rest = [_bound(metric, rows, 0.0, 1.0, "nothing is left to the engine")]
        else:
            rest = list(_by_slices(metric, contract, rows, states, engine))
            if audited is not None:
                rest.append(_direct(metric, clauses, rows, audited, kept, contract.alpha))
        found += rest
        if metric == "kl_engine_reference":
            found += [drift for one in rest for drift in _reward(contract, one)]
    return found


def _bound(
    metric: str,
    rows: Sequence[MeasurementRow],
    bound: float | None,
    confidence: float,
    method: str,
    detail: str = "",
) -> MixtureBound:
    before = [r.value for r in rows if r.metric == metric and r.slice == "all"]
    return MixtureBound(
        metric=metric,
        before=next((v for v in before if v is not None), None),
        bound=bound,
        unit=METRIC_WORDS[metric].unit,
        confidence=max(0.0, confidence),
        method=method,
        detail=detail,
    )


def _direct(
    metric: str,
    clauses: Sequence[StatisticalClause],
    rows: Sequence[MeasurementRow],
    audited: Audited,
    kept: Kept,
    alpha: float,
) -> MixtureBound:
    spec = METRICS[metric]
    frame = audited.tokens[audited.tokens["path"] == "decode"]
    answered = frame["prompt_id"].map({i: kept(f) for i, f in audited.facts.items()})
    if answered.isna().any():
        return _bound(metric, rows, None, 0.0, "none", "a token of a prompt that is not known")
    values = np.where(answered.to_numpy(dtype=bool), spec.values(frame), 0.0)
    if not np.isfinite(values).all():
        return _bound(metric, rows, None, 0.0, "none", "the engine's part has missing values")
    sums = by_prompt(values, frame["prompt_id"].to_numpy())
    ceiling = max(c.upper_end for c in clauses)
    measured = mean_bounds(sums.mean, ceiling=ceiling, alpha=alpha)
    if measured.clipped_high:
        text = f"{measured.clipped_high} prompts above the ceiling {ceiling:g}"
        return _bound(metric, rows, None, 0.0, "none", text)
    return _bound(
        metric, rows, measured.upper, 1 - alpha, "betting, for a table fixed beforehand",
        f"estimate {measured.estimate:.3g} over {measured.n} prompts, ceiling {ceiling:g}",
    )  # fmt: skip


def _by_slices(
    metric: str,
    contract: Contract,
    rows: Sequence[MeasurementRow],
    states: Mapping[str, SliceState],
    engine: str,
) -> Iterator[MixtureBound]:
    upper: dict[str, float] = {}
    for row in rows:
        if row.metric != metric or row.section != "statistical" or row.upper is None:
            continue
        if not row.clipped:  # else the bound is of the clipped mean
            upper[row.slice] = min(row.upper, upper.get(row.slice, np.inf))
    if "all" in upper:
        yield _bound(metric, rows, upper["all"], 1 - contract.alpha, "all, before re-routing")
    for key, definition in contract.slices.items():
        if not definition.by or definition.where or definition.bins:
            continue
        found = {n: named(contract, n) for n in states}
        names = [n for n, one in found.items() if one and one.definition == key and one.values]
        here = [n for n in names if states[n].to == engine]
        if not names or any(states[n].share is None for n in names):
            continue
        if any(n not in upper for n in here):
            continue
        total = sum((states[n].share or 0.0) * upper[n] for n in here)
        yield _bound(
            metric, rows, total, 1 - len(names) * contract.alpha, f"slices of {key}",
            "shares as in the audit; requests without these values fall back",
        )  # fmt: skip


def _reward(contract: Contract, kl: MixtureBound) -> list[MixtureBound]:
    """|E_P R - E_Q R| <= range(R) TV_seq, TV_seq from the mean KL over all traffic: concave in it,
    so the mean over the mixture may be put in."""
    budget = contract.budget
    if kl.bound is None or budget.reward_range is None or budget.horizon is None:
        return []
    tv = bounds.sequence_tv_from_mean_kl(kl.bound, budget.horizon)
    drift = float(bounds.reward_drift(float(tv), budget.reward_range))
    allowed = "" if budget.reward_drift is None else f", budget {budget.reward_drift:g}"
    return [
        MixtureBound(
            metric="reward_drift",
            before=None,
            bound=drift,
            unit="reward",
            confidence=kl.confidence,
            method=kl.method,
            detail=f"range(R) TV_seq over {budget.horizon} tokens{allowed}",
        )
    ]
