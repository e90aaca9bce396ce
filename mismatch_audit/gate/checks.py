"""Checks of a live engine after a push, by log-probs of fixed token sequences (canaries).

Each answers ok True, False or None (nothing to see). None is a pass only for a check that is not
``needed``: the movement of an update too small to see, a read-back of an engine that has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kernel_contracts.errors import InputError, NotComparableError

if TYPE_CHECKING:
    from pathlib import Path

    from kernel_contracts.contract import Contract

LogProbs = Sequence[Sequence[float]]

SEEN_ERROR = 0.15
"""A movement whose standard error is above this is not decided: 0 and 1 are then < 7 s.e. apart."""


@dataclass(frozen=True)
class SyncCheck:
    """ok None: nothing to check; needed: None then counts as a failure."""

    check: str
    ok: bool | None
    detail: str
    value: float | None = None
    limit: float | None = None
    needed: bool = True

    @property
    def holds(self) -> bool:
        """Does this check let the push stand?"""
        return self.ok is True or (self.ok is None and not self.needed)


@dataclass(frozen=True)
class SyncLimits:
    """kl: mean KL(engine || trainer) a token, nats, by the k3 estimate on the canaries.

    worst: largest |log-prob difference| of any canary token, nats. restored: largest mean
    |difference| a token, nats, between the engine before the push and after a rollback.
    movement: how far the share of the trainer's change that the engine made may be from 1.
    growth, floor: the median |difference| may be ``growth`` times what it was before the push, and
    is never minded below ``floor`` nats.
    """

    kl: float = 1.0e-2
    worst: float = 5.0
    restored: float = 0.02
    movement: float = 0.5
    growth: float = 4.0
    floor: float = 2.0e-3

    @classmethod
    def of(cls, contract: Contract) -> SyncLimits:
        """The strictest limit that the contract sets on KL(q || p) over all tokens (its
        ``kl_engine_reference`` and ``k3`` clauses on the slice ``all``), else the default."""
        limits = [
            clause.limit
            for clause in contract.statistical
            if clause.metric in ("kl_engine_reference", "k3")
            and clause.limit is not None
            and "all" in clause.slices
        ]
        return cls(kl=min(limits)) if limits else cls()


def check_version(reported: Any, pushed: Any) -> SyncCheck:
    """The engine must report the version that was pushed. (vLLM's is text: "7" is 7.)"""
    if reported is None:
        return SyncCheck("version", None, "the engine reports no weight version")
    ok = str(reported) == str(pushed)
    return SyncCheck("version", ok, f"pushed {pushed}, the engine reports {reported}")


def check_receipt(receipt: Any) -> SyncCheck:
    """What the engine said of the push itself (a ``PushReceipt``). It is a claim, so that saying
    nothing is no failure; saying that something went wrong is one."""
    name = "receipt"
    if left := tuple(getattr(receipt, "not_loaded", ()) or ()):
        return SyncCheck(name, False, f"{len(left)} parameters were not loaded, first {left[0]}")
    if getattr(receipt, "flushed", None) is False:
        return SyncCheck(name, False, "the prefix cache was not emptied: its keys are stale")
    tensors = getattr(receipt, "tensors", None)
    if tensors is None:
        return SyncCheck(name, None, "this engine gives none", needed=False)
    return SyncCheck(name, tensors > 0, f"{tensors} tensors sent")


def flat_pair(a: LogProbs, b: LogProbs) -> tuple[np.ndarray, np.ndarray] | str:
    """Both as float64 vectors ``[tokens]``, or what is wrong with them."""
    if len(a) != len(b) or any(len(x) != len(y) for x, y in zip(a, b, strict=True)):
        return "the two sides scored different numbers of tokens"
    first = np.array([v for row in a for v in row], dtype=np.float64)
    second = np.array([v for row in b for v in row], dtype=np.float64)
    if not len(first):
        return "no canary token was scored"
    bad = int((~np.isfinite(first)).sum() + (~np.isfinite(second)).sum())
    if bad or (first > 1e-6).any() or (second > 1e-6).any():
        return f"{bad} log-probs are not finite" if bad else "a log-prob is above 0"
    return first, second


def check_agreement(trainer: LogProbs, engine: LogProbs, limits: SyncLimits) -> SyncCheck:
    """k3 = mean of w - 1 - ln w, w = p/q: unbiased for KL(q || p) on tokens drawn from q."""
    name = "agreement"
    pair = flat_pair(trainer, engine)
    if isinstance(pair, str):
        return SyncCheck(name, None if "no canary" in pair else False, pair)
    gap = pair[0] - pair[1]
    with np.errstate(over="ignore"):  # a gap of 710 nats is infinite, and fails
        kl = float(np.mean(np.expm1(gap) - gap))
    worst = float(np.abs(gap).max())
    said = f"KL {kl:.3g} nats a token (limit {limits.kl:g}), worst token {worst:.3g}"
    if not worst <= limits.worst:
        return SyncCheck(name, False, f"{said} (limit {limits.worst:g})", worst, limits.worst)
    return SyncCheck(name, kl <= limits.kl, f"{said}, {len(gap)} tokens", kl, limits.kl)


def check_movement(
    trainer: tuple[LogProbs, LogProbs] | None,
    engine: tuple[LogProbs, LogProbs],
    limits: SyncLimits,
) -> SyncCheck:
    """Did the engine move as the trainer did? Least squares of its change on the trainer's, each
    (before, after): 1 when every weight arrived, 0 when none did. Undecided for a small update."""
    name = "movement"
    if trainer is None:
        return SyncCheck(name, None, "the trainer's log-probs before it are unknown", needed=False)
    ours, theirs = flat_pair(*trainer), flat_pair(*engine)
    if isinstance(ours, str) or isinstance(theirs, str):
        return SyncCheck(name, False, ours if isinstance(ours, str) else str(theirs))
    x, y = ours[1] - ours[0], theirs[1] - theirs[0]
    energy = float(x @ x)
    if len(x) != len(y):
        return SyncCheck(name, False, "the two sides scored different numbers of tokens")
    if energy == 0.0 or len(x) < 2:
        return SyncCheck(name, None, "the trainer's log-probs did not change", needed=False)
    share = float(x @ y) / energy
    error = math.sqrt(float(((y - share * x) ** 2).sum()) / (len(x) - 1) / energy)
    said = f"the engine made {share:.2f} +- {error:.2f} of the trainer's change"
    if error > SEEN_ERROR:
        return SyncCheck(name, None, f"{said}: too small an update to tell", share, needed=False)
    return SyncCheck(name, abs(share - 1) <= limits.movement, said, share, limits.movement)


def check_steady(
    before: tuple[LogProbs, LogProbs] | None,
    after: tuple[LogProbs, LogProbs],
    limits: SyncLimits,
) -> SyncCheck:
    """Are the two sides as close as before the push? Each (trainer, engine). A contract bears a KL
    that a sound engine does not use: a fault may hide in what is left. By the median, because a
    few rare tokens carry most of a mean."""
    name = "steady"
    if before is None:
        return SyncCheck(name, None, "the trainer's log-probs before it are unknown", needed=False)
    old, new = flat_pair(*before), flat_pair(*after)
    if isinstance(old, str) or isinstance(new, str):
        return SyncCheck(name, False, old if isinstance(old, str) else str(new))
    was, now = (float(np.median(np.abs(a - b))) for a, b in (old, new))
    limit = max(limits.floor, limits.growth * was)
    said = f"median difference {now:.3g} nats after {was:.3g} (limit {limit:.3g})"
    return SyncCheck(name, now <= limit, said, now, limit)


def check_restored(before: LogProbs, after: LogProbs, limits: SyncLimits) -> SyncCheck:
    """After a rollback the engine must answer as it did before the push."""
    pair = flat_pair(before, after)
    if isinstance(pair, str):
        return SyncCheck("restored", False, pair)
    gap = float(np.abs(pair[0] - pair[1]).mean())
    said = f"mean |change| {gap:.3g} nats a token since before the push"
    return SyncCheck("restored", gap <= limits.restored, said, gap, limits.restored)


def check_read_back(engine: Any, checkpoint: Path, folder: Path) -> SyncCheck:
    """Every tensor that the engine applies, against the cast of the one that was pushed.

    folder: an empty one for what is read; the caller removes it. An engine without ``read_back``
    is unobserved.
    """
    name = "read_back"
    if not hasattr(engine, "read_back"):
        return SyncCheck(name, None, "this engine cannot be read back", needed=False)
    from mismatch_audit.weights.live.compare import compare_live
    from mismatch_audit.weights.sides import open_side

    try:
        report = compare_live(open_side(checkpoint), engine, folder)
    except (InputError, NotComparableError) as error:
        return SyncCheck(name, False, f"{error.what}")
    ok = None if report.exit_code == 3 else report.exit_code == 0
    if report.findings:
        first = report.findings[0]
        said = f"{first.title}" + (f" (and {n} more)" if (n := len(report.findings) - 1) else "")
    else:
        said = f"{report.compared} tensors equal to what was pushed"
    return SyncCheck(name, ok, said, float(len(report.findings)), 0.0)
