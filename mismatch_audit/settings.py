"""What a run is told: one YAML file or the same fields as options. Unknown keys are errors."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kernel_contracts.errors import InputError


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ReferenceSettings(_Strict):
    """The training-side program."""

    dtype: str = "float32"
    """Weights and compute dtype of the forward."""
    attn_implementation: str = "sdpa"
    """transformers' attention kernel: sdpa, eager, flash_attention_2, ..."""
    device: str = "auto"
    """auto takes CUDA when there is one."""
    token_budget: int = Field(2048, ge=1)
    """Padded tokens a micro-batch."""
    padding: Literal["right", "left"] = "right"


class EngineSettings(_Strict):
    """The serving-side program."""

    program: Literal["vllm"] = "vllm"
    dtype: str = "bfloat16"
    model: str | None = None
    """Serve another checkpoint than the reference's (its digest is compared)."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Passed to the engine as they are, for example kv_cache_dtype: fp8."""
    env: dict[str, str] = Field(default_factory=dict)
    inject: dict[Literal["stale_weights"], float] = Field(default_factory=dict)
    """Faults put into the engine on purpose, to test a contract: stale_weights: 0.02."""
    startup_timeout: float = Field(600, gt=0)
    """Seconds to wait for the engine to load."""
    rows: Literal["full", "topk"] = "full"
    """full: whole distributions, through captured hidden states. topk: only what the engine's
    public interface shows, so divergences become intervals."""
    top_logprobs: int = Field(20, ge=2, le=1000)
    """k of ``rows: topk``."""


class SamplingSettings(_Strict):
    """How rollouts are drawn from the engine."""

    max_tokens: int = Field(48, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    seed: int = 0


class ProbeSettings(_Strict):
    """Cheap questions that the runtime clauses ask. Zero prompts switches a probe off."""

    lone_prompts: int = Field(24, ge=0)
    """Prompts (the shortest) decoded again alone, teacher-forced, for batch invariance."""
    lone_tokens: int = Field(16, ge=1)
    prefill_prompts: int | None = Field(None, ge=0)
    """Prompts whose tokens are scored on the prefill path too; null is all of them."""
    repeat_prompts: int = Field(24, ge=0)
    """Sequences (the shortest) scored again by both programs: repetition, order, noise floors."""


class RunSettings(_Strict):
    """Everything that decides a run's numbers."""

    model: str = "sample"
    prompts: str
    contract: str
    limit: int | None = Field(None, ge=1)
    chunk: int = Field(32, ge=2)
    """Prompts generated together, and the unit that a resumed run repeats."""
    reference: ReferenceSettings = Field(default_factory=ReferenceSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    sampling: SamplingSettings = Field(default_factory=SamplingSettings)
    probes: ProbeSettings = Field(default_factory=ProbeSettings)
    trust_remote_code: bool = False


def _closest(key: str, model: type[BaseModel], path: tuple[Any, ...]) -> str:
    current: Any = model
    for part in path:
        field = getattr(current, "model_fields", {}).get(part)
        if field is None:
            return ""
        current = field.annotation
    near = difflib.get_close_matches(key, list(getattr(current, "model_fields", {})), n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def parse_settings(document: dict[str, Any], where: str) -> RunSettings:
    """RunSettings from plain data. Raises InputError naming every wrong field."""
    try:
        return RunSettings.model_validate(document)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            *parents, key = item["loc"] or ("",)
            field = ".".join(str(p) for p in item["loc"])
            if item["type"] == "extra_forbidden":
                hint = _closest(str(key), RunSettings, tuple(parents))
                lines.append(f"{field}: unknown key. {hint}".rstrip())
            else:
                lines.append(f"{field}: {item['msg']}")
        raise InputError(
            "; ".join(lines), where=where, fix="see docs/run.md for every key"
        ) from None


def load_settings(path: Path) -> RunSettings:
    """Settings of a YAML file; its relative paths count from the file's own folder.

    Raises InputError for a missing file, YAML that does not parse, or a wrong field.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the run file: {error.strerror}", where=str(path)) from error
    except yaml.YAMLError as error:
        raise InputError(f"not valid YAML: {error}", where=str(path)) from error
    if not isinstance(document, dict):
        raise InputError("a run file is a mapping of settings", where=str(path))
    for key in ("prompts", "contract"):
        value = document.get(key)
        if isinstance(value, str) and not Path(value).is_absolute():
            document[key] = str(path.parent / value)
    for holder in (document, document.get("engine")):
        if isinstance(holder, dict) and isinstance(model := holder.get("model"), str):
            local = path.parent / model
            if model != "sample" and local.is_dir():
                holder["model"] = str(local)
    return parse_settings(document, str(path))
