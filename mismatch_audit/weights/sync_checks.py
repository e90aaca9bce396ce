"""The checks around one push, each a function of an engine: seven guards, four complementary
checks, and the small ones (version, prefix cache, zero-change push, withheld push).

No check is enough: ``docs/weights.md`` has the matrix of which check sees which fault. A check
that had nothing to look at says ``ok=None`` (unobserved), which is never a pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mismatch_audit.weights.probes import PROBE_LIMIT, Apply, probe_expert, probe_linear
from mismatch_audit.weights.schemes import E8M0_UNWRITTEN

KL_HARD_STOP = 1.0
_CAP_STEPS = 2


@dataclass(frozen=True)
class CheckResult:
    """ok None: nothing to check. value and limit: the number that decided, when there is one."""

    check: str
    ok: bool | None
    detail: str = ""
    value: float | None = None
    limit: float | None = None
    where: tuple[str, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutStep:
    """One step's rollouts: non-finite log-probs, mean KL(engine || reference), share at the cap."""

    nonfinite: int
    kl: float
    at_cap: float


def rollout_sentinel(steps: list[RolloutStep]) -> CheckResult:
    """Guard 1: non-finite values, KL > 1, or every response at the length cap twice running."""
    name = "rollout_sentinel"
    if not steps:
        return CheckResult(name, None, "no rollouts")
    bad = sum(step.nonfinite for step in steps)
    if bad:
        return CheckResult(name, False, f"{bad} non-finite log-probs", float(bad), 0.0)
    worst = max(step.kl for step in steps)
    if not worst <= KL_HARD_STOP:
        return CheckResult(name, False, f"KL {worst:.3g} nats", worst, KL_HARD_STOP)
    capped = [step.at_cap >= 1.0 for step in steps]
    if any(all(capped[i : i + _CAP_STEPS]) for i in range(len(capped) - _CAP_STEPS + 1)):
        return CheckResult(name, False, "every response at the length cap twice running")
    return CheckResult(name, True, f"KL {worst:.3g} nats", worst, KL_HARD_STOP)


def _worst(name: str, errors: dict[str, float], limit: float) -> CheckResult:
    if not errors:
        return CheckResult(name, None, "no such layer")
    failing = tuple(layer for layer, error in errors.items() if not error <= limit)
    layer = max(errors, key=lambda key: errors[key] if not math.isnan(errors[key]) else math.inf)
    return CheckResult(
        name,
        not failing,
        f"worst {errors[layer]:.3g} at {layer}",
        errors[layer],
        limit,
        failing,
        errors,
    )


def dense_self_probe(
    layers: Iterable[tuple[str, Apply, torch.Tensor]], limit: float = PROBE_LIMIT
) -> CheckResult:
    """Guard 2: each layer against its own dequantised weight, 8 rows. (name, apply, weight)."""
    errors = {
        name: probe_linear(apply, weight, limit=limit).relative_error
        for name, apply, weight in layers
    }
    return _worst("dense_self_probe", errors, limit)


def expert_probe(
    experts: Iterable[tuple[str, Apply, torch.Tensor, torch.Tensor]], limit: float = PROBE_LIMIT
) -> CheckResult:
    """Guard 3: each expert against its own dequantised pair. (name, apply, gate_up, down)."""
    errors = {
        name: probe_expert(apply, gate_up, down, limit=limit).relative_error
        for name, apply, gate_up, down in experts
    }
    return _worst("expert_probe", errors, limit)


def unwritten_scales(scales: Mapping[str, torch.Tensor], filled: int) -> CheckResult:
    """Guard 4: markers that survived the push. filled: scales that were marked before it."""
    name = "unwritten_scales"
    if not filled:
        return CheckResult(name, None, "no scales were filled before the push")
    left: dict[str, float] = {}
    for scale_name, scale in scales.items():
        marker = (
            scale == E8M0_UNWRITTEN
            if scale.dtype == torch.uint8
            else ~torch.isfinite(scale.float())
        )
        share = float(marker.float().mean())
        if share:
            left[scale_name] = share
    detail = f"{len(left)} tensors hold markers" if left else f"{filled} scales written"
    return CheckResult(name, not left, detail, float(len(left)), 0.0, tuple(left), left)


def set_audit(trainer: frozenset[str], engine: frozenset[str]) -> CheckResult:
    """Guard 5: the layers that each side quantises, by canonical name."""
    if not trainer and not engine:
        return CheckResult("set_audit", None, "neither side quantises")
    only_trainer, only_engine = sorted(trainer - engine), sorted(engine - trainer)
    detail = f"{len(only_trainer)} only in the trainer, {len(only_engine)} only in the engine"
    ok = not only_trainer and not only_engine
    return CheckResult("set_audit", ok, detail, where=tuple(only_trainer + only_engine))


def live_dtype(declared: Mapping[str, str], live: Mapping[str, str]) -> CheckResult:
    """Guard 6: dtypes read from the engine against those that it was started with."""
    if not declared:
        return CheckResult("live_dtype", None, "no dtypes were recorded")
    changed = tuple(
        f"{name}: {declared[name]} -> {live.get(name, 'gone')}"
        for name in sorted(declared)
        if live.get(name) != declared[name]
    )
    return CheckResult("live_dtype", not changed, f"{len(changed)} changed", where=changed)


def incoming_dtype(incoming: Mapping[str, str], live: Mapping[str, str]) -> CheckResult:
    """Guard 7: dtypes of what is sent against what the engine holds, by canonical name."""
    common = sorted(set(incoming) & set(live))
    if not common:
        return CheckResult("incoming_dtype", None, "no tensor in common")
    wrong = tuple(f"{n}: {incoming[n]} into {live[n]}" for n in common if incoming[n] != live[n])
    return CheckResult("incoming_dtype", not wrong, f"{len(wrong)} differ", where=wrong)


def anchored_probe(
    layers: Iterable[tuple[str, Apply, torch.Tensor]],
    experts: Iterable[tuple[str, Apply, torch.Tensor, torch.Tensor]] = (),
    adapted: Mapping[str, tuple[float, float]] | None = None,
    limit: float = PROBE_LIMIT,
) -> CheckResult:
    """Each layer against x W_master^T: the trainer's weight, not the engine's own.

    adapted: layer -> (movement coefficient, its standard error) of adapters that must be on.
    """
    errors = {
        name: probe_linear(apply, weight, limit=limit).relative_error
        for name, apply, weight in layers
    }
    errors |= {
        name: probe_expert(apply, gate_up, down, limit=limit).relative_error
        for name, apply, gate_up, down in experts
    }
    result = _worst("anchored_probe", errors, limit)
    off = {
        name: coefficient
        for name, (coefficient, error) in (adapted or {}).items()
        if not abs(coefficient - 1) <= max(0.5, 4 * error)
    }
    if not off:
        return result
    name, coefficient = next(iter(off.items()))
    return CheckResult(
        "anchored_probe",
        False,
        f"adapter of {name} applied {round(coefficient, 2) + 0.0:.2f} times",
        coefficient,
        1.0,
        (*result.where, *off),
        {"adapter_coefficients": off, **result.evidence},
    )


def version_check(before: int, after: int, pushed: int) -> CheckResult:
    """The engine's version must be the pushed one, and have grown."""
    ok = after == pushed and after > before
    return CheckResult("version", ok, f"{before} -> {after}, pushed {pushed}", float(after))


def prefix_cache(
    warm_hits: int, with_cache: torch.Tensor, without: torch.Tensor, hits_after: int
) -> CheckResult:
    """Log-probs after the push, with and without the prefix cache, of a prompt it knew before.

    warm_hits: hits before the push; without one the test would test nothing.
    """
    if not warm_hits:
        return CheckResult("prefix_cache", None, "the cache was never hit before the push")
    if not bool(torch.isfinite(with_cache).all() and torch.isfinite(without).all()):
        return CheckResult("prefix_cache", None, "log-probs are not finite")
    same = torch.equal(with_cache, without)
    worst = float((with_cache - without).abs().max())
    detail = f"largest change {worst:.3g} nats, {hits_after} stale hits"
    return CheckResult("prefix_cache", same and not hits_after, detail, worst, 0.0)


def zero_change_push(before: torch.Tensor, after: torch.Tensor) -> CheckResult:
    """The same weights pushed again must give bit-equal log-probs."""
    finite = bool(torch.isfinite(before).all())
    same = torch.equal(before, after)
    worst = float((before - after).abs().max())
    if not finite:
        return CheckResult("zero_change_push", None, "log-probs were not finite before")
    return CheckResult("zero_change_push", same, f"largest change {worst:.3g} nats", worst, 0.0)


def withheld_push(noticed: bool, route: str) -> CheckResult:
    """Weights that were never sent must not be found served: else the read-back is no evidence."""
    detail = "noticed" if noticed else f"{route} reports weights that nobody sent"
    return CheckResult("withheld_push", noticed, detail)


def canary_push(
    push: Callable[[float], None], apply: Callable[[], torch.Tensor], factor: float = 2.0
) -> CheckResult:
    """Rescale one layer, push, probe, push back: the layer must follow and come back bit-equal.

    push(c) sends the layer multiplied by c. factor is a power of two, so that every format
    represents it exactly and the answer must be exactly factor times the first.
    """
    before = apply()
    push(factor)
    during = apply()
    push(1.0)
    after = apply()
    norm = float(before.norm())
    gain = float((during * before).sum()) / norm**2 if norm else math.nan
    moved = math.isfinite(gain) and abs(gain / factor - 1) <= 1e-3
    restored = torch.equal(before, after)
    detail = f"scaled by {gain:.4g} for {factor:g}, {'' if restored else 'not '}restored"
    return CheckResult("canary_push", moved and restored, detail, gain, factor)
