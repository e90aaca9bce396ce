"""Inside the worker: checkpoint folders in and out, and what the loader complains of."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

_SHARD_BYTES = 1 << 30
LOADERS = ("vllm.model_executor.model_loader.reload.inplace",
            "vllm.model_executor.model_loader.reload.layerwise")  # fmt: skip
_TABLES = "RotaryEmbedding:"  # computed, in no checkpoint: the loader complains every time


class Complaints(logging.Handler):
    """What the loader says about weights that it was not given, however quiet the engine was asked
    to be: TRL sets VLLM_LOGGING_LEVEL=ERROR, under which the loader's warnings are never made."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self._levels: list[tuple[logging.Logger, int]] = []

    def __enter__(self) -> Complaints:
        self._levels = [(logger, logger.level) for logger in map(logging.getLogger, LOADERS)]
        for logger, _ in self._levels:
            logger.setLevel(min(logger.getEffectiveLevel(), logging.WARNING))
            logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        for logger, level in self._levels:
            logger.removeHandler(self)
            logger.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        loss = "not loaded" in text or "Failed to load" in text
        if loss and not text.startswith(_TABLES):
            self.lines.append(text[:500])


def stored(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                yield name, file.get_tensor(name)


class Shards:
    """Tensors of one rank, written in files of about a gibibyte."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank, self.count = folder, rank, 0
        self.waiting: dict[str, torch.Tensor] = {}
        self.bytes = self.names = 0

    def add(self, name: str, value: torch.Tensor) -> None:
        self.waiting[name] = value.detach().cpu().contiguous().clone()
        self.bytes, self.names = self.bytes + value.nbytes, self.names + 1
        if sum(item.nbytes for item in self.waiting.values()) >= _SHARD_BYTES:
            self.write()

    def write(self) -> None:
        if self.waiting:
            save_file(
                self.waiting, self.folder / f"served-rank-{self.rank}-{self.count:05d}.safetensors"
            )
            self.waiting, self.count = {}, self.count + 1
