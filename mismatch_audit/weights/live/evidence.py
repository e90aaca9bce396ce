"""What the checks of a live engine are fed with, from its facts, its rows and its read-back."""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from mismatch_audit.weights.live.base import LiveEngine, NextToken, Version
from mismatch_audit.weights.probes import Apply
from mismatch_audit.weights.sides import SCALE_KINDS, Side


def declared_set(engine: LiveEngine) -> frozenset[str]:
    """What the engine's own configuration says it quantises: linear layers of the blocks, but for
    the names (or "re:" patterns) that it ignores."""
    declared = (engine.facts().get("config") or {}).get("quantization_config") or {}
    ignored = [str(item) for item in declared.get("ignore") or []]
    return frozenset(
        f"{part}.weight"
        for layer in engine.names().values()
        for part in layer.parts
        if "layers." in part and not any(_matches(rule, part) for rule in ignored)
    )


def _matches(rule: str, name: str) -> bool:
    if rule.startswith("re:"):
        return re.match(rule.removeprefix("re:"), name) is not None
    return name == rule or name.endswith(f".{rule}")


def number(version: Version) -> int:
    """A version as a number; -1 for none, or one that is no number (vLLM starts at "default")."""
    text = str(version)
    return int(text) if text.isdecimal() else -1


def live_dtypes(side: Side) -> dict[str, str]:
    return {
        name: str(pieces[0].view().dtype).removeprefix("torch.")
        for name, pieces in side.layout.tensors.items()
    }


def scales_of(side: Side) -> dict[str, torch.Tensor]:
    return {
        name: stored.tensor()
        for rank in side.checkpoint.ranks
        for name, stored in rank.items()
        if name.endswith(SCALE_KINDS)
    }


def decoded(stored: dict[str, Any], layer: str) -> torch.Tensor | None:
    """A layer's own weight [out, in] as the read-back has it, dequantised."""
    name = f"{layer}.weight"
    if name not in stored:
        return None
    weight: torch.Tensor = stored[name].tensor()
    if weight.element_size() > 1:
        return weight.float()
    scale = stored.get(f"{name}_scale")
    return None if scale is None else weight.float() * scale.tensor().float()


def answers(rows: torch.Tensor) -> Apply:
    """A layer whose answer to the probe's rows is known already."""
    return lambda _: rows


def aligned(served: NextToken, fresh: NextToken) -> tuple[torch.Tensor, torch.Tensor]:
    """Both rows over the union of their tokens; a token that one lacks counts as its lowest."""
    tokens = sorted({*served.top, *fresh.top})

    def row(side: NextToken) -> torch.Tensor:
        floor = min(side.top.values(), default=math.nan)
        return torch.tensor([side.top.get(token, floor) for token in tokens], dtype=torch.float64)

    return row(served), row(fresh)
