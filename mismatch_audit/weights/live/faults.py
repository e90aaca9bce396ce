"""Faults put into a live engine's sync on purpose: a broken trainer or engine around a sound one.

Each is what a real stack did or could do; the tests and ``--inject`` show that the audit sees it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernel_contracts.errors import InputError
from mismatch_audit.weights.checkpoint import open_checkpoint
from mismatch_audit.weights.live.audit import SyncOptions, audit_sync
from mismatch_audit.weights.live.base import LiveEngine, PushReceipt, Version
from mismatch_audit.weights.live.engine_format import FolderWriter, write_for_engine
from mismatch_audit.weights.live.report import SyncReport
from mismatch_audit.weights.sides import open_side

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class LiveFault:
    """named: what the cause must contain, alternatives separated by "|". quantised: whether it
    needs (True) or excludes (False) a quantised engine; None: either."""

    flag: str
    title: str
    named: str
    quantised: bool | None = None

    def is_named(self, cause: str) -> bool:
        return any(word in cause for word in self.named.split("|"))


MENU = (
    # vLLM 0.32 cannot run an int8 layer on a CPU after a push that left it out: it fails loudly.
    LiveFault("skipped_layer", "skipped layer", "skipped layer|engine fails"),
    LiveFault("partial_push", "partial push", "partial push|engine fails"),
    LiveFault("withheld", "push acknowledged and withheld", "acknowledged, not applied"),
    LiveFault("version_only", "version bumped without a load", "without a load"),
    LiveFault("stale_cache", "prefix cache kept after the push", "stale prefix cache"),
    LiveFault("transposed", "transposed tensor", "transposed", quantised=False),
    LiveFault("scaled", "tensor scaled by 1.5", "scaled|quantizer"),
    LiveFault("nan", "NaN in a pushed tensor", "NaN"),
    LiveFault("swapped", "gate and up swapped", "swapped"),
    LiveFault("head_not_sent", "head not sent with the embedding", "lm_head.weight: stale"),
    LiveFault("stale_copy", "kernel keeps its packed copy of a layer", "stale"),
    LiveFault("rope_zeroed", "RoPE table zeroed by the reload", "zeroed"),
    LiveFault("echo", "read-back echoes the push, nothing loaded", "other memory", quantised=False),
    LiveFault("scale_doubled", "scale doubled in the push", "scaled|quantizer", True),
    LiveFault("incoming_dtype", "a norm sent in another dtype", "incoming dtype"),
    LiveFault("unquantised", "a layer sent unquantised", "quantise different layers", True),
)


def fault_by_flag(flag: str) -> LiveFault:
    """Raises InputError with the menu."""
    for fault in MENU:
        if fault.flag == flag:
            return fault
    raise InputError(
        f"unknown fault {flag!r}", fix=f"one of {', '.join(fault.flag for fault in MENU)}"
    )


def _layer(name: str) -> int:
    hit = re.search(r"layers\.(\d+)\.", name)
    return int(hit.group(1)) if hit else -1


def _middle(tensors: Tensors) -> int:
    return (max(map(_layer, tensors)) + 1) // 2


def _one(tensors: Tensors, leaf: str) -> str:
    return next(n for n in tensors if n.endswith(leaf) and _layer(n) == _middle(tensors))


def _skip(tensors: Tensors) -> Tensors:
    return {n: v for n, v in tensors.items() if _layer(n) != _middle(tensors)}


def _cut(tensors: Tensors) -> Tensors:
    """Everything up to the first layers, as from a push whose future nobody awaited."""
    return {n: v for n, v in tensors.items() if _layer(n) < _middle(tensors)}


def _changed(leaf: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Tensors]:
    def sent(tensors: Tensors) -> Tensors:
        name = _one(tensors, leaf)
        return {**tensors, name: change(tensors[name])}

    return sent


def _scaled(tensors: Tensors) -> Tensors:
    leaf = "down_proj.weight_scale"
    quantised = any(n.endswith(leaf) for n in tensors)
    return _changed(leaf if quantised else "down_proj.weight", lambda v: v * 1.5)(tensors)


def _poisoned(tensors: Tensors) -> Tensors:
    def one_nan(value: torch.Tensor) -> torch.Tensor:
        bad = value.clone()
        bad.view(-1)[7] = torch.nan
        return bad

    leaf = "up_proj.weight_scale"
    quantised = any(n.endswith(leaf) for n in tensors)
    return _changed(leaf if quantised else "up_proj.weight", one_nan)(tensors)


def _swapped(tensors: Tensors) -> Tensors:
    return {
        n.replace("gate_proj", "UP").replace("up_proj", "gate_proj").replace("UP", "up_proj"): v
        for n, v in tensors.items()
    }


def _without(leaf: str) -> Callable[[Tensors], Tensors]:
    def sent(tensors: Tensors) -> Tensors:
        return {
            n: v
            for n, v in tensors.items()
            if not (n.endswith(leaf) and _layer(n) in (-1, _middle(tensors)))
        }

    return sent


_SENT: dict[str, Callable[[Tensors], Tensors]] = {
    "skipped_layer": _skip,
    "partial_push": _cut,
    "transposed": _changed("self_attn.o_proj.weight", lambda v: v.t()),
    "scaled": _scaled,
    "nan": _poisoned,
    "swapped": _swapped,
    "head_not_sent": _without("lm_head.weight"),
    "scale_doubled": _changed("down_proj.weight_scale", lambda v: v * 2),
}
_LAYER_OF_COPY = "mlp.down_proj"


def _unquantised(tensors: Tensors) -> Tensors:
    name = _one(tensors, "mlp.down_proj.weight")
    rest = {n: v for n, v in tensors.items() if n != f"{name}_scale"}
    return {**rest, name: tensors[name].float() * tensors[f"{name}_scale"]}


# Faults of the exporter: what is sent is wrong before the push, and can be seen before it.
_EXPORTS: dict[str, Callable[[Tensors], Tensors]] = {
    "incoming_dtype": _changed("input_layernorm.weight", lambda v: v.to(torch.float16)),
    "unquantised": _unquantised,
}


def _rewritten(source: Path, folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    stored = open_checkpoint(source).ranks[0]
    writer = FolderWriter(folder)
    for name, value in change({n: item.tensor() for n, item in stored.items()}).items():
        writer.add(name, value)
    writer.close()
    return folder


def audit_faulty(
    engine: LiveEngine,
    fault: LiveFault,
    checkpoint: Path,
    options: SyncOptions | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> SyncReport:
    """``audit_sync`` with a fault put in. The engine needs one more push afterwards."""
    options = options or SyncOptions()
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        if fault.flag in _EXPORTS:
            sound = write_for_engine(open_side(checkpoint), engine, Path(scratch) / "sound")
            export = _rewritten(sound.folder, Path(scratch) / "broken", _EXPORTS[fault.flag])
            return audit_sync(engine, checkpoint, replace(options, export=export), say)
        broken: Any = FaultyEngine(engine, fault)
        try:
            return audit_sync(broken, checkpoint, options, say)
        finally:
            broken.undo()


class FaultyEngine:
    """A LiveEngine with one fault. Everything else goes to the engine inside."""

    def __init__(self, inner: Any, fault: LiveFault) -> None:
        self._inner, self._fault = inner, fault  # inner: an ExtensionEngine
        self._echo: Path | None = None
        self._scratch = tempfile.TemporaryDirectory(prefix="mismatch-audit-fault-")
        self._count = 0
        self._zeroed = False

    def undo(self) -> None:
        """Mend what a later push would not."""
        if self._zeroed:
            self._inner.rpc("audit_weights_unzero")
            self._zeroed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def push(self, checkpoint: Path, version: Version = None, *, flush: bool = True) -> PushReceipt:
        flag = self._fault.flag
        if flag in ("withheld", "version_only", "echo"):
            return self._acknowledged(checkpoint, version)
        whole = open_checkpoint(checkpoint).ranks[0]
        alone = len({_layer(name) for name in whole}) == 1  # a canary push
        if flag in _SENT and not alone:
            self._count += 1
            folder = Path(self._scratch.name) / str(self._count)
            checkpoint = _rewritten(Path(checkpoint), folder, _SENT[flag])
        layer = f"model.layers.{_middle(dict.fromkeys(whole, torch.empty(0)))}.{_LAYER_OF_COPY}"
        if flag == "stale_copy":
            self._inner.rpc("audit_weights_keep", layer)
        receipt: PushReceipt = self._inner.push(
            checkpoint, version, flush=flush and flag != "stale_cache"
        )
        if flag == "stale_copy":
            self._inner.rpc("audit_weights_restore")
        if flag == "rope_zeroed" and not self._zeroed:
            self._inner.rpc("audit_weights_zero", "cos_sin_cache")
            self._zeroed = True
        return receipt

    def _acknowledged(self, checkpoint: Path, version: Version) -> PushReceipt:
        """HTTP 200, and nothing loaded."""
        self._echo = Path(checkpoint)
        flushed = self._inner.flush()
        if version is not None and self._fault.flag != "withheld":
            self._inner.set_version(version)
        names = open_checkpoint(checkpoint).ranks[0]
        return PushReceipt(
            str(checkpoint), self._inner.weight_version(), len(names), 0, 0.0, flushed
        )

    def read_back(self, folder: Path) -> Path:
        if self._fault.flag != "echo" or self._echo is None:
            return Path(self._inner.read_back(folder))
        self._inner.read_back(folder)
        for path in folder.glob("*.safetensors"):
            path.unlink()
        for path in self._echo.glob("*.safetensors"):
            (folder / path.name).write_bytes(path.read_bytes())
        return folder
