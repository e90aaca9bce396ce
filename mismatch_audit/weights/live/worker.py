"""The process of an in-process engine for weight audits: the audit's own worker and more."""

from __future__ import annotations

import os
import sys
from typing import Any

from mismatch_audit.programs.vllm_worker import Worker, serve

TOP = 20


class WeightWorker(Worker):
    """Operations on weights. Tensors travel as files, as in the worker that this extends."""

    def op_rpc(self, method: str, args: list[Any]) -> dict[str, Any]:
        """A method of the worker extension, on every rank."""
        if not method.startswith("audit_weights_"):
            raise ValueError(f"{method!r} is no method of the weight extension")
        return {"results": self.llm.collective_rpc(method, args=tuple(args))}

    def op_version(self) -> dict[str, Any]:
        get = getattr(self.llm, "get_weight_version", None)
        return {"version": get() if get is not None else None}

    def op_set_version(self, version: str) -> dict[str, Any]:
        self.llm.update_weight_version(version)
        return {}

    def op_flush(self) -> dict[str, Any]:
        return {"flushed": bool(self.llm.reset_prefix_cache())}

    def op_logprobs(self, sequences: list[list[int]]) -> dict[str, Any]:
        """Teacher-forced log-probs of tokens 1.. ; prompt log-probs never read the cache."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=0,
            skip_reading_prefix_cache=True,
        )  # fmt: skip
        prompts = [{"prompt_token_ids": ids} for ids in sequences]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return {
            "logprobs": [
                [output.prompt_logprobs[i][ids[i]].logprob for i in range(1, len(ids))]
                for ids, output in zip(sequences, outputs, strict=True)
            ]
        }

    def op_next(self, prompts: list[list[int]], use_cache: bool) -> dict[str, Any]:
        """One request at a time, so that each may find what the one before it left."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1, temperature=0.0, detokenize=False, logprobs=TOP,
            skip_reading_prefix_cache=not use_cache,
        )  # fmt: skip
        tokens = []
        for ids in prompts:
            output = self.llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0]
            top = output.outputs[0].logprobs[0]
            tokens.append(
                {
                    "top": {str(token): entry.logprob for token, entry in top.items()},
                    "cached": output.num_cached_tokens or 0,
                }
            )
        return {"tokens": tokens}


if __name__ == "__main__":
    code = serve(WeightWorker())
    sys.stderr.flush()
    os._exit(code)
