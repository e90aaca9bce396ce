"""What the in-process engine and the HTTP server share: the worker extension's answers."""

from __future__ import annotations

import json
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_contracts.errors import InputError
from mismatch_audit.weights.live.base import LayerInfo, NextToken, PushReceipt, Version


class ExtensionEngine(ABC):
    """A LiveEngine over ``WeightExtension``. Subclasses say how it is reached."""

    def __init__(self, spec: str, scratch: Path | None = None) -> None:
        self.spec = spec
        self._facts: dict[str, Any] | None = None
        self._layers: dict[str, LayerInfo] | None = None
        self._scratch = tempfile.TemporaryDirectory(prefix="mismatch-audit-live-", dir=scratch)
        self._files = 0
        self.unread: tuple[str, ...] = ()
        self.off_scale: tuple[str, ...] = ()
        self.saturating: tuple[str, ...] = ()

    @abstractmethod
    def rpc(self, method: str, *args: Any) -> list[Any]:
        """A method of the extension: one result per rank."""

    @abstractmethod
    def weight_version(self) -> Version: ...

    @abstractmethod
    def set_version(self, version: Version) -> None: ...

    @abstractmethod
    def flush(self) -> bool: ...

    @abstractmethod
    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]: ...

    @abstractmethod
    def next_tokens(
        self, prompts: Sequence[Sequence[int]], *, use_cache: bool = True
    ) -> list[NextToken]: ...

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> ExtensionEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._scratch.cleanup()

    def _path(self, suffix: str = "") -> Path:
        self._files += 1
        return Path(self._scratch.name) / f"{self._files:05d}{suffix}"

    def facts(self) -> dict[str, Any]:
        if self._facts is None:
            ranks = self.rpc("audit_weights_facts")
            self._facts = dict(ranks[0])
        return {**self._facts, "weight_version": self.weight_version(), "spec": self.spec}

    def names(self) -> dict[str, LayerInfo]:
        if self._layers is None:
            self._layers = {
                item["name"]: LayerInfo(**{**item, "parts": tuple(item["parts"])})
                for item in self.rpc("audit_weights_layers")[0]
            }
        return dict(self._layers)

    def parameters(self) -> dict[str, tuple[tuple[int, ...], str]]:
        rows = self.rpc("audit_weights_parameters")[0]
        return {name: (tuple(shape), dtype) for name, shape, dtype in rows}

    def own_checksums(self) -> dict[str, str] | None:
        merged: dict[str, str] = {}
        for rank in self.rpc("audit_weights_checksums"):
            merged |= rank
        return merged or None

    def fill_scales(self) -> int:
        return int(self.rpc("audit_weights_fill")[0]["marked"])

    def mend(self) -> bool:
        """Make int8 kernels on a CPU survive a push (see the extension); whether it was needed."""
        return any(rank["mended"] for rank in self.rpc("audit_weights_mend"))

    def push(self, checkpoint: Path, version: Version = None, *, flush: bool = True) -> PushReceipt:
        folder = Path(checkpoint).resolve()
        if not any(folder.glob("*.safetensors")):
            raise InputError(
                "a push needs safetensors weights, and there are none",
                where=str(checkpoint),
                fix="save the checkpoint with safetensors",
            )
        answer = self.rpc("audit_weights_push", str(folder))[0]
        if not answer["tensors"]:
            raise InputError(
                "the engine sees no weights in the pushed folder",
                where=str(folder),
                fix="give --scratch a folder that the server and this command both see",
            )
        flushed = self.flush() if flush else None
        if version is not None:
            self.set_version(version)
        return PushReceipt(
            checkpoint=str(checkpoint),
            version=self.weight_version(),
            tensors=answer["tensors"],
            bytes=answer["bytes"],
            seconds=answer["seconds"],
            flushed=flushed,
            not_loaded=tuple(answer["not_loaded"]),
        )

    def effective_weight(self, layer: str) -> Any:
        from safetensors.torch import load_file

        path = self._path(".safetensors")
        self.rpc("audit_weights_effective", layer, str(path))
        return _taken(path, load_file)["weight"]

    def apply(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        from safetensors.torch import load_file, save_file

        source, folder = self._path(".safetensors"), self._path()
        folder.mkdir()
        save_file({name: x.contiguous() for name, x in rows.items()}, source)
        self.rpc("audit_weights_apply", str(source), str(folder))
        source.unlink()
        return _taken(folder / "applied-rank-0-0.safetensors", load_file)

    def read_back(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve()
        answers = self.rpc("audit_weights_read", str(folder))
        self.unread = tuple(sorted({name for rank in answers for name in rank["unread"]}))
        self.off_scale = tuple(sorted({name for rank in answers for name in rank["off_scale"]}))
        self.saturating = tuple(sorted({n for rank in answers for n in rank["saturating"]}))
        if not any(folder.glob("*.safetensors")):
            raise InputError(
                "the engine wrote its read-back somewhere else",
                where=str(folder),
                fix="give --scratch a folder that the server and this command both see",
            )
        (folder / "config.json").write_text(json.dumps(self.facts()["config"]), encoding="utf-8")
        return folder


def _taken(path: Path, load: Any) -> dict[str, Any]:
    """Tensors of a file that is removed."""
    tensors: dict[str, Any] = {name: value.clone() for name, value in load(path).items()}
    path.unlink()
    return tensors
