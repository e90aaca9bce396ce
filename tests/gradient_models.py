"""Tiny random models as references and engines, for exact checks of the policy gradient."""

from itertools import product

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from mismatch_audit.programs.base import Sequence_
from mismatch_audit.programs.reference import TransformersReference
from mismatch_audit.settings import ReferenceSettings

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def llama(folder, *, seed=0, spread=0.3, **changes):
    """A reference over a random Llama. spread: of its weights, so that p is not near uniform."""
    config = LlamaConfig(**{**SMALL, "initializer_range": spread, **changes})
    return from_config(folder, config, seed)


def from_config(folder, config, seed=0):
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return TransformersReference(str(folder), ReferenceSettings(device="cpu", token_budget=256))


def perturbed(reference, folder, size, seed=1):
    """Another reference whose weights differ by ``size`` of their own spread: an engine."""
    reference.model.save_pretrained(folder)
    other = TransformersReference(str(folder), reference.settings)
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in other.model.parameters():
            p += size * p.std() * torch.randn_like(p) if p.ndim > 1 else 0.0
    return other


def logprobs(reference, sequences):
    """sequence id -> [T] log-probs of the response tokens, float64, by an ordinary forward."""
    found = {}
    for s in sequences:
        with torch.no_grad():
            logits = reference.model(torch.tensor([s.token_ids])).logits[0].double()
        rows = logits[s.prompt_length - 1 : -1].log_softmax(-1)
        found[s.sequence_id] = rows.gather(1, torch.tensor(s.response)[:, None])[:, 0].numpy()
    return found


def sample(engine, prompts, length, seed=0):
    """One response a prompt drawn from the engine, and its log-probs there."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor(prompts)
    width = ids.shape[1]
    for _ in range(length):
        with torch.no_grad():
            row = engine.model(ids).logits[:, -1].double().softmax(-1)
        ids = torch.cat([ids, torch.multinomial(row, 1, generator=generator)], 1)
    sequences = [Sequence_(f"p{i:04d}", tuple(row), width) for i, row in enumerate(ids.tolist())]
    return sequences, logprobs(engine, sequences)


def prompts(n, length=3, vocab=64, seed=0):
    return np.random.default_rng(seed).integers(3, vocab, (n, length)).tolist()


def every_response(prompt, vocab, length):
    """All vocab ** length responses of a prompt."""
    return [
        Sequence_("-".join(map(str, y)), (*prompt, *y), len(prompt))
        for y in product(range(vocab), repeat=length)
    ]


def flat(gradients):
    return torch.cat([g.reshape(-1).double() for g in gradients])
