"""The whole measurement on tiny models with rollouts really drawn from the engine: a known bias is
within its interval, none is found where there is none, corrections behave as they must."""

import json
import math

import gradient_models as tiny
import numpy as np
import pytest
import torch

from kernel_contracts.errors import InputError, UnsoundError
from mismatch_audit.gradient import (
    NONE,
    SEQUENCE_WEIGHTS,
    TOKEN_WEIGHTS,
    measure_gradient,
    rollout_advantages,
)
from mismatch_audit.gradient.corrections import clip, mask, truncate
from mismatch_audit.gradient.parameter_space import exact_gradient

LENGTH, VOCAB = 2, 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    reference = tiny.llama(folder / "p", vocab_size=VOCAB, num_hidden_layers=1)
    return reference, tiny.perturbed(reference, folder / "q", 0.02)


def reward(sequence):
    """Of a response's tokens alone, so that it can be enumerated."""
    return 3.0 * (sequence.response[-1] % 2) + 1.0 * (sequence.response[0] > 10) - 1.5


def rollouts(engine, n, seed=0):
    sequences, q = tiny.sample(engine, [(5, 7)] * n, LENGTH, seed)
    return sequences, q, {s.sequence_id: reward(s) for s in sequences}


@pytest.fixture(scope="module")
def measured(pair):
    reference, engine = pair
    sequences, q, advantage = rollouts(engine, 400)
    p = tiny.logprobs(reference, sequences)
    return measure_gradient(reference, sequences, q, p, advantage, projection=2048)


def test_the_bias_of_real_rollouts_is_the_enumerated_one(pair, measured):
    """The truth by summing over all responses: |g_0 - g| / |g| in the full parameter space. The
    interval of 400 rollouts holds it, is not the whole line, and does not reach down to 0."""
    reference, engine = pair
    everything = tiny.every_response((5, 7), VOCAB, LENGTH)
    p, q = tiny.logprobs(reference, everything), tiny.logprobs(engine, everything)
    plain = truth = 0.0
    for s in everything:
        score = tiny.flat(exact_gradient(reference, s, np.ones(LENGTH)).values()) * reward(s)
        plain = plain + math.exp(q[s.sequence_id].sum()) * score
        truth = truth + math.exp(p[s.sequence_id].sum()) * score
    exact = float((plain - truth).norm() / truth.norm())
    found = measured.estimates["all"]
    assert exact > 0.1
    assert 0 < found.lower <= exact <= found.upper < 1
    assert found.value == pytest.approx(exact, rel=0.35)
    assert found.n_prompts == 400
    assert found.n_tokens == 800


def test_the_same_program_has_no_bias(pair):
    """Control: rollouts of the reference itself. Weights are 1 up to rounding."""
    reference, _ = pair
    sequences, q, advantage = rollouts(reference, 60)
    p = tiny.logprobs(reference, sequences)
    report = measure_gradient(reference, sequences, q, p, advantage, projection=1024)
    for one in report.biases:
        assert one.bias.lower == 0.0
        assert one.bias.value < 1e-6
    assert report.estimates["all"].upper < 1e-5


def test_rows_are_facts_of_every_slice_and_estimator(measured):
    rows = measured.rows()
    json.dumps(rows, allow_nan=False)
    assert {r["slice"] for r in rows} == {"all", "advantage > 0", "advantage < 0"}
    mine = {(r["estimator"], r["target"]): r for r in rows if r["slice"] == "all"}
    none = mine["none", "sequence weights"]
    assert none["variance_ratio"] == 1.0
    assert 0 < none["bias_to_noise"] < none["bias_to_noise_upper"] < none["upper"]
    assert none["harmless_batch"] == pytest.approx(none["bias_to_noise_upper"] ** -2)
    assert 0 < none["ess_share"] <= 1
    assert none["noise_floor"] > 0
    assert -1.1 < none["cosine"] < 1.1
    assert ("none", "token weights") in mine
    assert mine["token weights", "sequence weights"]["relative_bias"] < none["relative_bias"]
    facts = measured.facts
    assert facts["agreement_with_autograd"] < 1e-5
    assert facts["logprob_difference"] < 1e-4
    assert 0 < facts["rms_score_norm"] <= math.sqrt(2)


def test_corrections_that_do_nothing_and_one_that_takes_all(pair):
    """C above every weight is the plain weight, and shares its backward pass; a clip to [1, 1] is
    no weight at all; full weights leave no bias against themselves."""
    reference, engine = pair
    sequences, q, advantage = rollouts(engine, 40)
    p = tiny.logprobs(reference, sequences)
    corrections = [
        truncate("token", 1e9), truncate("sequence", 1e9), mask("token", 0, 1e9),
        clip("sequence", 0, 1e9), clip("token", 1, 1), NONE, TOKEN_WEIGHTS,
    ]  # fmt: skip
    report = measure_gradient(
        reference, sequences, q, p, advantage, corrections=corrections, projection=1024
    )
    mine = {
        b.estimator: b
        for b in report.biases
        if b.slice == "all" and b.target == SEQUENCE_WEIGHTS.name
    }
    assert mine["token TIS 1e+09"].bias == mine["token weights"].bias
    assert mine["token mask [0, 1e+09]"].bias == mine["token weights"].bias
    assert mine["token clip [1, 1]"].bias == mine["none"].bias
    for name in ("sequence TIS 1e+09", "sequence clip [0, 1e+09]"):
        assert (mine[name].bias.value, mine[name].bias.upper) == (0.0, 0.0)
        assert mine[name].cosine == pytest.approx(1.0)
    assert report.facts["batches"] <= 2  # two vectors a response, all of one kind


def test_weights_of_one_response():
    """Formulas, on ratios that are known."""
    delta = np.log([0.4, 1.0, 3.0])
    assert NONE.weights(delta) == pytest.approx([1, 1, 1])
    assert TOKEN_WEIGHTS.weights(delta) == pytest.approx([0.4, 1, 3])
    assert SEQUENCE_WEIGHTS.weights(delta) == pytest.approx([1.2] * 3)
    assert truncate("token", 2).weights(delta) == pytest.approx([0.4, 1, 2])
    assert truncate("sequence", 1.1).weights(delta) == pytest.approx([1.1] * 3)
    assert mask("token", 0.5, 2).weights(delta) == pytest.approx([0, 1, 0])
    assert mask("sequence", 1.3, 2).weights(delta) == pytest.approx([0, 0, 0])
    assert clip("token", 0.8, 1.2).weights(delta) == pytest.approx([0.8, 1, 1.2])
    with pytest.raises(InputError, match="positive"):
        truncate("token", 0)
    with pytest.raises(InputError, match="least <= most"):
        clip("token", 2, 1)
    with pytest.raises(InputError, match="same policy"):
        SEQUENCE_WEIGHTS.weights([800.0])


def test_slices_of_prompts_and_of_tokens(pair):
    """Disjoint masks of tokens add up to the whole; a set of prompts is their batch alone."""
    reference, engine = pair
    sequences, q, advantage = rollouts(engine, 24)
    p = tiny.logprobs(reference, sequences)
    ids = [s.sequence_id for s in sequences]
    first = {i: np.array([True, False]) for i in ids}
    slices = {
        "half": set(ids[:12]),
        "first": first,
        "every": {i: np.ones(2, bool) for i in ids},
        "few": set(ids[:3]),
        "mine": dict.fromkeys(ids[:12], True),
    }
    options = {"projection": 1024}
    report = measure_gradient(reference, sequences, q, p, advantage, slices, **options)
    alone = measure_gradient(reference, sequences[:12], q, p, advantage, **options)
    by = {(b.slice, b.estimator, b.target): b for b in report.biases}
    key = ("none", SEQUENCE_WEIGHTS.name)
    assert by["half", *key].bias.squared_bias == pytest.approx(
        next(b for b in alone.biases if b.slice == "all").bias.squared_bias, rel=1e-3
    )
    assert by["mine", *key].bias == by["half", *key].bias
    assert by["every", *key].bias == by["all", *key].bias
    assert by["first", *key].n_tokens == 24
    assert by["first", *key].bias.squared_bias != by["all", *key].bias.squared_bias
    assert report.left_out["few"] == "3 prompts, needs 8"
    assert "few" not in report.estimates
    with pytest.raises(InputError, match="masks"):
        measure_gradient(
            reference, sequences, q, p, advantage, {"bad": dict.fromkeys(ids, [True] * 5)}
        )


def test_several_responses_of_a_prompt_count_as_one(pair):
    """Every response twice: twice the rows, no more evidence."""
    reference, engine = pair
    sequences, q, advantage = rollouts(engine, 24)
    p = tiny.logprobs(reference, sequences)
    prompt_of = {s.sequence_id: f"prompt {i // 2}" for i, s in enumerate(sequences)}
    report = measure_gradient(
        reference, sequences, q, p, advantage, prompt_of=prompt_of, projection=1024
    )
    assert report.estimates["all"].n_prompts == 12
    assert report.estimates["all"].n_tokens == 48


def test_few_effective_responses_claim_nothing(pair):
    """One response carries the target: no interval. Fault: log-probs that drift far apart."""
    reference, engine = pair
    sequences, q, advantage = rollouts(engine, 16)
    p = tiny.logprobs(reference, sequences)
    q[sequences[3].sequence_id] = q[sequences[3].sequence_id] - 8.0
    report = measure_gradient(reference, sequences, q, p, advantage, projection=1024)
    assert (report.estimates["all"].lower, report.estimates["all"].upper) == (0.0, math.inf)
    assert "effective responses" in report.estimates["all"].method
    assert report.rows()[0]["upper"] is None


def test_missing_evidence_is_never_a_measurement(pair):
    reference, engine = pair
    sequences, q, advantage = rollouts(engine, 12)
    p = tiny.logprobs(reference, sequences)
    name = sequences[0].sequence_id

    def measure(q=q, p=p, advantage=advantage):
        return measure_gradient(reference, sequences, q, p, advantage, projection=1024)

    with pytest.raises(InputError, match="no engine log-probs"):
        measure(q={k: v for k, v in q.items() if k != name})
    with pytest.raises(InputError, match="finite"):
        measure(p={**p, name: np.array([np.nan, -1.0])})
    with pytest.raises(InputError, match="finite"):
        measure(q={**q, name: q[name][:1]})
    with pytest.raises(InputError, match="5 prompts"):
        measure(advantage={s.sequence_id: 1.0 for s in sequences[:5]})
    with pytest.raises(UnsoundError, match="differ from the reference's own"):
        measure(p={**p, name: p[name] - 0.5})
    left = measure(advantage={**advantage, name: math.nan})
    assert left.left_out["sequences"].startswith("1 without")
    assert left.estimates["all"].n_prompts == 11
    assert not measure(advantage=dict.fromkeys(advantage, 0.0)).estimates


def test_the_forward_holds_no_more_than_its_batch(pair):
    """The reference's parameters keep neither gradients nor hooks afterwards."""
    reference, _ = pair
    assert all(p.grad is None and p.requires_grad for p in reference.model.parameters())
    assert not any(m._forward_hooks for m in reference.model.modules())
    assert torch.is_grad_enabled()


def test_advantages_of_checked_and_unchecked_prompts():
    """Each kind is centred by itself; the neutral reward is 1 at half the horizon."""
    found = rollout_advantages(
        list("abcd"), ["5", "6", "", ""], [1, 1, 8, 0],
        [{"check": "number:5"}, {"check": "number:5"}, {}, {}], 16,
    )  # fmt: skip
    assert found.reward == {"a": 1.0, "b": 0.0, "c": 1.0, "d": 0.0}
    assert found.advantage == {"a": 0.5, "b": -0.5, "c": 0.5, "d": -0.5}
    assert (found.checked, found.neutral, found.positive, found.negative) == (2, 2, 2, 2)
    grouped = rollout_advantages(
        list("ab"), ["5", "6"], [1, 1], [{"check": "number:5"}] * 2, 16, groups=["x", "x"]
    )
    assert grouped.advantage["a"] == pytest.approx(math.sqrt(0.5), rel=1e-3)
    with pytest.raises(InputError, match="pair up"):
        rollout_advantages(["a"], [], [1], [{}], 16)
    with pytest.raises(InputError, match="horizon"):
        rollout_advantages(["a"], [""], [1], [{}], 0)
