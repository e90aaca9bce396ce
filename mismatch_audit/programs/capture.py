"""vLLM worker extension: keep the final hidden states of the rows that are being audited.

Requests carry ``SamplingParams.extra_args = {"audit_key": id, "audit_start": first_row}``. The
hooks sit outside the model's forward, next to the code that computes prompt log-probs, so compiled
graphs are untouched and an untagged request costs a dictionary look-up. Works on vLLM's V1 runner
(CPU, and where Triton is missing) and V2 runner (GPU). The hooked methods are internals: the
engine's self-check at the start of each run compares captured rows with public log-probs, so a
vLLM that moved them fails loudly instead of giving wrong rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_KEY, _START = "audit_key", "audit_start"


class _Store:
    """Captured rows: per key, (position of the first row, rows)."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[int, torch.Tensor]]] = {}
        self.tags: dict[str, tuple[str, int]] = {}  # V2: request id -> tag

    def keep(self, tag: tuple[str, int], start: int, rows: torch.Tensor) -> None:
        key, first = tag
        skip = max(first - start, 0)
        if skip < rows.shape[0]:
            self.rows.setdefault(key, []).append((start + skip, rows[skip:].clone()))


def _tag(sampling_params: Any) -> tuple[str, int] | None:
    extra = getattr(sampling_params, "extra_args", None) or {}
    return (str(extra[_KEY]), int(extra.get(_START, 0))) if _KEY in extra else None


def _v1_rows(
    runner: Any, scheduled: dict[str, int]
) -> Iterator[tuple[tuple[str, int], int, int, int]]:
    """(tag, position of the first row, offset in the batch, rows) of every tagged request."""
    for request_id, count in scheduled.items():
        request = runner.requests.get(request_id)
        tag = _tag(request.sampling_params) if request is not None else None
        if tag is not None:
            index = runner.input_batch.req_id_to_index[request_id]
            offset = int(runner.query_start_loc.np[index])
            yield tag, int(request.num_computed_tokens), offset, count


class CaptureExtension:
    """Methods that vLLM adds to its worker class (``worker_extension_cls``)."""

    model_runner: Any
    _audit_runner: str

    def audit_hook(self) -> str:
        """Install the hooks once; returns ``"v1"`` or ``"v2"``."""
        runner = self.model_runner
        if hasattr(self, "_audit_runner"):
            return self._audit_runner
        self._audit_store: _Store | None = None
        if hasattr(runner, "_get_prompt_logprobs_dict"):
            self._hook_v1(runner)
            self._audit_runner = "v1"
        elif hasattr(runner, "prompt_logprobs_worker") and hasattr(runner, "sample"):
            if getattr(runner, "batch_sharder", None) is not None:
                raise RuntimeError("mismatch-audit: sharded sampling reorders rows; switch it off")
            self._hook_v2(runner)
            self._audit_runner = "v2"
        else:
            raise RuntimeError("mismatch-audit: this vLLM's model runner has no known hook point")
        return self._audit_runner

    def _hook_v1(self, runner: Any) -> None:
        original = runner._get_prompt_logprobs_dict

        def hook(hidden: torch.Tensor, scheduled: dict[str, int]) -> Any:
            if self._audit_store is not None:
                for tag, start, offset, count in _v1_rows(runner, scheduled):
                    self._audit_store.keep(tag, start, hidden[offset : offset + count])
            return original(hidden, scheduled)

        runner._get_prompt_logprobs_dict = hook

    def _hook_v2(self, runner: Any) -> None:
        prompts = runner.prompt_logprobs_worker
        original_add, original_sample = prompts.add_request, runner.sample

        def add(request_id: str, index: int, params: Any) -> Any:
            tag = _tag(params)
            if tag is not None and self._audit_store is not None:
                self._audit_store.tags[request_id] = tag
            return original_add(request_id, index, params)

        def sample(hidden: torch.Tensor, batch: Any, grammar: Any) -> Any:
            store = self._audit_store
            if store is not None and store.tags:
                for i, request_id in enumerate(batch.req_ids):
                    tag = store.tags.get(request_id)
                    if tag is not None:
                        a, b = (int(batch.query_start_loc_np[j]) for j in (i, i + 1))
                        store.keep(tag, int(batch.positions[a]), hidden[a:b])
            return original_sample(hidden, batch, grammar)

        prompts.add_request = add
        runner.sample = sample

    def audit_begin(self) -> str:
        """Start to keep rows of tagged requests."""
        kind = self.audit_hook()
        self._audit_store = _Store()
        return kind

    def audit_end(self, path: str) -> dict[str, Any]:
        """Write kept rows to ``path`` (safetensors: ``<key>`` [n, H], ``<key>/pos`` [n])."""
        store, self._audit_store = self._audit_store, None
        if getattr(self, "rank", 0) != 0 or store is None:  # hidden states are replicated over TP
            return {}
        out: dict[str, torch.Tensor] = {}
        for key, parts in store.rows.items():
            parts.sort(key=lambda part: part[0])
            rows = torch.cat([part[1] for part in parts]).cpu().contiguous()
            at = [torch.arange(start, start + block.shape[0]) for start, block in parts]
            out[key], out[f"{key}/pos"] = rows, torch.cat(at)
        if out:
            save_file(out, path)
        return {
            "keys": len(store.rows),
            "rows": sum(v.shape[0] for k, v in out.items() if "/" not in k),
        }

    def audit_head(self, path: str) -> dict[str, Any]:
        """Write the head that the engine applies, read through the engine: identity rows through
        ``compute_logits`` give W^T exactly, whatever packing the kernel uses."""
        model = self.model_runner.get_model()
        config = self.model_runner.model_config
        width, dtype = config.get_hidden_size(), config.dtype
        eye = torch.eye(width, dtype=dtype, device=self.model_runner.device)
        parts = []
        with torch.inference_mode():
            for at in range(0, width, 256):
                logits = model.compute_logits(eye[at : at + 256].contiguous())
                if logits is not None:
                    parts.append(logits.cpu())
        if not parts:
            return {}
        weight = torch.cat(parts).t().contiguous()
        save_file({"weight": weight}, path)
        return {"shape": list(weight.shape), "dtype": str(weight.dtype).removeprefix("torch.")}

    def audit_logits(self, source: str, path: str) -> int:
        """Apply the engine's own head to the hidden states in ``source``; logits to ``path``."""
        model, device = self.model_runner.get_model(), self.model_runner.device
        out: dict[str, torch.Tensor] = {}
        with torch.inference_mode():
            for key, hidden in load_file(source).items():
                logits = model.compute_logits(hidden.to(device))
                if logits is not None:
                    out[key] = logits.cpu().contiguous()
        if out:
            save_file(out, path)
        return sum(v.shape[0] for v in out.values())

    def audit_perturb(self, scale: float, seed: int) -> int:
        """Fault injection: reload this engine's checkpoint with multiplicative noise on every
        matrix of the layers, as a stale copy of the weights would have."""
        from vllm.model_executor.model_loader import get_model_loader

        loader: Any = get_model_loader(self.model_runner.vllm_config.load_config)
        generator = torch.Generator().manual_seed(seed)
        changed = 0

        def noisy() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal changed
            config, model = self.model_runner.model_config, self.model_runner.get_model()
            for name, weight in loader.get_all_weights(config, model):
                if weight.ndim == 2 and "layers" in name:
                    noise = torch.randn(weight.shape, generator=generator)
                    weight = (weight.float() * (1 + scale * noise)).to(weight.dtype)
                    changed += 1
                yield name, weight

        self.model_runner.reload_weights(weights_iterator=noisy())
        return changed

    def audit_facts(self) -> dict[str, Any]:
        """What this worker really runs, read from live objects rather than from the request."""
        runner = self.model_runner
        model = runner.get_model()
        methods: dict[str, int] = {}
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if method is not None and hasattr(module, "input_size"):
                methods[type(method).__name__] = methods.get(type(method).__name__, 0) + 1
        backends = sorted(
            {
                type(getattr(module, "impl", None)).__name__
                for module in model.modules()
                if getattr(module, "impl", None) is not None and hasattr(module, "kv_cache_dtype")
            }
        )
        caches = sorted(
            {
                str(module.kv_cache_dtype)
                for module in model.modules()
                if hasattr(module, "kv_cache_dtype") and hasattr(module, "impl")
            }
        )
        return {
            "runner": self.audit_hook(),
            "architecture": type(model).__name__,
            "dtype": str(runner.model_config.dtype).removeprefix("torch."),
            "linear_methods": methods,
            "attention": backends,
            "kv_cache_dtype": caches,
            "device": str(runner.device),
        }
