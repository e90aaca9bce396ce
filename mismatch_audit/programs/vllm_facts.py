"""Facts that vLLM's own configuration tells: one list for the auditor's engine and for live ones,
so that a blessing of the one can be held against the other."""

from __future__ import annotations

import os
from typing import Any


def config_facts(config: Any) -> dict[str, Any]:
    """Of a ``VllmConfig``. Runs in vLLM's process."""
    model, cache = config.model_config, config.cache_config
    mode = model.logprobs_mode
    return {
        "logprobs_mode": str(getattr(mode, "value", mode)),
        "quantization": model.quantization,
        "head_dtype": str(getattr(model, "head_dtype", model.dtype)).removeprefix("torch."),
        "enforce_eager": bool(model.enforce_eager),
        "compilation_mode": str(getattr(config.compilation_config, "mode", "")),
        "tensor_parallel": int(config.parallel_config.tensor_parallel_size),
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "prefix_caching": bool(cache.enable_prefix_caching),
        "block_size": int(cache.block_size),
        "cache_dtype": str(cache.cache_dtype),
        "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT", "0"),
    }
