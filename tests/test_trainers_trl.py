"""The audit on a real GRPOTrainer: its actions without an engine, its verdicts with a real vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl", reason="pip install trl datasets")

from conftest import ROOT, load_script

from kernel_contracts.errors import InputError
from kernel_contracts.loading import parse_contract
from mismatch_audit.reports.record import load_record

CONTRACT = """
schema: kernel-contracts/v1
name: live
statistical:
  - {id: S1, metric: abs_dlp, limit: 0.02, ceiling: 0.04, tail: 0.2}
observability:
  - {id: O1, min_prompts: 8}
escalation:
  - {when: {clause: S1, verdict: FAIL}, action: ACTION}
"""


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """examples/grpo_trl.py as a module."""
    return load_script(ROOT / "examples" / "grpo_trl.py")


@pytest.fixture(scope="module")
def tiny(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = example.make_tiny_model(tmp_path_factory.mktemp("tiny"))
    return path


# Without an engine -------------------------------------------------------------------------------
class Sampler:
    """A rollout_func: random completions with the trainer's own log-probs, and a gap in those of
    every sequence whose index is in ``bad``."""

    def __init__(self, gap: float = 0.0, bad: tuple[int, ...] = ()) -> None:
        self.gap, self.bad = gap, bad

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        import torch

        tokens = trainer.processing_class(prompts)["input_ids"]
        ids = torch.randint(3, 200, (len(prompts), 8))
        logprobs = []
        for row, (prompt, completion) in enumerate(zip(tokens, ids, strict=True)):
            whole = torch.cat([torch.tensor(prompt), completion])[None]
            with torch.no_grad():
                rows = trainer.model(input_ids=whole).logits[0, len(prompt) - 1 : -1]
            own = rows.float().log_softmax(-1).gather(-1, completion[:, None])[:, 0]
            own = own + 3e-6 * torch.randn(own.shape)  # another kernel; equal columns are a fault
            logprobs.append((own + (self.gap if row in self.bad else 0.0)).tolist())
        return {"prompt_ids": tokens, "completion_ids": ids.tolist(), "logprobs": logprobs}


def trainer_of(tiny: Path, out: Path, sampler: Any, steps: int = 4) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(out), use_cpu=True, bf16=False, per_device_train_batch_size=16,
        num_generations=2, max_completion_length=8, max_steps=steps, logging_steps=1, seed=1,
        report_to=[], save_strategy="no", learning_rate=1e-3, gradient_checkpointing=False,
        disable_tqdm=True,
    )  # fmt: skip
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [float(len(set(c))) for c in completions],
        args=config,
        train_dataset=Dataset.from_dict(
            {"prompt": [f"say {i}" for i in range(8)], "domain": ["even", "odd"] * 4}
        ),
        processing_class=AutoTokenizer.from_pretrained(tiny),
        rollout_func=sampler,
    )


def audited(tiny: Path, folder: Path, sampler: Any, action: str, **options: Any) -> tuple[Any, Any]:
    from mismatch_audit.trainers.trl import attach

    trainer = trainer_of(tiny, folder / "trainer", sampler)
    contract = parse_contract(CONTRACT.replace("ACTION", action))
    return trainer, attach(trainer, contract=contract, strict=True, **options)


def test_a_clean_run_passes_and_its_numbers_are_in_the_trainers_log(
    tiny: Path, tmp_path: Path
) -> None:
    """The trainer's own log-probs, computed where TRL has not, agree with the sampler's to
    rounding; the report is written at the end, and the data's own column is recorded."""
    import pyarrow.parquet as pq

    trainer, audit = audited(
        tiny, tmp_path, Sampler(), "log", out=tmp_path, record=tmp_path / "r", environment="domain"
    )
    trainer.train()
    logged = [h["mismatch/abs_dlp"] for h in trainer.state.log_history if "mismatch/abs_dlp" in h]
    assert len(logged) == 4
    assert max(logged) < 1e-4
    assert [f.code for f in audit.report().findings if f.severity != "note"] == []
    assert (audit.verdict, audit.exit_code) == ("PASS", 0)
    assert load_record(tmp_path).counts.prompts == 32
    files = sorted((tmp_path / "r").glob("*.parquet"))
    assert len(files) == 4
    assert set(pq.read_table(files[0]).column("environment").to_pylist()) == {"even", "odd"}


def test_detach_gives_the_trainer_back(tiny: Path, tmp_path: Path) -> None:
    """No attribute and no callback of ours is left, and a second audit can be attached."""
    from mismatch_audit.trainers.trl import attach

    trainer = trainer_of(tiny, tmp_path, Sampler())
    before, callbacks = dict(vars(trainer)), list(trainer.callback_handler.callbacks)
    contract = parse_contract(CONTRACT.replace("ACTION", "log"))
    audit = attach(trainer, contract=contract)
    with pytest.raises(InputError, match="audited already"):
        attach(trainer, contract=contract)
    audit.detach()
    audit.detach()
    assert vars(trainer).keys() == before.keys()
    assert trainer.callback_handler.callbacks == callbacks
    attach(trainer, contract=contract).detach()


def test_mask_leaves_the_bad_sequences_out_of_the_loss(tiny: Path, tmp_path: Path) -> None:
    """Five sequences are off by 0.5 nats a token; once that is certain, theirs are the rows with no
    mask and no advantage."""
    bad = [2, 5, 7, 8, 11]
    sampler = Sampler(0.5, tuple(bad))
    trainer, audit = audited(tiny, tmp_path, sampler, "mask")
    seen: list[Any] = []
    ours = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda x: seen.append(ours(x)) or seen[-1]
    trainer.train()
    assert audit.last.actions == ("mask",)
    last = seen[-1]
    assert (last["completion_mask"].sum(dim=1) == 0).nonzero().flatten().tolist() == bad
    assert last["advantages"][bad].abs().sum() == 0
    assert last["num_items_in_batch"] == last["completion_mask"].sum()
    assert seen[0]["completion_mask"].sum() == 16 * 8


def test_skip_step_changes_neither_weights_nor_moments(tiny: Path, tmp_path: Path) -> None:
    """With every step beyond the limit from the start, the model stays as it was made; the same run
    without the action moves it."""
    import torch

    bad = Sampler(0.5, tuple(range(16)))
    for action, moves in (("skip_step", False), ("log", True)):
        trainer, audit = audited(tiny, tmp_path / action, bad, action)
        before = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.train()
        same = all(
            torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True)
        )
        assert same is not moves
        assert audit.skipped_steps == (0 if moves else 4)


def test_stop_ends_the_training(tiny: Path, tmp_path: Path) -> None:
    """One step of eight prompts, all beyond the ceiling, is enough."""
    trainer, audit = audited(tiny, tmp_path, Sampler(0.5, tuple(range(16))), "stop")
    trainer.train()
    assert trainer.state.global_step == 1
    assert audit.exit_code == 1


def test_a_sampler_without_log_probs_is_unobserved(tiny: Path, tmp_path: Path) -> None:
    """Generation by transformers records none: no step passes."""
    trainer, audit = audited(tiny, tmp_path, None, "log")
    trainer.train()
    assert audit.exit_code == 3
    assert audit.monitor.evidence.steps == 4


def test_an_error_in_the_audit_leaves_training_alone(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that cannot be read: four steps of training, four unobserved steps, no pass."""
    import mismatch_audit.trainers.trl as module

    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("no such column")

    trainer, audit = audited(tiny, tmp_path, Sampler(), "log")
    audit.monitor.strict = False
    monkeypatch.setattr(module, "batch_of", broken)
    trainer.train()
    assert trainer.state.global_step == 4
    assert audit.monitor.errors == 4
    assert audit.exit_code == 3


def test_another_trainer_is_refused_by_name() -> None:
    """The message says what is missing and which version was tested."""
    from mismatch_audit.trainers.trl import attach

    contract = parse_contract(CONTRACT.replace("ACTION", "log"))
    with pytest.raises(InputError, match="has no _generate_and_score_completions") as caught:
        attach(SimpleNamespace(state=None, args=None), contract=contract)
    assert "tested with trl 1.16" in str(caught.value)


def test_weights_and_guard_need_an_engine(tiny: Path, tmp_path: Path) -> None:
    """Nothing is read back from a trainer that pushes nowhere."""
    with pytest.raises(InputError, match="pushes no weights"):
        audited(tiny, tmp_path, Sampler(), "log", weights=1)


def fake_trainer(**generation: Any) -> Any:
    """As much of a trainer as a weight sync needs; ``synced`` counts what reached the engine."""
    fake = SimpleNamespace(state=SimpleNamespace(global_step=0), _last_loaded_step=-1, synced=0)

    def sync() -> None:
        fake.synced += 1

    fake.vllm_generation = SimpleNamespace(sync_weights=sync, **generation)
    return fake


def test_a_held_push_does_not_happen_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The engine keeps the weights of step 0 while the trainer goes on; released, the next push
    happens. The version that is recorded is the one that is served, not the one that TRL counts."""
    from mismatch_audit.trainers.trl_sync import WatchedSync

    trainer = fake_trainer()
    sync = WatchedSync(trainer, monitor=None)  # type: ignore[arg-type]
    trainer.vllm_generation.sync_weights()
    sync.hold = True
    for trainer.state.global_step in (1, 2):
        trainer.vllm_generation.sync_weights()
    assert (trainer.synced, sync.served_version) == (1, 0)
    assert "the weight push of step 2 is held back; the engine keeps serving step 0" in caplog.text
    assert sync.take_metrics()["mismatch/pushes_held"] == 2
    sync.hold = False
    trainer.state.global_step = 3
    trainer.vllm_generation.sync_weights()
    assert (trainer.synced, sync.served_version) == (2, 3)
    sync.detach()
    assert trainer.vllm_generation.sync_weights.__name__ == "sync"


def test_a_push_is_not_held_where_sleep_threw_the_weights_away() -> None:
    """Holding it would serve nothing at all."""
    from mismatch_audit.trainers.trl_sync import WatchedSync

    trainer = fake_trainer(_llm_weights_sleeping=True)
    sync = WatchedSync(trainer, monitor=None)  # type: ignore[arg-type]
    sync.hold = True
    trainer.vllm_generation.sync_weights()
    assert (trainer.synced, sync.held) == (1, 0)


def test_several_processes_take_the_same_actions(tiny: Path, tmp_path: Path) -> None:
    """This process asks for nothing, another one to stop: both stop."""
    import numpy as np
    import torch

    from mismatch_audit.trainers.decision import ACTIONS, Decision

    _, audit = audited(tiny, tmp_path, Sampler(), "log")
    others = torch.tensor([float(a == "stop") for a in ACTIONS])
    audit.trainer = SimpleNamespace(
        accelerator=SimpleNamespace(
            num_processes=2, device="cpu", reduce=lambda mine, reduction: mine + others
        )
    )
    agreed = audit._agree(Decision(0, (), np.zeros(2, dtype=bool)))
    assert agreed.actions == ("stop",)


@pytest.mark.engine
def test_attaching_loads_no_numba() -> None:
    """On a CPU vLLM cannot start in a process that has loaded it (see ``shield_llvmlite``)."""
    code = "import mismatch_audit.trainers.trl, sys; sys.exit('llvmlite' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


# With a real engine ------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def runs(
    example: ModuleType, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Every run, in one process: those in float32 share one engine."""
    pytest.importorskip("vllm", reason="make install")
    engines, out = example.Engines(), tmp_path_factory.mktemp("runs")

    def go(name: str, **options: Any) -> Any:
        return example.run(model=tiny, out=out / name, engines=engines, **options)

    found = {fault: go(fault, fault=fault) for fault in example.FAULTS}
    found["guarded"] = go("guarded", fault="none", guard=True, steps=4)
    found["guarded no_sync"] = go("guarded-no-sync", fault="no_sync", guard=True, steps=4)
    found["stopped"] = go("stopped", fault="no_sync", act=True)
    found["out"] = out
    return found


CAUSES = {
    "no_sync": "STALE_WEIGHTS",
    "stale_head": "SERVED_WEIGHTS_DIFFER",
    "temperature_semantics": "RAW_LOGPROBS",
    "prefix_cache": "STALE_PREFIX_CACHE",
    "bf16_sampler": "TWO_PRECISIONS",
}


@pytest.mark.engine
def test_a_clean_run_of_a_real_engine_passes(runs: dict[str, Any]) -> None:
    """Six steps, each with a weight sync: float32 on both sides differs by rounding, every served
    tensor is the trainer's, and no cause is named."""
    clean = runs["none"]
    assert (clean.exit_code, clean.verdict, clean.causes) == (0, "PASS", [])
    assert len(clean.steps) == 6
    assert all(step["weights/read_back_equal"] == 1 for step in clean.steps)
    assert max(step["mismatch/abs_dlp"] for step in clean.steps) < 2e-5


@pytest.mark.engine
@pytest.mark.parametrize("fault", CAUSES)
def test_each_fault_fails_and_is_named(runs: dict[str, Any], fault: str) -> None:
    """The verdict is FAIL, and the first cause is the injected one."""
    assert runs[fault].exit_code == 1
    assert runs[fault].causes[0] == CAUSES[fault]


@pytest.mark.engine
def test_stale_weights_are_seen_at_the_first_sync_after_an_update(runs: dict[str, Any]) -> None:
    """Step 0 served what the trainer had; at every later step the engine still has those."""
    stale = [step["weights/stale_after_step"] for step in runs["no_sync"].steps]
    assert stale == [0, 1, 2, 3, 4, 5]


@pytest.mark.engine
def test_a_guarded_sync_keeps_good_pushes_and_rolls_bad_ones_back(runs: dict[str, Any]) -> None:
    """A sync that moves nothing fails its check at the second push and every one after; the clean
    run's pushes all stand."""
    good = [step.get("weights/push_ok") for step in runs["guarded"].steps]
    assert good == [None, 1, 1, 1]
    bad = runs["guarded no_sync"]
    assert [step.get("weights/push_ok") for step in bad.steps] == [None, 0, 0, 0]
    assert "PUSH_ROLLED_BACK" in bad.causes


@pytest.mark.engine
def test_a_stop_ends_a_real_run(runs: dict[str, Any]) -> None:
    """With its actions allowed, the contract stops a run whose sync moves nothing as soon as that
    is certain."""
    assert len(runs["stopped"].steps) <= 3
    assert runs["stopped"].exit_code == 1


@pytest.mark.engine
@pytest.mark.parametrize(
    ("fault", "cause"),
    [("none", None), ("no_sync", "SYNC_NOT_APPLIED"), ("prefix_cache", "STALE_PREFIX_CACHE")],
)
def test_recorded_steps_tell_the_same_story_later(
    runs: dict[str, Any], fault: str, cause: str | None
) -> None:
    """The folder that the live audit wrote holds what it saw: six steps, both sides, versions,
    cache hits. Read from disk, the checks name the same cause from rollouts alone."""
    from mismatch_audit.rollouts.checks import all_checks, explain
    from mismatch_audit.rollouts.formats.registry import drain, open_sources

    sources, problems = open_sources([runs["out"] / fault / "rollouts"])
    assert problems == []
    checks, rows, steps = all_checks(), 0, set()
    for source in sources:
        for batch in drain(source, problems.append):
            rows += batch.n_sequences
            steps |= set(batch.scalar("step").tolist())
            assert batch.has("num_cached_tokens")
            for check in checks:
                check.update(batch)
    assert (rows, steps) == (192, set(range(6)))
    found = explain([r for c in checks for r in c.finish(sources[0].header)])
    named = [r.code for r in found if r.status == "found"]
    assert (named[0] if named else None) == cause
