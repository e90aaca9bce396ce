"""Gradients of single responses from a batched backward pass: they are autograd's own, for every
kind of parameter, and with them the estimators have exactly the bias that enumeration gives."""

import gradient_models as tiny
import numpy as np
import pytest
import torch
from transformers import Gemma2Config, GPT2Config, LlamaConfig, MixtralConfig, Qwen3Config

from kernel_contracts.errors import InputError, UnsoundError
from mismatch_audit.gradient import SEQUENCE_WEIGHTS, TOKEN_WEIGHTS
from mismatch_audit.gradient.capture import Capture
from mismatch_audit.gradient.parameter_space import exact_gradient, response_gradients
from mismatch_audit.gradient.projection import Projection
from mismatch_audit.programs.base import Sequence_

WIDTH = 1024
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
FAMILIES = {
    "tied": LlamaConfig(**tiny.SMALL, tie_word_embeddings=True),
    "untied, biases": LlamaConfig(**tiny.SMALL, attention_bias=True, tie_word_embeddings=False),
    "norms of queries and keys": Qwen3Config(**tiny.SMALL, head_dim=8),
    "softcap, norm of 1 + w": Gemma2Config(**tiny.SMALL, head_dim=8),
    "transposed weights, layer norm": GPT2Config(**GPT2),
    "fused experts": MixtralConfig(**tiny.SMALL, num_local_experts=4, num_experts_per_tok=2),
}


def responses():
    """Different lengths, and the padding token inside a prompt and a response."""
    rng = np.random.default_rng(0)
    made = []
    for i, n in enumerate((3, 7, 5, 9)):
        ids = rng.integers(3, 64, n + 4)
        ids[[1, 5]] = 0
        made.append(Sequence_(f"s{i}", tuple(map(int, ids)), 4))
    coefficients = [
        rng.standard_normal((k, s.n_response)) for k, s in zip((2, 1, 3, 0), made, strict=True)
    ]
    return made, coefficients


@pytest.mark.parametrize("family", FAMILIES)
def test_the_projection_of_autograds_own_gradient(family, tmp_path):
    """Each vector of the batched route is the projection of the gradient that autograd gives for
    that response alone: embeddings (tied or not), linear layers, biases, norms, heads, experts."""
    reference = tiny.from_config(tmp_path, FAMILIES[family])
    sequences, coefficients = responses()
    found = response_gradients(reference, sequences, coefficients, width=WIDTH)
    projection = Projection(WIDTH)
    for s, c, vectors in zip(sequences, coefficients, found.vectors, strict=True):
        assert len(vectors) == len(c)
        for k in range(len(c)):
            truth = torch.zeros(WIDTH)
            for name, gradient in exact_gradient(reference, s, c[k]).items():
                projection.add_tensor(truth, name, gradient)
            assert float((torch.from_numpy(vectors[k]) - truth).norm() / truth.norm()) < 1e-5
    assert found.agreement < 1e-5
    assert all(p.requires_grad and p.grad is None for p in reference.model.parameters())


def test_autograds_own_gradient_by_finite_differences(tmp_path):
    """exact_gradient itself, in float64: the log-probs of a step either way along a direction."""
    reference = tiny.llama(tmp_path)
    reference.model.double()
    # No padding token: its row of the embedding has no gradient, though it does move the log-probs.
    s, c = Sequence_("s", (5, 9, 11, 7, 20, 33, 9), 3), np.array([1.0, -0.5, 2.0, 0.3])
    gradients = exact_gradient(reference, s, c)
    torch.manual_seed(0)
    steps = {n: torch.randn_like(g) for n, g in gradients.items()}
    along = sum(float((gradients[n] * steps[n]).sum()) for n in steps)
    values = []
    for size in (1e-4, -2e-4):  # norms compute in float32, so not smaller
        with torch.no_grad():
            for name, p in reference.model.named_parameters():
                p += size * steps[name]
        values.append(float(c @ tiny.logprobs(reference, [s])[s.sequence_id]))
    assert (values[0] - values[1]) / 2e-4 == pytest.approx(along, rel=2e-3)


def test_inner_products_survive_the_projection(tmp_path):
    """Unbiased over seeds, for norms and for products of two responses. Fault: the same signs for
    every parameter would still be unbiased, a missing scale would not."""
    reference = tiny.llama(tmp_path)
    sequences, _ = responses()
    coefficients = [np.ones((1, s.n_response)) for s in sequences]
    exact = torch.stack(
        [
            tiny.flat(exact_gradient(reference, s, c[0]).values())
            for s, c in zip(sequences, coefficients, strict=True)
        ]
    )
    truth = (exact @ exact.T).numpy()
    size = np.sqrt(np.outer(np.diag(truth), np.diag(truth)))
    errors = []
    for seed in range(24):
        found = response_gradients(
            reference, sequences, coefficients, width=WIDTH, seed=seed, check=False
        )
        x = np.concatenate(found.vectors).astype(np.float64)
        errors.append((x @ x.T - truth) / size)
    errors = np.array(errors)
    assert np.abs(errors.mean(0)).max() < 4 * errors.std(0).max() / np.sqrt(24)
    assert errors.std(0).max() < 0.15


def test_every_correction_has_the_bias_that_enumeration_gives(tmp_path):
    """All 20^2 responses of a prompt, weighted by the engine's probabilities: full weights give the
    gradient of the expected reward exactly, and the bias of the others is its distance."""
    reference = tiny.llama(tmp_path / "p", vocab_size=20)
    engine = tiny.perturbed(reference, tmp_path / "q", 0.2)
    everything = tiny.every_response((5, 7), 20, 2)
    p, q = tiny.logprobs(reference, everything), tiny.logprobs(engine, everything)
    prob_q = np.array([np.exp(q[s.sequence_id].sum()) for s in everything])
    delta = [p[s.sequence_id] - q[s.sequence_id] for s in everything]
    reward = np.random.default_rng(0).standard_normal(len(everything))

    ids = torch.tensor([s.token_ids for s in everything])
    rows = reference.model(ids).logits[:, 1:-1].log_softmax(-1)
    chosen = rows.gather(2, ids[:, 2:, None])[..., 0].sum(1)
    expected = (chosen.exp() * torch.from_numpy(reward).float()).sum()
    named = dict(reference.model.named_parameters())
    truth = torch.zeros(WIDTH)
    for name, g in zip(named, torch.autograd.grad(expected, list(named.values())), strict=True):
        Projection(WIDTH).add_tensor(truth, name, g)

    def mean_gradient(weights):
        coefficients = [
            prob * r * w[None] for prob, r, w in zip(prob_q, reward, weights, strict=True)
        ]
        found = response_gradients(
            reference, everything, coefficients, width=WIDTH, token_budget=1600
        )
        return torch.from_numpy(np.concatenate(found.vectors).sum(0))

    def distance(weights):
        return float((mean_gradient(weights) - truth).norm() / truth.norm())

    assert abs(prob_q.sum() - 1) < 1e-5
    assert distance([SEQUENCE_WEIGHTS.weights(d) for d in delta]) < 1e-4
    none = distance([np.ones_like(d) for d in delta])
    token = distance([TOKEN_WEIGHTS.weights(d) for d in delta])
    assert none > 0.02  # the programs differ, and it shows
    assert token > 0.005  # prefix and continuation stay the engine's


def test_a_wrong_route_is_caught(tmp_path, monkeypatch):
    """The check against autograd before each run. Fault: the norms' gradients are left out."""
    reference = tiny.llama(tmp_path)
    sequences, coefficients = responses()
    monkeypatch.setattr(Capture, "_on_norm", lambda *a: None)
    with pytest.raises(UnsoundError, match="differs from ordinary autograd"):
        response_gradients(reference, sequences, coefficients, width=WIDTH)


def test_frozen_parameters_are_left_out(tmp_path):
    """As under adapters: what does not train has no gradient, and the check agrees."""
    reference = tiny.llama(tmp_path)
    for name, p in reference.model.named_parameters():
        p.requires_grad_("q_proj" in name)
    sequences, coefficients = responses()
    found = response_gradients(reference, sequences, coefficients, width=WIDTH)
    assert found.parameters == 2 * 32 * 32
    assert found.agreement < 1e-5


def test_coefficients_that_do_not_fit(tmp_path):
    reference = tiny.llama(tmp_path)
    sequences, coefficients = responses()
    with pytest.raises(InputError, match="one for each of its 3"):
        response_gradients(reference, sequences[:1], [np.ones((1, 4))])
    with pytest.raises(InputError, match="sets of coefficients"):
        response_gradients(reference, sequences, coefficients[:2])
    with pytest.raises(InputError, match="multiple"):
        response_gradients(reference, sequences, coefficients, width=100)
