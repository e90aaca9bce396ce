"""A guarded sync: what stands, what goes back, and that nothing unseen stands."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_contracts.errors import InputError
from kernel_contracts.loading import parse_contract
from mismatch_audit.gate import Served, SyncLimits, SyncOutcome, guarded_sync
from mismatch_audit.gate.checks import (
    check_agreement,
    check_movement,
    check_receipt,
    check_restored,
    check_steady,
    check_version,
)
from mismatch_audit.gate.sync import RollbackError

VOCABULARY, WIDTH, LAYERS = 24, 12, 3
Weights = np.ndarray


def policy(weights: Weights, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probs of tokens 1.. under a small residual network: ``weights`` is [layers, w, w]."""
    embed = np.random.default_rng(0).normal(size=(VOCABULARY, WIDTH))
    found = []
    for ids in sequences:
        hidden = embed[list(ids[:-1])]
        for layer in weights:
            hidden = hidden + np.tanh(hidden @ layer)
        logits = hidden @ embed.T / WIDTH
        rows = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        found.append([float(rows[i, token]) for i, token in enumerate(ids[1:])])
    return found


def initial() -> Weights:
    return np.random.default_rng(1).normal(size=(LAYERS, WIDTH, WIDTH)) * 0.3


def updated(weights: Weights, size: float = 0.1) -> Weights:
    return weights + size * np.random.default_rng(2).normal(size=weights.shape)


CANARIES = [[int(t) for t in np.random.default_rng(i).integers(0, VOCABULARY, 12)] for i in (1, 2)]


SEEN = {"version", "agreement", "movement", "steady"}


class Trainer:
    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def export(self, folder: Path) -> Path:
        np.save(folder / "weights.npy", self.weights)
        return folder

    def logprobs(self, sequences: Any) -> list[list[float]]:
        return policy(self.weights, sequences)


class Engine:
    """Serves with a rounding noise of 1e-3 nats, the same for the same weights."""

    def __init__(self, checkpoint: Path, version: int) -> None:
        self.weights, self.version = np.load(checkpoint / "weights.npy"), version
        self.pushes: list[int] = []

    def weight_version(self) -> Any:
        return str(self.version)

    def push(self, checkpoint: Path, version: int) -> Any:
        self.pushes.append(version)
        self.weights, self.version = self.load(np.load(checkpoint / "weights.npy")), version

    def load(self, new: Weights) -> Weights:
        return new

    def logprobs(self, sequences: Any) -> list[list[float]]:
        noise = np.random.default_rng(int(abs(np.nan_to_num(self.weights).sum()) * 1e9))
        rows = policy(self.weights, sequences)
        return [[float(np.minimum(0.0, v + 1e-3 * noise.normal())) for v in row] for row in rows]


@pytest.fixture
def start(tmp_path: Path) -> tuple[Served, Path]:
    """(what is served, the folder of pushes)."""
    old = tmp_path / "old"
    old.mkdir()
    Trainer(initial()).export(old)
    return Served(old, 4, policy(initial(), CANARIES)), tmp_path / "pushes"


def sync(
    engine: Engine, start: tuple[Served, Path], trainer: Trainer | None = None, **more: Any
) -> SyncOutcome:
    served, folder = start
    arguments = {"version": 5, "previous": served, "sequences": CANARIES, "folder": folder} | more
    return guarded_sync(trainer or Trainer(updated(initial())), engine, **arguments)


def test_clean_control_stands_and_old_pushes_are_removed(start: tuple[Served, Path]):
    """Three syncs in a row: each is served, checked, moved as the trainer did; of our own
    checkpoints only the served one stays, and the caller's first one is not touched."""
    served, folder = start
    engine, trainer = Engine(served.checkpoint, served.version), Trainer(initial())
    for version in (5, 6, 7):
        trainer.weights = updated(trainer.weights)
        outcome = sync(engine, (served, folder), trainer, version=version)
        assert outcome.ok, outcome.reasons
        assert {c.check for c in outcome.checks if c.ok} == SEEN
        served = outcome.served
        assert served.version == version
        np.testing.assert_array_equal(engine.weights, trainer.weights)
    assert [p.name for p in folder.iterdir()] == ["version-7"]
    assert start[0].checkpoint.exists()


class Silent(Engine):
    def load(self, new: Weights) -> Weights:
        return self.weights


class StaleLayer(Engine):
    def load(self, new: Weights) -> Weights:
        if self.pushes[-1] == 4:
            return new
        return np.concatenate([new[:1], self.weights[1:2], new[2:]])


class Broken(Engine):
    def load(self, new: Weights) -> Weights:
        return new if self.pushes[-1] == 4 else new * np.nan


class NoVersion(Engine):
    def push(self, checkpoint: Path, version: int) -> Any:
        super().push(checkpoint, version)
        self.version = 4


class Raises(Engine):
    def load(self, new: Weights) -> Weights:
        if self.pushes[-1] != 4:
            raise ConnectionError("reset by peer")
        return new


class Unflushed(Engine):
    def push(self, checkpoint: Path, version: int) -> Any:
        super().push(checkpoint, version)
        return SimpleNamespace(flushed=version == 4, tensors=3, not_loaded=())


class Short(Engine):
    def logprobs(self, sequences: Any) -> list[list[float]]:
        rows = super().logprobs(sequences)
        return rows if self.version == 4 else rows[:1]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Silent, "movement: the engine made -?0.0"),
        (StaleLayer, "agreement: KL"),
        (Broken, "not finite"),
        (NoVersion, "version: pushed 5, the engine reports 4"),
        (Raises, "ConnectionError: reset by peer"),
        (Unflushed, "receipt: the prefix cache was not emptied"),
        (Short, "different numbers of tokens"),
    ],
)
def test_each_fault_goes_back(start: tuple[Served, Path], kind: Callable[..., Engine], said: str):
    """Weights that did not arrive, one stale layer, NaN, a version that stays, a broken
    connection, a cache that was kept, rows that are missing: each is told by its check, and the
    old weights answer as before."""
    served, folder = start
    engine = kind(served.checkpoint, served.version)
    before = engine.logprobs(CANARIES)
    outcome = sync(engine, start, limits=SyncLimits(kl=1e-4))
    assert not outcome.ok
    assert outcome.rolled_back
    assert outcome.served is served
    assert any(re.search(said, reason) for reason in outcome.reasons), outcome.reasons
    assert engine.logprobs(CANARIES) == before
    assert engine.pushes == [5, 4]
    assert not (folder / "version-5").exists()


def test_engine_without_a_version_is_unobserved(start: tuple[Served, Path]):
    """An engine that tells no version gives no evidence that it took the push: it does not stand,
    and the way back cannot be shown either."""
    engine = Engine(start[0].checkpoint, 4)
    engine.weight_version = lambda: None  # type: ignore[method-assign]
    with pytest.raises(RollbackError, match="no weight version"):
        sync(engine, start)


def test_lost_engine_raises(start: tuple[Served, Path]):
    """Neither the push nor the way back works: exit code 4 and where to restart from."""

    class Dead(Engine):
        def push(self, checkpoint: Path, version: int) -> Any:
            raise ConnectionError("gone")

    with pytest.raises(RollbackError, match="so did the way back") as caught:
        sync(Dead(start[0].checkpoint, 4), start)
    assert caught.value.exit_code == 4
    assert str(start[0].checkpoint) in str(caught.value)

    class Forgetful(Engine):
        def load(self, new: Weights) -> Weights:
            return new * 0.5  # neither the new weights nor, on the way back, the old ones

    with pytest.raises(RollbackError, match="since before the push"):
        sync(Forgetful(start[0].checkpoint, 4), start)


def test_stopped_by_hand_goes_back(start: tuple[Served, Path]):
    """Ctrl-C during the checks: unchecked weights do not stay."""
    engine = Engine(start[0].checkpoint, 4)
    real, asked = engine.weight_version, []

    def interrupted() -> Any:
        asked.append(1)
        if len(asked) == 1:
            raise KeyboardInterrupt
        return real()

    engine.weight_version = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        sync(engine, start)
    np.testing.assert_array_equal(engine.weights, initial())
    assert engine.version == 4


def test_nothing_to_check_by_is_refused_before_the_push(start: tuple[Served, Path]):
    """No canaries, canaries of one token, the version that is served, an engine that answers
    nothing, an export that fails: nothing is pushed."""
    served, folder = start
    engine = Engine(served.checkpoint, 4)
    for changes in ({"sequences": []}, {"sequences": [[3]]}, {"version": 4}):
        with pytest.raises(InputError):
            sync(engine, start, **changes)
    trainer = Trainer(initial())
    trainer.export = lambda folder: (_ for _ in ()).throw(OSError("disk full"))  # type: ignore[method-assign]
    with pytest.raises(OSError, match="disk full"):
        sync(engine, start, trainer)
    assert list(folder.iterdir()) == []
    engine.logprobs = lambda sequences: [[] for _ in sequences]  # type: ignore[method-assign]
    with pytest.raises(InputError, match="cannot be checked"):
        sync(engine, start)
    assert engine.pushes == []


def test_limits_come_from_the_contract():
    """The strictest KL(q || p) promise over all tokens; the default where there is none."""
    text = """\
schema: kernel-contracts/v1
name: c
slices: {d: {by: domain}}
statistical:
  - {id: A, metric: kl_engine_reference, limit: 3.0e-3}
  - {id: B, metric: k3, limit: 2.0e-3}
  - {id: C, metric: kl_engine_reference, limit: 1.0e-4, slices: [d]}
  - {id: D, metric: flip_rate, limit: 1.0e-5}
"""
    assert SyncLimits.of(parse_contract(text)).kl == 2e-3
    only = text[: text.index("  - {id: A")] + text[text.index("  - {id: D") :]
    assert SyncLimits.of(parse_contract(only)) == SyncLimits()


ROWS = st.lists(
    st.lists(st.floats(-8, -1e-3), min_size=2, max_size=6), min_size=1, max_size=4
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(rows=ROWS, shift=st.floats(-2, 2))
def test_agreement_is_zero_for_equal_and_never_negative(rows: list[list[float]], shift: float):
    """k3 is 0 for equal rows, and e^d - 1 - d > 0 for a constant gap d."""
    same = check_agreement(rows, rows, SyncLimits())
    assert same.ok
    assert same.value == 0.0
    moved = [[v - abs(shift) for v in row] for row in rows]
    found = check_agreement(moved, rows, SyncLimits(worst=100))
    gap = -abs(shift)
    assert found.value == pytest.approx(np.expm1(gap) - gap, abs=1e-9)
    assert found.ok == (found.value <= 1e-2)


@settings(max_examples=200, deadline=None)
@given(share=st.floats(-1, 2), seed=st.integers(0, 99))
def test_movement_is_the_share_that_arrived(share: float, seed: int):
    """An engine that made ``share`` of the change, up to noise, is measured so."""
    random = np.random.default_rng(seed)
    old = [list(-3 - random.random(40))]
    change = 0.2 * random.normal(size=40)
    new = [list(np.array(old[0]) + change)]
    engine = [list(np.array(old[0]) + share * change + 1e-3 * random.normal(size=40))]
    found = check_movement((old, new), (old, engine), SyncLimits())
    assert found.value == pytest.approx(share, abs=0.02)
    if abs(abs(share - 1) - 0.5) > 0.02:
        assert found.ok == (abs(share - 1) <= 0.5)


def test_an_update_too_small_to_see_is_undecided_and_not_needed():
    """Changes of 1e-5 nats under noise of 1e-2 say nothing, and say that they do."""
    random = np.random.default_rng(0)
    old = [list(-3 - random.random(50))]
    new = [list(np.array(old[0]) + 1e-5 * random.normal(size=50))]
    engine = [list(np.array(old[0]) + 1e-2 * random.normal(size=50))]
    found = check_movement((old, new), (old, engine), SyncLimits())
    assert found.ok is None
    assert found.holds
    unmoved = check_movement((old, old), (old, engine), SyncLimits())
    assert unmoved.ok is None
    assert unmoved.holds
    assert check_movement(None, (old, old), SyncLimits()).ok is None


def test_a_gap_that_grew_is_told_by_its_median():
    """Four times the gap of before, and above the floor, is a fault even where the contract's KL
    would bear it; one bad token of many is not."""
    random = np.random.default_rng(0)
    p = [list(-3 - random.random(60))]

    def engine(size: float) -> list[list[float]]:
        return [list(np.array(p[0]) + size * random.normal(size=60))]

    limits = SyncLimits()
    assert check_steady((p, engine(5e-3)), (p, engine(5e-3)), limits).ok
    assert check_steady((p, engine(1e-6)), (p, engine(5e-4)), limits).ok
    grown = check_steady((p, engine(5e-3)), (p, engine(5e-2)), limits)
    assert grown.ok is False
    assert check_agreement(p, engine(5e-2), limits).ok
    outlier = engine(5e-3)
    outlier[0][7] -= 0.5
    assert check_steady((p, engine(5e-3)), (p, outlier), limits).ok
    assert check_steady(None, (p, p), limits).holds


def test_missing_evidence_never_holds():
    """No tokens, NaN, infinity, other lengths, a log-prob above 0, no version: never a pass."""
    limits = SyncLimits()
    good = [[-1.0, -2.0]]
    for bad in ([], [[]], [[-1.0]], [[-1.0, float("nan")]], [[-1.0, -np.inf]], [[-1.0, 0.5]]):
        assert not check_agreement(good, bad, limits).holds
        assert not check_agreement(bad, bad, limits).holds or bad == [[-1.0]]
        assert not check_restored(good, bad, limits).holds
    assert not check_version(None, 1).holds
    assert check_version("1", 1).holds
    assert not check_version("11", 1).holds
    assert not check_receipt(SimpleNamespace(tensors=0)).holds
    assert not check_receipt(SimpleNamespace(tensors=3, not_loaded=("a",))).holds
    assert check_receipt(None).ok is None
