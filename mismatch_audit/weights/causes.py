"""Which other masters a region could hold, and how the causes of its ranks add up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mismatch_audit.weights.diagnose import (
    Alternatives,
    Verdict,
    explain,
    fingerprint,
)
from mismatch_audit.weights.findings import Fault, TensorReport
from mismatch_audit.weights.layout import split_layer
from mismatch_audit.weights.rearrange import matches, transposed
from mismatch_audit.weights.shards import may_be_shard, shard_of, touched_region
from mismatch_audit.weights.sides import HEAD, Overlap, Pair, Side, operand
from mismatch_audit.weights.tally import Operand, Plain, Tally

# Tensors that one fused stored tensor may hold, so that their order can be mixed up.
_SIBLINGS = (
    ("gate_proj", "up_proj"),
    ("q_proj", "k_proj", "v_proj"),
)
# A merged adapter may be rounded once more (base plus delta in bf16) than our fp32 merge.
_MERGE_ERROR = 2**-7
_MERGE_COEFFICIENT = 0.1


class Explainer:
    """Alternative masters from the trainer, its previous version and its unadapted base."""

    def __init__(self, trainer: Side, served: Side, previous: Side | None) -> None:
        self.trainer, self.served, self.previous = trainer, served, previous
        self._prints: dict[torch.dtype, dict[tuple[Any, ...], str]] = {}
        self._lock = threading.Lock()

    def explain(self, pair: Pair, overlap: Overlap, tally: Tally) -> Verdict:
        """The cause of one differing region."""
        if (verdict := self._merge(pair, overlap, tally)) is not None:
            return verdict
        shape = self._shape(pair, overlap)
        region = partial(self._region, start=overlap.start, shape=shape)
        base = None
        if self.trainer.adapts(pair.trainer_name):
            plain_side = Side(self.trainer.label, self.trainer.layout)
            base = region(plain_side, pair.trainer_name)
        kind = pair.name.rpartition(".")[0].rpartition(".")[2]
        heads = {"q_proj": self.trainer.geometry.heads, "k_proj": self.trainer.geometry.kv_heads}
        ranks = max(1, len(self.served.checkpoint.ranks))
        return explain(
            overlap,
            tally,
            Alternatives(
                previous=region(self.previous, pair.trainer_name) if self.previous else None,
                base=base,
                transpose=self._transpose(pair.trainer_name, overlap.start, shape),
                siblings={
                    name: partial(region, self.trainer, name)
                    for name in self._siblings(pair.trainer_name)
                },
                lookup=partial(self._lookup, pair.trainer_name),
                rotary_heads=max(1, heads[kind] // ranks) if heads.get(kind) else 0,
            ),
        )

    def quantised_alternatives(
        self, pair: Pair, master: Operand, overlap: Overlap
    ) -> dict[str, tuple[Fault, Callable[[], Operand | None]]]:
        """The same alternatives for a quantised region, all columns: label -> (meaning, master)."""
        start = (overlap.start[0], 0)
        region = partial(self._region, start=start, shape=master.shape)
        others: dict[str, tuple[Fault, Callable[[], Operand | None]]] = {}
        if self.previous is not None:
            others["the previous version"] = (
                Fault.STALE,
                partial(region, self.previous, pair.trainer_name),
            )
        if self.trainer.adapts(pair.trainer_name):
            plain_side = Side(self.trainer.label, self.trainer.layout)
            others["the base without its adapter"] = (
                Fault.ADAPTER_OFF,
                partial(region, plain_side, pair.trainer_name),
            )
        for name in self._siblings(pair.trainer_name):
            others[name] = (Fault.SWAPPED, partial(region, self.trainer, name))
        others["its transpose"] = (
            Fault.TRANSPOSED,
            partial(self._transpose, pair.trainer_name, start, master.shape),
        )
        return others

    def is_transpose(self, pair: Pair) -> bool:
        """Whether an unsharded served tensor of another shape is the master's transpose."""
        ours = self.trainer.layout.tensors[pair.trainer_name]
        theirs = self.served.layout.tensors[pair.served_name]
        if len(ours) != 1 or len(theirs) != 1 or ours[0].shape != theirs[0].shape[::-1]:
            return False
        if len(ours[0].shape) != 2:
            return False
        master = operand(
            self.trainer, pair.trainer_name, ours[0], (0, 0), (ours[0].shape[0], ours[0].shape[1])
        )
        served = operand(
            self.served,
            pair.served_name,
            theirs[0],
            (0, 0),
            (theirs[0].shape[0], theirs[0].shape[1]),
        )
        return matches(transposed(master), served)

    def combine(
        self,
        report: TensorReport,
        causes: list[tuple[Overlap, Verdict]],
        regions: list[Overlap],
    ) -> None:
        """Writes the cause of a whole tensor from those of its differing regions."""
        severe = [item for item in causes if item[1][0] != Fault.MERGE_ROUNDING] or causes
        fault, evidence = severe[0][1]
        report.fault = fault
        report.evidence.update(evidence)
        if len(regions) > 1:
            report.ranks = sorted({item[0].served_rank for item in severe})
        other_head = fault in (Fault.STALE, Fault.UNRELATED, Fault.SWAPPED)
        if report.name == HEAD and other_head and self._head_alone():
            report.fault = Fault.UNTIED
            return
        if fault != Fault.STALE:
            return
        if len(regions) > len(severe):
            same_place = {region.start for region in regions}
            replicated = len(same_place) < len(regions)
            report.fault = Fault.UNSYNCED_RANK if replicated else Fault.SHARD_STALE
            report.evidence.update({"rank": report.ranks[0], "ranks": len(regions)})

    def one_shard(self, report: TensorReport, overlap: Overlap, tally: Tally) -> None:
        """An unsharded served tensor whose stale part is one equal part of its rows or columns."""
        if not may_be_shard(overlap, tally):
            return
        region = touched_region(overlap, tally)
        for axis, size in zip(("rows", "columns"), overlap.served.shape, strict=True):
            if axis in region and (shard := shard_of(*region[axis], size)) is not None:
                report.fault = Fault.SHARD_STALE
                report.evidence.update(
                    {"rank": shard[0], "ranks": shard[1], axis: list(region[axis])}
                )
                return

    def _head_alone(self) -> bool:
        """The head is tied on one side, by its config or because it is not stored."""
        stored = (HEAD in self.trainer.names, HEAD in self.served.names)
        tied = bool(self.trainer.geometry.tied) or stored[0] != stored[1]
        return tied and not self._still_tied()

    def _still_tied(self) -> bool:
        """Both are stored where served, and equal: they are stale together."""
        tensors = self.served.layout.tensors
        pieces = [tensors.get(n, []) for n in (HEAD, self.served.geometry.family.embedding)]
        if [len(own) for own in pieces] != [1, 1]:
            return False
        return torch.equal(pieces[0][0].view(), pieces[1][0].view())

    def _merge(self, pair: Pair, overlap: Overlap, tally: Tally) -> Verdict | None:
        """A merged adapter: how much of its update the served weight holds (1 when applied)."""
        if not self.trainer.adapts(pair.trainer_name) or self.trainer.adapter is None:
            return None
        shape = self._shape(pair, overlap)
        update = self.trainer.adapter.cut(pair.trainer_name, overlap.start, shape)
        if update is None:
            return None
        moved = along = 0.0
        for begin, end in tally.touched:
            delta = update.rows(begin, end).double()
            base = overlap.trainer.rows(begin, end).double() - delta
            moved += float((delta * delta).sum())
            along += float(((overlap.served.rows(begin, end).double() - base) * delta).sum())
        if not moved:
            return None
        coefficient = along / moved
        evidence = {"adapter_coefficient": coefficient, "relative_error": tally.relative_error}
        if tally.relative_error <= _MERGE_ERROR:
            if abs(coefficient - 1) <= _MERGE_COEFFICIENT:
                return Fault.MERGE_ROUNDING, evidence
            if abs(coefficient) <= _MERGE_COEFFICIENT:
                return Fault.ADAPTER_OFF, evidence
        return None

    def _shape(self, pair: Pair, overlap: Overlap) -> tuple[int, ...]:
        return overlap.served.shape if len(overlap.start) == 2 else self._flat(pair, overlap)

    def _flat(self, pair: Pair, overlap: Overlap) -> tuple[int, ...]:
        stored = self.trainer.layout.shape(pair.trainer_name)
        return (overlap.served.shape[0], *stored[1:]) if stored else ()

    @staticmethod
    def _region(
        side: Side, name: str, start: tuple[int, ...], shape: tuple[int, ...]
    ) -> Operand | None:
        """The same region of another tensor, when one piece holds it whole."""
        for piece in side.layout.tensors.get(name, []):
            own = piece.start or (0,) * len(piece.shape)
            if len(own) == len(start) and all(
                o <= s and s + n <= o + p
                for o, s, n, p in zip(own, start, shape, piece.shape, strict=True)
            ):
                return operand(side, name, piece, start, shape)
        return None

    def _transpose(
        self, name: str, start: tuple[int, ...], shape: tuple[int, ...]
    ) -> Operand | None:
        """The region that the transpose of a whole, square master has in this place."""
        pieces = self.trainer.layout.tensors[name]
        square = len(pieces[0].shape) == 2 and pieces[0].shape[0] == pieces[0].shape[1]
        if len(pieces) != 1 or not square or self.trainer.adapts(name):
            return None
        turned = pieces[0].view().t()
        rows, columns = (slice(s, s + n) for s, n in zip(start, shape, strict=True))
        return Plain(turned[rows, columns])

    def _siblings(self, name: str) -> list[str]:
        found = []
        for group in _SIBLINGS:
            for own in group:
                if f".{own}." in name:
                    found += [name.replace(f".{own}.", f".{o}.") for o in group if o != own]
        return [other for other in found if other in self.trainer.names]

    def _lookup(self, own: str, served: Operand) -> str | None:
        """The trainer's tensor whose cast begins like this one and equals it, if another one."""
        with self._lock:
            if served.dtype not in self._prints:
                self._prints[served.dtype] = self._index(served.dtype)
        key = (served.shape, fingerprint(served, served.dtype))
        name = self._prints[served.dtype].get(key)
        if name is None or name == own:
            return None
        start = (0,) * len(self.trainer.layout.shape(name))
        master = self._region(self.trainer, name, start, self.trainer.layout.shape(name))
        return name if matches(master, served) else None

    def _index(self, dtype: torch.dtype) -> dict[tuple[Any, ...], str]:
        index: dict[tuple[Any, ...], str] = {}
        family = self.trainer.geometry.family
        for name, pieces in self.trainer.layout.tensors.items():
            shape = self.trainer.layout.shape(name)
            if len(pieces) != 1 or not pieces[0].view().dtype.is_floating_point or 0 in shape:
                continue
            if split_layer(name, family)[0] and len(shape) != 2:
                continue  # gains and biases of layers are too often alike to identify anything
            master = operand(self.trainer, name, pieces[0], (0,) * len(shape), shape)
            index.setdefault((master.shape, fingerprint(master, dtype)), name)
        return index
