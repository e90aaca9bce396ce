"""State that the engine keeps between requests and should not: caches, age, a resume."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from mismatch_audit.rollouts.checks.base import CheckResult
from mismatch_audit.rollouts.checks.strata import Mean, Strata
from mismatch_audit.rollouts.checks.strata_checks import ENOUGH, FACTOR, FLOOR
from mismatch_audit.rollouts.checks.streaming import BOTH, Streaming
from mismatch_audit.rollouts.checks.view import TokenView, unknown
from mismatch_audit.rollouts.schema import Header


class PrefixCache(Streaming):
    """Cached prompt tokens may only come from requests of the same weights.

    After a push the first request of any prefix must have num_cached_tokens = 0. A log shows it in
    two ways: cached rows of later versions have more mismatch than uncached ones; or the initial
    version has uncached rows and no later version has a single one.
    """

    code = "STALE_PREFIX_CACHE"
    title = "the prefix cache outlives a weight update"
    needs: tuple[str, ...] = (*BOTH, "num_cached_tokens", "weights_version_max")
    priority = 77
    remedy = (
        "Reset the prefix cache with every push (reset_prefix_cache), or salt it with the weights "
        "version (cache_salt)."
    )

    def __init__(self) -> None:
        super().__init__()
        self.cached, self.fresh = Strata(), Strata()

    def see(self, tokens: TokenView) -> None:
        count = tokens.scalar("num_cached_tokens")
        version = tokens.version.astype(np.int64)
        known = (count >= 0) & (version >= 0) & (tokens.lag == 0)
        for strata, mask in ((self.cached, count > 0), (self.fresh, count == 0)):
            n = np.where(known & mask, tokens.sum_doubt, 0)
            strata.add(version, tokens.clusters, n, tokens.sum_abs)

    def judge(self, header: Header) -> list[CheckResult]:
        versions = sorted({*self.cached.table, *self.fresh.table})
        if len(versions) < 2:
            return [self.too_little("needs rows of two weights versions at lag 0")]
        start = versions[0]
        means = {
            ("cached", "first"): self.cached.mean(start),
            ("uncached", "first"): self.fresh.mean(start),
            ("cached", "later"): self.cached.mean_where(lambda k: k > start),
            ("uncached", "later"): self.fresh.mean_where(lambda k: k > start),
        }
        rows = [
            {"rows": kind, "versions": when, "scaled_mismatch": m.value, "prompts": int(m.clusters)}
            for (kind, when), m in means.items()
            if m.clusters
        ]
        cached, uncached = means["cached", "later"], means["uncached", "later"]
        if cached.clusters < ENOUGH:
            return [self.too_little("needs cached rows of 5 prompts after the first version")]
        before = means["cached", "first"]
        risen = before.clusters == 0 or cached.above(before, FACTOR)
        if cached.value > FLOOR and risen:
            if uncached.clusters >= 2 and cached.above(uncached, FACTOR):
                text = f"{cached.value / max(uncached.value, 1e-12):.3g} times on cached rows"
                return [self.found(text, rows)]
            if uncached.clusters == 0 and means["uncached", "first"].clusters >= 2:
                text = (
                    f"version {start} has uncached first requests and no later version has one: "
                    "the cache was not reset"
                )
                return [self.found(text, rows)]
        if uncached.clusters < 2:
            return [self.too_little("needs uncached rows after the first version to compare with")]
        return [self.clean("cached rows have no more mismatch than uncached ones", rows)]


class EncoderCache(Streaming):
    """Rows with images (or other media) go wrong after an update while text rows do not."""

    code = "STALE_ENCODER_CACHE"
    title = "the encoder cache outlives a weight update"
    needs: tuple[str, ...] = (*BOTH, "modality", "weights_version_max")
    priority = 76
    remedy = "Reset the multimodal encoder cache with every push."

    def __init__(self) -> None:
        super().__init__()
        self.text, self.media = Strata(), Strata()

    def see(self, tokens: TokenView) -> None:
        kind = tokens.scalar("modality")
        version = tokens.version.astype(np.int64)
        known = ~unknown(kind) & (version >= 0) & (tokens.lag == 0)
        for strata, mask in ((self.text, kind == "text"), (self.media, kind != "text")):
            n = np.where(known & mask, tokens.sum_doubt, 0)
            strata.add(version, tokens.clusters, n, tokens.sum_abs)

    def judge(self, header: Header) -> list[CheckResult]:
        versions = sorted({*self.text.table, *self.media.table})
        if len(versions) < 2:
            return [self.too_little("needs rows of two weights versions at lag 0")]
        start = versions[0]
        before = self.media.mean(start)
        media = self.media.mean_where(lambda k: k > start)
        text = self.text.mean_where(lambda k: k > start)
        if min(media.clusters, text.clusters) < ENOUGH or before.clusters < 2:
            return [self.too_little("needs text and media rows of 5 prompts after an update")]
        rows: list[dict[str, Any]] = [
            {"rows": "media", "versions": "later", "scaled_mismatch": media.value},
            {"rows": "media", "versions": "first", "scaled_mismatch": before.value},
            {"rows": "text", "versions": "later", "scaled_mismatch": text.value},
        ]
        if media.value > FLOOR and media.above(text, FACTOR) and media.above(before, FACTOR):
            return [self.found("media rows rise after an update, text rows do not", rows)]
        return [self.clean("media rows stay level after an update", rows)]


class EngineAge(Streaming):
    """Grows while one engine lives and falls back when it restarts: the engine's state, not the
    policy. A life ends where engine_age falls below half of what it had reached."""

    code = "GROWS_WITH_ENGINE_AGE"
    title = "the mismatch grows with the age of the engine and falls at its restart"
    needs: tuple[str, ...] = (*BOTH, "engine_age")
    priority = 80
    remedy = (
        "Something outlives the weight updates in the engine: KV or prefix caches that are not "
        "recomputed, stale graphs. Reset caches at every update."
    )
    LIVES = 1 << 20

    def __init__(self) -> None:
        super().__init__()
        self.strata = Strata(limit=1 << 13)
        self.life, self.oldest = 0, 0

    def see(self, tokens: TokenView) -> None:
        age = tokens.scalar("engine_age").astype(np.int64)
        life = np.empty_like(age)
        for i, a in enumerate(age.tolist()):
            if 0 <= a < self.oldest / 2:
                self.life, self.oldest = self.life + 1, a
            self.oldest = max(self.oldest, a)
            life[i] = self.life
        n = np.where((age >= 0) & (age < self.LIVES), tokens.sum_doubt, 0)
        self.strata.add(life * self.LIVES + age, tokens.clusters, n, tokens.sum_abs)

    def judge(self, header: Header) -> list[CheckResult]:
        lives: dict[int, list[int]] = {}
        for key in self.strata.order():
            lives.setdefault(self.strata.label(key) // self.LIVES, []).append(key)
        if len(lives) < 2:
            return [self.too_little("needs a restart of the engine in the log")]
        ends: list[tuple[Mean, Mean]] = []
        rows = []
        for life, keys in sorted(lives.items()):
            third = max(1, len(keys) // 3)
            young, old = self.strata.mean(*keys[:third]), self.strata.mean(*keys[-third:])
            ends.append((young, old))
            rows.append({"life": life, "young": young.value, "old": old.value, "ages": len(keys)})
        grown = sum(old.value > FLOOR and old.above(young, FACTOR) for young, old in ends)
        resets = sum(old.above(young, FACTOR) for (_, old), (young, _) in pairwise(ends))
        if grown and resets:
            return [self.found(f"grows in {grown} lives, falls at {resets} restarts", rows[:12])]
        return [self.clean(f"{len(lives)} lives of the engine", rows[:12])]


class Resume(Streaming):
    """The first steps after a resume against the rest. Runs are told apart by run_id, in the order
    of the log."""

    code = "AFTER_RESUME"
    title = "the mismatch is high right after a resume"
    needs: tuple[str, ...] = (*BOTH, "run_id", "step")
    priority = 79
    remedy = (
        "Push the checkpoint's weights before the first rollout, and hold training until the "
        "mismatch of a fixed prompt is back at its level before the resume."
    )
    FIRST = 3
    """Steps that count as right after."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = Strata(), Strata()
        self.start: dict[str, int] = {}
        self.order: dict[str, int] = {}

    def see(self, tokens: TokenView) -> None:
        runs, steps = tokens.scalar("run_id"), tokens.scalar("step")
        offset = np.zeros(len(steps), dtype=np.int64)
        number = np.full(len(steps), -1, dtype=np.int64)
        for name in dict.fromkeys(runs.tolist()):
            if name is None or (name not in self.order and len(self.order) >= 1024):
                continue
            here = runs == name
            self.order.setdefault(name, len(self.order))
            self.start.setdefault(name, int(steps[here].min()))
            offset[here], number[here] = steps[here] - self.start[name], self.order[name]
        right_after = (number > 0) & (offset < self.FIRST)
        for strata, mask in (
            (self.early, right_after),
            (self.late, (number >= 0) & ~right_after),
        ):
            n = np.where(mask, tokens.sum_doubt, 0)
            strata.add(number, tokens.clusters, n, tokens.sum_abs)

    def judge(self, header: Header) -> list[CheckResult]:
        if len(self.order) < 2:
            return [self.too_little("needs a second run_id: the log shows no resume")]
        early = self.early.mean(*self.early.table)
        before = self.late.mean(0)
        after = self.late.mean_where(lambda k: k > 0)
        if min(early.clusters, after.clusters, before.clusters) < 2:
            return [self.too_little("needs rows before, right after, and well after a resume")]
        row = {"before": before.value, "right_after": early.value, "later": after.value}
        if early.value > FLOOR and early.above(before, FACTOR) and early.above(after, FACTOR):
            return [self.found(f"the first {self.FIRST} steps after it", [row])]
        return [self.clean(f"{len(self.order) - 1} resumes without a rise", [row])]
