"""Staleness apart from mismatch: by lag, by weights version, by slice, and over the steps.

A token's lag is the trainer's version less the version that sampled it. With the engine's own
re-scoring at the trainer's version, log p - log q falls into two parts, exactly:

    trainer - sampler = (trainer - rescore) + (rescore - sampler)
                        implementation error   policy lag (and decode against prefill)

At lag 0 the second part is decode against prefill alone; that floor is taken off the other lags.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernel_contracts.bounds import (
    horizon_from_mean_kl,
    reward_drift,
    sequence_tv_from_mean_kl,
)
from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.checks.strata import Strata
from mismatch_audit.rollouts.checks.view import LOG_RATIO_CAP, TokenView, unknown, view
from mismatch_audit.rollouts.lag_sums import LagSums, Sums
from mismatch_audit.rollouts.trend import Trend

Array = npt.NDArray[Any]

TV_BUDGET = 0.1
"""Reward drift over reward range for which a horizon is stated."""
NO_LAG = (
    "needs weights_version_max (or token_version) and trainer_version: log the engine's weights "
    "version with every rollout, and the trainer's with its log-probs"
)
NO_RESCORE = (
    "needs rescore_logprob: score the same tokens again in the engine at the trainer's weights "
    "(prompt_logprobs); without it policy lag and kernel error cannot be told apart"
)
SLICES = ("environment", "modality", "finish_reason")


class Staleness:
    """Streaming: ``update`` every batch, ``finish`` once. Memory is bounded by the numbers of
    lags (65), slices (64 a column) and steps (2048), not by tokens.

    clip: half-width of the trainer's clip on p/q, for the share of tokens that it gates.
    """

    def __init__(self, clip: float = 0.2) -> None:
        self.lags = LagSums(clip)
        self.k3 = Strata()
        self.versions = Strata(), Strata()
        self.cross: Array = np.zeros((LagSums.SIZE, 5))
        self.age: dict[str, Strata] = {name: Strata(limit=64) for name in (*SLICES, "length")}
        self.trend = Trend()
        self.tokens = self.unknown = self.sequences = self.mixed = 0
        self.rescored = 0

    def update(self, batch: TokenBatch) -> None:
        """Count a batch; one without log-probs of both sides adds nothing."""
        tokens = view(batch)
        if not (tokens.has("sampler_logprob") and tokens.has("trainer_logprob")):
            return
        self.sequences += int((tokens.n > 0).sum())
        self.tokens += len(tokens.where)
        self.trend.add(tokens.scalar("step").astype(np.int64), tokens.sum_doubt, tokens.sum_abs)
        lag, known = token_lag(tokens)
        if known is None:
            self.unknown += len(tokens.where)
            return
        self.unknown += int((~known).sum())
        self.lags.add(tokens, lag, known)
        if tokens.has("rescore_logprob"):
            self._split(tokens, lag, known)
        self._sequences(tokens)

    def _split(self, tokens: TokenView, lag: Array, known: Array) -> None:
        rescore = tokens.pack("rescore_logprob")
        use = known & np.isfinite(rescore)
        e = np.clip(tokens.trainer - rescore, -LOG_RATIO_CAP, LOG_RATIO_CAP)
        m = np.clip(rescore - tokens.sampler, -LOG_RATIO_CAP, LOG_RATIO_CAP)
        at = LagSums.index(lag)
        if not use.all():
            at, e, m = at[use], e[use], m[use]
        self.rescored += len(at)
        for k, values in enumerate((None, np.abs(e), np.abs(m), e * e, m * m)):
            self.cross[:, k] += np.bincount(at, values, LagSums.SIZE)

    def _sequences(self, tokens: TokenView) -> None:
        version, lag = tokens.version, tokens.lag
        known = (version >= 0) & (tokens.scalar("trainer_version") >= 0)
        n = np.where(known, tokens.n, 0)
        self.versions[0].add(version.astype(np.int64), tokens.clusters, n, tokens.sum_abs)
        self.versions[1].add(version.astype(np.int64), tokens.clusters, n, tokens.n * lag)
        self.k3.add(np.clip(lag, -1, 63).astype(np.int64) + 1, tokens.clusters, n, tokens.sum_k3)
        oldest = tokens.scalar("weights_version_min")
        self.mixed += int((known & (oldest >= 0) & (oldest < version)).sum())
        one = np.where(known & (tokens.n > 0), 1.0, 0.0)
        for name in SLICES:
            if tokens.has(name):
                names = tokens.scalar(name)
                self.age[name].add(
                    names, tokens.clusters, np.where(unknown(names), 0, one), lag * one
                )
        octave = np.log2(np.maximum(tokens.n, 1)).astype(np.int64)
        self.age["length"].add(octave, tokens.clusters, one, lag * one)

    def finish(self) -> dict[str, Any]:
        """JSON-ready. What the log cannot say is under ``unobserved`` with the columns it needs."""
        missing: dict[str, str] = {}
        counted = self.lags.tokens()
        if not self.tokens:
            missing["all"] = "needs sampler_logprob and trainer_logprob"
        elif not counted:
            missing["lags"] = NO_LAG
        if not self.rescored:
            missing["decomposition"] = NO_RESCORE
        return {
            "tokens": self.tokens,
            "sequences": self.sequences,
            "tokens_of_unknown_lag": self.unknown,
            "sequences_of_several_versions": self.mixed,
            "lags": [self._lag_row(s) for s in self.lags.rows()],
            "versions": self._versions(),
            "decomposition": self._parts(),
            "age": {name: _ages(strata, name) for name, strata in self.age.items() if strata.table},
            "trend": self.trend.finish() if self.tokens else {},
            "unobserved": missing,
        }

    def _lag_row(self, s: Sums) -> dict[str, Any]:
        row = s.row()
        held = self.k3.mean(min(s.lag, 63) + 1)
        row["kl_engine_reference_se"] = held.se if held.clusters > 1 and not s.by_token else None
        kl = max(s.k3 / s.tokens, 0.0)
        bounds = []
        for name, length in s.lengths().items():
            by_kl = float(sequence_tv_from_mean_kl(kl, length))
            by_tv = min(1.0, length * s.tv / s.tokens)
            tv = min(by_kl, by_tv)
            bounds.append(
                {
                    "response": name,
                    "tokens": length,
                    "tv_sequence_from_kl": by_kl,
                    "tv_sequence_from_tv": by_tv,
                    "reward_drift_over_range": float(reward_drift(tv)),
                    "vacuous": tv >= 1.0,
                }
            )
        row["bounds"] = bounds
        horizon = float(horizon_from_mean_kl(kl, TV_BUDGET)) if kl > 0 else None
        row["horizon_for_reward_drift_0.1"] = horizon
        return row

    def _versions(self) -> list[dict[str, Any]]:
        size, lag = self.versions
        keys = size.order()
        step = max(1, -(-len(keys) // 64))
        return [
            {
                "weights_version": size.label(k),
                "mean_abs_log_ratio": m.value,
                "mean_lag": lag.mean(k).value,
                "tokens": int(m.tokens),
            }
            for k in keys[::step]
            for m in (size.mean(k),)
        ]

    def _parts(self) -> list[dict[str, Any]]:
        rows = []
        zero = self.cross[LagSums.index(np.array(0))]
        floor = float(zero[4] / zero[0]) if zero[0] else None
        for i in np.flatnonzero(self.cross[:, 0]).tolist():
            n, e, m, ee, mm = (float(v) for v in self.cross[i])
            rows.append(
                {
                    "lag": LagSums.lag(i),
                    "tokens": int(n),
                    "mean_abs_implementation_error": e / n,
                    "mean_abs_policy_lag": m / n,
                    "rms_implementation_error": (ee / n) ** 0.5,
                    "rms_policy_lag": (mm / n) ** 0.5,
                    "rms_policy_lag_above_floor": None
                    if floor is None
                    else max(mm / n - floor, 0.0) ** 0.5,
                    "share_of_policy_lag": mm / (mm + ee) if mm + ee > 0 else None,
                }
            )
        return rows


def token_lag(tokens: TokenView) -> tuple[Array, Array | None]:
    """``[M]`` lag of each comparable token and where it is known; (lag, None) where nowhere.

    By token where token_version is logged (a rollout that was resumed under newer weights), else
    from the sequence's oldest version, which never makes it look fresher than it is.
    """
    length = tokens.n.astype(np.int64)
    trainer = tokens.scalar("trainer_version")
    by_token = tokens.has("token_version")
    if by_token:
        version = tokens.pack("token_version").astype(np.int64)
        trainer = np.repeat(trainer, length)
    elif (tokens.version >= 0).any():
        version = tokens.scalar("weights_version_min")
        version = np.where(version < 0, tokens.version, version)
    else:
        return np.zeros(len(tokens.where), dtype=np.int64), None
    known = (trainer >= 0) & (version >= 0)
    lag = np.where(known, trainer - version, 0)
    if not by_token:
        lag, known = np.repeat(lag, length), np.repeat(known, length)
    return lag, known if known.any() else None


def _ages(strata: Strata, name: str) -> list[dict[str, Any]]:
    rows = []
    for key in strata.order():
        mean = strata.mean(key)
        shown = f"{2**key}-{2 ** (key + 1) - 1}" if name == "length" else key
        rows.append({name: shown, "mean_lag": mean.value, "sequences": int(mean.tokens)})
    return sorted(rows, key=lambda r: -float(r["mean_lag"]))
