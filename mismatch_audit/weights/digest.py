"""Hashing a checkpoint into a manifest: streamed, on every core, whatever the layout."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch

import mismatch_audit
from kernel_contracts.errors import InputError
from mismatch_audit.weights.formats import code_of, itemsize, short, torch_dtype
from mismatch_audit.weights.layout import Piece
from mismatch_audit.weights.manifest import (
    CHUNK_ELEMENTS,
    PLAIN_CASTS,
    Entry,
    Manifest,
    whole_digest,
)
from mismatch_audit.weights.rounding import nearest, pattern
from mismatch_audit.weights.schemes import Scheme, scheme_by_name
from mismatch_audit.weights.sides import Side, operand
from mismatch_audit.weights.tally import Operand
from mismatch_audit.weights.workers import TASK_ELEMENTS, Pages, default_threads, run_all

# Weights that engines quantise: the linear layers inside the blocks.
_QUANTISED_LEAVES = ("_proj.weight", ".c_attn.weight", ".c_proj.weight", ".c_fc.weight")


def chunk_digest(values: torch.Tensor) -> bytes:
    """SHA-256 of one chunk's little-endian bytes."""
    return hashlib.sha256(pattern(values.contiguous()).numpy().data.cast("B")).digest()


def tensor_digest(code: str, shape: tuple[int, ...], chunks: list[bytes]) -> str:
    """Digest of a tensor from those of its chunks, in order. code: safetensors dtype."""
    digest = hashlib.sha256(f"{code} {list(shape)}\n".encode())
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


@dataclass
class TensorHasher:
    """Digest of a tensor that arrives in pieces of any size, in row-major order."""

    code: str
    shape: tuple[int, ...]
    chunks: list[bytes] = field(default_factory=list)
    nonfinite: int = 0
    nonzero: bool = False
    _rest: torch.Tensor | None = None

    def update(self, values: torch.Tensor) -> None:
        flat = values.reshape(-1)
        self.nonfinite += count_nonfinite(flat)
        self.nonzero |= bool(pattern(flat).any())
        if self._rest is not None:
            flat, self._rest = torch.cat([self._rest, flat]), None
        whole = len(flat) // CHUNK_ELEMENTS * CHUNK_ELEMENTS
        for begin in range(0, whole, CHUNK_ELEMENTS):
            self.chunks.append(chunk_digest(flat[begin : begin + CHUNK_ELEMENTS]))
        if whole < len(flat):
            self._rest = flat[whole:].clone()

    def entry(self) -> Entry:
        chunks = [*self.chunks, chunk_digest(self._rest)] if self._rest is not None else self.chunks
        empty = math.prod(self.shape) == 0
        return Entry(
            short(self.code),
            self.shape,
            tensor_digest(self.code, self.shape, chunks),
            self.nonfinite,
            not self.nonzero and not empty,
        )


def count_nonfinite(values: torch.Tensor) -> int:
    """NaN and infinities of a block; a finite sum proves that there are none."""
    if not values.dtype.is_floating_point:
        return 0
    if values.element_size() > 1 and math.isfinite(float(values.sum(dtype=torch.float32))):
        return 0
    return int((~torch.isfinite(values.float())).sum())


def hash_tensor(values: torch.Tensor) -> Entry:
    """The entry of a tensor in memory (what an engine read back)."""
    hasher = TensorHasher(code_of(values.dtype), tuple(values.shape))
    hasher.update(values.contiguous())
    return hasher.entry()


@dataclass(frozen=True)
class _Task:
    """Rows of a tensor that start and end at chunk borders (or one whole, quantised tensor)."""

    name: str
    rows: tuple[int, int]
    quantised: bool = False


class _Builder:
    def __init__(self, side: Side, cast: str) -> None:
        self.side = side
        self.scheme: Scheme | None = None if cast in PLAIN_CASTS else scheme_by_name(cast)
        self.code = PLAIN_CASTS[cast] if self.scheme is None else "BF16"
        self.pages = Pages(side.checkpoint)

    def is_quantised(self, name: str) -> bool:
        inside = name.startswith(self.side.geometry.family.root)
        return self.scheme is not None and inside and name.endswith(_QUANTISED_LEAVES)

    def piece(self, name: str) -> Piece:
        pieces = self.side.layout.tensors[name]
        if len(pieces) != 1:
            raise InputError(
                "a manifest needs whole tensors, this one is cut into ranks",
                where=f"{self.side.label}:{name}",
                fix="gather the shards, or compare the sharded checkpoint itself",
            )
        return pieces[0]

    def master(self, name: str) -> Operand:
        piece = self.piece(name)
        return operand(self.side, name, piece, (0,) * len(piece.shape), piece.shape)

    def cast_code(self, name: str) -> str:
        stored = self.piece(name).stored.info.code
        floating = torch_dtype(stored).is_floating_point and itemsize(stored) > 1
        adapted = "F32" if self.side.adapts(name) else stored
        return self.code if self.code and floating else adapted

    def tasks(self, name: str) -> list[_Task]:
        if self.is_quantised(name):
            return [_Task(name, (0, self.piece(name).shape[0]), True)]
        rows, columns = self.master(name).shape
        # the fewest rows that hold whole chunks, then as many of those as make a task
        period = CHUNK_ELEMENTS // math.gcd(CHUNK_ELEMENTS, max(1, columns))
        step = max(1, TASK_ELEMENTS // max(1, period * columns)) * period
        return [_Task(name, (a, min(a + step, rows))) for a in range(0, rows, step)]

    def run(self, task: _Task) -> list[tuple[str, TensorHasher]]:
        master = self.master(task.name)
        if task.quantised:
            return self._run_quantised(task, master)
        code = self.cast_code(task.name)
        hasher = TensorHasher(code, self.piece(task.name).shape)
        step = max(1, CHUNK_ELEMENTS // max(1, master.shape[1]))
        for begin in range(*task.rows, step):
            block = master.rows(begin, min(begin + step, task.rows[1]))
            dtype = torch_dtype(code)
            hasher.update(nearest(block, dtype) if block.dtype != dtype else block)
            self.pages.used(block.nbytes)
        return [(task.name, hasher)]

    def _run_quantised(self, task: _Task, master: Operand) -> list[tuple[str, TensorHasher]]:
        scheme = self.scheme
        if scheme is None:
            return []
        rows, columns = master.shape
        kind = "weight_scale_inv" if scheme.name == "block_fp8" else "weight_scale"
        scale_shape = scheme.scale_shape((rows, columns))
        payload: TensorHasher | None = None
        scales: TensorHasher | None = None
        step = max(128, CHUNK_ELEMENTS // columns // 128 * 128)
        if scheme.name == "tensor_fp8":
            step = rows
        for begin in range(0, rows, step):
            block = master.rows(begin, min(begin + step, rows))
            values, scale = scheme.encode(block)
            payload = payload or TensorHasher(code_of(values.dtype), (rows, columns))
            scales = scales or TensorHasher(code_of(scale.dtype), scale_shape)
            payload.update(values)
            scales.update(scale)
            self.pages.used(block.nbytes)
        out = [(task.name, payload), (f"{task.name.removesuffix('weight')}{kind}", scales)]
        return [(name, hasher) for name, hasher in out if hasher is not None]


def build_manifest(
    side: Side,
    cast: str = "none",
    step: int | None = None,
    data_cut: str | None = None,
    threads: int | None = None,
) -> Manifest:
    """Hashes every canonical tensor after ``cast`` (none, fp32, bf16, fp16 or a quantiser).

    Raises InputError for tensor-parallel shards and unknown casts.
    """
    builder = _Builder(side, cast)
    tasks = [task for name in sorted(side.names) for task in builder.tasks(name)]
    done: dict[str, TensorHasher] = {}
    for results in run_all(builder.run, tasks, threads or default_threads()):
        for name, part in results:
            if name not in done:
                done[name] = part
                continue
            whole = done[name]
            whole.chunks += part.chunks
            whole.nonfinite += part.nonfinite
            whole.nonzero |= part.nonzero
            whole._rest = part._rest
    for name in side.names:  # tensors without elements have no task
        if name not in done:
            piece = builder.piece(name)
            done[name] = TensorHasher(builder.cast_code(name), piece.shape)
    entries = {name: hasher.entry() for name, hasher in done.items()}
    return Manifest(
        cast,
        entries,
        whole_digest(entries),
        source=Path(side.label).name,
        model_type=side.geometry.model_type,
        step=step,
        data_cut=data_cut,
        versions={"mismatch_audit": mismatch_audit.__version__, "torch": str(torch.__version__)},
    )
