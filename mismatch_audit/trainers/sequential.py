"""Tests of one promise that may be read after every step: an alarm that never closes, a pass that
must be earned anew.

A single e-process against "the mean is at most the limit" loses wealth on every healthy prompt, so
after a long healthy time it needs as long again to notice a fault. ``ChangeAlarm`` starts a fresh
one every ``window`` prompts and adds them up with weights that sum to at most one. The sum is again
an e-process (those not yet started count as 1), so while the promise is kept it reaches 1/alpha *at
any time* with probability at most alpha; and a fault is found as fast as by a process that began
just before it, up to the log of that one's weight. docs/trainers.md says how fast that is.
"""

from __future__ import annotations

from collections import deque
from math import inf, log

import numpy as np

from kernel_contracts.confidence.eprocess import EProcess

KEPT = 8
"""Recent processes that still bet; older ones keep the wealth they had, the very first one goes on:
it is the one that finds a small excess that was always there."""

LONG = 300
"""Prompts for which the first process's stakes are tuned."""


class ChangeAlarm:
    """Evidence that a mean of per-prompt values in [0, ceiling] was above ``limit`` at some time.

    window: prompts between two starts, and what a process's stakes are tuned to.  weight_cap: as
    for ``EProcess``.
    """

    def __init__(
        self,
        limit: float,
        ceiling: float,
        *,
        alpha: float,
        window: int = 16,
        weight_cap: float | None = None,
    ) -> None:
        def new(horizon: int) -> EProcess:
            return EProcess(
                limit=limit, ceiling=ceiling, side="above", alpha=alpha, horizon=horizon,
                weight_cap=weight_cap, remember=False,
            )  # fmt: skip

        self._new, self.window, self.n = new, window, 0
        self._first, self._first_share = new(LONG), _share(1)
        self._active: deque[tuple[float, EProcess]] = deque()
        self._started, self._settled, self._rest = 1, -inf, 1.0 - _share(1)
        self.log_e = 0.0

    def update(self, value: float, weight: float | None = None) -> None:
        """Count one prompt's value. Raises InputError where it is not finite."""
        if self.n % self.window == 0:
            self._start()
        self.n += 1
        self._first.update(value, prompt_id="", weight=weight)
        for _, process in self._active:
            process.update(value, prompt_id="", weight=weight)
        wealth = [w + p.log_e for w, p in self._active]
        first = log(self._first_share) + self._first.log_e
        self.log_e = float(np.logaddexp.reduce([log(self._rest), self._settled, first, *wealth]))

    def _start(self) -> None:
        self._started += 1
        share = _share(self._started)
        self._rest -= share
        self._active.append((log(share), self._new(self.window)))
        if len(self._active) > KEPT:
            weight, old = self._active.popleft()
            self._settled = float(np.logaddexp(self._settled, weight + old.log_e))


def _share(j: int) -> float:
    """Weight of the j-th start, 1 / (2.11 k ln^2 k) with k = j + 1: these sum to 1 (the series is
    2.1097), and fall off so slowly that the thousandth costs 12 nats."""
    k = j + 1
    return 1.0 / (2.11 * k * log(k) ** 2)


class PromiseTest:
    """One clause on one slice: mean of per-prompt values, and how many are above the ceiling.

    limit, ceiling: counted from the metric's floor.  tail: limit on the share of prompts above the
    ceiling, None where none can be.  FAIL needs the alarm over both; PASS needs both shown to be
    below their limits by processes that started at most two windows ago and still hold the wealth.
    """

    def __init__(
        self,
        limit: float,
        ceiling: float,
        *,
        alpha: float,
        tail: float | None = None,
        weight_cap: float | None = None,
        alarm_window: int = 16,
        pass_window: int = 300,
    ) -> None:
        self.limit, self.ceiling, self.alpha, self.tail = limit, ceiling, alpha, tail
        self.alarm = ChangeAlarm(
            limit, ceiling, alpha=alpha, window=alarm_window, weight_cap=weight_cap
        )
        self.tail_alarm = (
            ChangeAlarm(tail, 1.0, alpha=alpha, window=alarm_window) if tail is not None else None
        )
        self.pass_window, self.weight_cap = pass_window, weight_cap
        self._below: deque[list[EProcess]] = deque(maxlen=2)
        self.log_e_max, self.n, self.clipped = 0.0, 0, 0
        self._value_sum = self._weight_sum = 0.0

    def update(self, value: float, weight: float | None = None) -> None:
        """Count one prompt. value: of at least 0. Raises InputError where it is not finite."""
        self.alarm.update(value, weight)
        above = value > self.ceiling
        e = self.alarm.log_e
        if self.tail_alarm is not None:
            self.tail_alarm.update(float(above))
            e = float(np.logaddexp(e, self.tail_alarm.log_e)) - log(2.0)
        self.log_e_max = max(self.log_e_max, e)
        if self.n % self.pass_window == 0:
            self._below.append(self._fresh())
        for processes in self._below:
            processes[0].update(value, prompt_id="", weight=weight)
            for tail in processes[1:]:
                tail.update(float(above), prompt_id="")
        self.n += 1
        self.clipped += int(above)
        w = 1.0 if weight is None else weight
        self._value_sum, self._weight_sum = self._value_sum + w * value, self._weight_sum + w

    def _fresh(self) -> list[EProcess]:
        options = {
            "side": "below",
            "alpha": self.alpha,
            "horizon": self.pass_window,
            "remember": False,
        }
        found = [
            EProcess(limit=self.limit, ceiling=self.ceiling, weight_cap=self.weight_cap, **options)  # type: ignore[arg-type]
        ]
        if self.tail is not None:
            found.append(EProcess(limit=self.tail, ceiling=1.0, **options))  # type: ignore[arg-type]
        return found

    @property
    def mean(self) -> float:
        """Mean over all prompts so far, not clipped; NaN before any."""
        return self._value_sum / self._weight_sum if self._weight_sum else float("nan")

    @property
    def p_value(self) -> float:
        """Of "the promise was kept all the time"; valid at any time."""
        return float(np.exp(-self.log_e_max))

    @property
    def passes(self) -> bool:
        """Whether the recent prompts show, now, that the promise is kept."""
        level = log(1.0 / self.alpha)
        return any(all(p.log_e >= level for p in processes) for processes in self._below)
