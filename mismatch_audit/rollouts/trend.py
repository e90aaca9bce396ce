"""Level and trend of the mismatch over steps: medians beside means, spikes, and a change point."""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np
import numpy.typing as npt

from kernel_contracts.confidence.eprocess import EProcess
from kernel_contracts.confidence.laws import normal_sf

Array = npt.NDArray[Any]

BASELINE = 8
"""Steps that set the level; the last block compared has as many."""
TIMES = 2.0
"""A trend is a level beyond this many times the baseline: a healthy bf16 control rose by 41%."""
CEILING = 20.0
"""A step counts as at most this many baselines."""
ALPHA = 1e-3
"""While the level stays within ``TIMES`` baselines, alarms are 1000 steps apart or more."""
SPIKE = 5.0
"""A mean this many times the step's own median, and the run's median, is a spike."""
MOST_STEPS = 2048
VALUES_A_STEP = 256


class Trend:
    """Collects one number a sequence, by step; bounded memory.

    Of a step the exact mean (by tokens) is kept, and a median over its first 256 sequences. After
    2048 steps neighbours are merged, and so on.
    """

    def __init__(self) -> None:
        self.width = 1
        self.sums: dict[int, list[float]] = {}
        self.values: dict[int, list[float]] = {}

    def add(self, step: Array, n: Array, x: Array) -> None:
        """step, n (weight), x (sum): ``[S]``; the step's mean is sum(x) / sum(n)."""
        use = (n > 0) & (step >= 0)
        for key in np.unique(step[use] // self.width).tolist():
            here = use & (step // self.width == key)
            held = self.sums.setdefault(key, [0.0, 0.0])
            held[0] += float(n[here].sum())
            held[1] += float(x[here].sum())
            kept = self.values.setdefault(key, [])
            kept += (x[here] / n[here])[: VALUES_A_STEP - len(kept)].tolist()
        while len(self.sums) > MOST_STEPS:
            self._merge()

    def _merge(self) -> None:
        self.width *= 2
        sums, values = self.sums, self.values
        self.sums, self.values = {}, {}
        for key in sorted(sums):
            held = self.sums.setdefault(key // 2, [0.0, 0.0])
            held[0] += sums[key][0]
            held[1] += sums[key][1]
            kept = self.values.setdefault(key // 2, [])
            kept += values[key][: VALUES_A_STEP - len(kept)]

    def finish(self) -> dict[str, Any]:
        """JSON-ready: steps (mean, median), level, trend, spikes, change. Too short a log says so
        under ``unobserved``."""
        keys = sorted(self.sums)
        mean = np.array([self.sums[k][1] / self.sums[k][0] for k in keys])
        median = np.array([float(np.median(self.values[k])) for k in keys])
        label = [k * self.width for k in keys]
        out: dict[str, Any] = {
            "steps": len(keys),
            "steps_a_point": self.width,
            "points": [
                {"step": label[i], "mean": float(mean[i]), "median": float(median[i])}
                for i in _spread(len(keys), 256)
            ],
        }
        if len(keys) < BASELINE + 2:
            out["unobserved"] = f"needs {BASELINE + 2} steps, the log has {len(keys)}"
            return out
        out["level"] = {
            "first_mean": float(mean[:BASELINE].mean()),
            "first_median": float(np.median(median[:BASELINE])),
            "last_mean": float(mean[-BASELINE:].mean()),
            "last_median": float(np.median(median[-BASELINE:])),
        }
        out["trend"] = _slope(median)
        out["spikes"] = _spikes(label, mean, median)
        out["change"] = change_point(median, label)
        return out


def change_point(values: Array, label: list[int]) -> dict[str, Any]:
    """When the level rose beyond ``TIMES`` the baseline, by an e-detector.

    The baseline is the median of the first ``BASELINE`` steps. From there on an e-process bets
    that the mean is above TIMES baselines; it starts anew whenever its wealth falls below 1 (what
    was won before a rise must not be needed to see it). The step of the last new start is the
    estimate of the change; ``alarm`` the step at which the wealth reached 1/ALPHA.
    """
    base = float(np.median(values[:BASELINE]))
    result: dict[str, Any] = {"baseline": base, "limit": TIMES * base, "alarm": None, "since": None}
    if base <= 0:
        return result | {"unobserved": "the baseline is 0"}
    process, start = _new(base), BASELINE
    largest = 0.0
    for i in range(BASELINE, len(values)):
        process.update(float(values[i]), prompt_id=str(i))
        largest = max(largest, process.log_e)
        if process.log_e >= log(1 / ALPHA):
            after = values[start:]
            return result | {
                "alarm": label[i],
                "since": label[start],
                "log_e": float(process.log_e),
                "level_since": float(np.median(after)),
                "times_baseline": float(np.median(after)) / base,
                "still": bool(np.median(values[-BASELINE:]) > TIMES * base),
            }
        if process.log_e < 0:
            process, start = _new(base), i + 1
    return result | {"log_e": largest}


def _new(base: float) -> EProcess:
    # the horizon tunes the stakes: a rise to twice the limit should show within some 10 steps
    return EProcess(
        limit=TIMES * base, ceiling=CEILING * base, side="above", alpha=ALPHA, horizon=10
    )


def _slope(values: Array) -> dict[str, float]:
    """Theil-Sen slope a step (the median of all pairs' slopes), relative to the median, and
    Kendall's tau-b with its normal p value, corrected for ties: both robust to spikes."""
    index = np.array(_spread(len(values), 512))
    chosen = values[index]
    first, second = np.triu_indices(len(index), 1)
    rise, run = chosen[second] - chosen[first], index[second] - index[first]
    slope, middle = float(np.median(rise / run)), float(np.median(chosen))
    n, s = len(index), float(np.sign(rise).sum())
    ties = np.unique(chosen, return_counts=True)[1].astype(float)
    untied = n * (n - 1) / 2 - float((ties * (ties - 1)).sum()) / 2
    spread = n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())
    return {
        "slope_a_step": slope,
        "relative_over_log": slope * (len(values) - 1) / middle if middle > 0 else 0.0,
        "kendall_tau": s / (n * (n - 1) / 2 * untied) ** 0.5 if untied > 0 else 0.0,
        "p": 2 * normal_sf(abs(s) / (spread / 18) ** 0.5) if spread > 0 else 1.0,
    }


def _spikes(label: list[int], mean: Array, median: Array) -> list[dict[str, float]]:
    """Steps whose mean is ruled by few sequences: shown with the median, which they leave alone."""
    usual = float(np.median(mean))
    hits = np.flatnonzero((mean > SPIKE * usual) & (mean > SPIKE * median))
    order = hits[np.argsort(-mean[hits])][:10]
    return [
        {"step": label[i], "mean": float(mean[i]), "median": float(median[i]), "usual": usual}
        for i in order.tolist()
    ]


def _spread(n: int, most: int) -> list[int]:
    if n <= most:
        return list(range(n))
    return sorted({round(i * (n - 1) / (most - 1)) for i in range(most)})
