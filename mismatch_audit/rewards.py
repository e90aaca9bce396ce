"""Programmatic rewards in [0, 1] for prompts that carry a `check`, and advantages from rewards.

A check is one line of text: one or more ``kind:argument`` joined by `` & ``. The reward is the mean
over them, so a response that keeps half of what was asked earns half. Kinds (case is ignored unless
said otherwise):

====================  ============================================================================
number:42             the last number of the response is 42 (1); it occurs earlier (0.5)
contains:a|b          one of the texts occurs; contains_exact minds the case
absent:a|b            none of the texts occurs
starts:a  ends:a      the response begins or ends with the text
one_of:a,b            the whole response is one of the words (1), or begins with one (0.5)
order:a,b,c           share of the items that occur one after the other, in this order
count:a=3             the word occurs 3 times
words:N               N words; also max_words (falls to 0 at 2 N) and min_words (grows up to N)
lines:N               N lines that are not blank; bullets (or numbered items), sentences and
                      paragraphs count alike, and each point of |found - N| / N is lost
acrostic:MOON         share of the lines' first letters
case:lower|upper      share of the letters in that case
json  json:a,b        the response is JSON; with keys, the share that an object has
table:N               a Markdown table whose header has N columns
regex:pattern         the pattern occurs; its cost is bounded (see safe_pattern)
====================  ============================================================================

These rewards serve to give a policy gradient something to push on; they do not grade a model.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kernel_contracts.errors import InputError
from mismatch_audit import reward_checks as checks
from mismatch_audit.prompt_files import Mistakes, kind_name
from mismatch_audit.reward_checks import safe_pattern

if TYPE_CHECKING:
    from mismatch_audit.prompts import Prompt

Array = npt.NDArray[np.float64]

__all__ = ["advantages", "parse_check", "reward", "safe_pattern", "validate_checks"]

MAX_RESPONSE = 20_000
"""Characters of a response that are looked at."""
EQUAL_REWARDS = 1e-12
"""Rewards of a group that lie this close together count as equal."""


@dataclass(frozen=True)
class Check:
    """One ``kind:argument`` of a spec and the function that scores a response, in [0, 1]."""

    kind: str
    argument: str
    score: Callable[[str], float]


@lru_cache(maxsize=4096)
def parse_check(spec: str) -> tuple[Check, ...]:
    """The checks of a spec. Raises InputError for an unknown kind or an argument that is none."""
    parsed = []
    for part in spec.split(" & "):
        kind, _, argument = part.strip().partition(":")
        make = checks.KINDS.get(kind)
        if make is None:
            near = difflib.get_close_matches(kind, list(checks.KINDS), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(checks.KINDS)}"
            raise InputError(f"unknown check {kind!r} in {spec!r}", fix=hint)
        try:
            parsed.append(Check(kind, argument, make(argument)))
        except ValueError as error:
            raise InputError(
                f"check {part.strip()!r}: {error}",
                fix="samples/README.md lists every kind of check",
            ) from None
    return tuple(parsed)


def reward(prompt_metadata: Mapping[str, Any], response_text: str) -> float | None:
    """Reward in [0, 1] of a response to a prompt, or None when the prompt has no check.

    Raises InputError when the prompt's ``check`` is not a spec.
    """
    spec = prompt_metadata.get("check")
    if spec is None or (isinstance(spec, float) and math.isnan(spec)):
        return None
    if not isinstance(spec, str):
        raise InputError(f"a check must be text, found {kind_name(spec)}")
    text = response_text[:MAX_RESPONSE].strip()
    return float(np.mean([check.score(text) for check in parse_check(spec)]))


def validate_checks(prompts: Sequence[Prompt]) -> int:
    """Parse every prompt's check before anything runs; the number of prompts that have one.

    Raises InputError naming the place of each check that does not parse.
    """
    mistakes = Mistakes("prompts")
    checked = 0
    for prompt in prompts:
        try:
            checked += reward(prompt.metadata, "") is not None
        except InputError as error:
            mistakes.add(prompt.where or f"prompt {prompt.id!r}", error.what, error.fix)
    mistakes.raise_any()
    return checked


def advantages(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable] | None = None,
    *,
    normalise: bool = True,
    epsilon: float = 1e-4,
) -> Array:
    """Advantages of n responses, ``[n]``; NaN where there is no reward.

    groups: the prompt of each response. With groups, (r - group mean) / (group standard deviation
    + epsilon), the standard deviation with n - 1, as in GRPO; a group whose rewards are all equal
    gets 0. Without groups, r - mean over the batch, never divided. normalise=False only centres the
    groups too. A baseline that contains the response itself shrinks the expected gradient by
    (m - 1) / m for m responses in the mean, the same for every program that scores them.

    Raises InputError for a reward that is not finite, for lengths that differ, and for groups of
    one response each, whose advantage would be 0 whatever the reward.
    """
    values = np.array([math.nan if r is None else float(r) for r in rewards], dtype=np.float64)
    known = np.array([r is not None for r in rewards], dtype=bool)
    if not np.isfinite(values[known]).all():
        raise InputError("rewards must be finite", fix="use None where there is no reward")
    result = np.full(len(values), math.nan)
    if groups is None:
        if known.any():
            result[known] = values[known] - values[known].mean()
        return result
    if len(groups) != len(values):
        raise InputError(f"{len(values)} rewards but {len(groups)} groups")
    members: dict[Hashable, list[int]] = {}
    for index in np.flatnonzero(known):
        members.setdefault(groups[index], []).append(int(index))
    if members and max(map(len, members.values())) == 1:
        raise InputError(
            "every group has one response, so a group baseline leaves no advantage",
            fix="sample several responses a prompt, or centre over the batch (groups=None)",
        )
    for indices in members.values():
        centred = values[indices] - values[indices].mean()
        # Equal rewards leave rounding of 1e-17 behind, which a division must not blow up.
        if np.ptp(values[indices]) <= EQUAL_REWARDS:
            centred[:] = 0.0
        elif normalise:
            centred /= values[indices].std(ddof=1) + epsilon
        result[indices] = centred
    return result
