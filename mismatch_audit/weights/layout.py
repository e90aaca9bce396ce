"""From stored tensors to canonical ones: which slice of which tensor of which rank holds what.

A canonical tensor is a list of pieces; a piece is a zero-copy view of a stored tensor (rows of a
fused tensor, one expert of a stack, a transpose) plus the place it has in the canonical tensor.
Two layouts can then be compared whatever each side fuses or shards.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

from kernel_contracts.errors import InputError
from mismatch_audit.weights.checkpoint import Checkpoint, Stored
from mismatch_audit.weights.families import (
    PREFIXES,
    WRAPPERS,
    Experts,
    Family,
    Fused,
    Geometry,
)

if TYPE_CHECKING:
    import torch

BLOCK = 128  # rows and columns per scale of the block-fp8 layout
# What follows an expert stack's leaf in a stored name -> what follows an expert's own leaf.
_STACK_TAILS = {
    "": "weight",
    ".weight": "weight",
    "_weight": "weight",
    "_bias": "bias",
    ".bias": "bias",
    "_weight_scale": "weight_scale",
    ".weight_scale": "weight_scale",
    "_weight_scale_inv": "weight_scale_inv",
    ".weight_scale_inv": "weight_scale_inv",
    "_scale_inv": "weight_scale_inv",
}
Step = tuple[str, int, int]


@dataclass(frozen=True)
class Piece:
    """steps: ("rows" | "columns", begin, end), ("item", index, 0), ("transpose", 0, 0).

    start: where the piece's first element lies in the canonical tensor (rows, columns).
    """

    stored: Stored
    rank: int
    shape: tuple[int, ...]
    steps: tuple[Step, ...] = ()
    start: tuple[int, ...] = ()

    def view(self) -> torch.Tensor:
        """The piece as a view of the stored tensor, ``shape`` elements, nothing copied."""
        tensor = self.stored.tensor()
        for kind, first, second in self.steps:
            if kind == "rows":
                tensor = tensor[first:second]
            elif kind == "columns":
                tensor = tensor[:, first:second]
            elif kind == "item":
                tensor = tensor[first]
            else:
                tensor = tensor.t()
        return tensor

    def cut(self, begin: int, end: int) -> Piece:
        """Rows [begin, end) of this piece."""
        return replace(
            self,
            shape=(end - begin, *self.shape[1:]),
            steps=(*self.steps, ("rows", begin, end)),
        )

    def item(self, index: int) -> Piece:
        """Entry ``index`` of the first dimension."""
        return replace(
            self, shape=self.shape[1:], steps=(*self.steps, ("item", index, 0)), start=()
        )

    def transposed(self) -> Piece:
        return replace(
            self, shape=self.shape[::-1], steps=(*self.steps, ("transpose", 0, 0)), start=()
        )


@dataclass
class Layout:
    """tensors: canonical name -> pieces, all ranks. dropped: stored names that are no weights."""

    checkpoint: Checkpoint
    geometry: Geometry
    tensors: dict[str, list[Piece]] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)

    def shape(self, name: str) -> tuple[int, ...]:
        """The canonical shape: what all pieces cover together."""
        pieces = self.tensors[name]
        starts = [piece.start or (0,) * len(piece.shape) for piece in pieces]
        return tuple(
            max(start[i] + piece.shape[i] for start, piece in zip(starts, pieces, strict=True))
            for i in range(len(pieces[0].shape))
        )


@cache
def _pattern(leaf: str) -> re.Pattern[str]:
    """Matches a leaf ('*' is an expert's number) up to the end of a word of a stored name."""
    return re.compile(re.escape(leaf).replace(r"\*", r"(\d+)") + r"(?=[._]|$)")


def _matches(leaf: str, table: tuple[str, ...]) -> bool:
    return any((hit := _pattern(row).match(leaf)) and hit.end() == len(leaf) for row in table)


def canonical_root(name: str, family: Family) -> str:
    """A stored name without its wrappers, under the family's own root."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    for prefix, instead in PREFIXES:
        if name.startswith(prefix):
            name = instead + name[len(prefix) :]
    if not name.startswith((family.root, "lm_head.")):
        name = family.root + name
    return name


def split_layer(name: str, family: Family) -> tuple[str, str]:
    """(layer prefix with its dot, rest): ``model.layers.3.`` and ``mlp.up_proj.weight``."""
    hit = re.match(re.escape(f"{family.root}{family.layer}.") + r"\d+\.", name)
    return (hit.group(0), name[hit.end() :]) if hit else ("", name)


def _renamed(rest: str, family: Family) -> str:
    for old, new in family.renames.items():
        if hit := _pattern(old).match(rest):
            for group in hit.groups():
                new = new.replace("*", group, 1)
            return new + rest[hit.end() :]
    return rest


class _Builder:
    def __init__(self, checkpoint: Checkpoint, geometry: Geometry) -> None:
        self.layout = Layout(checkpoint, geometry)
        self.geometry, self.family = geometry, geometry.family
        self.ranks = len(checkpoint.ranks)
        self.conv1d = self.ranks == 1 and self._stores_inputs_first(checkpoint)
        self.turned_experts = self._turned_experts(checkpoint)

    def _stores_inputs_first(self, checkpoint: Checkpoint) -> bool:
        """transformers' Conv1D keeps [in, out]; c_attn and c_fc are wider than they are tall."""
        for name, stored in checkpoint.ranks[0].items():
            if re.search(r"\.(c_attn|c_fc)\.weight$", name) and len(stored.info.shape) == 2:
                return stored.info.shape[1] > stored.info.shape[0]
        return False

    def _turned_experts(self, checkpoint: Checkpoint) -> bool:
        """Whether expert stacks are [in, out] (Llama 4, GPT-OSS style): told by where the hidden
        size is, in any stack whose two sizes differ."""
        hidden = self.geometry.hidden
        for name, stored in checkpoint.ranks[0].items():
            shape = stored.info.shape
            if len(shape) != 3 or shape[1] == shape[2] or hidden not in shape[1:]:
                continue
            rest = self._rest(name)[1]
            for stack in self.family.experts:
                if _STACK_TAILS.get(rest.removeprefix(stack.leaf)) == "weight":
                    expected = shape[1] if len(stack.parts) == 1 else shape[2]
                    return expected != hidden
        return False

    def _rest(self, name: str) -> tuple[str, str]:
        prefix, rest = split_layer(canonical_root(name, self.family), self.family)
        return prefix, _renamed(rest, self.family)

    def build(self) -> Layout:
        for rank, names in enumerate(self.layout.checkpoint.ranks):
            for name, stored in names.items():
                self._place(name, Piece(stored, rank, stored.info.shape))
        return self.layout

    def _place(self, name: str, piece: Piece) -> None:
        prefix, rest = self._rest(name)
        if prefix and rest in self.family.ignored:
            self.layout.dropped.append(name)
            return
        if self.conv1d and rest.endswith(".weight") and rest[:-7] in self.family.conv1d:
            piece = piece.transposed()
        for stack in self.family.experts:
            tail = rest.removeprefix(stack.leaf) if rest.startswith(stack.leaf) else None
            if tail in _STACK_TAILS:
                self._place_experts(prefix, stack, _STACK_TAILS[tail], piece)
                return
        for fused in self.family.fused:
            if rest.startswith(fused.leaf + "."):
                self._place_fused(prefix, fused, rest[len(fused.leaf) + 1 :], piece)
                return
        leaf, _, kind = rest.rpartition(".")
        self._add(prefix, leaf, kind, piece)

    def _place_experts(self, prefix: str, stack: Experts, kind: str, piece: Piece) -> None:
        if not piece.shape:
            raise InputError("an expert stack cannot be a scalar", where=piece.stored.where)
        for expert in range(piece.shape[0]):
            slab = piece.item(expert)
            if kind == "weight" and len(slab.shape) == 2 and self.turned_experts:
                slab = slab.transposed()
            sizes = [slab.shape[0] // len(stack.parts)] * len(stack.parts) if slab.shape else []
            for part, own in self._cut(slab, stack.parts, sizes):
                self._add(prefix, f"{stack.into}.{expert}.{part}", kind, own)

    def _place_fused(self, prefix: str, fused: Fused, kind: str, piece: Piece) -> None:
        parts = fused.parts
        if fused.sizes == "equal":
            sizes = [piece.shape[0] // len(parts)] * len(parts) if piece.shape else []
        else:
            sizes = self._head_sizes(piece)
        for part, own in self._cut(piece, parts, sizes):
            self._add(prefix, part, kind, own)

    def _head_sizes(self, piece: Piece) -> list[int]:
        g = self.geometry
        if not (g.heads and g.kv_heads and g.head_dim):
            raise InputError(
                "q, k and v are fused and no config.json says how many heads each has",
                where=piece.stored.where,
                fix="put the model's config.json beside the weights",
            )
        return [
            g.heads // self.ranks * g.head_dim,
            max(1, g.kv_heads // self.ranks) * g.head_dim,
            max(1, g.kv_heads // self.ranks) * g.head_dim,
        ]

    def _cut(
        self, piece: Piece, parts: tuple[str, ...], sizes: list[int]
    ) -> list[tuple[str, Piece]]:
        """Parts of a fused piece, or of its scales (per row, per 128 rows, per part, or one)."""
        if len(parts) == 1:
            return [(parts[0], piece)]
        rows = piece.shape[0] if piece.shape else 1
        if not piece.shape or (piece.shape == (1,)):
            return [(part, piece) for part in parts]
        total = sum(sizes)
        if rows == len(parts) and rows != total:
            return [(part, piece.cut(i, i + 1)) for i, part in enumerate(parts)]
        if rows == -(-total // BLOCK) and rows != total:
            if any(size % BLOCK for size in sizes):
                raise InputError(
                    f"parts of {sizes} rows do not start at multiples of {BLOCK}, so their "
                    "block scales cannot be told apart",
                    where=piece.stored.where,
                )
            sizes = [size // BLOCK for size in sizes]
        elif rows != total:
            raise InputError(
                f"{rows} rows, but {' + '.join(parts)} need {' + '.join(map(str, sizes))}",
                where=piece.stored.where,
                fix="check the head counts of config.json",
            )
        placed, begin = [], 0
        for part, size in zip(parts, sizes, strict=True):
            placed.append((part, piece.cut(begin, begin + size)))
            begin += size
        return placed

    def _add(self, prefix: str, leaf: str, kind: str, piece: Piece) -> None:
        name = f"{prefix}{leaf}.{kind}" if leaf else f"{prefix}{kind}"
        if self.ranks > 1:
            piece = self._shard(leaf, kind, piece)
        pieces = self.layout.tensors.setdefault(name, [])
        if any(other.rank == piece.rank for other in pieces):
            other = next(item for item in pieces if item.rank == piece.rank)
            raise InputError(
                f"{other.stored.info.name!r} and {piece.stored.info.name!r} both claim to be "
                f"{name}",
                where=str(self.layout.checkpoint.path),
                fix="remove one of the two",
            )
        pieces.append(piece)

    def _shard(self, leaf: str, kind: str, piece: Piece) -> Piece:
        """Puts a rank's piece where tensor parallelism cut it from."""
        start = [0] * len(piece.shape)
        if _matches(leaf, self.family.column) and piece.shape:
            index = piece.rank
            if leaf in self.family.kv and 0 < self.geometry.kv_heads < self.ranks:
                index //= self.ranks // self.geometry.kv_heads  # replicated heads
            start[0] = index * piece.shape[0]
        elif _matches(leaf, self.family.row) and len(piece.shape) == 2 and piece.shape[1] > 1:
            start[1] = piece.rank * piece.shape[1]
        return replace(piece, start=tuple(start))


def layout_of(checkpoint: Checkpoint, geometry: Geometry) -> Layout:
    """The canonical tensors of a checkpoint.

    Raises InputError when two stored tensors claim one name, or a fused tensor cannot be cut.
    """
    return _Builder(checkpoint, geometry).build()
