"""SkyRL: a training callback that sees both columns of log-probs at every step's end.

    from mismatch_audit.trainers.skyrl import MismatchAuditCallback

    callbacks=[MismatchAuditCallback(contract="contract.yaml", out="runs/live")]

It has every event of SkyRL's ``TrainingCallback`` and needs SkyRL only where it runs. Actions:
``warn``, and ``stop``, which asks for a checkpoint and raises ``StopTraining`` where the trainer's
control has no flag to stop: the callback sees a step after its update, so it cannot mask or skip.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernel_contracts.contract import Contract
from kernel_contracts.errors import InputError
from kernel_contracts.loading import load_contract
from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.schema import Header
from mismatch_audit.trainers.environment import StopTraining
from mismatch_audit.trainers.monitor import Monitor
from mismatch_audit.trainers.step import from_sequences, plain_array

CAN = ("warn", "stop")
CLAMPED = -9999.0
"""What SkyRL's engine wire puts where a log-prob is missing or not finite."""


def batch_of(batch: Any, step: int, trajectory_ids: Sequence[Any] | None = None) -> TokenBatch:
    """A TrainingInputBatch: ``sequences`` and ``attention_mask`` ``[B, S]``, left-padded; the other
    columns ``[B, T]``, aligned with the last T positions. Rows past ``trajectory_ids`` are padding
    of the batch. An entry of -9999.0 is a missing log-prob."""
    ids, mask = plain_array(batch["sequences"]), plain_array(batch["attention_mask"]).astype(bool)
    response = plain_array(batch["response_mask"]).astype(bool)
    n = len(ids) if trajectory_ids is None else min(len(ids), len(trajectory_ids))
    width = response.shape[1]
    columns = {
        "loss_mask": _column(batch, "loss_mask"),
        "sampler_logprob": _column(batch, "rollout_logprobs"),
        "trainer_logprob": _column(batch, "action_log_probs"),
        "ref_logprob": _column(batch, "base_action_log_probs"),
        "advantage": _column(batch, "advantages"),
    }
    for name in ("sampler_logprob", "trainer_logprob"):
        values = columns[name]
        if values is not None:
            columns[name] = np.where(values <= CLAMPED, np.nan, values)
    tokens = {
        name: [values[s][response[s]] for s in range(n)]
        for name, values in columns.items()
        if values is not None and values.shape[1] == width
    }
    kept = [ids[s][mask[s]] for s in range(n)]
    lengths = response[:n].sum(axis=1)
    group = None if trajectory_ids is None else [str(t.instance_id) for t in trajectory_ids[:n]]
    return from_sequences(
        kept,
        [len(row) - int(size) for row, size in zip(kept, lengths, strict=True)],
        tokens=tokens,
        scalars={
            "framework": "skyrl",
            "step": step,
            "group_id": group,
            "n_left_pad": (~mask[:n]).sum(axis=1),
        },
        source=f"skyrl step {step}",
    )


def _column(batch: Any, name: str) -> Any:
    value = batch.get(name)
    return None if value is None else plain_array(value)


class MismatchAuditCallback:
    """Audits each step of SkyRL's RayPPOTrainer. Arguments as for ``Monitor``.

    Raises InputError for an action that a callback at a step's end cannot take.
    """

    def __init__(
        self,
        contract: Contract | str | Path,
        *,
        every: int = 50,
        out: str | Path | None = None,
        record: str | Path | None = None,
        actions: Collection[str] = CAN,
        strict: bool = False,
    ) -> None:
        if unable := set(actions) - set(CAN):
            raise InputError(
                f"a callback of SkyRL cannot {', '.join(sorted(unable))}", where="actions",
                fix=f"any of {', '.join(CAN)}",
            )  # fmt: skip
        self.monitor = Monitor(
            contract if isinstance(contract, Contract) else load_contract(contract),
            every=every,
            out=Path(out) if out is not None else None,
            record=Path(record) if record is not None else None,
            actions=actions,
            strict=strict,
            header=Header(framework="skyrl", format="live"),
        )
        self._metrics: dict[str, float] = {}

    def on_step_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
        """Judge the step's batch."""
        step = int(callback_input.global_step)

        def batch() -> TokenBatch:
            if callback_input.batch is None:
                raise InputError("the trainer gave no batch", where="on_step_end")
            ids = getattr(callback_input, "trajectory_ids", None)
            return batch_of(callback_input.batch, step, ids)

        decision = self.monitor.observe_from(batch, step=step)
        self._metrics = dict(decision.metrics)
        if decision.asks("stop"):
            self.monitor.try_report()
            if hasattr(control, "should_training_stop"):
                control.should_training_stop = True
                return
            control.should_save = True
            raise StopTraining(
                "the contract asks to stop: " + "; ".join(decision.reasons), where=f"step {step}"
            )

    def on_log(self, trainer: Any, callback_input: Any, control: Any) -> None:
        """Add the last step's numbers to what the trainer is about to log."""
        if callback_input.logs is not None:
            callback_input.logs.update(self._metrics)

    def on_train_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
        """The last report."""
        self.monitor.try_report()

    def _nothing(self, trainer: Any, callback_input: Any, control: Any) -> None:
        """An event that the audit does not need."""

    on_train_start = on_epoch_start = on_epoch_end = on_step_start = _nothing
    on_eval_start = on_eval_end = on_save = _nothing
