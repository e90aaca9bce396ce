"""Scores and bias in logit space: equal to their definitions on whole rows, and to the derivatives
of the log-prob, whatever the head does to its logits and however few rows fit in memory."""

import gradient_models as tiny
import numpy as np
import pytest
import torch

from kernel_contracts.bounds.gradient import logit_space_bias, score_norm_squared
from kernel_contracts.errors import InputError, NotComparableError
from mismatch_audit.compare.heads import Head
from mismatch_audit.gradient.logit_space import pooled_scores, position_bias, score_rows
from mismatch_audit.gradient.parameter_space import exact_gradient
from mismatch_audit.gradient.projection import Projection

TINY_CHUNK = 3 * 50 * 24
"""Bytes for three rows."""


def rows(n=11, vocab=50, width=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, width, generator=g)
    weight = torch.randn(vocab, width, generator=g)
    return hidden, weight, torch.randint(0, vocab, (n,), generator=g)


@pytest.mark.parametrize("options", [{}, {"scale": 0.25}, {"softcap": 5.0, "scale": 2.0}])
def test_the_derivative_of_the_log_prob(options):
    """By autograd through the head: with respect to hidden states, and to the head's weight and
    bias through their projection. Fault that it catches: a forgotten softcap or scale."""
    hidden, weight, targets = rows()
    bias = torch.randn(50, generator=torch.Generator().manual_seed(5))
    leaf_h, leaf_w, leaf_b = (x.clone().requires_grad_(True) for x in (hidden, weight, bias))
    logits = leaf_h @ leaf_w.T + leaf_b
    if "softcap" in options:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    logits = logits * options.get("scale", 1.0)
    logprob = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    logprob.sum().backward()

    projection = Projection(64)
    sides = projection.side("head", "rows", 50), projection.side("head", "columns", 16)
    found = score_rows(
        hidden,
        Head(weight, bias=bias, **options),
        targets,
        sides=sides,
        bias=lambda score, total: projection.add_vector(total, "bias", score),
        width=64,
        max_bytes=TINY_CHUNK,
    )
    torch.testing.assert_close(found.hidden, leaf_h.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.logprob.float(), logprob.detach(), rtol=1e-5, atol=1e-5)
    left, right = (side.view(11, 8, 8) for side in found.sides)
    ours, truth = torch.zeros(64), torch.zeros(64)
    projection.add_matrix(ours[None], "head", torch.einsum("nrk,nrl->rkl", left, right)[None])
    projection.add_tensor(truth, "head", leaf_w.grad)
    torch.testing.assert_close(ours, truth, rtol=1e-3, atol=1e-3)
    expected = torch.zeros(1, 64)
    projection.add_vector(expected, "bias", leaf_b.grad[None])
    torch.testing.assert_close(found.bias.sum(0), expected[0], rtol=1e-3, atol=1e-4)
    p = logits.detach().softmax(-1).double()
    own = p.gather(1, targets[:, None])[:, 0]
    exact = score_norm_squared(own.numpy(), p.square().sum(1).numpy())
    assert found.norm_squared.numpy() == pytest.approx(exact, abs=1e-6)
    direct = (torch.nn.functional.one_hot(targets, 50) - p).square().sum(1)
    assert found.norm_squared.numpy() == pytest.approx(direct.numpy(), abs=1e-6)


@pytest.mark.parametrize("kind", [None, "position", "token"])
def test_the_exact_bias_of_a_position(kind):
    """Against the formula on whole rows, with a chunk of less than one row."""
    hidden, weight, _ = rows()
    other = weight + 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    g = torch.Generator().manual_seed(4)
    a = {
        None: None,
        "position": torch.randn(11, generator=g),
        "token": torch.randn(11, 50, generator=g),
    }[kind]
    found = position_bias(hidden, Head(weight), hidden, Head(other), a, max_bytes=100)
    p, q = ((hidden @ w.T).double().softmax(-1).numpy() for w in (weight, other))
    whole = np.ones((11, 50)) if a is None else np.broadcast_to(a.reshape(11, -1), (11, 50))
    exact = logit_space_bias(p, q, whole)
    assert found.l1.numpy() == pytest.approx(np.abs(exact).sum(1), rel=1e-4, abs=1e-6)
    assert found.l2.numpy() == pytest.approx(np.linalg.norm(exact, axis=1), rel=1e-4, abs=1e-6)
    assert found.mean.numpy() == pytest.approx(exact.mean(0), abs=1e-6)
    assert found.mean_score_l1.numpy() == pytest.approx(np.abs(q - p).sum(1), rel=1e-4)
    if kind is None:
        assert found.l1.numpy() == pytest.approx(found.mean_score_l1.numpy(), rel=1e-4)


def test_the_same_program_has_no_mean_score():
    """Control of the one above."""
    hidden, weight, _ = rows()
    found = position_bias(hidden, Head(weight), hidden, Head(weight))
    assert float(found.mean_score_l1.max()) == 0.0


def test_pooled_scores_are_the_gradient_of_a_bias_on_the_logits(tmp_path):
    """sum_t c_t (e_y - p_t) of each owner, by autograd of an added bias; two owners, two sets."""
    hidden, weight, targets = rows()
    c = torch.randn(2, 11, generator=torch.Generator().manual_seed(6))
    owner = torch.tensor([0] * 4 + [1] * 7)
    found = pooled_scores(hidden, Head(weight), targets, c, owner, 2, max_bytes=TINY_CHUNK)
    for k in range(2):
        for o in range(2):
            bias = torch.zeros(50, requires_grad=True)
            logprob = (hidden @ weight.T + bias).log_softmax(-1).gather(1, targets[:, None])[:, 0]
            ((owner == o) * c[k] * logprob).sum().backward()
            torch.testing.assert_close(found[k, o], bias.grad, rtol=1e-4, atol=1e-5)


def test_a_sampled_score_averages_to_the_difference(tmp_path):
    """E over the engine's tokens of s = e_y - p is q - p, in parameters too: the sampled-token
    vectors of every token, weighted by p, cancel; weighted by q, they do not."""
    reference = tiny.llama(tmp_path, vocab_size=16)
    everything = tiny.every_response((5, 7), 16, 1)
    p = np.exp([tiny.logprobs(reference, [s])[s.sequence_id][0] for s in everything])
    vectors = torch.stack(
        [tiny.flat(exact_gradient(reference, s, [1.0]).values()) for s in everything]
    )
    q = np.roll(p, 1)
    size = float(vectors.norm(dim=1).max())
    assert float((torch.from_numpy(p) @ vectors).norm()) < 1e-5 * size
    assert float((torch.from_numpy(q) @ vectors).norm()) > 1e-2 * size


def test_rows_that_do_not_fit():
    hidden, weight, targets = rows()
    head = Head(weight)
    with pytest.raises(NotComparableError, match="vocabulary"):
        position_bias(hidden, head, hidden, Head(weight[:40]))
    with pytest.raises(InputError, match="engine rows"):
        position_bias(hidden, head, hidden[:5], head)
    with pytest.raises(InputError, match="token ids"):
        score_rows(hidden, head, targets[:5])
