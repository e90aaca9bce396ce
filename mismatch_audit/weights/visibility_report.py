"""What a visibility measurement holds: sums that add up over tensors, and their ratios."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

EXPORTS = ("nearest", "stochastic", "dither", "feedback")
QUANTILES = (0.1, 0.5, 0.9)
LAG_BINS_PER_OCTAVE, LAG_LOW, _LAG_HIGH = 8, -20, 60


@dataclass
class Movement:
    """Sums over weights of the served change s and the master's change d; they add up.

    gain: <s, d> / ||d||^2, 1 when the served copy moved as far as the master. noise: what of s is
    not along d, relative to ||d||.
    """

    dot: float = 0.0
    served: float = 0.0
    master: float = 0.0

    def add(self, served: torch.Tensor, master: torch.Tensor) -> None:
        s, d = served.double().reshape(-1), master.double().reshape(-1)
        self.dot += float(s @ d)
        self.served += float(s @ s)
        self.master += float(d @ d)

    def merge(self, other: Movement) -> None:
        self.dot += other.dot
        self.served += other.served
        self.master += other.master

    @property
    def gain(self) -> float:
        return self.dot / self.master if self.master else math.nan

    @property
    def cosine(self) -> float:
        norm = math.sqrt(self.served * self.master)
        return self.dot / norm if norm else math.nan

    @property
    def noise(self) -> float:
        if not self.master:
            return math.nan
        left = self.served - self.dot**2 / self.master
        return math.sqrt(max(0.0, left) / self.master)


@dataclass
class ExportEffect:
    """One way of exporting, over a straight run of pushes. visible / bytes: per push, means."""

    visible: int = 0
    bytes_changed: int = 0
    bytes_total: int = 0
    pushes: int = 0
    movement: Movement = field(default_factory=Movement)

    def merge(self, other: ExportEffect) -> None:
        self.visible += other.visible
        self.bytes_changed += other.bytes_changed
        self.bytes_total += other.bytes_total
        self.pushes = max(self.pushes, other.pushes)
        self.movement.merge(other.movement)


@dataclass
class Visibility:
    """One tensor, or all of them. weights: compared; moved: of which the master changed.

    predicted: sum of min(1, |d| / step). delayed_energy: share of ||d||^2 that no served weight
    shows yet, as a sum. on_grid: masters that the served format represents.
    """

    weights: int = 0
    moved: int = 0
    visible: int = 0
    predicted: float = 0.0
    delayed: int = 0
    delayed_energy: float = 0.0
    on_grid: int = 0
    movement: Movement = field(default_factory=Movement)
    from_origin: Movement = field(default_factory=Movement)
    lags: torch.Tensor = field(
        default_factory=lambda: torch.zeros(
            (_LAG_HIGH - LAG_LOW) * LAG_BINS_PER_OCTAVE, dtype=torch.int64
        )
    )
    exports: dict[str, ExportEffect] = field(
        default_factory=lambda: {name: ExportEffect() for name in EXPORTS}
    )

    def merge(self, other: Visibility) -> None:
        for name in ("weights", "moved", "visible", "predicted", "delayed", "on_grid"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.delayed_energy += other.delayed_energy
        self.movement.merge(other.movement)
        self.from_origin.merge(other.from_origin)
        self.lags = self.lags + other.lags
        for name, effect in other.exports.items():
            self.exports[name].merge(effect)

    def lag_quantiles(self) -> dict[str, float]:
        """Half-step lag, step / (2 |d|) pushes, of the weights that moved (bins of 1/8 octave)."""
        total = int(self.lags.sum())
        if not total:
            return {}
        cumulative = self.lags.cumsum(0)
        out = {}
        for q in QUANTILES:
            index = int(torch.searchsorted(cumulative, torch.tensor(math.ceil(q * total))))
            out[f"p{round(q * 100)}"] = 2.0 ** (LAG_LOW + (index + 0.5) / LAG_BINS_PER_OCTAVE)
        return out

    def to_dict(self) -> dict[str, Any]:
        n = max(1, self.weights)
        energy = self.movement.master
        return {
            "weights": self.weights,
            "moved_share": self.moved / n,
            "visible_share": self.visible / n,
            "predicted_visible_share": self.predicted / n,
            "gain": self.movement.gain,
            "cosine": self.movement.cosine,
            "noise": self.movement.noise,
            "gain_from_origin": self.from_origin.gain,
            "cosine_from_origin": self.from_origin.cosine,
            "delayed_share": self.delayed / n,
            "delayed_energy_share": self.delayed_energy / energy if energy else math.nan,
            "on_grid_share": self.on_grid / n,
            "lag_pushes": self.lag_quantiles(),
            "exports": {
                name: {
                    "visible_share_per_push": effect.visible / n / max(1, effect.pushes),
                    "bytes_changed_share_per_push": effect.bytes_changed
                    / max(1, effect.bytes_total),
                    "bytes_changed_per_push": effect.bytes_changed / max(1, effect.pushes),
                    "gain": effect.movement.gain,
                    "cosine": effect.movement.cosine,
                    "noise": effect.movement.noise,
                }
                for name, effect in self.exports.items()
            },
        }


@dataclass
class VisibilityReport:
    """overall and per tensor. master: fp32, or bf16 when every master value is a bf16 value."""

    cast: str
    pushes: int
    tensors: dict[str, Visibility]
    overall: Visibility
    master: str

    @property
    def fate(self) -> str:
        """What happens to updates that are not visible: they are late, or gone."""
        return "lost" if self.master == "bf16" else "delayed"

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "kind": "visibility",
            "cast": self.cast,
            "pushes": self.pushes,
            "master": self.master,
            "invisible_updates_are": self.fate,
            "overall": self.overall.to_dict(),
            "tensors": {name: item.to_dict() for name, item in self.tensors.items()},
        }
