"""A mean vector of n prompts, known through its inner products only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kernel_contracts.errors import InputError

Array = npt.NDArray[np.float64]

__all__ = ["FEWEST_PROMPTS", "MeanVector"]

FEWEST_PROMPTS = 8
"""Below it a t-quantile on jackknifed pairs says nothing (see docs/gradient.md on coverage)."""


@dataclass(frozen=True)
class MeanVector:
    """What inference on |E x| needs of vectors ``[n, d]``.

    square: unbiased squared norm of the mean, the average inner product of two different prompts
    (``kernel_contracts.confidence.u_statistic_sq_norm``).  plug_in: that of the average itself,
    inflated by noise.  left_out: ``square`` without each prompt, ``[n]``.  parts: ``square`` by
    each of the independent projections; own_parts: the mean |x|^2 by each.  largest_variance: of
    the mean, along any direction.  rest: variance of ``square`` from all other directions, at a
    true mean of 0.  gram: ``[n, n]``.
    """

    square: float
    plug_in: float
    left_out: Array
    parts: Array
    own_parts: Array
    largest_variance: float
    rest: float
    gram: Array

    @property
    def n(self) -> int:
        return len(self.gram)

    @classmethod
    def of(cls, x_nd: npt.ArrayLike, replicas: int = 1) -> MeanVector:
        """From vectors whose columns are ``replicas`` projections of equal width.

        Raises InputError for fewer than ``FEWEST_PROMPTS`` rows, a width that does not divide, or
        non-finite entries.
        """
        x = np.asarray(x_nd, np.float64)
        if x.ndim != 2 or replicas < 1 or x.shape[1] % replicas:
            raise InputError(f"need vectors [n, d] of {replicas} equal parts, got {x.shape}")
        if len(x) < FEWEST_PROMPTS:
            raise InputError(
                f"{len(x)} prompts; a gradient needs at least {FEWEST_PROMPTS}", fix="add prompts"
            )
        if not np.isfinite(x).all():
            raise InputError("vectors hold non-finite entries")
        n = len(x)
        grams = [part @ part.T for part in np.split(x, replicas, 1)]
        gram = np.sum(grams, 0)
        own, total = np.diag(gram), float(gram.sum())
        without = total - 2 * gram.sum(1) + 2 * own - own.sum()
        values = np.linalg.eigvalsh(_centred(gram)).clip(0) / (n - 1) / n
        return cls(
            square=_square(gram),
            plug_in=total / n**2,
            left_out=without / ((n - 1) * (n - 2)),
            parts=np.array([_square(g) * replicas for g in grams]),
            own_parts=np.array([np.trace(g) / n * replicas for g in grams]),
            largest_variance=float(values[-1]),
            rest=2 * float((values[:-1] ** 2).sum()),
            gram=gram,
        )

    def size(self) -> MeanVector:
        """The mean square E|x|^2 in the place of |E x|^2: a scale that is never lost in noise."""
        own = np.diag(self.gram)
        square = float(own.mean())
        return replace(
            self,
            square=square,
            plug_in=square,
            left_out=(own.sum() - own) / (self.n - 1),
            parts=self.own_parts,
            largest_variance=0.0,
            rest=0.0,
        )

    def split_halves(self, *, splits: int = 32, seed: int = 0) -> tuple[float, float]:
        """(mean of |difference of two halves' means|^2 / 4, mean cosine of the two means)."""
        rng = np.random.default_rng(seed)
        half = self.n // 2
        first, second = np.zeros((2, splits, self.n))
        for k in range(splits):
            order = rng.permutation(self.n)
            first[k, order[:half]] = 1 / half
            second[k, order[half : 2 * half]] = 1 / half
        aa = np.einsum("kn,kn->k", first @ self.gram, first)
        bb = np.einsum("kn,kn->k", second @ self.gram, second)
        ab = np.einsum("kn,kn->k", first @ self.gram, second)
        length = np.sqrt(aa * bb)
        cosine = float(np.mean(ab / length)) if (length > 0).all() else float("nan")
        return float(np.mean(np.maximum(aa + bb - 2 * ab, 0))) / 4, cosine


def _square(gram: Array) -> float:
    n = len(gram)
    return float((gram.sum() - np.trace(gram)) / (n * (n - 1)))


def _centred(gram: Array) -> Array:
    rows = gram.mean(0)
    return np.asarray(gram - rows - rows[:, None] + rows.mean())
