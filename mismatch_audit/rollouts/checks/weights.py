"""Weights that did not arrive: the mismatch along versions, and against the initial model."""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatch_audit.rollouts.checks.base import CheckResult
from mismatch_audit.rollouts.checks.level import limit_of
from mismatch_audit.rollouts.checks.series import Change, change
from mismatch_audit.rollouts.checks.strata import Mean, Strata
from mismatch_audit.rollouts.checks.streaming import BOTH, Streaming
from mismatch_audit.rollouts.checks.view import TokenView, segment_sums
from mismatch_audit.rollouts.schema import Header

BROKEN_KL = 0.5
"""Mean k3 a token right after one update: no single update moves a policy so far."""


class WeightSync(Streaming):
    """Step 0 clean, then a jump: the weights were not pushed, in part or in whole, or broke.

    Rows whose trainer_version is ahead of the engine's are left out where versions are logged:
    this is about rows that claim equal weights. The key is the weights version, the step without.
    """

    code = "SYNC_NOT_APPLIED"
    title = "weight updates do not reach the engine"
    needs: tuple[str, ...] = (*BOTH, "step")
    priority = 70
    remedy = (
        "Compare digests of served and trained weights after a push; push a changed layer and see "
        "that log-probs of a fixed prompt change (audit weights). Version counters prove nothing."
    )

    def __init__(self) -> None:
        super().__init__()
        self.by_version, self.by_step = Strata(), Strata()
        self.k3, self.missing = Strata(), Strata()
        self.moved = Strata()
        self.lagging = self.rows = 0

    def see(self, tokens: TokenView) -> None:
        batch = tokens.batch
        step = tokens.scalar("step").astype(np.int64)
        version = tokens.version.astype(np.int64)
        fresh = tokens.lag == 0
        self.rows += len(fresh)
        self.lagging += int((~fresh).sum())
        n = np.where(fresh, tokens.sum_doubt, 0)
        self.by_step.add(step, tokens.clusters, n, tokens.sum_abs)
        n = np.where(version >= 0, n, 0)
        self.by_version.add(version, tokens.clusters, n, tokens.sum_abs)
        key = np.where(version >= 0, version, step)
        count = np.where(fresh, tokens.n, 0)
        self.k3.add(key, tokens.clusters, count, tokens.sum_k3)
        sampled = segment_sums(batch.sampled, batch.offsets)
        self.missing.add(key, tokens.clusters, sampled, sampled - tokens.n)
        if tokens.has("ref_logprob"):
            gap = np.abs(tokens.pack("ref_logprob") - tokens.trainer)
            np.nan_to_num(gap, copy=False, nan=0.0, posinf=0.0)
            self.moved.add(key, tokens.clusters, n, tokens.sums(gap))

    def judge(self, header: Header) -> list[CheckResult]:
        series = self.by_version if len(self.by_version.table) >= 2 else self.by_step
        name = "weights_version" if series is self.by_version else "step"
        if len(series.table) < 2:
            if self.lagging and not series.table:
                return [self.too_little("every row has a trainer_version ahead of the engine's")]
            return [self.too_little("needs rows of two weights versions or steps")]
        keys = series.order()
        rows = [
            {name: series.label(k), "scaled_mismatch": m.value, "se": m.se}
            for k in _spread(keys)
            for m in (series.mean(k),)
        ]
        jump = change(series)
        if jump is None:
            if series.mean(keys[0]).clusters < 2:
                return [self.too_little("needs two prompts at the first version")]
            return [self.clean(f"no jump over {len(keys)} values of {name}", rows)]
        return [self._named(jump, header, name, series, rows)]

    def _named(
        self, jump: Change, header: Header, name: str, series: Strata, rows: list[dict[str, Any]]
    ) -> CheckResult:
        at = series.label(jump.key)
        text = (
            f"scaled mismatch {jump.before.value:.3g} before {name} {at} and "
            f"{jump.after.value:.3g} from there on"
        )
        if self._frozen(header, series):
            return self.found(
                f"{text}, while the trainer's weights stand still",
                rows,
                code="FROZEN_GROWTH",
                title="the mismatch grows although no weights change",
                priority=79,
                remedy="The engine's state drifts, or exporting weights (merge and unmerge in "
                "bf16) is not invertible: compare digests of the served weights over pushes.",
            )
        first = self.k3.mean(jump.key)
        lost = self._lost(jump.key)
        if first.value > BROKEN_KL or lost:
            text += f"; k3 is {first.value:.3g} at the first such version" + lost
            return self._corrupt(text, rows)
        if jump.grows:
            return self.found(f"{text}, growing with it", rows)
        if jump.grows is None:
            return self.found(f"{text}; too few versions to see whether it grows", rows)
        if header.tied_head:
            return self.found(
                f"{text}, constant since; the model ties its head to the embedding",
                rows,
                code="PARTIAL_SYNC",
                title="part of the weights is not updated in the engine",
                priority=73,
            )
        return self._corrupt(f"{text}, constant since", rows)

    def _corrupt(self, text: str, rows: list[dict[str, Any]]) -> CheckResult:
        return self.found(
            text,
            rows,
            code="RELOAD_CORRUPTS",
            title="reloading weights breaks the engine's copy",
            priority=71,
            remedy="Push the *same* weights twice: log-probs must be bit-equal. Look for dropped "
            "buffers, padding left unwritten, and NaN in the served weights.",
        )

    def _lost(self, key: int) -> str:
        """Non-empty where values went missing with the jump."""
        before = self.missing.mean_where(lambda k: k < key)
        after = self.missing.mean_where(lambda k: k >= key)
        if after.value > 1e-4 and after.above(before, 2.0):
            return f"; {after.value:.2%} of log-probs are missing since"
        return ""

    def _frozen(self, header: Header, series: Strata) -> bool:
        if header.correction.get("learning_rate") == 0:
            return True
        keys = self.moved.order()
        if len(keys) < 2:
            return False
        late = keys[-max(1, len(keys) // 3) :]
        return self.moved.mean(*late).value < 0.1 * series.mean(*series.order()[-len(late) :]).value


class InitialModel(Streaming):
    """Regresses sampler - trainer on initial model - trainer: 0 says the engine has the trainer's
    weights, 1 that it still has the initial ones, between that a part of them is old."""

    code = "ENGINE_SERVES_BASE"
    title = "the engine still serves the initial model"
    needs: tuple[str, ...] = (*BOTH, "ref_logprob")
    priority = 75
    remedy = (
        "Nothing pushed arrives: look for an adapter that is never attached, a reload from disk "
        "after the push, or a patch that missed. Canary: log-probs must change after a push."
    )
    KERNEL_RMS = 1.5
    """rms over mean of the trainer's own noise, taken at the limit for its dtype."""
    PART = 0.03
    BULK = 0.3

    def __init__(self) -> None:
        super().__init__()
        self.share, self.bulk = Strata(), Strata()
        self.ee = self.ff = self.ef = self.tokens = 0.0
        self.to_base = self.to_trainer = 0.0
        self.versions_known = True

    def see(self, tokens: TokenView) -> None:
        # float32 is ample here; one wild token must not rule the regression
        f = np.clip(tokens.pack("ref_logprob") - tokens.trainer, -5, 5)
        e = np.clip(tokens.sampler - tokens.trainer, -5, 5)
        use = np.isfinite(f)
        if (tokens.lag != 0).any():
            use &= np.repeat(tokens.lag == 0, tokens.n.astype(np.int64))
        count = np.count_nonzero(use)
        if count < len(use):
            f[~use] = 0.0
            e[~use] = 0.0
        product, square = e * f, f * f
        ff, ef = tokens.sums(square), tokens.sums(product)
        zero = np.zeros(len(ff), dtype=np.int64)
        self.share.add(zero, tokens.clusters, ff, ef)
        self.ff += float(ff.sum())
        self.ef += float(ef.sum())
        # a few wrong trainer log-probs are on both axes: old weights show on the others as well
        far = np.flatnonzero((np.abs(e) >= self.BULK) | (np.abs(f) >= self.BULK))
        if len(far):
            product[far] = square[far] = 0.0
            ff, ef = tokens.sums(square), tokens.sums(product)
        self.bulk.add(zero, tokens.clusters, ff, ef)
        self.ee += float(np.dot(e, e))
        self.tokens += count
        self.to_base += float(np.abs(e - f).sum(dtype=np.float64))
        self.to_trainer += float(np.abs(e).sum(dtype=np.float64))
        self.versions_known &= tokens.has("trainer_version")

    def judge(self, header: Header) -> list[CheckResult]:
        if not self.tokens:
            return [self.too_little("no row claims equal weights on both sides")]
        moved = (self.ff / self.tokens) ** 0.5
        # the trainer's noise is on both axes, which alone gives a share of noise^2 / moved^2
        noise = self.KERNEL_RMS * limit_of(header.trainer_dtype or "bfloat16")
        bias = (noise / moved) ** 2 if moved > 0 else 1.0
        if bias > 0.5:
            text = (
                f"the trainer is {moved:.2g} nats (rms) from the initial model, and its kernel "
                f"may be off by {noise:.2g}: no difference can be seen"
            )
            return [self.too_little(text)]
        share: Mean = self.share.mean(0)
        r2 = self.ef**2 / (self.ee * self.ff) if self.ee > 0 else 0.0
        row = {
            "share_of_old_weights": share.value,
            "se": share.se,
            "explained": r2,
            "mean_abs_sampler_less_initial": self.to_base / self.tokens,
            "mean_abs_sampler_less_trainer": self.to_trainer / self.tokens,
            "rms_trainer_less_initial": moved,
        }
        if share.beyond(self.PART + bias) and share.value > 0.9 and r2 > 0.5:
            return [self.found("sampler log-probs equal the initial model's", [row])]
        bulk = self.bulk.mean(0)
        row["share_in_the_bulk"] = bulk.value
        if not (share.beyond(self.PART + bias) and bulk.beyond(self.PART + bias)) or r2 < 0.02:
            return [self.clean(f"share of the initial weights {share.value:.3g}", [row])]
        text = f"the engine's log-probs lag {share.value:.1%} of the way to the initial model"
        if not self.versions_known:
            text += " (a part of the weights, or all of them some updates late)"
        if header.tied_head:
            text += "; the head is tied to the embedding, the usual victim"
        return [
            self.found(
                text,
                [row],
                code="PARTIAL_SYNC",
                title="part of the weights is not updated in the engine",
                priority=73,
                remedy="Compare the set of pushed names with the set of trainable names, layer by "
                "layer digests, and the head (tied, cached in another dtype).",
            )
        ]


def _spread(keys: list[int], count: int = 12) -> list[int]:
    """At most so many keys, first and last among them."""
    if len(keys) <= count:
        return keys
    return [keys[round(i * (len(keys) - 1) / (count - 1))] for i in range(count)]
