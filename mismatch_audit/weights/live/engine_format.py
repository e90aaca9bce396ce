"""The master in the format that a running engine loads: its dtypes, its quantiser."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from kernel_contracts.errors import InputError
from mismatch_audit.weights.checkpoint import open_checkpoint
from mismatch_audit.weights.layout import canonical_root
from mismatch_audit.weights.live.base import LiveEngine
from mismatch_audit.weights.rounding import nearest
from mismatch_audit.weights.schemes import Scheme, scheme_by_name
from mismatch_audit.weights.sides import Side

_SHARD_BYTES = 1 << 30


@dataclass
class SentWeights:
    """A folder that is pushed. dtypes: canonical name -> dtype sent. quantised: canonical weights
    sent as payload and scale."""

    folder: Path
    dtypes: dict[str, str] = field(default_factory=dict)
    quantised: frozenset[str] = frozenset()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class FolderWriter:
    """Safetensors files of about a gibibyte."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count, self.size = folder, 0, 0
        self.waiting: dict[str, torch.Tensor] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, value: torch.Tensor) -> None:
        self.waiting[name] = value.detach().cpu().contiguous().clone()
        self.size += value.nbytes
        if self.size >= _SHARD_BYTES:
            self.close()

    def close(self) -> None:
        if self.waiting:
            save_file(self.waiting, self.folder / f"push-{self.count:05d}.safetensors")
            self.waiting, self.size, self.count = {}, 0, self.count + 1


def quantised_parts(engine: LiveEngine) -> dict[str, Scheme | None]:
    """Canonical weights that the engine quantises -> scheme (None: one we cannot encode)."""
    return {
        f"{part}.weight": None if layer.scheme == "unknown" else scheme_by_name(layer.scheme)
        for layer in engine.names().values()
        if layer.scheme is not None
        for part in layer.parts
    }


def write_for_engine(master: Side, engine: LiveEngine, folder: Path) -> SentWeights:
    """Casts every weight once, to nearest, from the master to what the engine holds.

    Raises InputError for a sharded master, and for a quantiser that is not decoded here.
    """
    if len(master.checkpoint.ranks) != 1:
        raise InputError(
            "a push needs whole tensors", where=master.label, fix="gather the trainer's shards"
        )
    dtype = getattr(torch, str(engine.facts()["dtype"]))
    parts, family = quantised_parts(engine), master.geometry.family
    writer, sent, quantised = FolderWriter(folder), SentWeights(folder), set()
    for name, stored in master.checkpoint.ranks[0].items():
        value, canonical = stored.tensor(), canonical_root(name, family)
        if canonical in parts:
            scheme = parts[canonical]
            if scheme is None:
                raise InputError(
                    f"the engine quantises {canonical} in a way that is not encoded here",
                    where=engine.spec,
                    fix="send the trainer's own export: --export DIR",
                )
            payload, scale = scheme.encode(value)
            writer.add(name, payload)
            writer.add(f"{name}_scale", scale)
            sent.dtypes[canonical] = _name(payload.dtype)
            quantised.add(canonical)
        else:
            cast = nearest(value, dtype) if value.is_floating_point() else value
            writer.add(name, cast)
            sent.dtypes[canonical] = _name(cast.dtype)
    writer.close()
    sent.quantised = frozenset(quantised)
    return sent


def sent_as_it_is(master: Side, folder: Path) -> SentWeights:
    """An export of the trainer's own, to be sent untouched."""
    checkpoint, sent = open_checkpoint(folder), SentWeights(folder)
    quantised = set()
    for name, stored in checkpoint.ranks[0].items():
        canonical = canonical_root(name, master.geometry.family)
        sent.dtypes[canonical] = _name(stored.tensor().dtype)
        if canonical.endswith(".weight") and stored.tensor().element_size() == 1:
            quantised.add(canonical)
    sent.quantised = frozenset(quantised)
    return sent
