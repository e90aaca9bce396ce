"""The usual numbers of one batch: what trainers log, each with one name and one definition.

p is the trainer, q the sampler; tokens were drawn from q; d = log p - log q of a token, w = e^d.
Only tokens in the mask count, and of those only such with a finite log-prob on both sides; the rest
are counted in ``missing`` and ``nonfinite`` and never replaced.

Two averages exist for everything, and they differ when lengths do: ``x`` is the mean over tokens,
``x_seq_mean`` the mean over sequences of each sequence's mean. docs/rollouts.md lists how the names
of verl, TRL, NeMo-RL, prime-rl and others map to these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kernel_contracts.errors import InputError
from mismatch_audit.rollouts import kernels as k

FloatArray = NDArray[np.float64]

QUANTILES = (0.001, 0.01, 0.05, 0.5, 0.95, 0.99, 0.999)
BANDS = ((0.5, 2.0), (0.5, 5.0), (0.8, 1.2), (0.999, 1.001))
"""Bands of the token's ratio whose outside is reported: truncated weights as a rule, IcePop's,
ROLL's filter, and what only a bit-exact pair keeps."""


@dataclass(frozen=True)
class Statistics:
    """One batch, or one slice of a log. Every field in nats or without unit; NaN without tokens.

    sequences: with at least one counted token.  k1: mean of -d, unbiased for KL(q||p), any sign
    (verl's ``kl``).  k2: d^2/2.  k3: w - 1 - d, unbiased for KL(q||p) (verl's ``k3_kl``).  abs_dlp:
    mean |d|.  mult_prob_error: mean e^|d| (NeMo-RL).  abs_dp: mean |p - q| of the sampled token
    (verl's ``rollout_probs_diff_mean``).  rms_dlp: root of the mean of d^2.

    ppl_*: mean over sequences of exp(-mean log-prob).  log_ppl_diff: mean over sequences of
    mean log q - mean log p, so positive when the trainer is the more surprised; log_ppl_abs_diff of
    its absolute value, ppl_ratio of its exponential.

    chi2_token: mean of w^2, less 1.  chi2_seq_product: mean over sequences of exp(2 sum d), less 1
    (verl's ``chi2_seq``).  chi2_seq_geometric: mean over sequences of exp(2 mean d), less 1
    (ms-swift's number of that name).  inf where it is beyond float64.

    ess_token, ess_seq: (sum w)^2 / (n sum w^2) over tokens, or over sequences with w = exp(sum d):
    of the raw weights. On clamped ones a broken batch, all at the cap, looks perfect.

    ratio_*: of the token's w.  outside: band -> share of tokens beyond it.
    missing, nonfinite: masked tokens with a null or NaN, or an infinite, log-prob on either side.
    """

    tokens: int
    sequences: int
    missing: int
    nonfinite: int
    k1: float
    k1_seq_mean: float
    k2: float
    k3: float
    k3_seq_mean: float
    abs_dlp: float
    abs_dlp_seq_mean: float
    rms_dlp: float
    mult_prob_error: float
    mult_prob_error_seq_mean: float
    abs_dp: float
    ppl_trainer: float
    ppl_sampler: float
    log_ppl_diff: float
    log_ppl_abs_diff: float
    ppl_ratio: float
    chi2_token: float
    chi2_seq_product: float
    chi2_seq_geometric: float
    ess_token: float
    ess_seq: float
    ratio_mean: float
    ratio_min: float
    ratio_max: float
    ratio_quantiles: dict[float, float] = field(default_factory=dict)
    outside: dict[tuple[float, float], float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Flat names: ``ratio_p99``, ``outside_0.5_2``; for logs and tables."""
        flat = asdict(self)
        for level, value in flat.pop("ratio_quantiles").items():
            flat[f"ratio_p{100 * level:g}"] = value
        for (low, high), value in flat.pop("outside").items():
            flat[f"outside_{low:g}_{high:g}"] = value
        return flat


def batch_statistics(
    sampler: ArrayLike,
    trainer: ArrayLike,
    mask: ArrayLike,
    offsets: ArrayLike | None = None,
    *,
    bands: Sequence[tuple[float, float]] = BANDS,
    quantiles: Sequence[float] = QUANTILES,
) -> Statistics:
    """Statistics of one batch.

    sampler, trainer: log-probs in nats, [B, T] (padding is what the mask leaves out), or flat [N]
    with ``offsets`` [B + 1].  mask: same shape, true where a token was sampled and counts.
    Raises InputError where shapes differ.  A million tokens take about 40 ms on one core.
    """
    q, p, m, edges = _flat(sampler, trainer, mask, offsets)
    sums = sequence_sums(q, p, m, edges)
    with np.errstate(invalid="ignore"):
        d = np.subtract(p, q, dtype=np.float64)[m & np.isfinite(q) & np.isfinite(p)]
    ratio = np.exp(np.clip(d, -k.EXPONENT_CAP, k.EXPONENT_CAP))
    levels = np.quantile(ratio, list(quantiles)) if d.size else [float("nan")] * len(quantiles)
    return from_sequences(
        sums,
        ratio_range=(float(ratio.min()), float(ratio.max())) if d.size else None,
        ratio_quantiles={q: float(v) for q, v in zip(quantiles, levels, strict=True)},
        outside={
            (low, high): float(np.mean((ratio < low) | (ratio > high))) if d.size else float("nan")
            for low, high in bands
        },
    )


def sequence_sums(
    sampler: NDArray[Any],
    trainer: NDArray[Any],
    mask: NDArray[Any],
    offsets: NDArray[Any],
    thresholds: ArrayLike = (),
) -> FloatArray:
    """Sums of each sequence's features, float64 [B, len(kernels.FEATURES) + thresholds]; the last
    columns count tokens with |d| above each threshold.  Flat arrays as in `batch_statistics`."""
    limits = np.asarray(thresholds, dtype=np.float64)
    out = np.empty((len(offsets) - 1, k.N_FEATURES + limits.size))
    k.sum_sequences(sampler, trainer, mask, np.asarray(offsets, dtype=np.int64), limits, out)
    return out


def from_sequences(
    sums: FloatArray,
    *,
    ratio_range: tuple[float, float] | None = None,
    ratio_quantiles: dict[float, float] | None = None,
    outside: dict[tuple[float, float], float] | None = None,
) -> Statistics:
    """Statistics from `sequence_sums`; the ratio's distribution is passed in by who saw it."""
    parts = SequenceParts.of(sums)
    low, high = ratio_range or (float("nan"), float("nan"))
    return parts.statistics(low, high, ratio_quantiles or {}, outside or {})


@dataclass
class SequenceParts:
    """What sequences add up to, so that batches merge by `+`.

    token: sums of features.  sequence: sums over sequences of (means of d, |d|, k3, e^|d|; ppl of
    trainer and sampler; |mean d|; exp(-mean d); exp(2 mean d)).  logs: log of the sums of
    exp(sum d) and exp(2 sum d), which overflow as plain numbers.
    """

    token: FloatArray
    sequence: FloatArray
    logs: FloatArray
    n: int

    @classmethod
    def of(cls, sums: FloatArray) -> SequenceParts:
        """Of the rows of `sequence_sums`."""
        seen = sums[sums[:, k.ROWS] > 0]
        rows = seen[:, k.ROWS]
        d, q = seen[:, k.DLP] / rows, seen[:, k.SAMPLER] / rows
        with np.errstate(over="ignore"):
            columns = (
                d,
                seen[:, k.ABS_DLP] / rows,
                seen[:, k.K3] / rows,
                seen[:, k.MULT] / rows,
                np.exp(-(q + d)),
                np.exp(-q),
                np.abs(d),
                np.exp(-d),
                np.exp(2 * d),
            )
            sequence = np.array([float(c.sum()) for c in columns])
        total = seen[:, k.DLP]
        logs = np.array([_log_sum_exp(total), _log_sum_exp(2 * total)])
        return cls(sums.sum(axis=0), sequence, logs, len(seen))

    def __add__(self, other: SequenceParts) -> SequenceParts:
        return SequenceParts(
            self.token + other.token,
            self.sequence + other.sequence,
            np.logaddexp(self.logs, other.logs),
            self.n + other.n,
        )

    def statistics(
        self,
        ratio_min: float,
        ratio_max: float,
        ratio_quantiles: dict[float, float],
        outside: dict[tuple[float, float], float],
    ) -> Statistics:
        """The means of these sums."""
        t, rows = self.token, float(self.token[k.ROWS])
        with np.errstate(all="ignore"):
            mean = t / rows if rows else np.full_like(t, np.nan)
            seq = self.sequence / self.n if self.n else np.full_like(self.sequence, np.nan)
            product = float(np.exp(self.logs[1] - np.log(self.n))) - 1 if self.n else float("nan")
            ess_seq = float(np.exp(2 * self.logs[0] - self.logs[1])) / max(self.n, 1)
            ess_token = (t[k.K3] + rows + t[k.DLP]) ** 2 / (rows * t[k.W2]) if rows else np.nan
        return Statistics(
            tokens=int(rows),
            sequences=self.n,
            missing=int(t[k.MISSING]),
            nonfinite=int(t[k.NONFINITE]),
            k1=-float(mean[k.DLP]),
            k1_seq_mean=-float(seq[0]),
            k2=float(mean[k.DLP2]) / 2,
            k3=float(mean[k.K3]),
            k3_seq_mean=float(seq[2]),
            abs_dlp=float(mean[k.ABS_DLP]),
            abs_dlp_seq_mean=float(seq[1]),
            rms_dlp=float(np.sqrt(mean[k.DLP2])),
            mult_prob_error=float(mean[k.MULT]),
            mult_prob_error_seq_mean=float(seq[3]),
            abs_dp=float(mean[k.ABS_DP]),
            ppl_trainer=float(seq[4]),
            ppl_sampler=float(seq[5]),
            log_ppl_diff=-float(seq[0]),
            log_ppl_abs_diff=float(seq[6]),
            ppl_ratio=float(seq[7]),
            chi2_token=float(mean[k.W2]) - 1,
            chi2_seq_product=product,
            chi2_seq_geometric=float(seq[8]) - 1,
            ess_token=float(ess_token),
            ess_seq=ess_seq if self.n else float("nan"),
            # k3 + 1 + d is w, and keeps its digits where w is 1 to rounding
            ratio_mean=float(mean[k.K3] + 1 + mean[k.DLP]),
            ratio_min=ratio_min,
            ratio_max=ratio_max,
            ratio_quantiles=ratio_quantiles,
            outside=outside,
        )


def _log_sum_exp(values: FloatArray) -> float:
    if not values.size:
        return -np.inf
    top = float(values.max())
    return top + float(np.log(np.exp(values - top).sum()))


def _flat(
    sampler: ArrayLike, trainer: ArrayLike, mask: ArrayLike, offsets: ArrayLike | None
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.bool_], NDArray[np.int64]]:
    q, p, m = _floats(sampler), _floats(trainer), np.asarray(mask, dtype=bool)
    if not q.shape == p.shape == m.shape:
        raise InputError(
            f"shapes differ: sampler {q.shape}, trainer {p.shape}, mask {m.shape}",
            where="log-probs",
        )
    if offsets is not None:
        edges = np.asarray(offsets, dtype=np.int64)
        if q.ndim != 1 or edges[0] != 0 or edges[-1] != q.size or np.any(np.diff(edges) < 0):
            raise InputError("offsets do not partition the flat arrays", where="offsets")
    elif q.ndim == 2:
        edges = np.arange(q.shape[0] + 1, dtype=np.int64) * q.shape[1]
    else:
        raise InputError(f"need [B, T], or [N] with offsets; got {q.shape}", where="log-probs")
    return q.reshape(-1), p.reshape(-1), m.reshape(-1), edges


def _floats(values: ArrayLike) -> NDArray[Any]:
    array = np.asarray(values)
    if array.dtype not in (np.float32, np.float64):
        array = array.astype(np.float64)
    return np.ascontiguousarray(array)
