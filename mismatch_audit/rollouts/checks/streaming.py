"""The common part of the checks: which columns were seen, and what to say when they were not."""

from __future__ import annotations

from typing import Any, ClassVar

from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.checks.base import CheckResult, Severity
from mismatch_audit.rollouts.checks.view import TokenView, view
from mismatch_audit.rollouts.schema import Header

BOTH = ("sampler_logprob", "trainer_logprob")

HOW_TO_RECORD = {
    "sampler_logprob": "keep the engine's log-prob of every sampled token (vLLM: logprobs=0, "
    "logprobs_mode='processed_logprobs')",
    "trainer_logprob": "keep the trainer's own log-prob before the update (old_per_token_logps, "
    "old_log_probs); bypass modes that copy the sampler's are no evidence",
    "current_logprob": "keep the log-prob that the loss used",
    "rescore_logprob": "score the same tokens again with the engine's prompt_logprobs",
    "ref_logprob": "keep the log-prob of the initial (reference) model",
    "weights_version_max": "log the engine's weights version with every rollout",
    "trainer_version": "log the version of the weights that scored trainer_logprob",
    "num_cached_tokens": "log RequestOutput.num_cached_tokens",
    "n_left_pad": "log the trainer's left padding of every row",
    "engine_age": "log the weight updates since the engine started",
    "applied_weight": "log the importance weight that multiplied the loss",
    "microbatch_rows": "log the rows of the trainer's micro-batch",
    "routing_changed": "compare the engine's routed_experts with the trainer's",
    "environment": "log the environment's name with every rollout",
    "modality": "log 'text' or 'image' with every rollout",
    "finish_reason": "log the engine's finish_reason",
    "group_id": "log which prompt a rollout belongs to",
    "origin": "mark which tokens were sampled, forced, or came from a tool",
    "loss_mask": "log the loss mask",
    "run_id": "log a run id that changes when the job resumes",
    "engine": "log the engine and its version with every rollout",
    "step": "log the trainer's step",
    "turn_index": "log which turn a token belongs to",
}


class Streaming:
    """Base of the checks. ``see`` gets the batches that hold every column in ``needs``;
    ``judge`` is asked only when there was at least one."""

    code: str = ""
    title: str = ""
    needs: tuple[str, ...] = BOTH
    severity: Severity = "error"
    priority: int = 0
    remedy: str = ""
    optional: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        self.batches = 0
        self.absent: set[str] = set(self.needs)

    def update(self, batch: TokenBatch) -> None:
        tokens = view(batch)
        lacking = {name for name in self.needs if not tokens.has(name)}
        self.absent -= set(self.needs) - lacking
        if not lacking:
            self.batches += 1
            self.see(tokens)

    def finish(self, header: Header) -> list[CheckResult]:
        if not self.batches:
            return [self.unobserved(*sorted(self.absent or set(self.needs)), header=header)]
        return self.judge(header)

    def see(self, tokens: TokenView) -> None:
        raise NotImplementedError

    def judge(self, header: Header) -> list[CheckResult]:
        raise NotImplementedError

    # answers

    def clean(self, detail: str, evidence: list[dict[str, Any]] | None = None) -> CheckResult:
        return self._result("clean", detail, evidence or [])

    def found(self, detail: str, evidence: list[dict[str, Any]], **changes: Any) -> CheckResult:
        return self._result("found", detail, evidence, **changes)

    def too_little(self, detail: str) -> CheckResult:
        """The columns are there and the rows are not enough."""
        return self._result("unobserved", detail, [])

    def unobserved(self, *columns: str, header: Header | None = None) -> CheckResult:
        """Says which columns are missing, why the source lacks them, and how to record them."""
        lacks = header.lacks if header else {}
        parts = [
            f"needs {name}"
            + (f" (this source: {lacks[name]})" if name in lacks else "")
            + (f"; {HOW_TO_RECORD[name]}" if name in HOW_TO_RECORD else "")
            for name in columns
        ]
        return self._result("unobserved", ". ".join(parts), [])

    def _result(
        self, status: Any, detail: str, evidence: list[dict[str, Any]], **changes: Any
    ) -> CheckResult:
        values: dict[str, Any] = {
            "code": self.code,
            "title": self.title,
            "severity": self.severity,
            "remedy": self.remedy,
            "priority": self.priority,
        }
        values.update(changes)
        return CheckResult(
            status=status, detail=detail, evidence=[plain(row) for row in evidence], **values
        )


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """numpy scalars as Python's, floats rounded to 6 significant digits."""
    out = {}
    for key, value in row.items():
        value = value.item() if hasattr(value, "item") else value
        out[key] = float(f"{value:.6g}") if isinstance(value, float) else value
    return out
