"""Everything that decides a run's numbers, read and checked before any program starts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kernel_contracts.contract import Contract
from kernel_contracts.errors import InputError
from kernel_contracts.loading import contract_digest, load_contract
from mismatch_audit import identity
from mismatch_audit.programs.base import Sampling
from mismatch_audit.prompts import (
    EncodedPrompt,
    encode_prompts,
    load_prompts,
    prompts_digest,
    spread,
)
from mismatch_audit.rewards import validate_checks
from mismatch_audit.rundir import STATE, RunDirectory, read_json
from mismatch_audit.sample_model import resolve_model
from mismatch_audit.settings import RunSettings, parse_settings


@dataclass
class Run:
    """One audit under way: what it was told, where it writes, how long each stage took."""

    settings: RunSettings
    contract: Contract
    prompts: list[EncodedPrompt]
    tokenizer: Any
    folder: RunDirectory
    facts: dict[str, dict[str, Any]]
    timings: dict[str, float] = field(default_factory=dict)
    started: str = field(default_factory=lambda: now())

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of a block to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.timings[stage] = self.timings.get(stage, 0.0) + time.perf_counter() - start

    @property
    def sampling(self) -> Sampling:
        return Sampling(**self.settings.sampling.model_dump())

    def prefill_ids(self) -> set[str]:
        """Prompts that are scored on the prefill path too."""
        limit = self.settings.probes.prefill_prompts
        chosen = self.prompts if limit is None else self.prompts[:limit]
        return {p.id for p in chosen}


def now() -> str:
    """UTC time, ISO 8601, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def prepare(settings: RunSettings, out: Path, *, resume: bool) -> Run:
    """Read everything that can be wrong before any program starts.

    Raises InputError for bad prompts, contract, model or folder; NotComparableError when the
    contract was written for another pair than the settings ask for.
    """
    inputs = _read(settings)
    folder = RunDirectory(out, inputs.pop("spec"), resume=resume)
    return Run(settings=settings, folder=folder, **inputs)


def reopen(path: Path, contract: str) -> Run:
    """A finished run under another contract: its tables do not depend on the one it ran with.

    Raises InputError when the folder holds no run, or its prompts or weights have changed since.
    """
    state = read_json(path / STATE) if (path / STATE).exists() else None
    if state is None:
        raise InputError("no run of ours here", where=str(path), fix="audit run ... --out DIR")
    settings = parse_settings({**state["spec"]["settings"], "contract": contract}, str(path))
    inputs = _read(settings)
    spec = inputs.pop("spec")
    changed = [k for k in ("prompts", "weights") if spec[k] != state["spec"][k]]
    if changed:
        raise InputError(
            f"{' and '.join(changed)} changed since the run", where=str(path), fix="run it again"
        )
    return Run(settings=settings, folder=RunDirectory(path, state["spec"], resume=True), **inputs)


def _read(settings: RunSettings) -> dict[str, Any]:
    from transformers import AutoConfig, AutoTokenizer

    contract = load_contract(settings.contract)
    _check_requested(contract, settings)
    prompts = spread(load_prompts(settings.prompts), settings.limit)
    validate_checks(prompts)
    model = identity.model_files(resolve_model(settings.model))
    served = model
    if settings.engine.model is not None:
        served = identity.model_files(resolve_model(settings.engine.model))
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=settings.trust_remote_code)
    config = AutoConfig.from_pretrained(model, trust_remote_code=settings.trust_remote_code)
    text = config.get_text_config()
    encoded = encode_prompts(
        prompts,
        tokenizer,
        text.max_position_embeddings,
        settings.sampling.max_tokens,
        vocab_size=text.vocab_size,
    )
    weights = identity.weights_digest(model)
    facts: dict[str, dict[str, Any]] = {
        side: {
            "model": str(folder),
            "weights": weights if folder == model else identity.weights_digest(folder),
            "tokenizer": identity.tokenizer_digest(tokenizer if folder == model else
                AutoTokenizer.from_pretrained(folder)),
        }
        for side, folder in (("reference", model), ("engine", served))
    }  # fmt: skip
    facts["engine"]["unrepresentable_weights"] = identity.unrepresentable_share(
        served, settings.engine.dtype
    )
    spec = {
        "settings": settings.model_dump(mode="json"),
        "contract": contract_digest(contract),
        "prompts": prompts_digest(encoded),
        "weights": {side: f["weights"] for side, f in facts.items()},
    }
    return {
        "contract": contract,
        "prompts": encoded,
        "tokenizer": tokenizer,
        "facts": facts,
        "spec": spec,
    }


def _check_requested(contract: Contract, settings: RunSettings) -> None:
    """A contract for another engine or dtype is refused before minutes are spent on it."""
    asked = {
        "reference": {"dtype": settings.reference.dtype, "program": "transformers"},
        "engine": {"dtype": settings.engine.dtype, "program": settings.engine.program},
    }
    for side, facts in asked.items():
        promised = getattr(contract.pair, side)
        known = {name: value for name, value in promised.items() if name in facts}
        identity.check_facts(side, known, facts, settings.contract)
