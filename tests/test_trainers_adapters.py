"""Adapters, fed structures as verl, SkyRL and slime hand them over."""

from __future__ import annotations

import enum
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT

from kernel_contracts.errors import InputError
from mismatch_audit.reports.record import load_record
from mismatch_audit.rollouts.statistics import batch_statistics
from mismatch_audit.trainers import skyrl, slime, verl_plugin
from mismatch_audit.trainers.environment import StopTraining, monitor_from_environment

CONTRACT = """
schema: kernel-contracts/v1
name: live
statistical:
  - {id: S1, metric: abs_dlp, limit: 0.02, ceiling: 0.04, tail: 0.2}
observability:
  - {id: O1, min_prompts: 20}
escalation:
  - {when: {clause: S1, verdict: FAIL}, action: ACTION}
"""


@pytest.fixture
def contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a contract whose escalation is ``action`` and set the environment to it."""
    monkeypatch.setenv("MISMATCH_AUDIT_OUT", str(tmp_path / "out"))
    monkeypatch.setenv("MISMATCH_AUDIT_STRICT", "1")

    def write(action: str = "stop") -> Path:
        path = tmp_path / "contract.yaml"
        path.write_text(CONTRACT.replace("ACTION", action), encoding="utf-8")
        monkeypatch.setenv("MISMATCH_AUDIT_CONTRACT", str(path))
        monkeypatch.setenv("MISMATCH_AUDIT_ACTIONS", "warn" if action == "log" else action)
        slime.reset()
        return path

    yield write
    slime.reset()


def numbers(seed: int, gap: float, rows: int = 16, width: int = 12) -> tuple[Any, Any, Any]:
    """(sampler, trainer, mask) of one step, right-padded."""
    generator = torch.Generator().manual_seed(seed)
    sampler = -torch.rand((rows, width), generator=generator) - 0.1
    trainer = sampler + gap * torch.randn((rows, width), generator=generator)
    lengths = torch.randint(4, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width)[None] < lengths).long()
    return sampler * mask, trainer * mask, mask


# verl --------------------------------------------------------------------------------------------
def verl_data(seed: int, gap: float, *, legacy: bool = False) -> Any:
    """A DataProto as the v1 trainer makes it (a padded TensorDict, nothing else), or as the older
    trainer does (the whole batch, with uid)."""
    from tensordict import TensorDict

    sampler, trainer, mask = numbers(seed, gap)
    batch = {"responses": torch.ones_like(mask), "response_mask": mask, "entropy": sampler * 0,
             "rollout_log_probs": sampler, "old_log_probs": trainer}  # fmt: skip
    other: dict[str, Any] = {}
    if legacy:
        prompts = torch.ones(len(mask), 5, dtype=torch.long)
        batch["prompts"] = prompts
        batch["attention_mask"] = torch.cat([prompts, mask], dim=1)
        other = {
            "uid": np.array([f"p{i // 2}" for i in range(len(mask))], dtype=object),
            "min_global_steps": np.array([3] * len(mask), dtype=object),
            "max_global_steps": np.array([4] * len(mask), dtype=object),
        }
    return SimpleNamespace(
        batch=TensorDict(batch, batch_size=len(mask)), non_tensor_batch=other, meta_info={}
    )


def verl_module() -> Any:
    return SimpleNamespace(calculate_debug_metrics=lambda data: {"training/valid": 1})


@pytest.mark.parametrize("legacy", [False, True])
def test_verl_gets_its_own_metrics_and_ours(contract: Any, legacy: bool) -> None:
    """The numbers are those of the columns under the mask, and verl's own are kept."""
    contract("log")
    module = verl_module()
    assert verl_plugin.install(module) is verl_plugin.install(module)  # twice does no harm
    data = verl_data(0, 0.1, legacy=legacy)
    found = module.calculate_debug_metrics(data)
    q, p, mask = (data.batch[k].numpy() for k in
                  ("rollout_log_probs", "old_log_probs", "response_mask"))  # fmt: skip
    assert found["training/valid"] == 1
    expected = batch_statistics(q, p, mask.astype(bool)).abs_dlp
    assert found["mismatch/abs_dlp"] == pytest.approx(expected)


def test_verl_rows_carry_prompts_and_versions_where_verl_has_them() -> None:
    """uid is the group, min and max of the weights that sampled are kept; without uid a sequence is
    a prompt of its own."""
    whole = verl_plugin.batch_of(verl_data(0, 0.1, legacy=True), 7)
    assert whole.scalar("group_id").tolist()[:4] == ["p0", "p0", "p1", "p1"]
    assert set(whole.scalar("weights_version_min")) == {3}
    assert set(whole.scalar("weights_version_max")) == {4}
    assert set(whole.scalar("prompt_len")) == {5}
    bare = verl_plugin.batch_of(verl_data(0, 0.1), 7)
    assert not bare.has("group_id")
    assert bare.sampled.sum() == whole.sampled.sum()


def test_verl_stops_where_the_contract_asks(contract: Any, tmp_path: Path) -> None:
    """StopTraining is raised after the report was written; a clean run passes first."""
    contract("stop")
    module = verl_module()
    verl_plugin.install(module)
    for step in range(4):
        module.calculate_debug_metrics(verl_data(step, 0.004))
    with pytest.raises(StopTraining, match="S1 on all is FAIL"):
        [module.calculate_debug_metrics(verl_data(step, 0.3)) for step in range(4)]
    assert load_record(tmp_path / "out").verdict == "FAIL"


def test_the_verl_plugin_does_nothing_without_a_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl loads it in every process of every user who installed this package."""
    monkeypatch.delenv("MISMATCH_AUDIT_CONTRACT", raising=False)
    module = verl_module()
    before = module.calculate_debug_metrics
    assert verl_plugin.install(module) is None
    assert module.calculate_debug_metrics is before
    code = "import mismatch_audit.trainers.verl_entry, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


REAL_VERL = """
import torch
from verl import DataProto  # loads the plugin
from verl.utils.debug.metrics import calculate_debug_metrics  # as verl's trainers do afterwards

q = -torch.rand((8, 6))
ones = torch.ones(8, 6, dtype=torch.long)
found = calculate_debug_metrics(DataProto.from_dict({
    "responses": ones, "response_mask": ones, "rollout_log_probs": q, "old_log_probs": q + 0.1}))
assert found["training/rollout_probs_diff_valid"] == 1
print(found["mismatch/abs_dlp"])
"""


def test_the_real_verl_calls_the_hook(contract: Any) -> None:
    """verl itself, with the module loaded the way verl loads plugins: its trainers' function gives
    our numbers beside its own."""
    if any(importlib.util.find_spec(name) is None for name in ("verl", "ray")):
        pytest.skip("pip install verl ray")
    path = contract("log")
    environment = {
        **os.environ, "MISMATCH_AUDIT_CONTRACT": str(path), "VERL_USE_EXTERNAL_PLUGINS": "none",
        "VERL_USE_EXTERNAL_MODULES": "mismatch_audit.trainers.verl_entry",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", REAL_VERL], env=environment, capture_output=True, text=True,
        check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.split()[-1]) == pytest.approx(0.1, rel=1e-5)


def test_an_action_that_a_hook_cannot_take_is_refused(
    contract: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Better at the start than a mask that silently never happens."""
    contract("stop")
    monkeypatch.setenv("MISMATCH_AUDIT_ACTIONS", "mask")
    with pytest.raises(InputError, match="a hook into verl cannot mask"):
        verl_plugin.install(verl_module())
    monkeypatch.setenv("MISMATCH_AUDIT_ACTIONS", "warn")
    monkeypatch.setenv("MISMATCH_AUDIT_EVERY", "often")
    with pytest.raises(InputError, match="MISMATCH_AUDIT_EVERY"):
        monitor_from_environment("verl")


# SkyRL -------------------------------------------------------------------------------------------
class Batch(dict[str, Any]):
    """SkyRL's TrainingInputBatch is a mapping of tensors."""


def skyrl_input(seed: int, gap: float, rows: int = 16) -> Any:
    """Left-padded sequences; response columns aligned with the last positions."""
    sampler, trainer, mask = numbers(seed, gap, rows)
    flip = lambda x: torch.flip(x, [1])  # noqa: E731
    sampler, trainer, response = flip(sampler), flip(trainer), flip(mask)
    # a response shorter than the width starts later, and its prompt with it
    ids = torch.zeros(rows, 5 + mask.shape[1], dtype=torch.long)
    attention = torch.zeros_like(ids)
    for row in range(rows):
        size = 5 + int(mask[row].sum())
        ids[row, -size:] = torch.arange(1, size + 1)
        attention[row, -size:] = 1
    batch = Batch(
        sequences=ids, attention_mask=attention, response_mask=response, loss_mask=response,
        rollout_logprobs=sampler, action_log_probs=trainer, advantages=response * 0.5,
    )  # fmt: skip
    return SimpleNamespace(
        global_step=seed, batch=batch, metrics={}, logs={},
        trajectory_ids=[SimpleNamespace(instance_id=f"p{i // 2}", repetition_id=i % 2)
                        for i in range(rows - 2)],
    )  # fmt: skip


def test_skyrl_rows_are_the_sequences_without_padding() -> None:
    """Padding rows of the batch are dropped, prompts are five tokens long, the group is the
    instance, and -9999.0 is a missing log-prob, not one of -9999 nats."""
    given = skyrl_input(1, 0.01)
    last = given.batch["response_mask"][0].nonzero()[-1]
    given.batch["rollout_logprobs"][0, last] = skyrl.CLAMPED
    batch = skyrl.batch_of(given.batch, 1, given.trajectory_ids)
    assert batch.n_sequences == 14
    assert set(batch.scalar("prompt_len")) == {5}
    assert batch.scalar("group_id").tolist()[:3] == ["p0", "p0", "p1"]
    assert batch.sampled.sum() == int(given.batch["response_mask"][:14].sum())
    values = batch.tokens("sampler_logprob")[batch.sampled]
    assert np.isnan(values).sum() == 1
    assert np.nanmin(values) > -2


def test_the_skyrl_callback_judges_logs_and_stops(contract: Any, tmp_path: Path) -> None:
    """Metrics reach the dictionary that the trainer logs; without a stop flag in its control the
    callback asks for a checkpoint and raises."""
    callback = skyrl.MismatchAuditCallback(contract("stop"), out=tmp_path / "sky", strict=True)
    control = SimpleNamespace(should_save=False, should_evaluate=False)
    for step in range(4):
        given = skyrl_input(step, 0.004)
        callback.on_step_end(None, given, control)
        callback.on_log(None, given, control)
        assert given.logs["mismatch/abs_dlp"] < 0.02
    with pytest.raises(StopTraining):
        [callback.on_step_end(None, skyrl_input(step, 0.3), control) for step in range(4)]
    assert control.should_save
    assert load_record(tmp_path / "sky").verdict == "FAIL"
    flag = SimpleNamespace(should_training_stop=False)
    callback.on_step_end(None, skyrl_input(9, 0.3), flag)
    assert flag.should_training_stop
    with pytest.raises(InputError, match="cannot mask"):
        skyrl.MismatchAuditCallback(contract("stop"), actions=("mask",))


def test_a_skyrl_step_without_a_batch_is_unobserved(contract: Any) -> None:
    """No batch is no evidence, and no crash."""
    callback = skyrl.MismatchAuditCallback(contract("log"))
    given = SimpleNamespace(global_step=0, batch=None, logs={})
    callback.on_step_end(None, given, SimpleNamespace())
    assert callback.monitor.verdict == "UNOBSERVED"
    assert callback.monitor.errors == 1


# slime -------------------------------------------------------------------------------------------
def slime_call(seed: int, gap: float, **change: Any) -> dict[str, Any]:
    """The keyword arguments of slime's loss: ragged lists, pg_loss flat over them."""
    sampler, trainer, mask = numbers(seed, gap)
    sizes = mask.sum(dim=1).tolist()
    cut = lambda x: [row[:n] for row, n in zip(x, sizes, strict=True)]  # noqa: E731
    return {
        "args": SimpleNamespace(use_tis=False), "pg_loss": torch.ones(sum(sizes)),
        "train_log_probs": cut(trainer), "rollout_log_probs": cut(sampler),
        "loss_masks": cut(mask), "total_lengths": [n + 3 for n in sizes],
        "response_lengths": sizes, **change,
    }  # fmt: skip


def train(steps: int, gap: float) -> tuple[Any, Any, Any]:
    """Two micro-batches a step, the hook in front of each step."""
    out: Any = None
    for step in range(steps):
        slime.before_train_step(None, 0, step, None, None, None)
        slime.tis(**slime_call(2 * step, gap))
        out = slime.tis(**slime_call(2 * step + 1, gap))
    slime.before_train_step(None, 0, steps, None, None, None)
    return out


def test_slime_metrics_are_per_token_and_the_loss_is_untouched(contract: Any) -> None:
    """slime averages every metric over tokens itself, so each is as long as the loss."""
    contract("log")
    loss, masks, metrics = train(4, 0.004)
    call = slime_call(7, 0.004)
    assert torch.equal(loss, torch.ones_like(loss))
    assert metrics["mismatch_abs_dlp"].shape == call["pg_loss"].shape
    gaps = [p - q for p, q in zip(call["train_log_probs"], call["rollout_log_probs"], strict=True)]
    assert torch.allclose(metrics["mismatch_abs_dlp"], torch.cat(gaps).abs())
    assert sum(int(m.sum()) for m in masks) == sum(call["response_lengths"])
    assert slime._get_state().monitor.verdict == "PASS"


def test_slime_stops_and_masks(contract: Any) -> None:
    """stop raises in front of the next step; mask empties the bad sequences' masks."""
    contract("stop")
    with pytest.raises(StopTraining):
        train(4, 0.3)
    contract("mask")
    _, masks, _ = train(4, 0.3)
    assert sum(int(m.sum()) for m in masks) < 0.1 * sum(len(m) for m in masks)
    _, masks, _ = slime.tis(**slime_call(3, 0.001))
    assert all(int(m.sum()) == len(m) for m in masks)


def test_slime_goes_on_with_the_function_that_it_stands_in_for(
    contract: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--use-tis without slime's module is an error that names it; a named function runs."""
    contract("log")
    with pytest.raises(InputError, match="vanilla_tis_function"):
        slime.tis(**slime_call(0, 0.01, args=SimpleNamespace(use_tis=True)))
    module = SimpleNamespace(halve=lambda **k: (k["pg_loss"] / 2, k["loss_masks"], {"tis": 1}))
    monkeypatch.setitem(sys.modules, "my_tis", module)
    monkeypatch.setenv(slime.INNER, "my_tis.halve")
    loss, _, metrics = slime.tis(**slime_call(0, 0.01))
    assert float(loss[0]) == 0.5
    assert metrics["tis"] == 1


def test_slime_samples_are_recorded_for_later(
    contract: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, versions and cache hits as slime's Sample has them; its own log goes on."""

    class Status(enum.Enum):
        COMPLETED = "completed"

    contract("log")
    monkeypatch.setenv("MISMATCH_AUDIT_RECORD", str(tmp_path / "rollouts"))
    sample = SimpleNamespace(
        index=3, group_index=1, tokens=[5, 6, 7, 8], response_length=2, status=Status.COMPLETED,
        rollout_log_probs=[-0.1, -0.2], loss_mask=[1, 0], weight_versions=["4", "5"],
        prefix_cache_info=SimpleNamespace(cached_tokens=1, total_prompt_tokens=2),
    )  # fmt: skip
    assert slime.log_rollout(7, None, [sample], {}, 1.0) is False
    assert len(list((tmp_path / "rollouts" / "sampler").glob("*.parquet"))) == 1
    batch = slime.batch_of([sample], 7)
    assert batch.sampled.tolist() == [False, False, True, False]
    assert batch.scalar("weights_version_min").tolist() == [4]
    assert batch.scalar("weights_version_max").tolist() == [5]
    assert batch.scalar("num_cached_tokens").tolist() == [1]
    assert batch.scalar("finish_reason").tolist() == ["stop"]


def test_slime_without_a_contract_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions may stay on the command line."""
    monkeypatch.delenv("MISMATCH_AUDIT_CONTRACT", raising=False)
    slime.reset()
    call = slime_call(0, 0.3)
    loss, masks, metrics = slime.tis(**call)
    assert loss is call["pg_loss"]
    assert masks is call["loss_masks"]
    assert metrics == {}
    slime.reset()
