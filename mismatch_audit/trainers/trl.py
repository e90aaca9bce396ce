"""One line on a TRL GRPOTrainer: every step audited, the contract's actions carried out.

    from mismatch_audit.trainers.trl import attach

    audit = attach(trainer, contract="contract.yaml", out="runs/live")
    trainer.train()
    sys.exit(audit.exit_code)

Instance attributes of the trainer are wrapped, none of its classes; ``audit.detach()`` restores.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from kernel_contracts.contract import Contract
from kernel_contracts.errors import InputError
from kernel_contracts.loading import load_contract
from kernel_contracts.measurement import EXIT_CODES
from mismatch_audit.reports.record import Record
from mismatch_audit.trainers.decision import ACTIONS, Decision
from mismatch_audit.trainers.monitor import Monitor
from mismatch_audit.trainers.trl_batch import batch_of, header_of
from mismatch_audit.trainers.trl_engine import ColocatedEngine, watched_requests
from mismatch_audit.trainers.trl_sync import WatchedSync

log = logging.getLogger("mismatch_audit.trainers")

TESTED = "1.16"
NEEDED = ("_generate_and_score_completions", "_get_per_token_logps_and_entropies", "_metrics",
          "state", "accelerator", "args", "add_callback", "remove_callback")  # fmt: skip
NEEDED_VLLM = ("vllm_generation", "_last_loaded_step")
NEEDED_ENGINE = ("sync_weights", "_iter_named_params")


def attach(
    trainer: Any,
    *,
    contract: Contract | str | Path,
    every: int = 50,
    out: str | Path | None = None,
    record: str | Path | None = None,
    actions: Collection[str] = ACTIONS,
    strict: bool = False,
    weights: int = 0,
    guard: str | Path | None = None,
    environment: str = "environment",
) -> MismatchAuditCallback:
    """Audit every training step of a GRPOTrainer from now on.

    contract, every, out, record, actions, strict: as for ``Monitor``. weights: read the served
    weights back at every so many syncs and compare them with the trainer's (0: never; colocated
    vLLM only). guard: folder for checkpoints; each sync is then checked on the live engine and
    rolled back when a check fails (colocated vLLM, one process, weights not sharded). environment:
    the dataset's column that becomes ``environment``, for slices by it.

    Raises InputError where the trainer, or its version of TRL, lacks a name that is needed, or is
    attached to already.
    """
    _check(trainer)
    judged = contract if isinstance(contract, Contract) else load_contract(contract)
    return MismatchAuditCallback(
        trainer,
        Monitor(
            judged,
            every=every,
            out=Path(out) if out is not None else None,
            record=Path(record) if record is not None else None,
            actions=actions,
            strict=strict,
            rank=int(trainer.accelerator.process_index),
        ),
        weights=weights,
        guard=Path(guard) if guard is not None else None,
        environment=environment,
    )


class MismatchAuditCallback(TrainerCallback):
    """What ``attach`` returns: the audit of one trainer, which is also one of its callbacks.

    monitor: verdicts and causes so far. sync: the watched weight sync, None without vLLM.
    last: the decision on the newest step.
    """

    def __init__(
        self,
        trainer: Any,
        monitor: Monitor,
        *,
        weights: int = 0,
        guard: Path | None = None,
        environment: str = "environment",
    ) -> None:
        _check(trainer)
        self.trainer, self.monitor, self.environment = trainer, monitor, environment
        self.last: Decision | None = None
        self.skipped_steps = 0
        generation = getattr(trainer, "vllm_generation", None)
        self.llm = getattr(generation, "llm", None)
        self.facts = ColocatedEngine(generation).facts() if self.llm is not None else {}
        monitor.header = header_of(trainer, self.facts)
        self.sync: WatchedSync | None = None
        if generation is not None:
            self.sync = WatchedSync(trainer, monitor, weights=weights, guard=guard)
        elif weights or guard is not None:
            raise InputError(
                "this trainer pushes no weights to an engine", where="weights, guard",
                fix="set use_vllm=True, or leave them out",
            )  # fmt: skip
        self._original = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = self._generate
        trainer._mismatch_audit = self
        trainer.add_callback(self)

    def detach(self) -> None:
        """Give the trainer back as it was, with the last report written. Twice does no harm."""
        if getattr(self.trainer, "_mismatch_audit", None) is not self:
            return
        del self.trainer._generate_and_score_completions
        del self.trainer._mismatch_audit
        if self.sync is not None:
            self.sync.detach()
        self.trainer.remove_callback(self)

    # The step ------------------------------------------------------------------------------------
    def _generate(self, inputs: Any) -> Any:
        watch: AbstractContextManager[list[int | None]] = (
            watched_requests(self.llm) if self.llm is not None else nullcontext([])
        )
        with watch as cached:
            output = self._original(inputs)
        if not self.trainer.model.training:  # an evaluation: nothing is learnt from it
            return output
        started, step = time.perf_counter(), int(self.trainer.state.global_step)
        try:
            batch = batch_of(
                self.trainer,
                output,
                served_version=self.sync.served_version if self.sync is not None else None,
                engine_age=self.sync.syncs if self.sync is not None else 0,
                serial=self.monitor.evidence.steps,
                environment=_texts(inputs, self.environment),
                cached=cached,
                logprobs_mode=self.facts.get("logprobs_mode"),
            )
        except Exception as error:
            if self.monitor.strict:
                raise
            decision = self.monitor.not_observed(step, error, len(output["advantages"]))
        else:
            if self.sync is not None:
                self.sync.canaries = self.sync.canaries or _canaries(batch)
            decision = self.monitor.observe(batch, step=step)
        self.last = self._agree(decision)
        metrics = dict(decision.metrics) | (self.sync.take_metrics() if self.sync else {})
        # All that was added to the step, the trainer's own log-probs where TRL had none included.
        metrics[f"{self.monitor.prefix}seconds"] = time.perf_counter() - started
        for name, value in metrics.items():
            self.trainer._metrics["train"][name].append(value)
        return self._act(self.last, output)

    def _agree(self, decision: Decision) -> Decision:
        """The same actions on every process: a stop or a held push on one of them would hang."""
        accelerator = self.trainer.accelerator
        if accelerator.num_processes == 1:
            return decision
        import torch

        flags = torch.tensor([float(a in decision.actions) for a in ACTIONS])
        agreed = accelerator.reduce(flags.to(accelerator.device), reduction="sum").tolist()
        actions = tuple(a for a, n in zip(ACTIONS, agreed, strict=True) if n > 0)
        return Decision(**{**decision.__dict__, "actions": actions})

    def _act(self, decision: Decision, output: dict[str, Any]) -> dict[str, Any]:
        if self.sync is not None:
            self.sync.hold = decision.asks("hold_push")
        if not decision.asks("mask"):
            return output
        import torch

        keep = torch.as_tensor(~decision.masked, device=output["completion_mask"].device)
        output = dict(output)
        output["completion_mask"] = output["completion_mask"] * keep[:, None].to(
            output["completion_mask"].dtype
        )
        shape = (-1, *[1] * (output["advantages"].dim() - 1))
        output["advantages"] = output["advantages"] * keep.view(shape)
        loss_mask = output["completion_mask"]
        if "tool_mask" in output:
            loss_mask = loss_mask * output["tool_mask"]
        if "num_items_in_batch" in output:
            output["num_items_in_batch"] = self.trainer.accelerator.gather(loss_mask.sum()).sum()
        return output

    # Callbacks -----------------------------------------------------------------------------------
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """skip_step: without gradients an optimiser touches neither weights nor moments."""
        if self.last is None or not self.last.asks("skip_step"):
            return
        self.skipped_steps += 1
        for parameter in self.trainer.model.parameters():
            parameter.grad = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """stop: the trainer ends after this step, with its usual last save."""
        if self.sync is not None:
            self.sync.record_step(int(state.global_step))
        if self.last is not None and self.last.asks("stop"):
            control.should_training_stop = True
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last report."""
        self.monitor.try_report()

    # Results -------------------------------------------------------------------------------------
    def report(self) -> Record:
        """The record of the run so far (written too, where ``out`` says)."""
        record: Record = self.monitor.report()
        return record

    @property
    def verdict(self) -> str:
        """Of the contract on the steps so far, and of the causes named: what the report says."""
        return self.monitor.judged()[0]

    @property
    def exit_code(self) -> int:
        """0 pass, 1 violated, 3 inconclusive or unobserved, 4 not comparable."""
        return EXIT_CODES[self.verdict]


def _texts(inputs: Any, column: str) -> list[str | None] | None:
    """A column of the dataset's rows; None where no row has it."""
    values = [row.get(column) for row in inputs]
    return [None if v is None else str(v) for v in values] if any(values) else None


def _canaries(batch: Any, count: int = 8) -> list[list[int]]:
    """Some of the step's own sequences, to check pushes by: the same ones every time, so that the
    engine's movement can be compared with the trainer's."""
    ids, edges = batch.tokens("token_ids"), batch.offsets
    picked = range(0, batch.n_sequences, max(1, batch.n_sequences // count))
    return [ids[edges[s] : edges[s + 1]].tolist() for s in list(picked)[:count]]


def _check(trainer: Any) -> None:
    """Raises InputError unless everything that is wrapped or read is there."""
    import trl

    if getattr(trainer, "_mismatch_audit", None) is not None:
        raise InputError("this trainer is audited already", fix="detach() the first audit")
    absent = [name for name in NEEDED if not hasattr(trainer, name)]
    if getattr(trainer, "use_vllm", False):
        absent += [name for name in NEEDED_VLLM if not hasattr(trainer, name)]
        generation = getattr(trainer, "vllm_generation", None)
        absent += [f"vllm_generation.{n}" for n in NEEDED_ENGINE if not hasattr(generation, n)]
    if absent:
        raise InputError(
            f"{type(trainer).__name__} of trl {trl.__version__} has no {', '.join(absent)}",
            where="attach",
            fix=f"give a GRPOTrainer; tested with trl {TESTED} (pip install 'trl=={TESTED}.*'), or "
            "feed mismatch_audit.trainers.monitor.Monitor from your own trainer",
        )
