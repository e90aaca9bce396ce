"""Pairs of laws for the tests of bounds: random, adversarial and extremal; and small trees."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

DRIFTS = (1e-6, 1e-3, 0.02, 0.25, 1.0, 3.0, 8.0)
"""Drifts at which the extremal pair of each bound is built."""


def random_pairs(seed: int, batches: int = 40, rows: int = 200) -> Iterator[tuple]:
    """``(z_p, z_q)``, each ``[rows, V]``: flat to peaked q; d normal, uniform, two-valued, a spike
    on one token, or all on the top token; drifts from 1e-6 to 16."""
    rng = np.random.default_rng(seed)
    for batch in range(batches):
        vocab = int(rng.integers(2, 12))
        z_q = rng.normal(0, 10 ** rng.uniform(-1, 1), (rows, vocab))
        kind = batch % 5
        d = rng.normal(size=(rows, vocab))
        if kind == 1:
            d = rng.uniform(size=(rows, vocab))
        elif kind == 2:
            d = (rng.uniform(size=(rows, vocab)) < rng.uniform(size=(rows, 1))).astype(float)
            d[:, :2] = 0.0, 1.0  # never all alike: a drift of 0 has its own test
        elif kind == 3:
            d = np.eye(vocab)[rng.integers(vocab, size=rows)] * rng.choice([-1, 1], (rows, 1))
        elif kind == 4:
            d = np.eye(vocab)[z_q.argmax(1)] * rng.choice([-1, 1], (rows, 1))
        yield z_q + d * 10 ** rng.uniform(-6, 1.2, (rows, 1)), z_q


def two_blocks(drift: float, mass: float) -> tuple[np.ndarray, np.ndarray]:
    """``(z_p, z_q)`` of two tokens, q's second of the given mass, p's raised by the drift."""
    z_q = np.array([np.log1p(-mass), np.log(mass)])
    return z_q + np.array([0.0, drift]), z_q


class Tree:
    """p and q over responses of T tokens of V kinds, by exact enumeration of all V^T.

    p, q: one array ``[V^t, V]`` per step t, a row per prefix. Prefixes and responses are numbered
    by their tokens as digits, the first the highest.
    """

    def __init__(self, p: list[np.ndarray], q: list[np.ndarray]) -> None:
        self.p, self.q = p, q
        self.T, self.V = len(p), p[0].shape[1]
        self.prefix_p, self.prefix_q = self._prefixes(p), self._prefixes(q)
        self.P, self.Q = self.prefix_p[-1], self.prefix_q[-1]

    @staticmethod
    def _prefixes(steps: list[np.ndarray]) -> list[np.ndarray]:
        laws = [np.ones(1)]
        for step in steps:
            laws.append((laws[-1][:, None] * step).reshape(-1))
        return laws

    def along(self, t: int, values: np.ndarray) -> np.ndarray:
        """Values ``[V^t, V, ...]`` of step t, spread to every response ``[V^T, ...]``."""
        flat = values.reshape(-1, *values.shape[2:])
        return np.repeat(flat, self.V ** (self.T - t - 1), axis=0)

    @property
    def ratios(self) -> np.ndarray:
        """w_t of every response, ``[V^T, T]``."""
        return np.stack([self.along(t, self.p[t] / self.q[t]) for t in range(self.T)], axis=1)

    @property
    def token_tv(self) -> list[np.ndarray]:
        return [np.abs(p - q).sum(1) / 2 for p, q in zip(self.p, self.q, strict=True)]

    @property
    def token_kl(self) -> list[np.ndarray]:
        """KL(q||p) of each context."""
        return [(q * np.log(q / p)).sum(1) for p, q in zip(self.p, self.q, strict=True)]

    @property
    def mean_tv(self) -> np.ndarray:
        """E_Q[TV at t], ``[T]``."""
        pairs = zip(self.prefix_q[:-1], self.token_tv, strict=True)
        return np.array([(law * tv).sum() for law, tv in pairs])

    @property
    def mean_kl(self) -> np.ndarray:
        """E_Q[KL(q||p) at t], ``[T]``."""
        pairs = zip(self.prefix_q[:-1], self.token_kl, strict=True)
        return np.array([(law * kl).sum() for law, kl in pairs])

    @property
    def sup_tv(self) -> float:
        return max(float(tv.max()) for tv in self.token_tv)

    @property
    def sup_kl(self) -> float:
        return max(float(kl.max()) for kl in self.token_kl)

    @property
    def drift(self) -> float:
        logs = [np.log(p / q) for p, q in zip(self.p, self.q, strict=True)]
        return max(float((x.max(1) - x.min(1)).max()) for x in logs)

    @property
    def tv(self) -> float:
        return float(np.abs(self.P - self.Q).sum() / 2)

    @property
    def kl(self) -> float:
        return float((self.Q * np.log(self.Q / self.P)).sum())

    def surrogate_error(self, rewards: np.ndarray) -> float:
        """J(p) - J(q) - E_q[(R - J(q)) sum_t rho_t]."""
        advantage = rewards - self.Q @ rewards
        surrogate = self.Q @ (advantage * self.ratios.sum(1))
        return float(self.P @ rewards - self.Q @ rewards - surrogate)


def random_tree(rng: np.random.Generator, vocab: int, tokens: int) -> Tree:
    """A tree whose size of drift varies by orders of magnitude, and between contexts."""
    size = 10 ** rng.uniform(-3, 0.7)
    q, p = [], []
    for t in range(tokens):
        z = rng.normal(0, rng.uniform(0.1, 2), (vocab**t, vocab))
        d = rng.normal(0, 1, (vocab**t, vocab)) * size * rng.uniform(0.3, 1, (vocab**t, 1))
        q.append(_softmax(z))
        p.append(_softmax(z + d))
    return Tree(p, q)


def constant_tree(p: np.ndarray, q: np.ndarray, tokens: int) -> Tree:
    """The same pair at every context."""
    vocab = len(p)
    return Tree(
        [np.tile(p, (vocab**t, 1)) for t in range(tokens)],
        [np.tile(q, (vocab**t, 1)) for t in range(tokens)],
    )


def _softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
