"""From a model and a prompt file to the bench that faults are put into."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kernel_contracts.errors import InputError
from mismatch_audit.identity import model_files
from mismatch_audit.programs.reference import TransformersReference
from mismatch_audit.prompts import encode_prompts, load_prompts
from mismatch_audit.sample_model import resolve_model
from mismatch_audit.selftest.bench import Bench, short_prompts
from mismatch_audit.settings import ReferenceSettings


def prepare_bench(
    model: str,
    prompts: Path,
    *,
    limit: int,
    max_tokens: int,
    most: int,
    seed: int,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> tuple[Bench, int]:
    """(bench on ``limit`` prompts of at most ``most`` tokens, how many were too long).

    Raises InputError where no prompt is short enough.
    """
    from transformers import AutoTokenizer

    written = load_prompts(prompts)
    progress("load", 0, 2)
    folder = model_files(resolve_model(model))
    reference = TransformersReference(str(folder), ReferenceSettings())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    context = reference.model.config.get_text_config().max_position_embeddings
    encoded = encode_prompts(written, tokenizer, context, max_tokens + 1)
    kept, too_long = short_prompts(encoded, most, limit)
    if not kept:
        raise InputError(
            f"no prompt has at most {most} tokens",
            where=str(prompts),
            fix="raise --max-prompt-tokens",
        )
    progress("texts", 1, 2)
    return Bench(reference, kept, max_tokens=max_tokens, seed=seed), too_long
