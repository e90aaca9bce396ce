"""Two checkpoints side by side: who is compared with whom, region by region."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kernel_contracts.errors import InputError
from mismatch_audit.weights.checkpoint import Checkpoint, open_checkpoint
from mismatch_audit.weights.families import Geometry, geometry_of
from mismatch_audit.weights.layout import Layout, Piece, layout_of
from mismatch_audit.weights.lora import Adapter, Merged, has_lora_factors, open_adapter
from mismatch_audit.weights.tally import Operand, Unsigned, plain

HEAD = "lm_head.weight"
SCALE_KINDS = ("weight_scale", "weight_scale_inv")
# Serving-side scalars of activations and caches: the trainer's weights do not decide them.
UNCHECKED_KINDS = ("input_scale", "k_scale", "v_scale", "q_scale", "output_scale")
_VOCABULARY_PADDING = 512


@dataclass
class Side:
    """A checkpoint with its canonical layout, and an adapter that is merged on the fly.

    unsigned_zeros: read -0 as +0, to compare with a read-back through a kernel: sums lose the sign.
    """

    label: str
    layout: Layout
    adapter: Adapter | None = None
    unsigned_zeros: bool = False

    @property
    def checkpoint(self) -> Checkpoint:
        return self.layout.checkpoint

    @property
    def geometry(self) -> Geometry:
        return self.layout.geometry

    @property
    def names(self) -> set[str]:
        return set(self.layout.tensors)

    def adapts(self, name: str) -> bool:
        return self.adapter is not None and name in self.adapter.updates


def open_side(
    path: Path | str, adapter: Path | str | None = None, peer: Checkpoint | None = None
) -> Side:
    """Opens a checkpoint; its geometry comes from its own config.json, else from its peer's.

    Raises InputError for anything unreadable, and for an adapter given in place of a checkpoint.
    """
    checkpoint = open_checkpoint(path)
    if has_lora_factors(checkpoint):
        raise InputError(
            "holds LoRA factors, not merged weights",
            where=str(path),
            fix="give the base checkpoint, and the adapter with --trainer-adapter",
        )
    config = checkpoint.config or (peer.config if peer else {})
    geometry = geometry_of(config, str(checkpoint.path / "config.json"))
    layout = layout_of(checkpoint, geometry)
    side = Side(str(path), layout)
    if adapter is not None:
        side.adapter = open_adapter(adapter, geometry)
        unknown = sorted(set(side.adapter.updates) - side.names)
        if unknown:
            raise InputError(
                f"the adapter changes {len(unknown)} weights that the base lacks: {unknown[0]}",
                where=str(adapter),
            )
    return side


@dataclass(frozen=True)
class Overlap:
    """A region that one piece of each side covers. start: its place in the canonical tensor."""

    trainer: Operand
    served: Operand
    start: tuple[int, ...]
    trainer_rank: int
    served_rank: int

    @property
    def elements(self) -> int:
        return self.served.shape[0] * self.served.shape[1]


@dataclass
class Pair:
    """A canonical tensor to compare. trainer_name differs from name for a tied head only."""

    name: str
    trainer_name: str
    served_name: str
    note: str = ""
    scale_name: str | None = None
    evidence: dict[str, object] = field(default_factory=dict)


def _region(piece: Piece, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    own = piece.start or (0,) * len(piece.shape)
    view = piece.view()
    for axis, (begin, size) in enumerate(zip(start, shape, strict=True)):
        if begin != own[axis] or size != piece.shape[axis]:
            view = view.narrow(axis, begin - own[axis], size)
    return view


def _intersection(a: Piece, b: Piece) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    start_a, start_b = a.start or (0,) * len(a.shape), b.start or (0,) * len(b.shape)
    start = tuple(map(max, zip(start_a, start_b, strict=True)))
    shape = tuple(
        min(sa + na, sb + nb) - s
        for sa, na, sb, nb, s in zip(start_a, a.shape, start_b, b.shape, start, strict=True)
    )
    return (start, shape) if all(size > 0 for size in shape) else None


def operand(
    side: Side, name: str, piece: Piece, start: tuple[int, ...], shape: tuple[int, ...]
) -> Operand:
    """A region of a piece, with the side's adapter merged in."""
    view = _region(piece, start, shape)
    update = side.adapter.cut(name, start, shape) if side.adapter is not None else None
    whole = plain(view) if update is None else Merged(view, update)
    return Unsigned(whole) if side.unsigned_zeros and view.dtype.is_floating_point else whole


def overlaps(trainer: Side, served: Side, pair: Pair) -> Iterator[Overlap]:
    """Every region that both sides hold, as operands of equal shape."""
    for own in served.layout.tensors[pair.served_name]:
        for other in trainer.layout.tensors[pair.trainer_name]:
            if (region := _intersection(other, own)) is None:
                continue
            start, shape = region
            yield Overlap(
                operand(trainer, pair.trainer_name, other, start, shape),
                operand(served, pair.served_name, own, start, shape),
                start,
                other.rank,
                own.rank,
            )


def shapes_agree(trainer: Side, served: Side, pair: Pair) -> bool:
    """Equal canonical shapes, or a served vocabulary padded by less than 512 rows."""
    ours = trainer.layout.shape(pair.trainer_name)
    theirs = served.layout.shape(pair.served_name)
    if ours == theirs:
        return True
    padded = (
        pair.name in (HEAD, trainer.geometry.family.embedding)
        and ours[1:] == theirs[1:]
        and 0 < theirs[0] - ours[0] < _VOCABULARY_PADDING
    )
    if padded:
        pair.note = f"{theirs[0] - ours[0]} padding rows of the served vocabulary not compared"
    return padded


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def pair_up(trainer: Side, served: Side) -> tuple[list[Pair], list[str], list[str], list[str]]:
    """(pairs, missing on the served side, unknown to the trainer, notes).

    Tied heads are resolved here: a side without ``lm_head.weight`` serves its embedding.
    Scales that belong to a served quantised weight travel with their pair.
    """
    ours, theirs = trainer.names, served.names
    embedding = trainer.geometry.family.embedding
    pairs, missing, notes = [], [], []
    taken: set[str] = set()
    for name in sorted(ours):
        if _kind(name) in UNCHECKED_KINDS:
            continue
        if name in theirs:
            pair = Pair(name, name, name)
            for kind in SCALE_KINDS:
                scale = f"{name.removesuffix('weight')}{kind}"
                if name.endswith(".weight") and scale in theirs and scale not in ours:
                    pair.scale_name = scale
                    taken.add(scale)
            pairs.append(pair)
            taken.add(name)
        elif name == HEAD and embedding in theirs:
            pairs.append(Pair(name, name, embedding, "the served head is its embedding (tied)"))
        elif name.endswith("inv_freq"):
            notes.append(f"{name}: only the trainer stores it; the engine computes its own")
        else:
            missing.append(name)
    extra = []
    for name in sorted(theirs - taken):
        if name == HEAD and embedding in ours:
            pairs.append(Pair(name, embedding, name, "the trainer's head is its embedding (tied)"))
        elif _kind(name) in UNCHECKED_KINDS:
            notes.append(f"{name}: not decided by the trainer's weights, not compared")
        else:
            extra.append(name)
    return pairs, missing, extra, notes
