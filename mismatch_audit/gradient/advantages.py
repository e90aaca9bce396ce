"""Advantages of a live run's rollouts: programmatic rewards, and a neutral one for the rest."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernel_contracts.errors import InputError
from mismatch_audit.rewards import advantages, reward

__all__ = ["RolloutAdvantages", "neutral_reward", "rollout_advantages"]


@dataclass(frozen=True)
class RolloutAdvantages:
    """advantage, reward: sequence id -> value.  checked, neutral: responses whose reward came from
    the prompt's check, and from ``neutral_reward``.  positive, negative, zero: signs counted."""

    advantage: dict[str, float]
    reward: dict[str, float]
    checked: int
    neutral: int
    positive: int
    negative: int
    zero: int


def neutral_reward(n_response: int, horizon: int) -> float:
    """1 at half the horizon, falling to 0 at no token and at the horizon.

    For prompts without a check. It prefers neither the longest nor the shortest response, depends
    on no text, and gives the gradient something to push on: not a judgement of the model.
    """
    if horizon < 1:
        raise InputError(f"the horizon must be at least one token, got {horizon}")
    share = min(n_response / horizon, 1.0)
    return 1.0 - abs(2.0 * share - 1.0)


def rollout_advantages(
    sequence_ids: Sequence[str],
    texts: Sequence[str],
    lengths: Sequence[int],
    metadata: Sequence[Mapping[str, Any]],
    horizon: int,
    *,
    groups: Sequence[Hashable] | None = None,
) -> RolloutAdvantages:
    """Advantages of n responses; lengths in tokens, metadata of each one's prompt.

    groups: the prompt of each response; with several responses a prompt, advantages are those of
    GRPO. Otherwise checked and neutral rewards are centred by themselves, so that one kind's level
    is not the other's advantage. Raises InputError for lists of other lengths.
    """
    n = len(sequence_ids)
    if not n == len(texts) == len(lengths) == len(metadata) or len(set(sequence_ids)) != n:
        raise InputError("ids (all different), texts, lengths and metadata must pair up")
    known = [reward(m, text) for m, text in zip(metadata, texts, strict=True)]
    values = [
        neutral_reward(length, horizon) if r is None else r
        for r, length in zip(known, lengths, strict=True)
    ]
    if groups is not None and len(set(groups)) < n:
        found = advantages(values, groups)
    else:
        found = np.zeros(n)
        for kind in (True, False):
            mine = [i for i in range(n) if (known[i] is not None) == kind]
            found[mine] = advantages([values[i] for i in mine])
    checked = sum(r is not None for r in known)
    return RolloutAdvantages(
        advantage=dict(zip(sequence_ids, found.tolist(), strict=True)),
        reward=dict(zip(sequence_ids, values, strict=True)),
        checked=checked,
        neutral=n - checked,
        positive=int((found > 0).sum()),
        negative=int((found < 0).sum()),
        zero=int((found == 0).sum()),
    )
