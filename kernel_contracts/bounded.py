"""A mean of bounded per-prompt values against a limit: the test behind most verdicts."""

from __future__ import annotations

import numpy as np

from kernel_contracts.confidence import (
    clopper_pearson,
    mean_bounds,
    mean_test,
    prompts_to_decide,
    proportion_p_value,
    zero_failure_n,
)
from kernel_contracts.measurement import Measurement
from kernel_contracts.metrics import Array


def bounded_mean(
    clause: str,
    name: str,
    metric: str,
    values: Array,
    limit: float,
    ceiling: float,
    alpha: float,
    *,
    n_tokens: int,
    weights: Array | None = None,
    cap: float | None = None,
    tail: float | None = None,
    floor: float = 0.0,
) -> Measurement:
    """A mean of per-prompt values in [0, ceiling] against a limit, by betting.

    values, limit and ceiling count from ``floor``, the least value that the metric can take.
    tail: limit on the share of prompts above the ceiling, by Clopper-Pearson; both must hold. A
    mean clipped at the ceiling never exceeds the true one, so a FAIL needs no second test.
    """
    options = {"ceiling": ceiling, "alpha": alpha, "weights": weights, "weight_cap": cap}
    bounds = mean_bounds(values, **options)  # type: ignore[arg-type]
    p_fail = mean_test(values, limit=limit, side="above", **options).p_value  # type: ignore[arg-type]
    notes, passed = [], bounds.upper <= limit
    quiet = 0  # prompts that a tail without a single event still asks for
    if tail is not None:
        above = int(np.sum(values > ceiling))
        share_upper = clopper_pearson(above, len(values), alpha)[1]
        p_tail = proportion_p_value(above, len(values), tail, above=True)
        p_fail = min(1.0, 2 * min(p_fail, p_tail))
        if above:
            notes.append(f"{above} of {len(values)} prompts above the ceiling {ceiling + floor:g}")
        if share_upper > tail:
            passed = False
            if above == 0:
                quiet = zero_failure_n(tail, alpha)
    if not passed:
        needed, side = prompts_to_decide(
            values, limit, ceiling, alpha, weights=weights, weight_cap=cap
        )
        if quiet:
            needed, side = max(needed or 0, quiet), "PASS"
        if needed is not None and needed > len(values):
            notes.append(f"about {needed - len(values)} more prompts would decide ({side})")
        elif needed is None:
            notes.append("no realistic number of prompts would decide")
    weight = np.ones_like(values) if weights is None else weights
    estimate = float((values * weight).sum() / weight.sum()) if weight.sum() > 0 else None
    return Measurement(
        clause=clause, slice=name, metric=metric, section="", value=estimate, lower=bounds.lower,
        upper=bounds.upper, limit=limit, n_prompts=bounds.n, n_tokens=n_tokens,
        verdict="PASS" if passed else "INCONCLUSIVE",
        method=f"{bounds.method}, ceiling {ceiling + floor:g}", detail="; ".join(notes),
        p_fail=p_fail, clipped=bounds.clipped_high,
    )  # fmt: skip
