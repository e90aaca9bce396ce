"""A generation batch of TRL's GRPOTrainer as rows of the sequence table, and what holds for all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.schema import Header
from mismatch_audit.trainers.step import from_padded, plain_array

VISION = ("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes",
          "num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids",
          "image_position_ids")  # fmt: skip


def trainer_logprobs(trainer: Any, output: Mapping[str, Any]) -> Any:
    """``[B, T]`` of the trainer's own program at its temperature: TRL's where it computed them,
    else computed here, in the trainer's own micro-batches."""
    known = output.get("old_per_token_logps")
    if known is not None:
        return known
    import torch

    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    vision = {name: output[name] for name in VISION if name in output}
    with torch.no_grad():
        return trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, output["completion_ids"].size(1),
            batch_size=trainer.args.per_device_train_batch_size, **vision,
        )[0]  # fmt: skip


def batch_of(
    trainer: Any,
    output: Mapping[str, Any],
    *,
    served_version: int | None,
    engine_age: int,
    serial: int = 0,
    environment: Sequence[str | None] | None = None,
    cached: Sequence[int | None] = (),
    logprobs_mode: str | None = None,
) -> TokenBatch:
    """One call of ``_generate_and_score_completions`` as a batch of B sequences.

    served_version: the trainer's step whose weights the engine was given last; None where there is
    no separate engine to sync. serial: of the call: a step may make several. cached: of each
    request, prompt tokens from the prefix cache. environment: of each row of the data.
    """
    prompt_ids, prompt_mask = plain_array(output["prompt_ids"]), plain_array(output["prompt_mask"])
    ids, mask = plain_array(output["completion_ids"]), plain_array(output["completion_mask"])
    n, step = len(ids), int(trainer.state.global_step)
    groups = [
        hashlib.sha256(row[keep > 0].astype(np.int64).tobytes()).hexdigest()[:16]
        for row, keep in zip(prompt_ids, prompt_mask, strict=True)
    ]
    rank = int(trainer.accelerator.process_index)
    sampling = {
        name: getattr(trainer, name, None)
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    }
    override = getattr(trainer.args, "generation_kwargs", None) or {}
    sampling |= {k: v for k, v in override.items() if k in sampling}
    return from_padded(
        prompt_ids,
        prompt_mask,
        ids,
        mask,
        loss_mask=output.get("tool_mask"),
        tokens={
            "sampler_logprob": output.get("sampling_per_token_logps"),
            "trainer_logprob": trainer_logprobs(trainer, output),
            "ref_logprob": output.get("ref_per_token_logps"),
            "applied_weight": output.get("importance_sampling_ratio"),
        },
        scalars={
            "framework": "trl",
            "engine": "vllm" if getattr(trainer, "use_vllm", False) else "transformers",
            "step": step,
            "sample_id": [f"{step}-{rank}-{serial}-{i}" for i in range(n)],
            "group_id": groups,
            "weights_version_min": served_version,
            "weights_version_max": served_version,
            "trainer_version": step,
            "microbatch_rows": int(trainer.args.per_device_train_batch_size),
            "num_cached_tokens": _whole(cached, n),
            "logprobs_mode": logprobs_mode,
            "environment": environment,
            "finish_reason": _finish(ids, mask, trainer),
            "sequence_advantage": plain_array(output["advantages"]).reshape(n, -1).mean(axis=1),
            "engine_age": engine_age,
            **{k: v for k, v in sampling.items() if v is not None},
        },
        source=f"trl step {step}",
    )


def _whole(cached: Sequence[int | None], n: int) -> list[int | None] | None:
    """Only where there was one request a sequence; several turns give several."""
    return list(cached) if len(cached) == n and any(c is not None for c in cached) else None


def _finish(ids: Any, mask: Any, trainer: Any) -> list[str]:
    ends = set(np.atleast_1d(getattr(trainer, "eos_token_ids", ())).tolist())
    last = np.maximum(mask.sum(axis=1).astype(int) - 1, 0)
    return ["stop" if int(row[i]) in ends else "length" for row, i in zip(ids, last, strict=True)]


def header_of(trainer: Any, engine: Mapping[str, Any]) -> Header:
    """What holds for the whole run. engine: facts read from the running engine, if any."""
    config = trainer.model.config
    text = getattr(config, "get_text_config", lambda: config)()
    tokenizer = getattr(trainer, "_tokenizer", trainer.processing_class)
    correction = {
        name: getattr(trainer, name)
        for name in (
            "vllm_importance_sampling_correction",
            "vllm_importance_sampling_mode",
            "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_clip_min",
            "off_policy_mask_threshold",
        )
        if hasattr(trainer, name)
    }
    lacks = {} if getattr(trainer, "use_vllm", False) else {
        "sampler_logprob": "TRL records no log-probs of the sampler without use_vllm"
    }  # fmt: skip
    return Header(
        framework="trl",
        format="live",
        model=str(getattr(trainer.model, "name_or_path", "") or "") or None,
        eos_ids=tuple(int(i) for i in np.atleast_1d(getattr(trainer, "eos_token_ids", ()))),
        pad_id=getattr(tokenizer, "pad_token_id", None),
        vocab_size=getattr(text, "vocab_size", None),
        tied_head=bool(getattr(text, "tie_word_embeddings", False)),
        position_type="rotary" if getattr(text, "rope_parameters", None) else None,
        trainer_dtype=str(trainer.model.dtype).removeprefix("torch."),
        engine_dtype=engine.get("dtype"),
        engine_version=engine.get("version"),
        correction={**correction, "logprobs_mode": engine.get("logprobs_mode")},
        lacks=lacks,
    )
