"""Means along an ordered key (version, step): did they jump, did they grow?"""

from __future__ import annotations

from dataclasses import dataclass

from mismatch_audit.rollouts.checks.strata import Mean, Strata

JUMP = 2.0
"""A level must at least double to count: a healthy bf16 control of 32 steps itself rose 41%."""
GROWTH = 1.3
"""From the first to the last third after the jump."""
SMALLEST = 1e-4
"""Scaled mismatch that float32 kernels stay under."""


@dataclass(frozen=True)
class Change:
    """Where the level changed. key: the first of the new level; after: keys from there on."""

    key: int
    before: Mean
    after: Mean
    first: bool
    grows: bool | None
    """None: fewer than 3 keys after the change."""


def change(strata: Strata) -> Change | None:
    """A rise between the first key and the rest, else at the split that explains most."""
    keys = strata.order()
    if len(keys) < 2:
        return None
    splits = [1]
    if len(keys) > 2:
        splits.append(_best_split(strata, keys))
    for j in splits:
        before, after = strata.mean(*keys[:j]), strata.mean(*keys[j:])
        if after.value > SMALLEST and after.above(before, JUMP):
            return Change(keys[j], before, after, j == 1, grows(strata, keys[j:]))
    return None


def grows(strata: Strata, keys: list[int]) -> bool | None:
    """Whether the last third of the keys is above the first."""
    if len(keys) < 3:
        return None
    third = len(keys) // 3
    first, last = strata.mean(*keys[:third]), strata.mean(*keys[-third:])
    return last.above(first, GROWTH)


def _best_split(strata: Strata, keys: list[int]) -> int:
    """j of the largest between-group sum of squares (the usual single change point)."""
    weight = [strata.mean(k).tokens for k in keys]
    value = [strata.mean(k).value for k in keys]
    total = sum(weight)
    whole = sum(w * v for w, v in zip(weight, value, strict=True))
    best, at, w_left, x_left = -1.0, 1, 0.0, 0.0
    for j in range(1, len(keys)):
        w_left += weight[j - 1]
        x_left += weight[j - 1] * value[j - 1]
        gap = (whole - x_left) / (total - w_left) - x_left / w_left
        score = w_left * (total - w_left) * gap * gap
        if score > best:
            best, at = score, j
    return at
