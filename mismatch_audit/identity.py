"""Who are the two programs, and do they evaluate the same policy? Asked before any number."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_contracts.errors import InputError, NotComparableError


@dataclass(frozen=True)
class Identity:
    """Facts of one program: digests, dtypes, kernels, versions, sampling semantics."""

    facts: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """A fact, or None."""
        return self.facts.get(name)


def model_files(model: str) -> Path:
    """The local folder of a checkpoint directory or of a hub id that was downloaded before."""
    path = Path(model)
    if path.is_dir():
        return path
    from transformers.utils.hub import cached_file

    try:
        config = cached_file(model, "config.json")
    except OSError as error:
        raise InputError(
            f"no model {model!r}: {str(error).splitlines()[0]}",
            fix="give a checkpoint directory, a reachable hub id, or `sample`",
        ) from error
    return Path(str(config)).parent


def weights_digest(folder: Path) -> str:
    """SHA-256 over the weight files in name order. Raises InputError when there are none."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        raise InputError("no weights (*.safetensors) in the model's folder", where=str(folder))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 of what decides token ids: vocabulary, merges, normaliser, special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab())
    return hashlib.sha256(text.encode()).hexdigest()


def unrepresentable_share(folder: Path, dtype: str) -> float:
    """Share of weights that change when rounded to the engine's dtype: a rounded copy is another
    policy. Streams one tensor at a time."""
    import torch
    from safetensors import safe_open

    target = getattr(torch, dtype, None)
    if target is None:
        return 0.0
    changed = total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a dict)
                weight = tensors.get_tensor(name)
                total += weight.numel()
                if weight.dtype != target and weight.is_floating_point():
                    changed += int((weight.to(target).to(weight.dtype) != weight).sum())
    return changed / total if total else 0.0


def check_facts(side: str, promised: dict[str, Any], actual: dict[str, Any], contract: str) -> None:
    """The contract binds a pair of programs: a fact that differs makes it another pair.

    Raises NotComparableError naming every fact that differs or is unknown.
    """
    wrong = []
    for name, value in promised.items():
        if name not in actual:
            wrong.append(f"{name}: the contract says {value!r}, the {side} does not tell")
        elif not _same(value, actual[name]):
            wrong.append(f"{name}: the contract says {value!r}, the {side} has {actual[name]!r}")
    if wrong:
        raise NotComparableError(
            "; ".join(wrong),
            where=f"{contract}: pair.{side}",
            fix="use a contract written for this pair, or run the programs that it names",
        )


def check_same(
    names: list[str], reference: dict[str, Any], engine: dict[str, Any], contract: str
) -> None:
    """Facts that must be equal on both sides (weights, tokenizer, ...)."""
    wrong = [
        f"{name}: reference {str(reference.get(name))[:16]}, engine {str(engine.get(name))[:16]}"
        for name in names
        if reference.get(name) is None or reference.get(name) != engine.get(name)
    ]
    if wrong:
        raise NotComparableError(
            "the two sides differ where the contract says they must not: " + "; ".join(wrong),
            where=contract,
            fix="serve the same checkpoint and tokenizer, or drop the name from pair.same",
        )


def _same(promised: Any, actual: Any) -> bool:
    if isinstance(actual, list):
        return len(actual) == 1 and _same(promised, actual[0])
    return str(promised).removeprefix("torch.") == str(actual).removeprefix("torch.")


_SECRET = re.compile(r"token$|_key$|^key$|secret|password|credential|^auth", re.IGNORECASE)


def without_secrets(arguments: dict[str, Any]) -> dict[str, Any]:
    """A copy for reports: values of arguments that are named like a secret (``hf_token``,
    ``api_key``) become ``"(not shown)"``, nested ones too."""
    return {
        name: "(not shown)"
        if _SECRET.search(name)
        else without_secrets(value)
        if isinstance(value, dict)
        else value
        for name, value in arguments.items()
    }


def no_op_requests(requested: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """Engine settings that were asked for and changed nothing, as far as the engine tells."""
    said = []
    cache = requested.get("kv_cache_dtype")
    if cache not in (None, "auto") and not any(
        str(cache) in str(c) for c in facts["kv_cache_dtype"]
    ):
        said.append(f"kv_cache_dtype={cache}: the engine's caches are {facts['kv_cache_dtype']}")
    quantization = requested.get("quantization")
    methods = facts.get("linear_methods", {})
    if quantization and set(methods) <= {"UnquantizedLinearMethod"}:
        said.append(f"quantization={quantization}: every linear layer is unquantised")
    return said
