"""``audit run --gradient``: the policy-gradient bias of a run's rollouts, per slice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pandas as pd

from kernel_contracts.slices import resolve
from kernel_contracts.verdict import BiasEstimate, Evidence
from mismatch_audit.prepare import Run
from mismatch_audit.programs.base import Sequence_


def measured(run: Run, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """``{"rows": [...], "estimates": {slice: ...}, ...}``, kept in the run's folder."""
    if (known := run.folder.cached_json("gradient")) is not None:
        return dict(known)
    with run.timed("gradient"):
        result = _measure(run, progress)
    return dict(run.folder.cache_json("gradient", result))


def with_gradient(evidence: Evidence, result: dict[str, Any]) -> Evidence:
    """The evidence with what the verdicts judge: slice -> both ratios."""
    relative, noise = (
        {name: BiasEstimate(**value) for name, value in result[kept].items()}
        for kept in ("estimates", "noise_estimates")
    )
    return replace(evidence, gradient=relative, gradient_noise=noise)


def _measure(run: Run, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    from mismatch_audit.gradient import measure_gradient, rollout_advantages
    from mismatch_audit.programs.reference import TransformersReference

    tokens, sequences = run.folder.tables()
    decode = tokens[tokens["path"] == "decode"].sort_values(["sequence_id", "position"])
    rows = sequences.to_dict("records")
    metadata = {p.id: p.metadata for p in run.prompts}
    rollouts = [
        Sequence_(r["sequence_id"], tuple(map(int, r["token_ids"])), int(r["prompt_length"]))
        for r in rows
    ]
    advantages = rollout_advantages(
        [s.sequence_id for s in rollouts],
        [run.tokenizer.decode(s.response, skip_special_tokens=True) for s in rollouts],
        [s.n_response for s in rollouts],
        [metadata[r["prompt_id"]] for r in rows],
        run.settings.sampling.max_tokens,
    )
    reference = TransformersReference(
        run.facts["reference"]["model"],
        run.settings.reference,
        trust=run.settings.trust_remote_code,
    )
    report = measure_gradient(
        reference,
        rollouts,
        _logprobs(decode, "engine_logprob"),
        _logprobs(decode, "reference_logprob"),
        advantages.advantage,
        _slices(run, decode),
        prompt_of={r["sequence_id"]: r["prompt_id"] for r in rows},
        seed=run.contract.seed,
        alpha=run.contract.alpha,
        progress=progress,
    )
    return {
        "rows": report.rows(),
        "estimates": {name: asdict(value) for name, value in report.estimates.items()},
        "noise_estimates": {n: asdict(value) for n, value in report.noise_estimates.items()},
        "left_out": report.left_out,
        "rewards": {"checked": advantages.checked, "neutral": advantages.neutral},
    }


def _logprobs(decode: pd.DataFrame, column: str) -> dict[str, np.ndarray[Any, Any]]:
    return {
        str(name): part[column].to_numpy(dtype=np.float64)
        for name, part in decode.groupby("sequence_id", sort=True)
    }


def _slices(run: Run, decode: pd.DataFrame) -> dict[str, set[Any]]:
    """Slices that hold whole prompts; a slice of single tokens would need passes of its own."""
    metadata = pd.DataFrame([{"prompt_id": p.id, **p.metadata} for p in run.prompts])
    found: dict[str, set[Any]] = {}
    for one in resolve(run.contract, decode, metadata):
        ids = decode["prompt_id"]
        inside = set(ids[one.mask])
        if inside and not inside & set(ids[~one.mask]):
            found[one.name] = inside
    return found
