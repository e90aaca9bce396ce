"""How much of a training step reaches the served weights, under each way of exporting them.

An RL update is far smaller than a step of bf16, so rounding to nearest serves almost none of it
at once: from a start on the grid, a weight waits step / (2 |d|) pushes for its first change. That
is a delay for an fp32 master and a loss for a bf16 one. See docs/weights.md, "Visibility".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernel_contracts.errors import InputError
from mismatch_audit.weights.grids import BF16, FloatGrid, Grid, Served, changed_bytes
from mismatch_audit.weights.layout import split_layer
from mismatch_audit.weights.rounding import Rounding, nearest
from mismatch_audit.weights.sides import Side, operand
from mismatch_audit.weights.stochastic import Noise, stochastic
from mismatch_audit.weights.tally import Operand
from mismatch_audit.weights.visibility_report import (
    EXPORTS,
    LAG_BINS_PER_OCTAVE,
    LAG_LOW,
    ExportEffect,
    Visibility,
    VisibilityReport,
)
from mismatch_audit.weights.workers import Pages, default_threads, row_ranges, run_all

# Tasks are this much smaller than a comparison's: each holds some thirty copies of its rows.
_THINNER = 16


@dataclass(frozen=True)
class _Task:
    name: str
    grid: Grid
    before: Operand
    after: Operand
    origin: Operand | None
    rows: tuple[int, int]
    amax: torch.Tensor


def _simulate(
    task: _Task, w0: torch.Tensor, w1: torch.Tensor, pushes: int, seed: int, export: str
) -> ExportEffect:
    """Exports w0, then ``pushes`` steps of the same update, and watches the served copy."""
    start = task.rows[0] * task.before.shape[1]
    change = w1 - w0
    state = torch.zeros_like(w0)
    first: Served | None = None
    last: Served | None = None
    effect = ExportEffect(pushes=pushes)
    for push in range(pushes + 1):
        w = w0 + push * change
        rounding: Rounding = nearest
        if export == "stochastic":
            rounding = stochastic(task.name, start, Noise(seed, push))
        elif export == "dither":
            rounding = stochastic(task.name, start, Noise(seed))
        wanted = w + state if export == "feedback" else w
        served = task.grid.served(wanted, task.amax, rounding)
        if export == "feedback":
            state = wanted - served.values
        if last is not None:
            effect.visible += int(torch.count_nonzero(last.changed(served)))
            effect.bytes_changed += changed_bytes(last, served)
            effect.bytes_total += sum(part.nbytes for part in served.parts)
        else:
            first = served
        last = served
    if first is not None and last is not None:
        effect.movement.add(last.values - first.values, pushes * change)
    return effect


def _measure(task: _Task, pushes: int, seed: int) -> Visibility:
    begin, end = task.rows
    w0, w1 = task.before.rows(begin, end).float(), task.after.rows(begin, end).float()
    if w0.shape[1] == 1 and task.grid.name != "binary":
        w0, w1 = w0.reshape(1, -1), w1.reshape(1, -1)
    out = Visibility(weights=w0.numel())
    change = w1 - w0
    moved = change != 0
    old = task.grid.served(w0, task.amax, nearest)
    new = task.grid.served(w1, task.amax, nearest)
    q0, q1, seen = old.values, new.values, old.changed(new)
    out.moved, out.visible = int(moved.sum()), int(seen.sum())
    out.on_grid = int((q0 == w0).sum())
    hidden = moved & ~seen
    out.delayed = int(hidden.sum())
    out.delayed_energy = float((change.double() ** 2)[hidden].sum())
    out.movement.add(q1 - q0, change)
    if task.origin is not None:
        origin = task.origin.rows(begin, end).float().view(w0.shape)
        served_origin = task.grid.served(origin, task.amax, nearest).values
        out.from_origin.add(q1 - served_origin, w1 - origin)
    step = task.grid.step(w0, task.amax)
    if step is None:
        out.predicted = math.nan
    else:
        out.predicted = float((change.abs() / step).clamp_max(1).double().sum())
        lag = torch.log2((step / (2 * change.abs()))[moved])
        index = ((lag - LAG_LOW) * LAG_BINS_PER_OCTAVE).long().clamp(0, len(out.lags) - 1)
        out.lags = torch.bincount(index, minlength=len(out.lags))
    for export in EXPORTS:
        out.exports[export] = _simulate(task, w0, w1, pushes, seed, export)
    return out


def _single(side: Side, name: str) -> Operand:
    pieces = side.layout.tensors[name]
    if len(pieces) != 1:
        raise InputError("visibility needs unsharded masters", where=f"{side.label}:{name}")
    return operand(side, name, pieces[0], (0,) * len(pieces[0].shape), pieces[0].shape)


def _largest(master: Operand) -> torch.Tensor:
    rows, columns = master.shape
    parts = [master.rows(*r).abs().max().float() for r in row_ranges(rows, columns)]
    return torch.stack(parts).max()


def measure_visibility(
    before: Side,
    after: Side,
    grid: Grid,
    origin: Side | None = None,
    pushes: int = 8,
    seed: int = 0,
    threads: int | None = None,
) -> VisibilityReport:
    """Compares two masters of one run. Layers' matrices use ``grid``; all else is served in bf16.

    origin: the run's first master, for the gain so far. Raises InputError when the two have no
    tensor in common or differ in shape.
    """
    names = [n for n in sorted(before.names & after.names) if _is_weight(before, n)]
    if not names:
        raise InputError(
            "the two checkpoints have no weight in common",
            where=f"{before.label}, {after.label}",
        )
    tasks: list[_Task] = []
    rounded = True
    for name in names:
        old, new = _single(before, name), _single(after, name)
        if old.shape != new.shape:
            raise InputError(f"shapes {old.shape} and {new.shape} differ", where=name)
        first = _single(origin, name) if origin is not None and name in origin.names else None
        inside = bool(split_layer(name, before.geometry.family)[0])
        linear = inside and old.shape[1] > 1
        own: Grid = grid if linear or isinstance(grid, FloatGrid) else BF16
        amax = _largest(old)
        rounded &= _on_bf16(old) and _on_bf16(new)
        tasks += [
            _Task(name, own, old, new, first, rows, amax)
            for rows in row_ranges(old.shape[0], old.shape[1] * _THINNER)
        ]
    pages = Pages(before.checkpoint, after.checkpoint)

    def work(task: _Task) -> Visibility:
        result = _measure(task, pushes, seed)
        pages.used(result.weights * 8)
        return result

    tensors: dict[str, Visibility] = {}
    overall = Visibility()
    for task, result in zip(tasks, run_all(work, tasks, threads or default_threads()), strict=True):
        tensors.setdefault(task.name, Visibility()).merge(result)
        overall.merge(result)
    return VisibilityReport(grid.name, pushes, tensors, overall, "bf16" if rounded else "fp32")


def _is_weight(side: Side, name: str) -> bool:
    piece = side.layout.tensors[name][0]
    return piece.view().dtype.is_floating_point and len(piece.shape) >= 1 and 0 not in piece.shape


def _on_bf16(master: Operand) -> bool:
    """Whether every value is a bf16 value (a bf16 master, whatever its container)."""
    if master.dtype == torch.bfloat16:
        return True
    for rows in row_ranges(*master.shape):
        block = master.rows(*rows)
        if not torch.equal(block.to(torch.bfloat16).to(block.dtype), block):
            return False
    return True
