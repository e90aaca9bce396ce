"""The engine's process: vLLM behind a line protocol on stdin and stdout.

One JSON object a line in, one out: ``{"op": ..., ...}`` -> ``{"ok": true, ...}`` or
``{"ok": false, "error": ...}``. Tensors travel as safetensors files whose paths are in the
messages. Everything that vLLM prints goes to stderr, which the auditor keeps as ``engine.log``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from typing import Any

from mismatch_audit.programs.vllm_facts import config_facts

_PR_SET_PDEATHSIG = 1


class Worker:
    """Handlers of the protocol's operations, over one in-process ``vllm.LLM``."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.runner = ""

    def op_load(self, model: str, args: dict[str, Any]) -> dict[str, Any]:
        import vllm

        self.llm = vllm.LLM(model=model, **args)
        self.runner = self.llm.collective_rpc("audit_hook")[0]
        return {"facts": self.op_facts()["facts"]}

    def op_facts(self) -> dict[str, Any]:
        import torch
        import vllm

        facts = {
            "program": "vllm",
            "version": vllm.__version__,
            "torch": torch.__version__,
            **self.llm.collective_rpc("audit_facts")[0],
            **config_facts(self.llm.llm_engine.vllm_config),
        }
        return {"facts": facts}

    def _run(self, prompts: list[list[int]], params: list[Any], out: str) -> list[Any]:
        self.llm.collective_rpc("audit_begin")
        outputs = self.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
        self.llm.collective_rpc("audit_end", args=(out,))
        return list(outputs)

    def op_generate(
        self, requests: list[dict[str, Any]], out: str, sampling: dict[str, Any]
    ) -> dict[str, Any]:
        """Sample responses; per request its ids, the sampler's own log-probs, finish reason."""
        from vllm import SamplingParams

        params = []
        for request in requests:
            extra: dict[str, Any] = {
                "audit_key": request["key"],
                "audit_start": len(request["prompt"]) - 1,
            }
            options = dict(sampling, seed=request["seed"])
            forced = request.get("forced")
            if forced:
                options.update(max_tokens=len(forced), temperature=0.0, ignore_eos=True)
                if self.runner == "v2":
                    options["trace_decode_token_ids"] = forced
                else:
                    extra["audit_forced"] = forced
            params.append(
                SamplingParams(
                    **options,
                    logprobs=0,
                    detokenize=False,
                    # Rollouts read the prefix cache as in serving; a probe must not.
                    skip_reading_prefix_cache=bool(forced),
                    extra_args=extra,
                )
            )
        results = []
        for output in self._run([r["prompt"] for r in requests], params, out):
            best = output.outputs[0]
            ids = list(best.token_ids)
            results.append(
                {
                    "token_ids": ids,
                    "logprobs": [
                        entry[token].logprob
                        for entry, token in zip(best.logprobs, ids, strict=True)
                    ],
                    "finish_reason": best.finish_reason or "",
                    "n_cached": output.num_cached_tokens or 0,
                }
            )
        return {"results": results}

    def op_score(self, requests: list[dict[str, Any]], out: str) -> dict[str, Any]:
        """Prefill whole sequences; per request the engine's own log-probs of the response."""
        import numpy as np
        from vllm import SamplingParams

        params = []
        for request in requests:
            ids, start = request["token_ids"], request["start"]
            options: dict[str, Any] = {}
            if self.runner == "v2":
                # Exactly one column a row, and only response rows: the cheap public route there.
                options["prompt_logprob_token_ids"] = np.asarray(ids[start:], dtype=np.int64)[
                    :, None
                ]
                options["prompt_logprob_start"] = start - 1
            else:
                options["prompt_logprobs"] = 0
            params.append(
                SamplingParams(
                    max_tokens=1,
                    temperature=0.0,
                    detokenize=False,
                    skip_reading_prefix_cache=True,
                    extra_args={"audit_key": request["key"], "audit_start": start - 1},
                    **options,
                )
            )
        results = []
        for request, output in zip(
            requests, self._run([r["token_ids"] for r in requests], params, out), strict=True
        ):
            ids, start = request["token_ids"], request["start"]
            if list(output.prompt_token_ids) != ids:
                raise RuntimeError(f"the engine scored other tokens than sent for {request['key']}")
            if self.runner == "v2":
                reported = [float(v) for v in np.asarray(output.prompt_token_id_logprobs)[:, 0]]
            else:
                reported = [
                    output.prompt_logprobs[i][ids[i]].logprob for i in range(start, len(ids))
                ]
            results.append({"logprobs": reported, "n_cached": output.num_cached_tokens or 0})
        return {"results": results}

    def op_score_top(self, request: dict[str, Any], out: str, top: int) -> dict[str, Any]:
        """One sequence through public prompt log-probs: a row is ``[[token, log-prob], ...]``."""
        from vllm import SamplingParams

        ids, start = request["token_ids"], request["start"]
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            prompt_logprobs=top,
            skip_reading_prefix_cache=True,
            extra_args={"audit_key": request["key"], "audit_start": start - 1},
        )
        output = self._run([ids], [params], out)[0]
        return {"top": [_entries(output.prompt_logprobs[i]) for i in range(start, len(ids))]}

    def op_generate_top(
        self, requests: list[dict[str, Any]], sampling: dict[str, Any], top: int
    ) -> dict[str, Any]:
        """Responses with the public top log-probs of each step, nothing captured."""
        from vllm import SamplingParams

        params = [
            SamplingParams(**dict(sampling, seed=r["seed"]), logprobs=top, detokenize=False)
            for r in requests
        ]
        prompts = [{"prompt_token_ids": r["prompt"]} for r in requests]
        results = []
        for output in self.llm.generate(prompts, params, use_tqdm=False):
            best = output.outputs[0]
            results.append(
                {
                    "token_ids": list(best.token_ids),
                    "rows": [_entries(row) for row in best.logprobs],
                    "finish_reason": best.finish_reason or "",
                    "n_cached": output.num_cached_tokens or 0,
                }
            )
        return {"results": results}

    def op_score_rows(self, requests: list[dict[str, Any]], top: int) -> dict[str, Any]:
        """Prefill whole sequences; per request the public top log-probs of its response rows."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=top,
            skip_reading_prefix_cache=True,
        )  # fmt: skip
        prompts = [{"prompt_token_ids": r["token_ids"]} for r in requests]
        results = []
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        for request, output in zip(requests, outputs, strict=True):
            rows = output.prompt_logprobs[request["start"] :]
            results.append(
                {"rows": [_entries(row) for row in rows], "n_cached": output.num_cached_tokens or 0}
            )
        return {"results": results}

    def op_plain(self, requests: list[dict[str, Any]], sampling: dict[str, Any]) -> dict[str, Any]:
        """The same requests with no audit at all: no tags, no log-probs. For benchmarks."""
        from vllm import SamplingParams

        params = [
            SamplingParams(**dict(sampling, seed=r["seed"]), detokenize=False, ignore_eos=True,
                           skip_reading_prefix_cache=True)
            for r in requests
        ]  # fmt: skip
        prompts = [{"prompt_token_ids": r["prompt"]} for r in requests]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return {"tokens": sum(len(o.outputs[0].token_ids) for o in outputs)}

    def op_head(self, out: str) -> dict[str, Any]:
        return {"head": self.llm.collective_rpc("audit_head", args=(out,))[0]}

    def op_logits(self, source: str, out: str) -> dict[str, Any]:
        return {"rows": self.llm.collective_rpc("audit_logits", args=(source, out))[0]}

    def op_reset(self) -> dict[str, Any]:
        self.llm.reset_prefix_cache()
        return {}

    def op_perturb(self, scale: float, seed: int) -> dict[str, Any]:
        changed = self.llm.collective_rpc("audit_perturb", args=(scale, seed))[0]
        self.llm.reset_prefix_cache()
        return {"changed": changed}


def _entries(row: dict[int, Any]) -> list[tuple[int, float]]:
    return [(token, entry.logprob) for token, entry in row.items()]


def _die_with_parent() -> None:
    """A killed auditor must not leave an engine behind that holds the device (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(worker: Worker | None = None) -> int:
    """Answer operations until stdin closes."""
    _die_with_parent()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever vLLM prints must not break the protocol
    worker = worker or Worker()
    for line in sys.stdin:
        message = json.loads(line)
        operation = message.pop("op")
        if operation == "close":
            break
        try:
            reply = {"ok": True, **getattr(worker, f"op_{operation}")(**message)}
        except Exception as error:  # the one place where any failure becomes a message
            traceback.print_exc()
            reply = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
    return 0


if __name__ == "__main__":
    # vLLM's own teardown can hang on a CPU; nothing is left to save here.
    code = serve()
    sys.stderr.flush()
    os._exit(code)
