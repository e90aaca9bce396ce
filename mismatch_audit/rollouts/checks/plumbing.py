"""Checks of the log itself: missing values, copied columns, aggregation."""

from __future__ import annotations

import numpy as np

from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.checks.base import CheckResult
from mismatch_audit.rollouts.checks.strata import ALPHA, p_value
from mismatch_audit.rollouts.checks.streaming import BOTH, Streaming
from mismatch_audit.rollouts.checks.view import SENTINEL, TokenView, view
from mismatch_audit.rollouts.schema import Header

INFORMATIVE = -0.01
"""A log-prob above this is of a near-certain token: equal on both sides without any copying."""


class CopiedColumn(Streaming):
    """The two columns are one: no evidence about the engine."""

    code = "COLUMNS_NOT_INDEPENDENT"
    title = "the trainer's log-probs equal the sampler's exactly"
    priority = 88
    remedy = (
        "Record the trainer's own log-probs: switch off bypass_mode or use_rollout_logprobs, and "
        "look for a .get(..., old_log_probs) fallback. If both sides are meant to be bit-equal, "
        "show it with the live audit."
    )

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.equal_rows = self.tokens = self.equal = 0

    def see(self, tokens: TokenView) -> None:
        tells = tokens.sampler < INFORMATIVE
        same = tells & (tokens.sampler == tokens.trainer)
        per_row, same_row = tokens.sums(tells), tokens.sums(same)
        self.tokens += int(per_row.sum())
        self.equal += int(same_row.sum())
        self.rows += int((per_row >= 4).sum())
        self.equal_rows += int(((per_row >= 4) & (same_row == per_row)).sum())

    def judge(self, header: Header) -> list[CheckResult]:
        if not self.rows:
            return [self.too_little("no sequence has 4 tokens of probability below 0.99")]
        share = self.equal_rows / self.rows
        row = {
            "sequences": self.rows,
            "equal_sequences": self.equal_rows,
            "equal_tokens": self.equal / self.tokens,
        }
        if share == 1.0:
            text = (
                f"all {self.equal} tokens agree to the last bit: the columns are copies, or the "
                "kernels are bit-equal; the log cannot say which, so nothing is known"
            )
            return [self._result("unobserved", text, [row])]
        if share > 0.05:  # two float32 results agree by chance on a few tokens, not on whole rows
            text = f"{share:.1%} of the sequences agree to the last bit while the others do not"
            return [self.found(text, [row])]
        return [
            self.clean(f"{self.equal / self.tokens:.2%} of tokens agree to the last bit", [row])
        ]


class MissingLogprobs(Streaming):
    """Sampled tokens without a usable log-prob on one side."""

    code = "NONFINITE_LOGPROBS"
    title = "sampled tokens without a finite log-prob"
    priority = 45
    needs: tuple[str, ...] = ()
    remedy = (
        "Find where they arise before any nan_to_num: a masked or clamped token is silently "
        "trained on or dropped. NaN at p near 1 is a known engine fault; NaN after a weight push "
        "means unwritten weights."
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen = dict.fromkeys(BOTH, False)
        self.sampled = 0
        self.missing = dict.fromkeys(BOTH, 0)
        self.infinite = dict.fromkeys(BOTH, 0)
        self.sentinels = dict.fromkeys(BOTH, 0)
        self.certain = 0

    def update(self, batch: TokenBatch) -> None:
        self.batches += 1
        self.see(view(batch))

    def see(self, tokens: TokenView) -> None:
        batch = tokens.batch
        sampled = batch.sampled
        self.sampled += int(np.count_nonzero(sampled))
        for name in BOTH:
            if not tokens.has(name):
                continue
            self.seen[name] = True
            value = batch.tokens(name)[sampled]
            bad = ~np.isfinite(value)
            self.missing[name] += int(np.isnan(value).sum()) if bad.any() else 0
            self.infinite[name] += int(np.isinf(value).sum()) if bad.any() else 0
            self.sentinels[name] += int((value <= SENTINEL).sum() - np.isneginf(value).sum())
            if name == "sampler_logprob" and bad.any() and tokens.has("trainer_logprob"):
                trainer = batch.tokens("trainer_logprob")[sampled][bad]
                self.certain += int((trainer > INFORMATIVE).sum())

    def judge(self, header: Header) -> list[CheckResult]:
        absent = [name for name in BOTH if not self.seen[name]]
        if absent:
            return [self.unobserved(*absent, header=header)]
        if not self.sampled:
            return [self.too_little("no sampled token")]
        rows = [
            {
                "column": name,
                "missing": self.missing[name],
                "infinite": self.infinite[name],
                "sentinels": self.sentinels[name],
                "sampled_tokens": self.sampled,
            }
            for name in BOTH
        ]
        bad = sum(
            count[name] for count in (self.missing, self.infinite, self.sentinels) for name in BOTH
        )
        if not bad:
            return [self.clean(f"{self.sampled} sampled tokens, both sides finite", rows)]
        text = f"{bad} values of {self.sampled} sampled tokens are missing, infinite or sentinels"
        if self.certain:
            text += f"; {self.certain} of them where the trainer gives p > 0.99"
        return [self.found(text, sorted(rows, key=lambda r: -self.missing[str(r["column"])]))]


class Aggregation(Streaming):
    """The mean over tokens and the mean of sequence means tell different stories."""

    code = "MEAN_OF_MEANS"
    title = "token mean and mean of sequence means differ"
    severity = "warning"
    priority = 30
    remedy = (
        "Name the aggregation of every logged mismatch metric. Compare token means with token "
        "means; the mismatch depends on the length of the response."
    )

    FACTOR = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.first, self.second = np.zeros(4), np.zeros((4, 4))

    def see(self, tokens: TokenView) -> None:
        n, total = tokens.n, tokens.sum_k3
        columns = ((n > 0) + 0.0, total / np.maximum(n, 1), n, total)
        rows = np.stack([np.bincount(tokens.clusters, c) for c in columns], axis=1)
        rows = rows[rows[:, 2] > 0]
        self.count += len(rows)
        self.first += rows.sum(0)
        self.second += rows.T @ rows

    def judge(self, header: Header) -> list[CheckResult]:
        if self.count < 20:
            return [self.too_little("needs comparable tokens of 20 prompts")]
        sequences, own, tokens, total = (float(v) for v in self.first)
        by_sequence, by_token = own / sequences, total / tokens
        row = {"k3_token_mean": by_token, "k3_mean_of_means": by_sequence}
        for more, less, sign in ((by_sequence, by_token, 1.0), (by_token, by_sequence, -1.0)):
            gap = more - self.FACTOR * less
            if gap > 0 and p_value(gap, self._se(by_sequence, by_token, sign), self.count) < ALPHA:
                text = f"k3 is {by_token:.3g} by tokens and {by_sequence:.3g} by sequences"
                return [self.found(text, [row])]
        return [self.clean("both aggregations agree within a factor of 1.5", [row])]

    def _se(self, by_sequence: float, by_token: float, sign: float) -> float:
        """Of the gap between one mean and FACTOR times the other, linearised: both come from the
        same prompts, so their errors mostly cancel."""
        sequences, _, tokens, _ = (float(v) for v in self.first)
        a, b = (1.0, self.FACTOR) if sign > 0 else (self.FACTOR, 1.0)
        weights = sign * np.array(
            [-a * by_sequence / sequences, a / sequences, b * by_token / tokens, -b / tokens]
        )
        variance = float(weights @ self.second @ weights) * self.count / (self.count - 1)
        return float(np.sqrt(max(variance, 0.0)))
