"""slime (and miles): functions to name on its command line; settings by environment variables.

    --custom-tis-function-path mismatch_audit.trainers.slime.tis --get-mismatch-metrics
    --custom-megatron-before-train-step-hook-path mismatch_audit.trainers.slime.before_train_step
    --custom-rollout-log-function-path mismatch_audit.trainers.slime.log_rollout

``tis`` sees both columns, micro-batch by micro-batch and without token ids; ``before_train_step``
closes a step and judges it. ``log_rollout`` runs in another process and sees the sampler's side
alone, with tokens and weight versions: it is recorded for ``audit rollouts``, never judged a pass.
Without MISMATCH_AUDIT_CONTRACT all three do nothing. Actions: ``warn``, ``mask`` (bad sequences of
the micro-batch at hand, by the verdict of the steps before it) and ``stop``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from kernel_contracts.errors import InputError
from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.schema import Header
from mismatch_audit.trainers.decision import Decision
from mismatch_audit.trainers.environment import StopTraining, monitor_from_environment
from mismatch_audit.trainers.monitor import Monitor
from mismatch_audit.trainers.recording import record_step
from mismatch_audit.trainers.step import from_sequences, plain_array

CAN = ("warn", "mask", "stop")
INNER = "MISMATCH_AUDIT_TIS"
"""Names the TIS function to go on with (``module.function``). Default: slime's, with --use-tis."""


@dataclass
class _State:
    """One process's monitor and the micro-batches of the step under way."""

    monitor: Monitor | None = None
    sampler: list[Any] = field(default_factory=list)
    trainer: list[Any] = field(default_factory=list)
    masks: list[Any] = field(default_factory=list)
    steps: int = 0
    last: Decision | None = None


_state: _State | None = None


def _get_state() -> _State:
    global _state
    if _state is None:
        rank = int(os.environ.get("RANK", "0"))
        _state = _State(monitor_from_environment("slime", rank=rank, can=CAN))
    return _state


def reset() -> None:
    """Forget everything, and read the environment anew at the next call."""
    global _state
    _state = None


def tis(
    *,
    args: Any,
    pg_loss: Any,
    train_log_probs: Sequence[Any],
    rollout_log_probs: Sequence[Any],
    loss_masks: Sequence[Any],
    **kwargs: Any,
) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """slime's ``custom_tis_function``: (pg_loss, masks, per-token metrics ``[tokens]``).

    The importance sampling is left to the function that would have run: see ``INNER``.
    """
    import torch

    state = _get_state()
    inner = _inner(args)
    call = {"args": args, "pg_loss": pg_loss, "train_log_probs": train_log_probs,
            "rollout_log_probs": rollout_log_probs, "loss_masks": loss_masks, **kwargs}  # fmt: skip
    loss, masks, metrics = inner(**call) if inner else (pg_loss, loss_masks, {})
    if state.monitor is None:
        return loss, masks, metrics
    state.trainer += [plain_array(x) for x in train_log_probs]
    state.sampler += [plain_array(x) for x in rollout_log_probs]
    state.masks += [plain_array(x) for x in loss_masks]
    gap = torch.cat([p - q for p, q in zip(train_log_probs, rollout_log_probs, strict=True)])
    metrics = {**metrics, "mismatch_abs_dlp": gap.abs(), "mismatch_k3": gap.exp() - gap - 1}
    if state.last is not None and state.last.asks("mask"):
        bad = _bad(state.monitor, train_log_probs, rollout_log_probs, loss_masks)
        masks = [m * 0 if b else m for m, b in zip(masks, bad, strict=True)]
    return loss, masks, metrics


def before_train_step(
    args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any
) -> None:
    """slime's hook before a step: judges the step before it. Raises StopTraining for ``stop``."""
    state = _get_state()
    if state.monitor is None or not state.trainer:
        return
    monitor, step = state.monitor, state.steps
    state.last = monitor.observe_from(
        lambda: _batch(state.trainer, state.sampler, state.masks, step), step=step
    )
    state.steps += 1
    state.trainer, state.sampler, state.masks = [], [], []
    if state.last.asks("stop"):
        monitor.try_report()
        raise StopTraining(
            "the contract asks to stop: " + "; ".join(state.last.reasons), where=f"step {step}"
        )


def log_rollout(
    rollout_id: int, args: Any, samples: Sequence[Any], rollout_extra_metrics: Any, time: float
) -> bool:
    """slime's rollout log hook: records the samples. False: slime's own log goes on."""
    record = os.environ.get("MISMATCH_AUDIT_RECORD")
    if record and os.environ.get("MISMATCH_AUDIT_CONTRACT"):
        header = Header(
            framework="slime",
            format="live",
            lacks={"trainer_logprob": "the rollout process has no log-probs of the trainer"},
        )
        record_step(Path(record) / "sampler", batch_of(samples, rollout_id), header, rollout_id)
    return False


def batch_of(samples: Sequence[Any], rollout_id: int) -> TokenBatch:
    """slime's Sample objects (or their ``to_dict()``): the sampler's side with its versions."""
    rows = [s if isinstance(s, dict) else vars(s) for s in samples]
    versions = [[int(v) for v in row.get("weight_versions") or []] for row in rows]
    cached = [(row.get("prefix_cache_info") or {}) for row in rows]
    infos = [c if isinstance(c, dict) else vars(c) for c in cached]
    return from_sequences(
        [row["tokens"] for row in rows],
        [len(row["tokens"]) - int(row["response_length"]) for row in rows],
        tokens={
            "sampler_logprob": [row.get("rollout_log_probs") for row in rows],
            "loss_mask": [
                row.get("loss_mask") or [1] * int(row["response_length"]) for row in rows
            ],
        },
        scalars={
            "framework": "slime",
            "step": rollout_id,
            "group_id": [str(row.get("group_index")) for row in rows],
            "sample_id": [f"{rollout_id}-{row.get('index')}" for row in rows],
            "weights_version_min": [min(v, default=None) for v in versions],
            "weights_version_max": [max(v, default=None) for v in versions],
            "num_cached_tokens": [info.get("cached_tokens") for info in infos],
            "finish_reason": [_status(row.get("status")) for row in rows],
        },
        source=f"slime rollout {rollout_id}",
    )


def _status(status: Any) -> str | None:
    value = getattr(status, "value", status)
    return {"completed": "stop", "truncated": "length", "aborted": "abort"}.get(str(value))


def _batch(
    trainer: Sequence[Any], sampler: Sequence[Any], masks: Sequence[Any], step: int
) -> TokenBatch:
    """Responses without tokens or prompts: each is a prompt of its own."""
    return from_sequences(
        [np.zeros(len(x), dtype=np.int64) for x in trainer],
        [0] * len(trainer),
        tokens={"trainer_logprob": trainer, "sampler_logprob": sampler, "loss_mask": masks},
        scalars={"framework": "slime", "step": step},
        source=f"slime step {step}",
    )


def _bad(
    monitor: Monitor, trainer: Sequence[Any], sampler: Sequence[Any], masks: Sequence[Any]
) -> list[bool]:
    """Sequences of a micro-batch that break the promises by themselves."""
    p, q, m = ([plain_array(x) for x in column] for column in (trainer, sampler, masks))
    batch = _batch(p, q, m, 0)
    return [bool(b) for b in monitor.bad_sequences(batch)]


def _inner(args: Any) -> Any:
    path = os.environ.get(INNER, "")
    if not path:
        if not getattr(args, "use_tis", False):
            return None
        path = "slime.backends.megatron_utils.loss.vanilla_tis_function"
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"no function {path!r}: {error}", where=INNER, fix="give module.function"
        ) from error
