"""The sequential test: the same evidence as the fixed-sample test, valid under peeking, and a state
that neither loses nor double-counts a prompt across restarts."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_contracts.confidence import EProcess, mean_test
from kernel_contracts.errors import InputError


def feed(process, values, weights=None, start=0):
    for i, value in enumerate(values):
        weight = None if weights is None else float(weights[i])
        process.update(float(value), prompt_id=f"p{start + i}", weight=weight)
    return process


@pytest.mark.parametrize("side", ["above", "below"])
@pytest.mark.parametrize("weighted", [False, True])
def test_after_the_horizon_it_equals_the_fixed_sample_test(side, weighted):
    """Prompt by prompt or all at once: same stakes, same wealth, same p-value."""
    rng = np.random.default_rng(4)
    x = rng.exponential(0.1, 120)
    w = rng.integers(0, 60, 120) if weighted else None
    cap = 60.0 if weighted else None
    whole = mean_test(x, limit=0.12, ceiling=0.8, side=side, alpha=0.05, weights=w, weight_cap=cap)
    process = EProcess(limit=0.12, ceiling=0.8, side=side, horizon=120, weight_cap=cap)
    feed(process, x, w)
    assert process.log_e == pytest.approx(whole.log_e, rel=1e-9, abs=1e-12)
    assert process.log_e_max == pytest.approx(max(whole.log_e_max, 0.0), rel=1e-9, abs=1e-12)
    assert process.p_value == pytest.approx(whole.p_value, rel=1e-9)


def peeking_rates(side, audits=400, n=250):
    """Share of audits at mean = limit in which a look after every prompt ever decides wrongly:
    by the e-process, and by a normal interval that is recomputed at each look."""
    rng = np.random.default_rng(11)
    x = np.minimum(rng.lognormal(-0.72, 1.2, (audits, n)), 8.0)
    limit = np.minimum(np.random.default_rng(12).lognormal(-0.72, 1.2, 4_000_000), 8.0).mean()
    ours = 0
    for row in x:
        process = EProcess(limit=limit, ceiling=8.0, side=side, horizon=n)
        for i, value in enumerate(row):
            process.update(value, prompt_id=str(i))
            if process.rejects():
                ours += 1
                break
    t = np.arange(1, n + 1)
    mean = np.cumsum(x, 1) / t
    variance = np.maximum(np.cumsum(x**2, 1) / t - mean**2, 0) * t / np.maximum(t - 1, 1)
    sign = 1 if side == "below" else -1
    clears = sign * (limit - mean) > 1.645 * np.sqrt(variance / t)
    return ours / audits, clears[:, 4:].any(1).mean()


@pytest.mark.parametrize("side", ["above", "below"])
def test_peeking_after_every_prompt_keeps_the_level(side):
    """Control: at most the nominal 5 % (plus simulation noise) at mean = limit.  Fault: the normal
    interval, looked at as often, breaks its level: 3 times over for false alarms, and 10 times over
    for false passes, because skewed values look small at first."""
    ours, normal = peeking_rates(side)
    assert ours <= 0.05 + 0.02
    assert normal > (0.50 if side == "below" else 0.15)


def test_it_finds_what_it_should():
    """Power: twice the limit is flagged, half the limit is passed, within 300 prompts."""
    rng = np.random.default_rng(8)
    x = np.minimum(rng.lognormal(-0.5, 1.0, 300), 8.0)
    assert feed(EProcess(limit=0.5, ceiling=8.0, side="above"), x).rejects()
    assert feed(EProcess(limit=2.0, ceiling=8.0, side="below"), x).rejects()
    assert not feed(EProcess(limit=2.0, ceiling=8.0, side="above"), x).rejects()
    assert not feed(EProcess(limit=0.5, ceiling=8.0, side="below"), x).rejects()


def test_evidence_stays_after_the_alarm():
    """The p-value never grows back, while the e-value follows the current wealth."""
    process = feed(EProcess(limit=0.2, ceiling=1.0, side="above", horizon=30), [1.0] * 30)
    assert process.rejects(0.01)
    before = process.p_value
    feed(process, [0.0] * 200, start=30)
    assert process.p_value == before
    assert process.log_e < process.log_e_max
    assert process.rejects(0.01)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(0, 2), min_size=1, max_size=30),
    st.integers(0, 30),
    st.sampled_from(["above", "below"]),
)
def test_a_restart_changes_nothing(values, cut, side):
    """Through JSON at any point: the same wealth as without the restart, and a replay of everything
    already counted is ignored."""
    straight = feed(EProcess(limit=0.4, ceiling=1.5, side=side), values)
    first = feed(EProcess(limit=0.4, ceiling=1.5, side=side), values[:cut])
    second = EProcess.from_dict(json.loads(json.dumps(first.to_dict())))
    feed(second, values)  # replays the first part: ids repeat
    assert second.to_dict() == straight.to_dict()
    assert second.n == len(values)


def test_a_prompt_counts_once():
    """Fault: counting one strange prompt again and again would raise an alarm from one prompt."""
    process = EProcess(limit=0.1, ceiling=1.0, side="above")
    assert process.update(1.0, prompt_id="a") is True
    once = process.log_e
    assert not any(process.update(1.0, prompt_id="a") for _ in range(100))
    assert process.log_e == once
    assert process.n == 1
    assert not process.rejects()
    for i in range(100):
        process.update(1.0, prompt_id=f"epoch 1/{i}")
    assert process.rejects()


def test_a_limit_of_zero_survives_json():
    process = EProcess(limit=0.0, ceiling=1.0, side="above")
    process.update(0.0, prompt_id="a")
    assert process.p_value == 1.0
    process.update(0.3, prompt_id="b")
    again = EProcess.from_dict(json.loads(json.dumps(process.to_dict(), allow_nan=False)))
    assert again.p_value == 0.0
    assert again.rejects()


def test_clipped_values_are_counted_and_the_estimate_is_theirs():
    process = feed(EProcess(limit=0.5, ceiling=1.0, side="below"), [0.2, 3.0, -1.0])
    assert process.clipped == 2
    assert process.estimate == pytest.approx(1.2 / 3)
    assert np.isnan(EProcess(limit=0.5, ceiling=1.0, side="below").estimate)


def test_refused_values_leave_no_trace():
    """A NaN, or a weight over the cap, is an error and changes no evidence; the prompt may follow
    with a good value."""
    process = EProcess(limit=0.5, ceiling=1.0, side="above", weight_cap=10)
    before = process.to_dict()
    for value, weight in ((np.nan, 1.0), (0.3, 11.0), (0.3, -1.0), (0.3, None)):
        with pytest.raises(InputError):
            process.update(value, prompt_id="a", weight=weight)
    assert process.to_dict() == before
    assert process.update(0.3, prompt_id="a", weight=10.0)
    with pytest.raises(InputError):
        EProcess(limit=0.5, ceiling=1.0, side="above").update(0.3, prompt_id="a", weight=1.0)


@pytest.mark.parametrize(
    "damage",
    [
        {"format": "e-process/v0"},
        {"wealth": [0.0, 1.0]},
        {"wealth": None},
        {"sums": [0.0]},
        {"sums": [float("nan"), 0.0, 0.0]},
        {"side": "sideways"},
        {"limit": 2.0},
        {"seen": None},
    ],
)
def test_a_damaged_state_is_refused(damage):
    state = EProcess(limit=0.5, ceiling=1.0, side="below").to_dict() | damage
    with pytest.raises(InputError):
        EProcess.from_dict(state)


@pytest.mark.parametrize(
    "change", [{"limit": 1.0}, {"side": "both"}, {"alpha": 0}, {"horizon": 0}, {"weight_cap": -1}]
)
def test_unusable_settings_are_named(change):
    with pytest.raises(InputError):
        EProcess(**({"limit": 0.5, "ceiling": 1.0, "side": "above"} | change))


def test_without_memory_the_wealth_is_the_same_and_the_state_stays_small() -> None:
    """A process whose caller lets no prompt in twice need not keep their ids."""
    rng = np.random.default_rng(5)
    kept = EProcess(limit=0.1, ceiling=1.0, side="above")
    light = EProcess(limit=0.1, ceiling=1.0, side="above", remember=False)
    for i, x in enumerate(rng.uniform(0, 0.4, 200)):
        kept.update(x, prompt_id=f"p{i}")
        light.update(x, prompt_id=f"p{i}")
        if i == 100:
            light = EProcess.from_dict(json.loads(json.dumps(light.to_dict())))
    assert light.log_e == kept.log_e
    assert light.n == kept.n == 200
    assert len(json.dumps(light.to_dict())) < 400 < len(json.dumps(kept.to_dict()))
