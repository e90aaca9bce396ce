"""Policy-gradient bias bounds, by exact enumeration.

The argument: on a tree the biased and the true gradient are finite sums, for any advantage and any
scores with E_p[s | context] = 0 and |s| <= G. Random ones find no violation; for each bound said to
be attained, scores and advantages are built that reach 99% of it. What weights remove, and what
they leave, is checked against the same enumeration.
"""

from __future__ import annotations

import numpy as np
import pytest
from bounds_pairs import Tree, constant_tree, random_tree, two_blocks
from scipy.stats import binom

from kernel_contracts import bounds as b
from kernel_contracts import divergence as dv
from kernel_contracts.errors import InputError

SLACK = 1 + 1e-9


def law(z):
    return np.exp(dv.log_softmax(z))


def random_scores(rng, tree: Tree, width: int = 3) -> np.ndarray:
    """``[V^T, T, width]``, zero mean under p at every context, largest norm 1."""
    scores = []
    for t, p in enumerate(tree.p):
        raw = rng.normal(size=(*p.shape, width)) * 10 ** rng.uniform(-1, 1, (len(p), 1, 1))
        raw -= (p[..., None] * raw).sum(1, keepdims=True)
        scores.append(tree.along(t, raw))
    stacked = np.stack(scores, axis=1)
    return stacked / np.linalg.norm(stacked, axis=-1).max()


def advantages(rng, size: int) -> np.ndarray:
    kinds = (rng.uniform(-1, 1, size), np.sign(rng.normal(size=size)), np.ones(size))
    return kinds[rng.integers(3)]


def gradient(law_, weights, advantage, scores) -> np.ndarray:
    """E_law[A sum_t weight_t s_t]."""
    return np.einsum("n,n,nt,ntk->k", law_, advantage, weights, scores)


def cases(seed, count=250, tokens=(1, 5)):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        tree = random_tree(rng, int(rng.integers(2, 4)), int(rng.integers(*tokens)))
        yield tree, random_scores(rng, tree), advantages(rng, len(tree.P)), rng


def fisher_norm(law_, scores_sum, bias) -> float:
    """sqrt(b^T E[s s^T]^-1 b)."""
    fisher = np.einsum("n,ni,nj->ij", law_, scores_sum, scores_sum)
    return float(np.sqrt(max(bias @ np.linalg.pinv(fisher, rcond=1e-12) @ bias, 0)))


def test_without_weights_no_tree_violates_a_bound():
    for tree, s, a, _ in cases(1):
        ones = np.ones((len(tree.P), tree.T))
        t, d = tree.T, tree.drift
        a_max, g = np.abs(a).max(), np.linalg.norm(s, axis=-1).max()
        bias = gradient(tree.Q, ones, a, s) - gradient(tree.P, ones, a, s)
        norm, total = np.linalg.norm(bias), s.sum(1)
        chi2 = ((tree.Q - tree.P) ** 2 / tree.P).sum()
        square = (tree.P * (total**2).sum(1)).sum()
        steps = (tree.P[:, None] * (s**2).sum(2)).sum()
        assert square == pytest.approx(steps, rel=1e-9)  # scores are orthogonal increments
        assert norm <= b.bias_none_trajectory(tree.tv, t, a_max, g) * SLACK
        assert norm <= b.bias_none_trajectory_from_sup_tv(tree.sup_tv, t, a_max, g) * SLACK
        assert norm <= b.bias_none_trajectory_from_drift(d, t, a_max, g) * SLACK
        assert norm <= t**1.5 * a_max * g * d / 2 * SLACK
        assert norm <= b.l2_bias(chi2, square, a_max) * SLACK
        assert norm <= b.l2_bias_from_drift(d, t, a_max, g) * SLACK
        natural = fisher_norm(tree.P, total, bias)
        assert natural <= b.natural_bias(chi2, a_max) * (1 + 1e-6)
        assert natural <= b.natural_bias_from_drift(d, t, a_max) * (1 + 1e-6)
        if t == 1:
            rho = np.abs(tree.ratios - 1).max()
            assert norm <= b.bias_none_token(tree.tv, a_max, g) * SLACK
            assert norm <= b.bias_none_token(b.tv_from_ratio(rho), a_max, g) * SLACK
            v = (s[:, 0] * a[:, None]).mean(0)
            radius = np.linalg.norm(s[:, 0] * a[:, None] - v, axis=1).max()
            assert norm <= b.bias_token_centred(tree.tv, radius) * SLACK
            shift = np.linalg.norm(0.7 * tree.Q @ s[:, 0])
            assert shift <= b.bias_baseline(tree.tv, -0.7, g) * SLACK


def test_with_weights_no_tree_violates_a_bound():
    worse = total = 0
    for tree, s, a, rng in cases(2, count=400):
        t, eps = tree.T, tree.sup_tv
        a_max, g = np.abs(a).max(), np.linalg.norm(s, axis=-1).max()
        ones = np.ones((len(tree.P), t))
        truth = gradient(tree.P, ones, a, s)
        big = np.linalg.norm(a[:, None] * s.sum(1), axis=1).max()
        w = tree.ratios
        full = tree.P / tree.Q

        def off(weights, tree=tree, a=a, s=s, truth=truth):
            return np.linalg.norm(gradient(tree.Q, weights, a, s) - truth)

        token, none = off(w), off(ones)
        assert token <= b.bias_token_weights(eps, t, a_max, g) * SLACK + 1e-15
        cumulative = off(np.cumprod(w, axis=1))
        assert cumulative <= b.bias_cumulative_weights(eps, t, a_max, g) * SLACK + 1e-14
        assert off(full[:, None] * ones) <= 1e-12
        if t > 1:
            worse, total = worse + (token > none), total + 1

        c = 1 + 10 ** rng.uniform(-3, 1)
        cut = off(np.minimum(full, c)[:, None] * ones)
        excess = (tree.Q * np.maximum(full - c, 0)).sum()
        chi2 = (tree.Q * (full - 1) ** 2).sum()
        beyond = tree.P[full > c].sum()
        tight = b.bias_truncated(excess, big)
        assert cut <= tight * SLACK + 1e-14
        assert tight <= b.bias_truncated_from_chi2(chi2, c, big) * SLACK
        assert tight <= b.bias_truncated_from_exceedance(min(beyond, 1), big) * SLACK
        assert beyond <= b.weight_tail_from_drift(tree.drift, t, c) + 1e-12
        if b.truncation_is_noop(c, tree.drift, t):
            assert cut <= 1e-12

        low, high = 1 - rng.uniform(0, 1), 1 + 10 ** rng.uniform(-3, 1)
        inside = (full >= low) & (full <= high)
        masked = off((full * inside)[:, None] * ones)
        assert masked <= b.bias_masked(min(tree.P[~inside].sum(), 1), big) * SLACK + 1e-14

        clip = rng.uniform(0, 0.9)
        clipped = off(np.clip(full, 1 - clip, 1 + clip)[:, None] * ones)
        distance = (tree.Q * b.clip_distance(full, clip)).sum()
        assert clipped <= b.bias_clipped(distance, big) * SLACK + 1e-14
        if t == 1:
            assert tight <= b.bias_truncated_from_drift(tree.drift, c, big) * SLACK + 1e-14
            assert clipped <= b.bias_clipped_from_drift(tree.drift, clip, big) * SLACK + 1e-14
    assert 0 < worse / total < 0.3  # token weights do make it worse now and then


def _paired(p: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each token split in two halves with scores +1 and -1, so that E_p[s] = 0 costs nothing."""
    return np.repeat(p / 2, 2), np.repeat(q / 2, 2), np.tile([1.0, -1.0], len(p))


@pytest.mark.parametrize("d", [1e-3, 0.3, 2.0])
def test_one_token_bounds_are_attained(d):
    p, q = (law(z) for z in two_blocks(d, 1 / (1 + np.exp(d / 2))))
    p2, q2, s = _paired(p, q)
    a = s * np.sign(q2 - p2)
    bias = abs(((q2 - p2) * a * s).sum())
    assert bias == pytest.approx(b.bias_none_token(b.tv_from_drift(d)))
    assert bias == pytest.approx(b.bias_none_trajectory(b.tv_from_drift(d), 1))
    assert bias == pytest.approx(b.bias_none_trajectory_from_sup_tv(b.tv_from_drift(d), 1))
    follows = np.sign(q - p)
    centred = follows - (p @ follows)  # zero mean under p; A s - v stays within 1 of v
    assert abs(q @ centred) == pytest.approx(b.bias_token_centred(b.tv_from_drift(d), 1.0))
    # A baseline: E_q[b s] with s along the sign of q - p on halves of equal mass under p.
    rho = np.tanh(d / 2)
    half, tilted = np.array([0.5, 0.5]), np.array([0.5 - rho / 2, 0.5 + rho / 2])
    baseline = abs(0.7 * tilted @ np.array([-1.0, 1.0]))
    assert baseline == pytest.approx(b.bias_baseline(rho / 2, 0.7))
    assert baseline / 0.7 == pytest.approx(
        b.bias_none_token(b.tv_from_ratio(np.abs(half / tilted - 1).max() * (1 - rho))), rel=1e-6
    )
    # Clip at 0 is no weight at all.
    assert b.bias_clipped_from_drift(d, 0.0) == pytest.approx(2 * np.tanh(d / 4))
    w = p / q
    assert (q * b.clip_distance(w, 0.0)).sum() == pytest.approx(2 * np.tanh(d / 4))
    # Truncation: A s = 1 everywhere it matters.
    c = np.exp(d / 3)
    mass = np.expm1((d - np.log(c)) / 2) / np.expm1(d)
    p, q = (law(z) for z in two_blocks(d, mass))
    lost = (q * np.maximum(p / q - c, 0)).sum()
    assert lost == pytest.approx(b.bias_truncated_from_drift(d, c), rel=1e-6)


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_l2_and_natural_bounds_are_attained(tokens):
    """A = 1 and s_t the increments of Q/P: the bias is chi2, and E_P||S||^2 is chi2 too."""
    rng = np.random.default_rng(tokens)
    tree = random_tree(rng, 3, tokens)
    steps = []
    for t in range(tokens):
        before = (tree.prefix_q[t] / tree.prefix_p[t])[:, None]
        steps.append(tree.along(t, before * (tree.q[t] / tree.p[t] - 1))[:, None])
    s = np.stack(steps, axis=1)
    ones = np.ones((len(tree.P), tokens))
    a = np.ones(len(tree.P))
    bias = gradient(tree.Q, ones, a, s) - gradient(tree.P, ones, a, s)
    chi2 = ((tree.Q - tree.P) ** 2 / tree.P).sum()
    square = (tree.P * (s.sum(1) ** 2).sum(1)).sum()
    assert np.linalg.norm(bias) == pytest.approx(b.l2_bias(chi2, square), rel=1e-9)
    assert fisher_norm(tree.P, s.sum(1), bias) == pytest.approx(b.natural_bias(chi2), rel=1e-9)


@pytest.mark.parametrize("tokens", [1, 3])
def test_natural_bound_from_drift_is_attained(tokens):
    d = 0.9
    high_q, high_p = (law(z) for z in two_blocks(d, 1 / (1 + np.exp(d))))
    tree = constant_tree(high_p, high_q, tokens)
    chi2 = ((tree.Q - tree.P) ** 2 / tree.P).sum()
    assert b.natural_bias(chi2) == pytest.approx(b.natural_bias_from_drift(d, tokens))


def test_l2_bound_from_drift_is_approached_as_drift_vanishes():
    """Independent small steps, unit scores along q/p - 1: the bias is T D/2 to leading order."""
    d, t = 1e-4, 4
    tree = constant_tree(*(law(z) for z in two_blocks(d, 0.5)), t)
    s = np.stack([tree.along(i, np.sign(tree.q[i] - tree.p[i]))[:, None] for i in range(t)], axis=1)
    # Zero mean under p to the order of d; G = 1.
    bias = (tree.Q - tree.P) @ s.sum(1)
    assert abs(bias[0]) >= 0.99 * b.l2_bias_from_drift(d, t)
    assert b.bias_none_trajectory_from_drift(d, t) == b.l2_bias_from_drift(d, t)


def _attacked(eps: float):
    """T = 2 with paired tokens (block, sign): p = (1/2, 1/2), q tilted by eps at every step."""
    p, q = np.array([0.5, 0.5]), np.array([0.5 - eps, 0.5 + eps])
    p2, q2, sign = _paired(p, q)
    tree = constant_tree(p2, q2, 2)
    block = np.sign(q2 - p2)
    first, second = np.repeat(np.arange(4), 4), np.tile(np.arange(4), 4)
    return tree, sign, block, first, second


@pytest.mark.parametrize("eps", [1e-3, 0.2])
def test_token_and_cumulative_weights_leave_what_is_said(eps):
    """T = 2: token weights leave the continuation at t = 1 and the prefix at t = 2, 2 F eps each;
    cumulative weights leave the first only."""
    tree, sign, block, first, second = _attacked(eps)
    a = sign[first] * block[second]
    s = np.stack([sign[first], sign[first] * block[second] * block[first]], axis=1)[..., None]
    for context in range(4):  # zero mean given the past, as scores must have
        here = first == context
        assert (tree.p[1][context] * s[here, 1, 0]).sum() == pytest.approx(0, abs=1e-15)
    ones = np.ones((16, 2))
    truth = gradient(tree.P, ones, a, s)
    left = abs(gradient(tree.Q, tree.ratios, a, s) - truth)[0]
    assert left == pytest.approx(b.bias_token_weights(eps, 2))
    cumulative = abs(gradient(tree.Q, np.cumprod(tree.ratios, axis=1), a, s) - truth)[0]
    assert cumulative == pytest.approx(b.bias_cumulative_weights(eps, 2))


def test_masked_truncated_and_clipped_responses_are_attained():
    """A S constant where the weight is lost: the bias is all that the bound counts."""
    tree = random_tree(np.random.default_rng(5), 3, 3)
    full = tree.P / tree.Q
    low, high = np.quantile(full, [0.3, 0.7])
    lost = (full < low) | (full > high)
    missing = (tree.P * lost).sum()
    assert (tree.P - tree.Q * full * ~lost).sum() == pytest.approx(b.bias_masked(missing))
    excess = (tree.Q * np.maximum(full - high, 0)).sum()
    assert (tree.P - tree.Q * np.minimum(full, high)).sum() == pytest.approx(
        b.bias_truncated(excess)
    )
    clip = np.clip(full, 0.9, 1.1)
    follows = np.sign(full - clip)
    distance = (tree.Q * b.clip_distance(full, 0.1)).sum()
    assert (tree.Q * (full - clip) * follows).sum() == pytest.approx(b.bias_clipped(distance))
    # W = 2C - 1 on a vanishing mass.
    c, q = 1.5, 1e-6
    p_far, q_far = np.array([1 - q * (2 * c - 1), q * (2 * c - 1)]), np.array([1 - q, q])
    excess = (q_far * np.maximum(p_far / q_far - c, 0)).sum()
    chi2 = (q_far * (p_far / q_far - 1) ** 2).sum()
    assert excess == pytest.approx(b.bias_truncated_from_chi2(chi2, c), rel=1e-4)
    # W far over C.
    p_far = np.array([0.5, 0.5])
    excess = (q_far * np.maximum(p_far / q_far - c, 0)).sum()
    assert excess == pytest.approx(b.bias_truncated_from_exceedance(0.5), rel=1e-4)
    assert b.bias_full_weights() == 0
    assert b.bias_full_weights(0.1, 2.0) == pytest.approx(0.2)


def test_logit_space_is_exact():
    """s = e_y - p: the mean score under q is q - p, and the bias vector is the enumerated one."""
    rng = np.random.default_rng(6)
    p, q, a = rng.dirichlet(np.ones(7)), rng.dirichlet(np.ones(7)), rng.normal(size=7)
    scores = np.eye(7) - p
    want = (q * a) @ scores - (p * a) @ scores
    np.testing.assert_allclose(b.logit_space_bias(p, q, a), want, atol=1e-15)
    np.testing.assert_allclose(q @ scores, q - p, atol=1e-15)
    norms = b.score_norm_squared(p, (p**2).sum())
    np.testing.assert_allclose(norms, (scores**2).sum(1))
    assert (norms <= 2).all()
    # With A = 1 softmax scores attain the natural bound whatever p and q are.
    bias = b.logit_space_bias(p, q, np.ones(7))
    chi2 = ((q - p) ** 2 / p).sum()
    assert fisher_norm(p, scores, bias) == pytest.approx(b.natural_bias(chi2), rel=1e-9)


def test_truncation_is_a_noop_exactly_from_e_to_the_drift():
    d = 0.4
    assert b.truncation_is_noop(np.exp(d) * (1 + 1e-12), d)
    assert not b.truncation_is_noop(np.exp(d) * 0.999, d)
    assert not b.truncation_is_noop(np.exp(d), d, tokens=2)
    assert not b.truncation_is_noop(2.0, np.nan)
    assert b.bias_truncated_from_drift(d, np.exp(d)) == 0
    p, q = (law(z) for z in two_blocks(d, 1e-9))
    assert (p / q).max() > 0.999 * np.exp(d)  # and a weight does come that close


def test_the_weight_tail_has_the_right_exponent():
    """4096 independent steps, exactly: the bound is above, its logarithm within a factor of 1.7."""
    d, t = 0.1, 4096
    p, q = (law(z) for z in two_blocks(d, 0.5))
    up, down = np.log(p[1] / q[1]), np.log(p[0] / q[0])
    for log_c in (2.0, 8.0, 15.0, 25.0, 40.0):
        needed = np.ceil((log_c - t * down) / (up - down))
        tail = binom.sf(needed - 1, t, p[1])
        bound = float(b.weight_tail_from_drift(d, t, np.exp(log_c)))
        assert tail <= bound
        assert log_c < 15 or np.log(bound) < 0.6 * np.log(tail)
    assert b.weight_tail_from_drift(0.0, 5, 1.0) == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: b.bias_none_token(1.2),
        lambda: b.bias_none_token(0.1, -1.0),
        lambda: b.bias_none_trajectory(0.1, 0),
        lambda: b.bias_truncated_from_chi2(0.1, 1.0),
        lambda: b.bias_truncated_from_drift(0.1, 0.5),
        lambda: b.bias_clipped_from_drift(0.1, 1.0),
        lambda: b.clip_distance([-0.1], 0.2),
        lambda: b.weight_tail_from_drift(0.1, 5, 0.9),
        lambda: b.natural_bias(-1.0),
    ],
)
def test_outside_the_domain_is_refused(call):
    with pytest.raises(InputError):
        call()
