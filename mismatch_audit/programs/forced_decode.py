"""Teacher-forced decode on vLLM's V1 runner, by its public custom-logits-processor interface.

Raw log-probs are computed before processors run, so what the engine returns is its own opinion of
the forced token. The V2 runner has trace replay for this and never loads the class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class ForcedDecode(AdapterLogitsProcessor):
    """``SamplingParams.extra_args = {"audit_forced": [ids]}`` decides every next token."""

    @classmethod
    def validate_params(cls, params: Any) -> None:
        """Anything goes: untagged requests are left alone."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(
        self, params: Any
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        forced = (params.extra_args or {}).get("audit_forced")
        if not forced:
            return None

        def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            step = len(output_ids)
            if step < len(forced):
                logits.fill_(float("-inf"))
                logits[forced[step]] = 0.0
            return logits

        return process
