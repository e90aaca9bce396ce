"""Writing the served checkpoint from the master: streamed, sharded as the source, resumable.

Roundings: ``nearest``; ``stochastic`` (fresh noise at every push); ``dither`` (one fixed noise
per weight, so that a weight changes only when its master crosses its own threshold); ``feedback``
(to nearest, with the rounding error of this push added to the next master).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernel_contracts.errors import InputError, UnsoundError
from mismatch_audit.weights.checkpoint import INDEXES, Checkpoint, open_checkpoint
from mismatch_audit.weights.digest import build_manifest
from mismatch_audit.weights.export_plan import (
    JOURNAL,
    STATE_FOLDER,
    Journal,
    ShardPlan,
    element_bytes,
    open_journal,
    plan_shards,
    source_identity,
)
from mismatch_audit.weights.formats import torch_dtype
from mismatch_audit.weights.rounding import Rounding, nearest, pattern
from mismatch_audit.weights.safetensors_file import SafetensorsFile, encode_header
from mismatch_audit.weights.sides import open_side
from mismatch_audit.weights.stochastic import Noise, self_test, stochastic
from mismatch_audit.weights.workers import Pages, default_threads, run_all

ROUNDINGS = ("nearest", "stochastic", "dither", "feedback")
BLOCK_ELEMENTS = 1 << 20
_COPIED = (".json", ".txt", ".model", ".jinja", ".py", ".md")
_NOT_COPIED = {"config.json", "manifest.json", JOURNAL, *INDEXES}


@dataclass(frozen=True)
class ExportOptions:
    """push numbers the exports of a run (fresh noise). state: the previous export's folder."""

    rounding: str = "nearest"
    dtype: str = "bf16"
    seed: int = 0
    push: int = 0
    state: Path | None = None
    step: int | None = None
    data_cut: str | None = None
    threads: int | None = None


MakeRounding = Callable[[str, int, Noise], Rounding]


def export_checkpoint(
    source: Path | str,
    out: Path | str,
    options: ExportOptions,
    make: MakeRounding = stochastic,
) -> dict[str, Any]:
    """Writes ``out`` and returns a summary {tensors, cast, bytes, rounding, digest}.

    Run again after an interruption, it goes on where it stopped. Raises InputError for options or
    folders that cannot be used, UnsoundError when the stochastic rounding fails its self-test
    (make: replaced in tests only).
    """
    out = Path(out)
    if options.rounding not in ROUNDINGS:
        raise InputError(f"unknown rounding {options.rounding!r}", fix=", ".join(ROUNDINGS))
    if options.state is not None and options.rounding != "feedback":
        raise InputError("only feedback rounding has a state", fix="leave out --state")
    checkpoint = open_checkpoint(source)
    plans = plan_shards(checkpoint, options.dtype)
    if options.rounding in ("stochastic", "dither"):
        _check_rounding(make, options.dtype, plans)
    journal = open_journal(
        out,
        Journal(
            source_identity(checkpoint),
            options.rounding,
            options.dtype,
            options.seed,
            options.push,
            str(options.state) if options.state is not None else None,
        ),
    )
    try:
        digest = _write_all(checkpoint, out, plans, options, journal, make)
    except OSError as error:
        raise InputError(
            f"cannot write: {error.strerror or error}",
            where=str(out),
            fix="mend it and run the same command again: what is written is kept",
        ) from error
    return {
        "tensors": sum(len(plan.codes) for plan in plans),
        "cast": sum(plan.is_cast(name) for plan in plans for name in plan.codes),
        "bytes": sum(plan.size for plan in plans),
        "rounding": options.rounding,
        "digest": digest,
    }


def _write_all(
    checkpoint: Checkpoint,
    out: Path,
    plans: list[ShardPlan],
    options: ExportOptions,
    journal: Journal,
    make: MakeRounding,
) -> str:
    """Shards, then what belongs beside them, then the manifest; returns the whole digest."""
    pages = Pages(checkpoint)
    for plan in plans:
        if plan.name not in journal.finished:
            _Writer(plan, out, options, journal, make, pages).write()
    _write_beside(checkpoint, out, plans, options)
    manifest = build_manifest(open_side(out), "none", options.step, options.data_cut)
    manifest.versions |= {
        "rounding": options.rounding,
        "seed": str(options.seed),
        "push": str(options.push),
    }
    manifest.cast = options.dtype
    manifest.write(out / "manifest.json")
    (out / JOURNAL).unlink()
    return manifest.digest


def _check_rounding(make: MakeRounding, dtype: str, plans: list[ShardPlan]) -> None:
    codes = {code for plan in plans for name, code in plan.codes.items() if plan.is_cast(name)}
    for code in codes:
        problem = self_test(make, torch_dtype(code)).problem
        if problem is not None:
            raise UnsoundError(
                f"the stochastic rounding to {dtype} {problem}", fix="nothing was written"
            )


def pwrite_all(descriptor: int, data: memoryview, offset: int) -> None:
    """os.pwrite until every byte is written (a full disk or a signal may cut it short)."""
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


@dataclass
class _Writer:
    """One shard: a .partial file of the final size, filled tensor by tensor, then renamed."""

    plan: ShardPlan
    out: Path
    options: ExportOptions
    journal: Journal
    make: MakeRounding
    pages: Pages

    def write(self) -> None:
        partial = self.out / f"{self.plan.name}.partial"
        done = self.journal.done.setdefault(self.plan.name, [])
        fresh = not partial.is_file() or partial.stat().st_size != self.plan.size
        if fresh:
            done.clear()
        state = self._open_state(fresh)
        with partial.open("r+b" if not fresh else "w+b") as handle:
            if fresh:
                handle.truncate(self.plan.size)
                handle.write(self.plan.header)
            descriptor = handle.fileno()
            for name in self.plan.codes:
                if name in done:
                    continue
                self._tensor(descriptor, state, name)
                handle.flush()
                os.fsync(descriptor)
                if state is not None:
                    os.fsync(state.descriptor)
                    state.release()
                done.append(name)
                self.journal.write(self.out)
        if state is not None:
            state.finish()
        partial.replace(self.out / self.plan.name)
        self.journal.finished.append(self.plan.name)
        self.journal.write(self.out)

    def _open_state(self, fresh: bool) -> _State | None:
        if self.options.rounding != "feedback":
            return None
        return _State(self.plan, self.out, self.options.state, fresh)

    def _tensor(self, descriptor: int, state: _State | None, name: str) -> None:
        source = self.plan.file.tensor(name).reshape(-1)
        code = self.plan.codes[name]
        begin, _ = self.plan.places[name]
        size = element_bytes(code)
        old = state.previous(name) if state is not None and self.plan.is_cast(name) else None

        def block(start: int) -> None:
            values = source[start : start + BLOCK_ELEMENTS]
            if not self.plan.is_cast(name):
                written = values
            elif state is not None:
                wanted = values.float()
                if old is not None:
                    wanted = wanted + old[start : start + BLOCK_ELEMENTS]
                written = nearest(wanted, torch_dtype(code))
                state.store(name, start, wanted - written.float())
            else:
                written = self._round(name, start, values, code)
            data = pattern(written.contiguous()).numpy().data.cast("B")
            pwrite_all(descriptor, data, begin + start * size)
            self.pages.used(values.nbytes)

        starts = range(0, source.numel(), BLOCK_ELEMENTS)
        run_all(block, starts, self.options.threads or default_threads())

    def _round(self, name: str, start: int, values: torch.Tensor, code: str) -> torch.Tensor:
        dtype = torch_dtype(code)
        if self.options.rounding == "nearest":
            return nearest(values, dtype)
        push = self.options.push if self.options.rounding == "stochastic" else None
        return self.make(name, start, Noise(self.options.seed, push))(values.float(), dtype)


class _State:
    """The rounding error of every cast weight, fp32, in a file beside the shard."""

    def __init__(self, plan: ShardPlan, out: Path, previous: Path | None, fresh: bool) -> None:
        entries = [
            (name, "F32", info.shape)
            for name, info in plan.file.infos.items()
            if plan.is_cast(name)
        ]
        header, self._places = encode_header(entries, {"format": "pt"})
        folder = out / STATE_FOLDER
        folder.mkdir(exist_ok=True)
        self._final, self._partial = folder / plan.name, folder / f"{plan.name}.partial"
        if not fresh and not self._partial.is_file() and self._final.is_file():
            self._final.replace(self._partial)  # stopped between this rename and the shard's
        self._handle = self._partial.open("w+b" if fresh else "r+b")
        if fresh:
            self._handle.truncate(max([len(header), *(e for _, e in self._places.values())]))
            self._handle.write(header)
            self._handle.flush()
        self._old: SafetensorsFile | None = None
        if previous is not None:
            self._old = SafetensorsFile(previous / STATE_FOLDER / plan.name)
            for name, _, shape in entries:
                info = self._old.infos.get(name)
                if info is None or info.shape != shape:
                    raise InputError(
                        f"the feedback state has no {name!r} of shape {list(shape)}",
                        where=str(previous),
                        fix="start without --state, or name the run's own previous export",
                    )

    @property
    def descriptor(self) -> int:
        return self._handle.fileno()

    def previous(self, name: str) -> torch.Tensor | None:
        return self._old.tensor(name).reshape(-1) if self._old is not None else None

    def store(self, name: str, start: int, error: torch.Tensor) -> None:
        begin, _ = self._places[name]
        data = error.contiguous().numpy().data.cast("B")
        pwrite_all(self.descriptor, data, begin + 4 * start)

    def release(self) -> None:
        if self._old is not None:
            self._old.release()

    def finish(self) -> None:
        self._handle.close()
        self._partial.replace(self._final)


def _write_beside(
    checkpoint: Checkpoint, out: Path, plans: list[ShardPlan], options: ExportOptions
) -> None:
    """Config with the served dtype, an index when the source is sharded, tokenizer files."""
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    if checkpoint.config:
        config = dict(checkpoint.config)
        key = "dtype" if "dtype" in config else "torch_dtype"
        config[key] = {"bf16": "bfloat16", "fp16": "float16"}[options.dtype]
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    if len(plans) > 1:
        total = sum(end - begin for plan in plans for begin, end in plan.places.values())
        mapping = {name: plan.name for plan in plans for name in plan.codes}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(mapping.items()))}
        (out / INDEXES[0]).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    if not checkpoint.path.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in _COPIED and path.name not in _NOT_COPIED:
            shutil.copyfile(path, out / path.name)
