"""The two programs side by side: what matters of each, and where they differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mismatch_audit.reports.notation import NOTHING, fact, percent
from mismatch_audit.reports.rows import Facts, Identities

COMPARABLE = ("model", "weights", "tokenizer", "vocab_size", "dtype", "head_dtype")
"""Facts in which two programs of one policy would be alike: a difference is marked."""

SHOWN = (
    "program",
    "version",
    *COMPARABLE,
    "device",
    "attention",
    "kv_cache_dtype",
    "cache_dtype",
    "quantization",
    "linear_methods",
    "runner",
    "logprobs_mode",
    "batch_invariant",
    "tensor_parallel",
    "sampling",
    "requested",
    "inject",
    "unrepresentable_weights",
    "route",
)
"""In this order, where either side has them. The whole identity is in report.json."""

_TITLES = {
    "kv_cache_dtype": "KV cache",
    "cache_dtype": "KV cache asked",
    "vocab_size": "vocabulary",
    "head_dtype": "head dtype",
    "linear_methods": "linear layers",
    "logprobs_mode": "log-probs mode",
    "batch_invariant": "batch invariant",
    "tensor_parallel": "tensor parallel",
    "requested": "engine arguments",
    "inject": "injected fault",
    "unrepresentable_weights": "weights rounded",
    "route": "rows from",
}


_USUAL = {"batch_invariant": ("0", "False"), "tensor_parallel": ("1",)}


@dataclass(frozen=True)
class IdentityRow:
    """One fact of both sides, as text. differs: alike is expected and is not the case."""

    name: str
    reference: str
    engine: str
    differs: bool


def identity_rows(identities: Identities) -> list[IdentityRow]:
    """The facts worth a line, in a fixed order."""
    reference, engine = identities.reference, identities.engine
    rows = []
    for name in SHOWN:
        if _empty(reference.get(name)) and _dull(name, engine):
            continue
        known = not _empty(reference.get(name)) and not _empty(engine.get(name))
        differs = name in COMPARABLE and known and reference[name] != engine[name]
        rows.append(
            IdentityRow(
                _TITLES.get(name, name),
                _shown(name, reference.get(name)),
                _shown(name, engine.get(name)),
                differs,
            )
        )
    return rows


def all_rows(identities: Identities) -> list[IdentityRow]:
    """Every fact, those of ``identity_rows`` first, then the others by name."""
    shown = identity_rows(identities)
    others = sorted({*identities.reference, *identities.engine} - set(SHOWN))
    return shown + [
        IdentityRow(
            name,
            _shown(name, identities.reference.get(name)),
            _shown(name, identities.engine.get(name)),
            False,
        )
        for name in others
    ]


def _empty(value: Any) -> bool:
    return value is None or value == {} or value == []


def _dull(name: str, engine: Facts) -> bool:
    """True where the engine's fact is what every engine has."""
    value = engine.get(name)
    if _empty(value) or str(value) in _USUAL.get(name, ()):
        return True
    held = engine.get("kv_cache_dtype") if name == "cache_dtype" else None
    return isinstance(held, list) and set(map(str, held)) == {str(value)}


def _shown(name: str, value: Any) -> str:
    if _empty(value):
        return NOTHING
    if name == "unrepresentable_weights" and isinstance(value, int | float):
        return percent(float(value))
    if name == "model":
        return _model_name(str(value))
    if isinstance(value, list):
        return fact(sorted(set(map(str, value))))
    return fact(value)


def _model_name(path: str) -> str:
    """The folder's name; of a hub cache's folder, the hub id."""
    parts = [part for part in path.split("/") if part]
    hub = next((part for part in parts if part.startswith("models--")), None)
    if hub is not None:
        return hub.removeprefix("models--").replace("--", "/")
    return parts[-1] if path.startswith("/") and parts else path
