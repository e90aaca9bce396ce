"""Weight sync watched from inside a trainer, whatever the trainer: what was pushed, what arrived.

    audit = SyncAudit(read_served(engine), dtype="bfloat16", config=model.config.to_dict())
    audit.record(model.named_parameters(), step=0)            # before the first step
    ...optimizer.step()...
    audit.record(model.named_parameters(), step=step)         # after each optimiser step
    ...the trainer syncs its weights...
    metrics = audit.check(model.named_parameters(), step=step, version=version)
    logger.log(metrics.scalars())

``record`` costs a gather of some thousand elements a tensor; ``check`` reads the served tensors
back, so call it every N syncs on a large model.
"""

from __future__ import annotations

import math
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kernel_contracts.errors import InputError
from mismatch_audit.weights.compare import CompareOptions, compare_sides
from mismatch_audit.weights.families import geometry_of
from mismatch_audit.weights.layout import canonical_root
from mismatch_audit.weights.memory import memory_side
from mismatch_audit.weights.sides import Side, open_side
from mismatch_audit.weights.values import numel_of, served_values
from mismatch_audit.weights.visibility_report import Movement

if TYPE_CHECKING:
    from mismatch_audit.weights.live.base import LiveEngine, Version

Named = Iterable[tuple[str, torch.Tensor]]
SAMPLE = 4096
HISTORY = 8
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class SyncMetrics:
    """One sync. Shares and gains are of a fixed sample of every tensor's weights.

    moved_fraction: weights that the master changed since the last sync. visible_fraction: weights
    whose served-format value changed with it. gain: <served change, master's change> / ||master's
    change||^2, from what was read back (else from the cast): 1 when the engine follows the master.
    read_back_equal: every bit served equals the cast of the master; None when nothing was read.
    stale_after_step: how many optimiser steps ago the master was what is served now (0: current;
    None: nothing was read, or none of the remembered steps). findings: the causes, as sentences.
    """

    step: int
    version: Version
    tensors: int
    weights: int
    moved_fraction: float
    visible_fraction: float
    gain: float
    gain_of_cast: float
    read_back_equal: bool | None
    stale_after_step: int | None
    unequal: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    nonfinite: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool | None:
        """False: something is wrong. None: nothing was read back, which is never a pass."""
        return False if self.nonfinite else self.read_back_equal

    def scalars(self, prefix: str = "weights/") -> dict[str, float]:
        """For a logger: numbers only; what is unknown is left out."""
        values: dict[str, Any] = {
            "moved_fraction": self.moved_fraction,
            "visible_fraction": self.visible_fraction,
            "gain": self.gain,
            "gain_of_cast": self.gain_of_cast,
            "read_back_equal": self.read_back_equal,
            "stale_after_step": self.stale_after_step,
            "unequal_tensors": len(self.unequal) if self.read_back_equal is not None else None,
            "nonfinite": self.nonfinite,
            "sync_audit_seconds": self.seconds,
        }
        return {
            prefix + key: float(value)
            for key, value in values.items()
            if value is not None and math.isfinite(value)
        }


@dataclass
class _Snapshot:
    """A step's master on the sample: canonical name -> fp32 values."""

    step: int
    values: dict[str, torch.Tensor] = field(default_factory=dict)


def read_served(engine: LiveEngine) -> Callable[[], Side]:
    """Reads everything that an engine applies (see ``LiveEngine.read_back``)."""

    held: list[tempfile.TemporaryDirectory[str]] = []  # the newest read-back is mapped, not copied

    def read() -> Side:
        held[:] = [tempfile.TemporaryDirectory(prefix="mismatch-audit-readback-")]
        return open_side(engine.read_back(Path(held[0].name)))

    return read


class SyncAudit:
    """Watches a trainer's weight syncs. Raises InputError for parameters that cannot be mapped.

    served: reads the served tensors, as a Side, or as ``{name: tensor}`` under the trainer's or
    the engine's names; None measures only what the cast would show. dtype: of the served weights
    (float32, bfloat16, float16). config: the model's config.json as a mapping, for names and
    fused layouts. sample: weights watched per tensor. history: steps remembered for
    ``stale_after_step``.
    """

    def __init__(
        self,
        served: Callable[[], Side | Mapping[str, torch.Tensor]] | None = None,
        *,
        dtype: str = "bfloat16",
        config: Mapping[str, Any] | None = None,
        sample: int = SAMPLE,
        history: int = HISTORY,
        threads: int = 1,
    ) -> None:
        if dtype not in _DTYPES:
            raise InputError(f"unknown served dtype {dtype!r}", fix=f"one of {', '.join(_DTYPES)}")
        self._served, self._dtype = served, _DTYPES[dtype]
        self._config, self._sample, self._threads = dict(config or {}), sample, threads
        self._family = geometry_of(self._config, "config").family
        self._history: deque[_Snapshot] = deque(maxlen=history + 1)
        self._synced: _Snapshot | None = None
        self._served_before: dict[str, torch.Tensor] = {}

    def record(self, parameters: Named, step: int) -> None:
        """Remember the master after optimiser step ``step`` (once before the first, too)."""
        snapshot = self._snapshot(parameters, step)
        if self._history and self._history[-1].step == step:
            self._history.pop()
        self._history.append(snapshot)
        if self._synced is None:
            self._synced = snapshot

    def check(self, parameters: Named, step: int, version: Version = None) -> SyncMetrics:
        """After a sync of step ``step``: what the served weights are now. Call it once a sync."""
        started = time.perf_counter()
        named = [(name, _whole(value)) for name, value in parameters]
        self.record(named, step)
        now, before = self._history[-1], self._synced
        moved, visible, weights, cast = 0, 0, 0, Movement()
        for name, values in now.values.items():
            old = before.values.get(name, values) if before is not None else values
            moved += int((values != old).sum())
            q0, q1 = old.to(self._dtype), values.to(self._dtype)
            visible += int((q0 != q1).sum())
            weights += values.numel()
            cast.add(q1.float() - q0.float(), values - old)
        equal, lag, unequal, findings, gain = self._read(named, now, before)
        self._synced = now
        return SyncMetrics(
            step=step,
            version=version,
            tensors=len(now.values),
            weights=weights,
            moved_fraction=moved / weights if weights else math.nan,
            visible_fraction=visible / weights if weights else math.nan,
            gain=cast.gain if gain is None else gain,
            gain_of_cast=cast.gain,
            read_back_equal=equal,
            stale_after_step=lag,
            unequal=unequal,
            findings=findings,
            nonfinite=sum(int((~torch.isfinite(v)).sum()) for v in now.values.values()),
            seconds=time.perf_counter() - started,
        )

    def _snapshot(self, parameters: Named, step: int) -> _Snapshot:
        snapshot = _Snapshot(step)
        for name, value in parameters:
            canonical = canonical_root(name, self._family)
            snapshot.values[canonical] = self._sampled(canonical, _whole(value))
        if not snapshot.values:
            raise InputError("the trainer gave no parameters", where=f"step {step}")
        return snapshot

    def _sampled(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The same elements of a tensor every time, in fp32 on the CPU."""
        flat = value.detach().reshape(-1)
        if flat.numel() > self._sample:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            index = torch.randint(flat.numel(), (self._sample,), generator=generator)
            flat = flat[index.to(flat.device)]
        return flat.to("cpu", torch.float32, copy=True)

    def _read(
        self, named: list[tuple[str, torch.Tensor]], now: _Snapshot, before: _Snapshot | None
    ) -> tuple[bool | None, int | None, tuple[str, ...], tuple[str, ...], float | None]:
        if self._served is None:
            return None, None, (), (), None
        served = self._served()
        if not isinstance(served, Side):
            served = memory_side("served", served, self._config)
        trainer = memory_side("trainer", {n: v.cpu() for n, v in named}, self._config)
        trainer.unsigned_zeros = True  # a read-back through a kernel has no negative zero
        report = compare_sides(trainer, served, options=CompareOptions(threads=self._threads))
        if not report.compared:
            return None, None, (), ("nothing to compare: no tensor in common",), None
        sampled = {
            name: self._sampled(name, value)
            for name in now.values
            if (value := served_values(served, name)) is not None
            and value.numel() == numel_of(trainer, name)
        }
        gain = None
        if before is not None and self._served_before:
            movement = Movement()
            for name in sampled.keys() & self._served_before.keys() & before.values.keys():
                change = now.values[name] - before.values[name]
                movement.add(sampled[name] - self._served_before[name], change)
            gain = movement.gain
        self._served_before = sampled
        unequal = tuple(r.name for r in report.reports if not r.healthy)
        titles = tuple(f"{f.code} {f.title}" for f in report.findings)
        return report.exit_code == 0, self._lag(sampled), unequal, titles, gain

    def _lag(self, sampled: Mapping[str, torch.Tensor]) -> int | None:
        """Optimiser steps between the newest remembered master that these values are the cast of
        and the current one."""
        current = self._history[-1].step
        for snapshot in reversed(self._history):
            common = [name for name in sampled if name in snapshot.values]
            if common and all(
                torch.equal(snapshot.values[n].to(self._dtype).float(), sampled[n]) for n in common
            ):
                return current - snapshot.step
        return None


def _whole(value: torch.Tensor) -> torch.Tensor:
    """A sharded parameter (DTensor) gathered, else itself. A collective under FSDP: every rank
    must call it."""
    gather = getattr(value, "full_tensor", None)
    return gather() if callable(gather) else value
