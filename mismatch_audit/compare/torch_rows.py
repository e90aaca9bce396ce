"""The comparison in plain torch and float64, streamed over slices of the vocabulary.

The route for whatever the fused kernels do not cover: no numba, a device without Triton, or rows so
wide that one does not fit in memory. Also the yardstick that the fused kernels are tested against.
Two passes over the slices; float64 throughout, so its only limit is its speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

Slices = Callable[[], Iterable[tuple[int, torch.Tensor]]]
"""Gives, each time it is called, ``(offset, logits [T, n])`` over the vocabulary in order."""

BYTES_PER_LOGIT = 96
"""Extra memory of one logit of both rows here: about twelve float64 temporaries."""


class Side:
    """One side's first pass: log-sum-exp, top two, the target's log-prob, non-finite count."""

    def __init__(self, target_ids: torch.Tensor) -> None:
        rows, device = target_ids.shape[0], target_ids.device
        self.target_ids = target_ids
        self.total = torch.zeros(rows, dtype=torch.float64, device=device)
        self.top = self.total - torch.inf
        self.second = self.total - torch.inf
        self.target = self.total * torch.nan
        self.top1 = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self.nonfinite = torch.zeros(rows, dtype=torch.int64, device=device)

    def add(self, offset: int, logits: torch.Tensor) -> None:
        """Take in the logits ``[T, n]`` of the tokens from ``offset``."""
        z = logits.double()
        finite = z.isfinite()
        self.nonfinite += (~finite).sum(1)
        if not bool(finite.all()):
            # Such a row's metrics become NaN at the end; here it must only not disturb the code.
            z = torch.where(finite, z, -torch.inf)
        best, index = z.max(1)  # the first of equal maxima
        rest = z.scatter(1, index[:, None], -torch.inf).max(1).values
        better = best > self.top
        self.second = torch.where(
            better, torch.maximum(self.top, rest), torch.maximum(self.second, best)
        )
        top = torch.maximum(self.top, best)
        shift = torch.where(top.isfinite(), top, 0.0)
        self.total = self.total * (self.top - shift).exp() + (z - shift[:, None]).exp_().sum(1)
        self.top1 = torch.where(better, index + offset, self.top1)
        self.top = top
        here = self.target_ids - offset
        inside = (here >= 0) & (here < z.shape[1])
        at = here.clamp(0, z.shape[1] - 1)[:, None]
        self.target = torch.where(inside, z.gather(1, at)[:, 0], self.target)

    @property
    def lse(self) -> torch.Tensor:
        """``[T]`` log-sum-exp of what was taken in."""
        return torch.add(self.top, self.total.log())

    def columns(self) -> dict[str, torch.Tensor]:
        """``logprob, margin, top1, top1_logprob`` of this side, and its ``nonfinite``."""
        lse, bad = self.lse, self.nonfinite > 0
        nan = torch.nan
        return {
            "logprob": (self.target - lse).masked_fill(bad, nan),
            "margin": (self.top - self.second).masked_fill(bad, nan),
            "top1": self.top1.masked_fill(bad, -1),
            "top1_logprob": (self.top - lse).masked_fill(bad, nan),
            "nonfinite": self.nonfinite,
        }


def log_probs(slices: Slices, target_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of one side: ``logprob, margin, top1, top1_logprob, entropy, nonfinite``, each ``[T]``."""
    side = Side(target_ids)
    for offset, logits in slices():
        side.add(offset, logits)
    entropy = torch.zeros_like(side.total)
    for _, logits in slices():
        logp = logits.double() - side.lse[:, None]
        entropy -= (logp.exp() * logp).sum(1)
    columns = side.columns()
    columns["entropy"] = entropy.masked_fill(side.nonfinite > 0, torch.nan)
    return columns


def compare(
    reference: Slices, engine: Slices, target_ids: torch.Tensor, *, eta: float
) -> dict[str, torch.Tensor]:
    """Every column of the comparison, each ``[T]``. Both sides must be cut into equal slices.

    With x = log p - log q, KL(q || p) is summed as q (e^x - 1 - x) and KL(p || q) as
    p (e^-x - 1 + x): each term is >= 0, where the terms of sum q (log q - log p) cancel.
    """
    p_side, q_side = Side(target_ids), Side(target_ids)
    for (offset, z_p), (_, z_q) in zip(reference(), engine(), strict=True):
        p_side.add(offset, z_p)
        q_side.add(offset, z_q)
    lse_p, lse_q = p_side.lse[:, None], q_side.lse[:, None]

    zero = torch.zeros_like(p_side.total)
    kl_qp, kl_pq, tv, chi2, entropy, mean, square, in_p, in_q = (zero.clone() for _ in range(9))
    low, high = zero + torch.inf, zero - torch.inf
    for (_, z_p), (_, z_q) in zip(reference(), engine(), strict=True):
        logp, logq = z_p.double() - lse_p, z_q.double() - lse_q
        p, q, x = logp.exp(), logq.exp(), logp - logq
        small = x.abs() <= 1
        centred = torch.expm1(x) - x
        kl_qp += torch.where(small, q * centred, p - q - q * x).sum(1)
        centred = torch.expm1(-x) + x
        kl_pq += torch.where(small, p * centred, q - p + p * x).sum(1)
        gap = torch.where(small, q * torch.expm1(x), p - q)
        tv += gap.abs().sum(1)
        chi2 += torch.where(gap == 0, 0.0, gap * torch.expm1(x)).sum(1)
        entropy -= torch.where(p > 0, p * logp, 0.0).sum(1)
        mean += (q * x).sum(1)
        square += (q * x * x).sum(1)
        nucleus = (p >= eta) | (q >= eta)
        in_p += torch.where(nucleus, 0.0, p).sum(1)
        in_q += torch.where(nucleus, 0.0, q).sum(1)
        low = torch.minimum(low, torch.where(nucleus, x, torch.inf).amin(1))
        high = torch.maximum(high, torch.where(nucleus, x, -torch.inf).amax(1))

    nonfinite = p_side.nonfinite + q_side.nonfinite
    bad = nonfinite > 0
    metrics = {
        "kl_engine_reference": kl_qp,
        "kl_reference_engine": kl_pq,
        "tv": tv / 2,
        "chi2": chi2,
        "drift": torch.where(high >= low, high - low, torch.nan),  # NaN: no token reaches eta
        "tail_mass": torch.maximum(in_p, in_q),
        "logit_var": (square - mean * mean).clamp(min=0),
        "entropy": entropy,
    }
    columns = {name: value.masked_fill(bad, torch.nan) for name, value in metrics.items()}
    for name, side in (("reference", p_side), ("engine", q_side)):
        own = side.columns()
        for part in ("logprob", "margin", "top1_logprob"):
            columns[f"{name}_{part}"] = own[part].masked_fill(bad, torch.nan)
        columns[f"{name}_top1"] = own["top1"].masked_fill(bad, -1)
    columns["flip"] = columns["engine_top1"] != columns["reference_top1"]
    columns["nonfinite"] = nonfinite
    return columns


def compare_whole(
    z_p: torch.Tensor, z_q: torch.Tensor, target_ids: torch.Tensor, *, eta: float
) -> dict[str, torch.Tensor]:
    """``compare`` of logits ``[T, V]`` that are there as a whole."""
    return compare(lambda: [(0, z_p)], lambda: [(0, z_q)], target_ids.to(z_p.device), eta=eta)


def log_probs_whole(logits: torch.Tensor, target_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """``log_probs`` of logits ``[T, V]`` that are there as a whole."""
    return log_probs(lambda: [(0, logits)], target_ids.to(logits.device))
