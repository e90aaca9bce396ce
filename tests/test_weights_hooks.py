"""The trainer hook: what of a step the served copy shows, whether it arrived, and how old it is.

The argument: a served copy that is the cast of an earlier master is told from one that is current
and from one that is neither, by its own bits; and nothing read is never a pass.
"""

from __future__ import annotations

import pytest
import torch
from weights_zoo import LLAMA, Tensors, cast, fused, llama_weights

from kernel_contracts.errors import InputError
from mismatch_audit.weights.hooks import SyncAudit


def after(weights: Tensors, seed: int, size: float = 1e-3) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {n: v + size * torch.randn(v.shape, generator=generator) for n, v in weights.items()}


class Trainer:
    """Three masters, and an engine that holds whichever was pushed last."""

    def __init__(self, size: float = 1e-3) -> None:
        self.masters = [llama_weights()]
        for seed in (1, 2):
            self.masters.append(after(self.masters[-1], seed, size))
        self.served = fused(cast(self.masters[0]))
        self.audit = SyncAudit(lambda: self.served, config=LLAMA)
        self.audit.record(self.masters[0].items(), 0)


def test_a_sync_that_arrived_is_equal_current_and_followed() -> None:
    trainer = Trainer()
    assert trainer.audit.check(trainer.masters[0].items(), 0).ok is True
    trainer.audit.record(trainer.masters[1].items(), 1)
    trainer.served = fused(cast(trainer.masters[1]))
    metrics = trainer.audit.check(trainer.masters[1].items(), 1, version=7)
    assert metrics.ok is True
    assert metrics.stale_after_step == 0
    assert metrics.version == 7
    assert metrics.findings == ()
    assert metrics.gain == pytest.approx(1, abs=0.01)
    assert metrics.gain == pytest.approx(metrics.gain_of_cast)
    assert 0.8 < metrics.visible_fraction <= metrics.moved_fraction <= 1


def test_a_sync_that_was_withheld_is_two_steps_old_and_named() -> None:
    trainer = Trainer()
    trainer.audit.check(trainer.masters[0].items(), 0)
    trainer.audit.record(trainer.masters[1].items(), 1)
    metrics = trainer.audit.check(trainer.masters[2].items(), 2)
    assert metrics.ok is False
    assert metrics.stale_after_step == 2
    assert metrics.gain == 0
    assert any("nothing pushed" in title for title in metrics.findings)
    assert metrics.scalars()["weights/unequal_tensors"] == metrics.tensors


def test_one_stale_layer_is_unequal_and_no_step_is_claimed() -> None:
    trainer = Trainer()
    mixed = {
        name: trainer.masters[0 if "layers.1." in name else 1][name] for name in trainer.masters[0]
    }
    trainer.served = fused(cast(mixed))
    metrics = trainer.audit.check(trainer.masters[1].items(), 1)
    assert metrics.ok is False
    assert metrics.stale_after_step is None
    assert metrics.unequal
    assert all("layers.1." in name for name in metrics.unequal)


def test_updates_below_the_grid_are_invisible_and_no_fault() -> None:
    """Steps of 1e-6 on weights of 0.05: the cast hardly changes, and the read-back is equal."""
    trainer = Trainer(size=1e-6)
    trainer.served = fused(cast(trainer.masters[1]))
    metrics = trainer.audit.check(trainer.masters[1].items(), 1)
    assert metrics.moved_fraction > 0.9
    assert metrics.visible_fraction < 0.1
    assert metrics.ok is True


def test_trainer_wrappers_and_tied_heads_are_understood() -> None:
    trainer = Trainer()
    wrapped = {f"module.{n}": v for n, v in trainer.masters[0].items()}
    assert trainer.audit.check(wrapped.items(), 0).ok is True


def test_nothing_read_is_no_pass() -> None:
    weights = llama_weights()
    audit = SyncAudit(config=LLAMA)
    metrics = audit.check(weights.items(), 0)
    assert metrics.ok is None
    assert "weights/read_back_equal" not in metrics.scalars()
    foreign = SyncAudit(lambda: {"other.weight": torch.ones(2, 2)}, config=LLAMA)
    assert foreign.check(weights.items(), 0).ok is not True


def test_a_nan_master_fails_even_when_it_is_served_faithfully() -> None:
    weights = llama_weights()
    weights["model.norm.weight"][3] = torch.nan
    audit = SyncAudit(lambda: fused(cast(weights)), config=LLAMA)
    metrics = audit.check(weights.items(), 0)
    assert metrics.nonfinite == 1
    assert metrics.ok is False


def test_no_parameters_is_an_error() -> None:
    with pytest.raises(InputError, match="no parameters"):
        SyncAudit(config=LLAMA).record([], 0)
    with pytest.raises(InputError, match="dtype"):
        SyncAudit(dtype="int3")
