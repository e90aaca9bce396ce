"""Mismatch that belongs to some rows: padding, caches, environments, engines, micro-batches.

All compare sum|d| / sum(1 - sqrt(p q)) (``TokenView.sum_doubt``), so that strata of unequal
confidence may be compared, and find nothing below a factor of 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mismatch_audit.rollouts.checks.base import CheckResult
from mismatch_audit.rollouts.checks.strata import Mean, Strata
from mismatch_audit.rollouts.checks.streaming import BOTH, Streaming
from mismatch_audit.rollouts.checks.view import TokenView, unknown
from mismatch_audit.rollouts.schema import Header

Array = npt.NDArray[Any]

FACTOR = 2.0
ENOUGH = 5
"""Prompts a stratum needs."""
FLOOR = 1e-4
"""Scaled mismatch below which no stratum is worth naming: float32 noise is about 1e-5."""


class LeftPadding(Streaming):
    code = "LEFT_PADDING"
    title = "mismatch depends on the trainer's left padding"
    needs: tuple[str, ...] = (*BOTH, "n_left_pad")
    priority = 78
    remedy = (
        "Pass position_ids computed from the attention mask (cumsum - 1) to the trainer's forward, "
        "or pack sequences without padding."
    )

    def __init__(self) -> None:
        super().__init__()
        self.strata = Strata()

    def see(self, tokens: TokenView) -> None:
        pad = tokens.scalar("n_left_pad").astype(np.int64)
        # octaves of padding: 0, 1, 2-3, 4-7, ...
        octave = np.ceil(np.log2(np.maximum(pad, 0) + 1)).astype(np.int64)
        n = np.where(pad >= 0, tokens.sum_doubt, 0)
        self.strata.add(octave, tokens.clusters, n, tokens.sum_abs)

    def judge(self, header: Header) -> list[CheckResult]:
        none, some = self.strata.mean(0), self.strata.mean_where(lambda k: k > 0)
        rows = [
            {"left_pad": "0" if k == 0 else f"{2 ** (k - 1)}-{2**k - 1}", **_show(m)}
            for k in self.strata.order()
            for m in (self.strata.mean(k),)
        ]
        if min(none.clusters, some.clusters) < ENOUGH:
            return [self.too_little("needs padded and unpadded rows of 5 prompts each")]
        if some.value > FLOOR and some.above(none, FACTOR):
            text = f"{some.value / max(none.value, 1e-12):.3g} times as much on padded rows"
            return [self.found(text, rows[::-1])]
        return [self.clean("padded and unpadded rows agree", rows)]


class Named(Streaming):
    """One value of a string column has far more mismatch than the others together."""

    column: str = ""
    severity = "warning"

    def __init__(self) -> None:
        super().__init__()
        self.strata = Strata(limit=256)

    def see(self, tokens: TokenView) -> None:
        names = tokens.scalar(self.column)
        known = ~unknown(names)
        n = np.where(known, tokens.sum_doubt, 0)
        self.strata.add(names, tokens.clusters, n, tokens.sum_abs)

    def judge(self, header: Header) -> list[CheckResult]:
        means = {k: self.strata.mean(k) for k in self.strata.order()}
        enough = [k for k, m in means.items() if m.clusters >= ENOUGH]
        if len(enough) < 2:
            return [self.too_little(f"needs two values of {self.column} with 5 prompts each")]
        ranked = sorted(enough, key=lambda k: -means[k].value)
        rows = [{self.column: k, **_show(means[k])} for k in ranked[:8]]
        rest = {k: self.strata.mean_where(lambda other, k=k: other != k) for k in ranked[:3]}
        for k in ranked[:3]:
            if means[k].value > FLOOR and means[k].above(rest[k], FACTOR):
                text = f"{k!r} has {means[k].value / max(rest[k].value, 1e-12):.3g} times the rest"
                return [self.found(text, rows)]
        return [self.clean(f"{len(enough)} values agree within a factor of 2", rows)]


class Environment(Named):
    code = "ENVIRONMENT_MISMATCH"
    title = "the mismatch belongs to one environment"
    column = "environment"
    needs: tuple[str, ...] = (*BOTH, "environment")
    priority = 55
    remedy = "Look at what that environment adds: its template, tools, images, or response length."


class Engine(Named):
    code = "ENGINE_VERSION"
    title = "the mismatch belongs to one engine or engine version"
    column = "engine"
    needs: tuple[str, ...] = (*BOTH, "engine")
    priority = 72
    remedy = "Keep a baseline for each engine version, and bisect between the two below."


class MicroBatch(Streaming):
    """Rows scored in micro-batches of one size against the others."""

    code = "MICROBATCH_VARIANCE"
    title = "the trainer's log-probs depend on the micro-batch"
    needs: tuple[str, ...] = (*BOTH, "microbatch_rows")
    severity = "warning"
    priority = 60
    remedy = "Score with the micro-batch that is trained with, or use batch-invariant kernels."

    def __init__(self) -> None:
        super().__init__()
        self.strata = Strata(limit=128)

    def see(self, tokens: TokenView) -> None:
        rows = tokens.scalar("microbatch_rows").astype(np.int64)
        n = np.where(rows > 0, tokens.sum_doubt, 0)
        self.strata.add(rows, tokens.clusters, n, tokens.sum_abs)

    def judge(self, header: Header) -> list[CheckResult]:
        means = {k: self.strata.mean(k) for k in self.strata.order()}
        enough = [k for k, m in means.items() if m.clusters >= ENOUGH]
        if len(enough) < 2:
            return [self.too_little("needs two micro-batch sizes with 5 prompts each")]
        ranked = sorted(enough, key=lambda k: -means[k].value)
        rows = [{"microbatch_rows": self.strata.label(k), **_show(means[k])} for k in ranked]
        worst, best = means[ranked[0]], means[ranked[-1]]
        if worst.value > FLOOR and worst.above(best, FACTOR):
            text = f"{worst.value / max(best.value, 1e-12):.3g} times between sizes"
            return [self.found(text, rows)]
        return [self.clean("sizes agree within a factor of 2", rows)]


class TrainerNoise(Streaming):
    """The loss's log-probs against the old ones, of the same weights: the trainer against itself.

    In a run that makes one update a batch the two are one computation. With several updates a
    batch the first one still is, so some sequences must be equal exactly.
    """

    code = "TRAINER_NOT_REPRODUCIBLE"
    title = "the trainer does not reproduce its own log-probs"
    needs: tuple[str, ...] = ("trainer_logprob", "current_logprob")
    severity = "warning"
    priority = 61
    remedy = (
        "Compute old log-probs with the same micro-batches as the loss, or use batch-invariant "
        "kernels; below this floor no mismatch means anything."
    )
    BAND = 1e-3

    def __init__(self) -> None:
        super().__init__()
        self.strata = Strata()
        self.outside = self.tokens = self.rows = self.equal = 0

    def see(self, tokens: TokenView) -> None:
        gap = tokens.pack("current_logprob") - tokens.trainer  # float32: exact 0 stays exact
        known = np.isfinite(gap)
        if known.all():
            n = tokens.n
        else:
            gap[~known] = 0.0
            n = tokens.sums(known)
        size = np.abs(gap)
        x = tokens.sums(size)
        self.strata.add(np.zeros(len(n), dtype=np.int64), tokens.clusters, n, x)
        self.tokens += int(n.sum())
        self.rows += int((n > 0).sum())
        self.equal += int(((n > 0) & (x == 0)).sum())
        if len(size) and float(size.max()) > 0.05:
            self.outside += int(((gap > np.log(1.1)) | (gap < np.log(0.9))).sum())

    def judge(self, header: Header) -> list[CheckResult]:
        if not self.tokens:
            return [self.unobserved(*BOTH, header=header)]
        mean = self.strata.mean(0)
        row = {
            "mean_abs_current_less_old": mean.value,
            "share_outside_0.9_1.1": self.outside / self.tokens,
            "sequences": self.rows,
            "equal_sequences": self.equal,
        }
        if self.equal == 0 and mean.beyond(self.BAND):
            text = f"mean |current - old| is {mean.value:.3g}, and no sequence is equal"
            return [self.found(text, [row])]
        return [self.clean(f"{self.equal} of {self.rows} sequences are equal", [row])]


class Routing(Streaming):
    """Mismatch of tokens whose experts changed between sampler and trainer."""

    code = "ROUTING_CHANGED"
    title = "the mismatch sits on tokens whose experts changed"
    needs: tuple[str, ...] = (*BOTH, "routing_changed")
    priority = 64
    remedy = "Replay the engine's routing in the trainer (routed_experts, R3)."

    def __init__(self) -> None:
        super().__init__()
        self.strata = Strata()

    def see(self, tokens: TokenView) -> None:
        where = tokens.where[tokens.batch.present("routing_changed")[tokens.where]]
        if len(where) != len(tokens.where):
            return  # a batch that knows it of some tokens only
        changed = tokens.pack("routing_changed")
        n, x = tokens.sums(tokens.doubt * changed), tokens.sums(tokens.abs_d * changed)
        one = np.ones(len(n), dtype=np.int64)
        self.strata.add(one, tokens.clusters, n, x)
        left = np.maximum(tokens.sum_doubt - n, 0)
        left[left < 1e-4 * tokens.sum_doubt] = 0  # what float32 leaves of nothing
        self.strata.add(0 * one, tokens.clusters, left, np.maximum(tokens.sum_abs - x, 0))

    def judge(self, header: Header) -> list[CheckResult]:
        changed, kept = self.strata.mean(1), self.strata.mean(0)
        if min(changed.clusters, kept.clusters) < ENOUGH:
            return [self.too_little("needs tokens with and without changed experts")]
        rows = [{"routing": "changed", **_show(changed)}, {"routing": "kept", **_show(kept)}]
        if changed.value > FLOOR and changed.above(kept, FACTOR):
            text = f"{changed.value / max(kept.value, 1e-12):.3g} times where experts changed"
            return [self.found(text, rows)]
        return [self.clean("changed and kept routes agree within a factor of 2", rows)]


def _show(mean: Mean) -> dict[str, Any]:
    return {"scaled_mismatch": mean.value, "se": mean.se, "prompts": int(mean.clusters)}
