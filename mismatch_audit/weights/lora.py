"""LoRA adapters beside a base checkpoint: the merged weight, block by block.

W = W0 + s * B A with s = alpha / r, or alpha / sqrt(r) for rank-stabilised adapters (PEFT's
``use_rslora``). B ``[out, r]``, A ``[r, in]``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernel_contracts.errors import InputError
from mismatch_audit.weights.checkpoint import Checkpoint, open_file
from mismatch_audit.weights.families import Geometry
from mismatch_audit.weights.layout import canonical_root
from mismatch_audit.weights.safetensors_file import strict_json

_FACTOR = re.compile(r"^(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight$")


@dataclass(frozen=True)
class LowRank:
    """One module's update. a ``[r, in]``, b ``[out, r]``."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Rows of s * B A in fp32."""
        return self.scaling * (self.b[begin:end].float() @ self.a.float())


@dataclass(frozen=True)
class Merged:
    """The merged weight as an operand: fp32 rows of W0 + s B A."""

    base: torch.Tensor
    update: LowRank

    @property
    def shape(self) -> tuple[int, int]:
        return self.base.shape[0], self.base.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return self.base[begin:end].float() + self.update.rows(begin, end)


@dataclass(frozen=True)
class Adapter:
    """updates: canonical weight name -> low-rank update."""

    path: Path
    updates: dict[str, LowRank]

    def cut(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> LowRank | None:
        """The update of a rank's slice of a weight."""
        update = self.updates.get(name)
        if update is None or len(shape) != 2:
            return None
        row, column = start or (0, 0)
        return LowRank(
            update.a[:, column : column + shape[1]],
            update.b[row : row + shape[0]],
            update.scaling,
        )


def _scaling(config: dict[str, Any], module: str, rank: int, where: str) -> float:
    def chosen(pattern_key: str, key: str) -> Any:
        for expression, value in (config.get(pattern_key) or {}).items():
            if re.search(rf"(?:^|\.){expression}$", module):
                return value
        return config.get(key)

    alpha, declared = chosen("alpha_pattern", "lora_alpha"), chosen("rank_pattern", "r")
    if not isinstance(alpha, int | float) or declared != rank:
        raise InputError(
            f"{module}: lora_alpha {alpha!r}, r {declared!r}, but the factors have rank {rank}",
            where=where,
        )
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def open_adapter(path: Path | str, geometry: Geometry) -> Adapter:
    """Reads a PEFT adapter directory.

    Raises InputError for a missing config, an unpaired factor, DoRA (which is not linear in the
    factors) or a bias that this comparison would ignore.
    """
    folder = Path(path)
    where = str(folder / "adapter_config.json")
    if not (folder / "adapter_config.json").is_file():
        raise InputError("no adapter_config.json", where=str(folder))
    config = strict_json((folder / "adapter_config.json").read_bytes(), where)
    if not isinstance(config, dict):
        raise InputError("is not a mapping", where=where)
    if config.get("use_dora"):
        raise InputError("DoRA adapters are not supported", where=where, fix="merge it first")
    files = [folder / f"adapter_model{suffix}" for suffix in (".safetensors", ".bin")]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise InputError("no adapter_model.safetensors or .bin", where=str(folder))
    file = open_file(found)
    factors: dict[str, dict[str, torch.Tensor]] = {}
    for name in file.infos:
        hit = _FACTOR.match(name)
        if hit is None:
            raise InputError(
                f"tensor {name!r} is not a LoRA factor", where=str(found), fix="merge it first"
            )
        module = canonical_root(hit["module"], geometry.family)
        factors.setdefault(module, {})[hit["side"]] = file.tensor(name)
    updates = {}
    for module, pair in factors.items():
        if set(pair) != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[1]:
            raise InputError(f"{module}: its factors do not pair", where=str(found))
        scaling = _scaling(config, module, pair["A"].shape[0], where)
        updates[f"{module}.weight"] = LowRank(pair["A"], pair["B"], scaling)
    if not updates:
        raise InputError("the adapter holds no factors", where=str(found))
    return Adapter(folder, updates)


def unknown_targets(adapter: Adapter, names: set[str]) -> list[str]:
    """Adapted modules that the base does not have (a misnamed adapter merges nothing)."""
    return sorted(name for name in adapter.updates if name not in names)


def has_lora_factors(checkpoint: Checkpoint) -> bool:
    """An adapter, or an unmerged training state, rather than a checkpoint."""
    return any(".lora_" in name for rank in checkpoint.ranks for name in rank)
