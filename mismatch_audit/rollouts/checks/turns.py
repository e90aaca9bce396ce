"""Does the prompt of turn k + 1 start with all tokens of turn k?"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from mismatch_audit.rollouts.checks.base import CheckResult
from mismatch_audit.rollouts.checks.streaming import Streaming
from mismatch_audit.rollouts.checks.view import TokenView
from mismatch_audit.rollouts.schema import Header

Array = npt.NDArray[Any]

MATCH = 6
"""Tokens that must agree for two texts to count as aligned again."""
DRIFT = 16
"""Re-tokenising moves a boundary by a few tokens; a longer change is an edit."""


class PrefixExtension(Streaming):
    """Consecutive rows of one sample_id and step are the turns of one conversation."""

    code = "PREFIX_NOT_EXTENDED"
    title = "a turn does not start with the turns before it"
    needs: tuple[str, ...] = ("sample_id", "token_ids")
    severity = "error"
    priority = 60

    def __init__(self) -> None:
        super().__init__()
        self.held: tuple[Any, Array] | None = None
        self.pairs = 0
        self.kinds: Counter[str] = Counter()
        self.examples: dict[str, list[dict[str, Any]]] = {}

    def see(self, tokens: TokenView) -> None:
        batch = tokens.batch
        ids, at = batch.tokens("token_ids"), batch.offsets
        names, steps = tokens.scalar("sample_id"), tokens.scalar("step")
        run = tokens.scalar("run_id")
        prompt_len = tokens.scalar("prompt_len")
        same = np.flatnonzero((names[1:] == names[:-1]) & (steps[1:] == steps[:-1])) + 1
        todo = same.tolist()
        if self.held and len(names) and self.held[0] == (run[0], steps[0], names[0]):
            self._compare(self.held[1], ids[at[0] : at[0] + prompt_len[0]], names[0])
        for s in todo:
            before = ids[at[s - 1] : at[s]]
            self._compare(before, ids[at[s] : at[s] + prompt_len[s]], names[s])
        if len(names):
            self.held = ((run[-1], steps[-1], names[-1]), ids[at[-2] :].copy())

    def _compare(self, before: Array, prompt: Array, name: str) -> None:
        self.pairs += 1
        n = min(len(before), len(prompt))
        wrong = np.flatnonzero(before[:n] != prompt[:n])
        if not len(wrong) and len(before) <= len(prompt):
            return
        at = int(wrong[0]) if len(wrong) else n
        kind, removed, added = classify(before[at:], prompt[at:])
        self.kinds[kind] += 1
        rows = self.examples.setdefault(kind, [])
        if len(rows) < 3:
            rows.append({"sample_id": name, "at": at, "removed": removed, "added": added})

    def judge(self, header: Header) -> list[CheckResult]:
        if not self.pairs:
            return [self.too_little("no two rows in a row share a sample_id (one turn each)")]
        if not self.kinds:
            return [self.clean(f"{self.pairs} turns start with the ones before them")]
        answers = []
        failed = self.kinds.total()
        for kind, count in self.kinds.most_common():
            if count < 0.25 * failed:
                continue  # a short overlap can be read either way: the usual kind names the cause
            code, title, remedy = _KINDS[kind]
            answers.append(
                self.found(
                    f"{count} of {self.pairs} turns ({failed} in all do not extend the earlier)",
                    self.examples[kind],
                    code=code,
                    title=title,
                    remedy=remedy,
                )
            )
        return answers


_KINDS = {
    "retokenised": (
        "RETOKENISED_TURN",
        "earlier turns were decoded and encoded again into other tokens",
        "Carry token ids from turn to turn, not text: BPE does not return the sampled ids.",
    ),
    "edited": (
        "HISTORY_EDITED",
        "the chat template removes part of the earlier turns",
        "A template that strips thinking makes every turn a sequence of its own: train on the turn "
        "as it was sampled, or use a template that keeps the history.",
    ),
    "other": (
        "PREFIX_NOT_EXTENDED",
        "a turn does not start with the turns before it",
        "Render the conversation once and extend its tokens; compare both at the place below.",
    ),
}


def classify(before: Array, after: Array) -> tuple[str, int, int]:
    """How ``after`` differs from ``before``, both from the first difference on.

    -> (kind, tokens removed, tokens added): "edited" where tokens were only taken out, and
    "retokenised" where a few became others and the texts agree again after them.
    """
    if len(after) == 0:
        return "edited", len(before), 0
    for removed in range(1, len(before) - 1):
        m = min(MATCH, len(before) - removed, len(after))  # the next turn begins where before ends
        if m >= 2 and (before[removed : removed + m] == after[:m]).all():
            return "edited", removed, 0
    for total in range(2, 2 * DRIFT + 1):
        for removed in range(max(1, total - DRIFT), min(total, DRIFT + 1)):
            a, b = before[removed : removed + MATCH], after[total - removed :][:MATCH]
            m = min(len(a), len(b))
            if m >= min(2, len(before) - removed) and m and (a[:m] == b[:m]).all():
                return "retokenised", removed, total - removed
    if len(before) <= DRIFT:  # the change reaches the end of the earlier turn
        return "retokenised", len(before), min(len(after), len(before))
    return "other", 0, 0
