"""Is log-prob i of token i on both sides? Shifts, zero-filled runs, placeholders, forced tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mismatch_audit.rollouts.checks.base import CheckResult
from mismatch_audit.rollouts.checks.sample import Row, Sample
from mismatch_audit.rollouts.checks.streaming import BOTH, Streaming
from mismatch_audit.rollouts.checks.view import TokenView
from mismatch_audit.rollouts.schema import Header, Origin

Array = npt.NDArray[Any]

SHIFTS = (-2, -1, 0, 1, 2)


class SampleCheck(Streaming):
    """A check that works on the shared sample of whole prompts, at the end."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.sample = sample

    def see(self, tokens: TokenView) -> None:
        self.sample.update(tokens.batch)

    def sampled_rows(self, *columns: str) -> list[Row]:
        return [r for r in self.sample.rows() if all(c in r.columns for c in columns)]


class ShiftedLogprobs(SampleCheck):
    """Compares trainer[i] with sampler[i + k]. A sequence counts as shifted where some k != 0 cuts
    the mean difference to under a third, of at least 0.1 nats over at least 8 tokens."""

    code = "SHIFTED_LOGPROBS"
    title = "log-probs of the two sides belong to different tokens"
    priority = 98
    remedy = (
        "Align the columns: element i must be log P(token i | tokens before i) on both sides. "
        "Shift the trainer's column by the number below (drop the first, or prepend a null)."
    )

    def judge(self, header: Header) -> list[CheckResult]:
        rows = self.sampled_rows(*BOTH)
        tried, hits = 0, dict.fromkeys(SHIFTS, 0)
        sums = dict.fromkeys(SHIFTS, 0.0)
        for row in rows:
            if int(row.used.sum()) < 10:
                continue
            tried += 1
            means = {k: _mean_gap(row, k) for k in SHIFTS}
            for k in SHIFTS:
                sums[k] += means[k]
            best = min(SHIFTS, key=lambda k: (means[k], abs(k)))
            if best and means[0] > 0.1 and means[best] < means[0] / 3:
                hits[best] += 1
        if not tried:
            return [self.too_little("no sequence has 10 comparable tokens")]
        table = [
            {"shift": k, "mean_abs_gap": sums[k] / tried, "best_for_sequences": hits[k]}
            for k in sorted(SHIFTS, key=lambda k: sums[k])
        ]
        wrong = sum(hits.values())
        if wrong >= max(3, 0.02 * tried):
            k = max(hits, key=lambda k: hits[k])
            text = (
                f"in {wrong} of {tried} sequences trainer_logprob[i] agrees with "
                f"sampler_logprob[i{k:+d}] and not with [i]"
            )
            return [self.found(text, table)]
        return [self.clean(f"shift 0 fits best in {tried - wrong} of {tried} sequences", table)]


def _mean_gap(row: Row, k: int) -> float:
    n = len(row.used)
    here, there = slice(max(0, -k), min(n, n - k)), slice(max(0, k), min(n, n + k))
    both = row.used[here] & row.used[there]
    count = int(np.count_nonzero(both))
    if count < 8:
        return float("inf")
    trainer, sampler = row.columns["trainer_logprob"], row.columns["sampler_logprob"]
    gap = np.abs(trainer[here][both] - sampler[there][both])
    return float(gap.sum(dtype=np.float64)) / count


class ZeroLogprobs(Streaming):
    """Sampler log-probs of exactly 0.0 (certainty) where the trainer is not certain at all."""

    code = "ZERO_FILLED_LOGPROBS"
    title = "sampler log-probs are padded with 0.0"
    priority = 92
    remedy = (
        "Write null, not 0.0, where the engine gave no log-prob, and take such tokens out of the "
        "loss; keep the engine's token ids rather than encoding its text again."
    )
    DOUBT = -0.05
    DOUBT_TRUNCATED = -1.0
    """Where top-p keeps one token alone, q is 1 although p is only above top_p."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences = self.tokens = self.zeros = self.runs = self.last_only = 0
        self.longest = 0
        self.inner = 0
        self.gap = 0.0

    def see(self, tokens: TokenView) -> None:
        self.sequences += int((tokens.n > 0).sum())
        self.tokens += len(tokens.where)
        zero = tokens.sampler == 0.0
        if not zero.any():
            return
        whole = _untruncated(tokens)
        limit = np.where(whole, self.DOUBT, self.DOUBT_TRUNCATED).astype(np.float32)
        zero &= tokens.trainer < tokens.batch.spread(limit)[tokens.where]
        if not zero.any():
            return
        self.zeros += int(zero.sum())
        self.gap -= float(tokens.trainer[zero].sum(dtype=np.float64))
        count = tokens.sums(zero)
        full = tokens.n > 0
        at_end = np.zeros(len(count), dtype=bool)
        at_end[full] = zero[tokens.last]
        tail = np.zeros(len(count))
        number = np.where(zero, -1, np.arange(len(zero)))
        starts = np.concatenate([[0], np.cumsum(tokens.n[full])[:-1]]).astype(np.int64)
        latest = np.maximum.reduceat(number, starts)  # last token that is not zero-filled
        tail[full] = tokens.last - np.maximum(latest, starts - 1)
        self.runs += int(((tail >= 2) | (count - tail * at_end >= 2)).sum())
        self.last_only += int(((count == 1) & at_end).sum())
        self.inner += int(((count > 0) & ~at_end).sum())
        self.longest = max(self.longest, int(tail.max()))

    def judge(self, header: Header) -> list[CheckResult]:
        row = {
            "zeros": self.zeros,
            "tokens": self.tokens,
            "sequences": self.sequences,
            "sequences_with_runs": self.runs,
            "sequences_last_token_only": self.last_only,
            "longest_tail_run": self.longest,
            "mean_trainer_logprob_there": -self.gap / self.zeros if self.zeros else None,
        }
        # 3 sequences: a lone exact 0.0 can be a token of probability 1 that the trainer doubts
        if self.last_only >= 3 and self.last_only > 3 * self.runs:
            return [
                self.found(
                    f"{self.last_only} of {self.sequences} sequences end in a token of sampler "
                    "log-prob exactly 0.0 that the trainer finds unlikely: it was appended",
                    [row],
                    code="PLACEHOLDER_LAST_TOKEN",
                    title="the last token was appended, not sampled",
                    remedy="Set loss_mask 0 and a null log-prob on a forced EOS.",
                )
            ]
        if self.runs + self.inner >= 3:
            return [
                self.found(
                    f"{self.zeros} log-probs are exactly 0.0 where the trainer gives "
                    f"{-self.gap / self.zeros:.3g} on average; runs in {self.runs} sequences",
                    [row],
                )
            ]
        return [self.clean(f"{self.zeros} doubtful zeros in {self.tokens} tokens", [row])]


def _untruncated(tokens: TokenView) -> Array:
    """``[S]`` bool: the log says that nothing was truncated."""
    top_p, top_k = tokens.scalar("top_p"), tokens.scalar("top_k")
    min_p = np.nan_to_num(tokens.scalar("min_p"), nan=0.0)
    return np.asarray((top_p >= 1.0) & (top_k <= 0) & (min_p == 0.0))


class LossOnUnsampled(Streaming):
    """Tokens that the policy did not draw and that are trained on all the same."""

    code = "LOSS_ON_UNSAMPLED"
    title = "the loss counts tokens that were not sampled"
    needs: tuple[str, ...] = ("origin", "loss_mask")
    priority = 91
    remedy = "Set loss_mask 0 on prompt, tool and forced tokens: no ratio is defined there."

    def __init__(self) -> None:
        super().__init__()
        self.counts = dict.fromkeys((Origin.PROMPT, Origin.ENVIRONMENT, Origin.FORCED), 0)
        self.tokens = 0

    def see(self, tokens: TokenView) -> None:
        trained = tokens.batch.tokens("loss_mask")
        origin = tokens.batch.tokens("origin")[trained]
        self.tokens += len(origin)
        if bool((origin == Origin.SAMPLED).all()):
            return
        for kind in self.counts:
            self.counts[kind] += int((origin == kind).sum())

    def judge(self, header: Header) -> list[CheckResult]:
        rows = [
            {"origin": kind.name.lower(), "tokens": count, "of_trained": self.tokens}
            for kind, count in sorted(self.counts.items(), key=lambda item: -item[1])
            if count
        ]
        if rows:
            return [self.found(f"{sum(self.counts.values())} of {self.tokens} trained", rows)]
        return [self.clean(f"all {self.tokens} trained tokens were sampled")]
