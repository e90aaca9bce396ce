"""The whole self-test: clean rows, the control, every fault, and the smallest drift detected."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kernel_contracts.contract import Contract
from kernel_contracts.errors import InputError
from kernel_contracts.selftest import (
    Calibration,
    Injection,
    calibrate,
    smallest_detected,
    testable,
)
from kernel_contracts.verdict import Evidence, judge
from mismatch_audit.selftest.bench import Bench
from mismatch_audit.selftest.faults import Fault

LOW, HIGH = 1e-5, 1.0
"""Nats of noise between which the smallest detected drift is looked for: KL 5e-11 to 0.5."""

STEPS = 8
"""Halvings of the log size: to within a factor 10^(5/256) = 1.05."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class DetectableDrift:
    """What the contract sees at this sample size, from noise on every logit.

    missed, caught: sizes (nats of noise); None where none of the tried ones was.  kl, tv: means
    over tokens at ``caught`` (at ``missed`` where nothing was caught).
    """

    missed: float | None
    caught: float | None
    kl: float
    tv: float


@dataclass(frozen=True)
class Measured:
    """What a fault does to the rows, whatever a contract says: means over tokens."""

    name: str
    kl: float
    tv: float
    abs_dlp: float
    flip_rate: float


@dataclass(frozen=True)
class SelfTest:
    """calibrations and drifts: one a contract.  measured: one a fault, the control first."""

    calibrations: tuple[Calibration, ...]
    drifts: tuple[DetectableDrift | None, ...]
    measured: tuple[Measured, ...]

    @property
    def exit_code(self) -> int:
        """The worst of the contracts."""
        return max(c.exit_code for c in self.calibrations)


def check_tolerated(names: Collection[str], faults: Sequence[Fault]) -> None:
    """Raises InputError for a name that is not among the faults, before minutes are spent."""
    known = [fault.name for fault in faults]
    for name in names:
        if name not in known:
            raise InputError(
                f"no fault {name!r} in this self-test",
                where="--tolerate",
                fix=f"one of: {', '.join(known)}",
            )


def run_selftest(
    contracts: Sequence[Contract],
    bench: Bench,
    faults: Sequence[Fault],
    *,
    tolerate: Collection[str] = (),
    drift: bool = True,
    progress: Progress = lambda stage, done, total: None,
) -> SelfTest:
    """Self-test every contract on the same rows.

    tolerate: faults that every one of them bears, beside those that a contract itself names.
    drift: also look for the smallest detected drift (some 10 comparisons a contract, no forward).
    """
    progress("control", 0, len(faults))
    control = bench.control()
    injections: list[Injection] = []
    for done, fault in enumerate(faults):
        progress(f"fault {fault.name}", done, len(faults))
        injections.append(bench.inject(fault))
    tried = {one.name for one in injections}
    calibrations = tuple(
        calibrate(c, control, injections, tolerate=tried & {*tolerate, *c.tolerates})
        for c in contracts
    )
    noise: dict[float, Evidence] = {}
    drifts: list[DetectableDrift | None] = []
    for done, contract in enumerate(contracts):
        progress("smallest detected drift", done, len(contracts))
        drifts.append(_drift(contract, bench, noise) if drift else None)
    measured = [_measured("control", control)]
    measured += [_measured(i.name, i.evidence) for i in injections]
    return SelfTest(calibrations, tuple(drifts), tuple(measured))


def _drift(contract: Contract, bench: Bench, known: dict[float, Evidence]) -> DetectableDrift:
    part = testable(contract, len(bench.sequences)).contract

    def detected(size: float) -> bool:
        if size not in known:
            known[size] = bench.noise(size)
        return any(m.verdict == "FAIL" for m in judge(part, known[size]))

    missed, caught = smallest_detected(detected, low=LOW, high=HIGH, steps=STEPS)
    shown = _measured("", known[caught or HIGH])
    return DetectableDrift(missed, caught, shown.kl, shown.tv)


def _measured(name: str, evidence: Evidence) -> Measured:
    rows = evidence.tokens
    dlp = (rows["reference_logprob"] - rows["engine_logprob"]).abs()
    return Measured(
        name,
        float(rows["kl_engine_reference"].mean()),
        float(rows["tv"].mean()),
        float(dlp.mean()),
        float(rows["flip"].mean()),
    )
