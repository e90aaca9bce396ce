"""Tensors that are in memory (an engine's read-back, a trainer's state) as a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mismatch_audit.weights.checkpoint import Checkpoint, Stored
from mismatch_audit.weights.families import geometry_of
from mismatch_audit.weights.formats import code_of
from mismatch_audit.weights.layout import layout_of
from mismatch_audit.weights.safetensors_file import TensorInfo
from mismatch_audit.weights.sides import Side


class MemoryFile:
    """Named tensors behind the interface of a weight file."""

    def __init__(self, label: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.path = Path(label)
        self._tensors = {name: value.detach() for name, value in tensors.items()}
        self.infos = {
            name: TensorInfo(name, code_of(value.dtype), tuple(value.shape), 0, value.nbytes)
            for name, value in self._tensors.items()
        }

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def release(self) -> None:
        """Nothing is mapped."""


def memory_side(
    label: str,
    tensors: Mapping[str, torch.Tensor] | list[Mapping[str, torch.Tensor]],
    config: Mapping[str, Any],
) -> Side:
    """A side of a comparison from tensors in memory: one mapping, or one per rank."""
    ranks = tensors if isinstance(tensors, list) else [tensors]
    files = [MemoryFile(f"{label}[{rank}]", names) for rank, names in enumerate(ranks)]
    stored = [{name: Stored(info, file) for name, info in file.infos.items()} for file in files]
    checkpoint = Checkpoint(Path(label), dict(config), stored, list(files))
    return Side(label, layout_of(checkpoint, geometry_of(config, label)))
