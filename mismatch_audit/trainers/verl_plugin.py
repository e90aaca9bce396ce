"""verl: a plugin of its entry-point group ``verl.plugins``, with no change to verl.

verl loads it in every process when it is imported. It wraps
``verl.utils.debug.metrics.calculate_debug_metrics``, which verl's trainers call once a step with
both columns of log-probs, and adds ``mismatch/...`` to what they log. Settings are environment
variables (``mismatch_audit.trainers.environment``).

Actions: ``warn``, and ``stop``, which raises ``StopTraining``: the hook sees the batch after it was
written to where the actors read it, so it cannot mask. With ``bypass_mode`` verl never calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kernel_contracts.errors import AuditError
from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.trainers.environment import StopTraining, monitor_from_environment
from mismatch_audit.trainers.monitor import Monitor
from mismatch_audit.trainers.step import from_padded, plain_array

CAN = ("warn", "stop")


def batch_of(data: Any, step: int) -> TokenBatch:
    """A DataProto of either trainer: ``batch`` is a TensorDict, ``non_tensor_batch`` may be empty.

    Needs ``responses``, ``response_mask`` (the v1 trainer) or ``attention_mask`` (else the mask of
    the whole sequence). Without ``uid`` every sequence counts as a prompt of its own.
    """
    tensors = data.batch
    responses = plain_array(tensors["responses"])
    n, width = responses.shape
    attended = plain_array(tensors["attention_mask"]) if "attention_mask" in tensors else None
    trained = (
        plain_array(tensors["response_mask"])[:, -width:] if "response_mask" in tensors else None
    )
    mask = attended[:, -width:] if attended is not None else trained
    if mask is None:
        raise AuditError("neither response_mask nor attention_mask in the batch", where="verl")
    prompts = plain_array(tensors["prompts"]) if "prompts" in tensors else np.zeros((n, 0), int)
    prompt_mask = attended[:, : prompts.shape[1]] if attended is not None else np.ones_like(prompts)
    extra: Mapping[str, Any] = getattr(data, "non_tensor_batch", None) or {}
    versions = {
        column: _numbers(extra[name])
        for column, name in (
            ("weights_version_min", "min_global_steps"),
            ("weights_version_max", "max_global_steps"),
        )
        if name in extra
    }
    return from_padded(
        prompts,
        prompt_mask,
        responses,
        mask,
        loss_mask=trained,
        tokens={
            "sampler_logprob": _get(tensors, "rollout_log_probs"),
            "trainer_logprob": _get(tensors, "old_log_probs"),
            "ref_logprob": _get(tensors, "ref_log_prob"),
            "advantage": _get(tensors, "advantages"),
            "applied_weight": _get(tensors, "rollout_is_weights"),
        },
        scalars={
            "framework": "verl",
            "step": step,
            "trainer_version": step,
            "group_id": [str(u) for u in extra["uid"]] if "uid" in extra else None,
            **versions,
        },
        source=f"verl step {step}",
    )


def _get(tensors: Any, name: str) -> Any:
    return tensors[name] if name in tensors else None  # noqa: SIM401  (a TensorDict's get warns)


def _numbers(values: Any) -> list[int | None]:
    return [None if v is None else int(v) for v in values]


class Hook:
    """Stands in for ``calculate_debug_metrics``: the same call, the same result and more in it."""

    def __init__(self, original: Callable[[Any], dict[str, Any]], monitor: Monitor) -> None:
        self.original, self.monitor, self.calls = original, monitor, 0

    def __call__(self, data: Any) -> dict[str, Any]:
        metrics = dict(self.original(data))
        meta = getattr(data, "meta_info", None) or {}
        step = int(meta.get("global_steps", self.calls))
        self.calls += 1
        decision = self.monitor.observe_from(lambda: batch_of(data, step), step=step)
        metrics |= decision.metrics
        if decision.asks("stop"):
            self.monitor.try_report()
            raise StopTraining(
                "the contract asks to stop: " + "; ".join(decision.reasons), where=f"step {step}"
            )
        return metrics


def install(module: Any = None) -> Hook | None:
    """Wrap the function in its module (verl's own by default); None where no contract is set.

    Twice does no harm. verl swallows exceptions of plugins, so one is also logged as an error.
    """
    monitor = monitor_from_environment("verl", can=CAN)
    if monitor is None:
        return None
    if module is None:
        import verl.utils.debug.metrics as module
    current = module.calculate_debug_metrics
    hook = current if isinstance(current, Hook) else Hook(current, monitor)
    module.calculate_debug_metrics = hook
    return hook
