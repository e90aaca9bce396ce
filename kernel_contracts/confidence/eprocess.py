"""A sequential test of a mean that may be looked at after every prompt and survives restarts."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from math import exp, inf, log, log1p, sqrt
from typing import Any

import numpy as np

from kernel_contracts.confidence._checks import check_limit, check_positive, check_probability
from kernel_contracts.confidence.betting import (
    PRIOR_MEAN,
    PRIOR_VARIANCE,
    STAKE_CAP,
    Side,
    grid_above,
)
from kernel_contracts.errors import InputError

_FORMAT = "e-process/v1"
_SETTINGS = ("limit", "ceiling", "side", "alpha", "horizon", "weight_cap")


class EProcess:
    """Evidence, prompt by prompt, that a mean lies above (or below) a limit.

    side "above": evidence against "every prompt's mean, given the past, is at most limit", so it
    raises an alarm.  side "below": evidence against "at least limit", so it grants a pass.  Under
    that null, the wealth exceeds 1/alpha *at any time* with probability at most alpha: look after
    every prompt and stop when you like.

    limit, ceiling: in the unit of the values, which are clipped into [0, ceiling].  horizon: the
    number of prompts for which the stakes are tuned (after exactly that many, the wealth equals
    `mean_test` on the same values).  alpha: tunes the stakes too.  weight_cap: for the ratio of
    sums, the largest weight that `update` may get.

    Each prompt counts once: `update` ignores a prompt id it has seen, also after `from_dict`.
    Where prompts recur by design (epochs), put the epoch into the id.  remember: False keeps no
    ids, so that the state stays small over months; the caller then lets no prompt in twice.
    """

    def __init__(
        self,
        *,
        limit: float,
        ceiling: float,
        side: Side,
        alpha: float = 0.05,
        horizon: int = 300,
        weight_cap: float | None = None,
        remember: bool = True,
    ) -> None:
        self._m = check_limit(limit, ceiling)
        check_probability("alpha", alpha)
        check_positive("horizon", horizon)
        if side not in ("above", "below"):
            raise InputError(f"must be 'above' or 'below', got {side!r}", where="side")
        if weight_cap is not None:
            check_positive("weight_cap", weight_cap)
        self.limit, self.ceiling, self.side = float(limit), float(ceiling), side
        self.alpha, self.horizon, self.weight_cap = float(alpha), int(horizon), weight_cap
        self._level = log(1.0 / alpha)
        self._grid = grid_above(self._level, self.horizon, weighted=weight_cap is not None)
        self._wealth = [0.0] * (len(self._grid) if side == "above" else 1)
        self._weight_sum, self._value_sum, self._residual_sum = 0.0, 0.0, 0.0
        self.remember, self._n = bool(remember), 0
        self._seen: set[str] = set()
        self.log_e_max = 0.0
        self.clipped = 0

    @property
    def n(self) -> int:
        """Prompts counted so far."""
        return self._n

    @property
    def estimate(self) -> float:
        """Mean of the clipped values (ratio of sums when weighted); NaN before any weight."""
        total = self._weight_sum
        return self._value_sum / total * self.ceiling if total > 0 else float("nan")

    @property
    def log_e(self) -> float:
        """log of the current wealth: an e-value at any stopping time (for e-BH)."""
        return float(np.logaddexp.reduce(self._wealth)) - log(len(self._wealth))

    @property
    def p_value(self) -> float:
        """min(1, 1 / largest wealth so far): a p-value at any time (for Holm)."""
        return exp(-self.log_e_max)

    def rejects(self, alpha: float | None = None) -> bool:
        """Whether the null has fallen at ``alpha`` (default: the level the stakes are tuned to)."""
        level = self.alpha if alpha is None else check_probability("alpha", alpha)
        return self.log_e_max >= log(1.0 / level)

    def update(self, value: float, *, prompt_id: str, weight: float | None = None) -> bool:
        """Count one prompt's value; return False, changing nothing, if the prompt was counted.

        Raises InputError on NaN or inf, and on a weight that is missing, unexpected, negative or
        over the cap.
        """
        if not np.isfinite(value):
            raise InputError(f"value {value} of prompt {prompt_id!r} is not finite", where="update")
        w = self._scaled_weight(weight)
        key = sha256(prompt_id.encode()).hexdigest()[:24] if self.remember else ""
        if key in self._seen:
            return False
        x = min(max(value / self.ceiling, 0.0), 1.0)
        self.clipped += int(not 0.0 <= value <= self.ceiling)
        if self.side == "above":
            self._bet_above(x, w)
        else:
            self._bet_below(x, w)
        self._weight_sum += w
        self._value_sum += w * x
        if self.side == "below":  # after the bet: stakes may use earlier values only
            centre = (PRIOR_MEAN + self._value_sum) / (1.0 + self._weight_sum)
            self._residual_sum += (w * (x - centre)) ** 2
        self._n += 1
        if self.remember:
            self._seen.add(key)
        self.log_e_max = max(self.log_e_max, self.log_e)
        return True

    def _scaled_weight(self, weight: float | None) -> float:
        if self.weight_cap is None:
            if weight is not None:
                raise InputError("this test was set up without weights", where="weight")
            return 1.0
        if weight is None or not 0.0 <= weight <= self.weight_cap:
            raise InputError(f"must lie in [0, {self.weight_cap}], got {weight}", where="weight")
        return float(weight) / self.weight_cap

    def _bet_above(self, x: float, w: float) -> None:
        if self._m == 0.0:  # one positive value refutes "the mean is 0"
            if w * x > 0:
                self._wealth = [inf] * len(self._wealth)
            return
        gain = w * (x / self._m - 1.0)
        self._wealth = [
            old + log1p(float(share) * gain)
            for old, share in zip(self._wealth, self._grid, strict=True)
        ]

    def _bet_below(self, x: float, w: float) -> None:
        variance = (PRIOR_VARIANCE + self._residual_sum) / (self.n + 1)
        stake = min(sqrt(2.0 * self._level / (self.horizon * variance)), STAKE_CAP / (1 - self._m))
        self._wealth[0] += log1p(-stake * w * (x - self._m))

    def to_dict(self) -> dict[str, Any]:
        """The whole state as JSON-ready values; prompt ids only as hashes (or their number alone).

        Infinite wealth (a limit of 0, refuted) is written as the string "inf".
        """
        return {
            "format": _FORMAT,
            **{name: getattr(self, name) for name in _SETTINGS},
            "wealth": [_number_out(v) for v in self._wealth],
            "log_e_max": _number_out(self.log_e_max),
            "sums": [self._weight_sum, self._value_sum, self._residual_sum],
            "clipped": self.clipped,
            "seen": sorted(self._seen) if self.remember else self._n,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> EProcess:
        """Restore a state written by `to_dict`; InputError if damaged or of another format."""
        if state.get("format") != _FORMAT:
            raise InputError(
                f"expected format {_FORMAT!r}, got {state.get('format')!r}",
                where="e-process state",
                fix="start a new test; evidence cannot be carried over from another format",
            )
        try:
            process = cls(**{name: state[name] for name in _SETTINGS})
            wealth = [float(v) for v in state["wealth"]]
            sums = [float(v) for v in state["sums"]]
            process.log_e_max = float(state["log_e_max"])
            process.clipped = int(state["clipped"])
            seen = state["seen"]
            process.remember = not isinstance(seen, int)
            process._seen = set() if isinstance(seen, int) else {str(v) for v in seen}
            process._n = seen if isinstance(seen, int) else len(process._seen)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"damaged: {error!r}", where="e-process state") from error
        if len(wealth) != len(process._wealth) or len(sums) != 3 or np.isnan(wealth + sums).any():
            raise InputError("damaged: wealth or sums do not fit", where="e-process state")
        process._wealth = wealth
        process._weight_sum, process._value_sum, process._residual_sum = sums
        return process


def _number_out(value: float) -> float | str:
    return "inf" if value == inf else value
