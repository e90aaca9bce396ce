"""Audit, bless, gate, hand over, check, and keep the new weights or go back to the old ones.

Every step is announced in the journal before it is taken. After a crash at any point the same
command goes on; ``recover`` goes back. What a router or a restart may serve stands in
``serving.json``, which names checked weights only and is replaced in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_contracts.errors import AuditError, InputError
from mismatch_audit.gate.bless import NotBlessed, bless_run
from mismatch_audit.gate.canaries import canaries_of
from mismatch_audit.gate.checks import SyncCheck
from mismatch_audit.gate.decide import Request, decide
from mismatch_audit.gate.journal import locked
from mismatch_audit.gate.live_checks import Prober
from mismatch_audit.gate.store import PushResult, Snapshot, Store, describe
from mismatch_audit.gate.sync import RollbackError
from mismatch_audit.gate.targets import Target, TargetError, Weights
from mismatch_audit.gate.weights import identify

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


@dataclass(frozen=True)
class PushPlan:
    """source: the checkpoint to serve, under ``version``. previous: what is served now; needed for
    the first push of a store. audit: gives the folder of an audit of ``source`` (runs it, or names
    a finished one). trusted: the public keys that the gate trusts."""

    source: Path
    version: int
    contract: Path
    audit: Callable[[], Path]
    key: Ed25519PrivateKey
    trusted: Path
    target: Target
    prober: Prober
    previous: tuple[Path, int] | None = None
    lifetime: timedelta = timedelta(days=7)


def run_push(plan: PushPlan, folder: Path) -> PushResult:
    """One push, or the rest of one that a crash cut short. folder: of the journal.

    A push of anything else that was cut short is rolled back first. Raises InputError for a plan
    that cannot start, RollbackError when neither way works.
    """
    from kernel_contracts.loading import contract_digest, load_contract

    with locked(folder):
        store = Store(folder)
        contract = contract_digest(load_contract(plan.contract))
        source = Weights(plan.source.resolve(), int(plan.version), identify(plan.source).tensors)
        begun = store.unfinished
        _same_phases(store, plan.target)
        if begun is not None:
            mine = begun["source"] == describe(source) and begun["contract"] == contract
            if not mine or store.going_back:
                result = roll_back(store, plan.target, plan.prober, ["cut short"], 1)
                if mine:
                    return result
        if store.unfinished is None and (done := store.committed_as(source, contract)):
            return done  # the crash came after the commit
        if store.unfinished is None:
            store.begin(source, contract, _previous(plan, store), plan.target.two_phase)
        return _forward(plan, store, source)


def recover(folder: Path, target: Target, prober: Prober) -> PushResult | None:
    """Go back from a push that a crash cut short; None when there is none."""
    with locked(folder):
        store = Store(folder)
        if store.unfinished is None:
            return None
        _same_phases(store, target)
        return roll_back(store, target, prober, ["cut short, and gone back on demand"], 0)


def _same_phases(store: Store, target: Target) -> None:
    begun = store.unfinished
    if begun is not None and begun["two_phase"] != target.two_phase:
        raise InputError(
            "the push that was cut short began with"
            + ("" if begun["two_phase"] else "out")
            + " --activate",
            where=str(store.folder),
            fix="repeat its command, or --recover, with the same targets",
        )


def _previous(plan: PushPlan, store: Store) -> Weights:
    served, given = store.served, plan.previous
    if served is None:
        if given is None:
            raise InputError(
                "what does the engine serve now? Without it there is no way back",
                where=str(store.folder),
                fix="give --previous CHECKPOINT --previous-version N with the first push",
            )
        served = Weights(given[0].resolve(), given[1], identify(given[0]).tensors)
    elif given is not None and (given[1], given[0].resolve()) != (
        served.version,
        served.checkpoint,
    ):
        raise InputError(
            f"the journal says that version {served.version} is served, from {served.checkpoint}",
            where="--previous",
            fix="leave --previous out, or start with another --store",
        )
    if served.version == plan.version:
        raise InputError(
            f"version {plan.version} is served already",
            where="--version",
            fix="number the pushes upwards",
        )
    return served


def _forward(plan: PushPlan, store: Store, source: Weights) -> PushResult:
    """Audit, bless, gate: also of a push that was cut short, whose weights may have changed since
    or whose blessing may have expired."""
    blessing_path = store.folder / "blessings" / f"version-{source.version}.dsse.json"
    try:
        run = plan.audit()
        store.append("audited", run=str(run))
        blessing = bless_run(
            run, plan.key, lifetime=plan.lifetime, weights=source.checkpoint, out=blessing_path
        )
        store.append("blessed", keyid=blessing.keyid, expires=blessing.statement.predicate.expires)
        decision = decide(
            Request(
                source.checkpoint, plan.prober.facts(), plan.contract, blessing_path, plan.trusted
            )
        )
        snapshot = store.snapshot() if store.handed else _snapshot(plan, run)
    except AuditError as error:
        code = error.exit_code if isinstance(error, NotBlessed) else 2
        return _refuse(plan, store, [str(error)], code)
    if not decision.allow:
        reasons = [f"{reason.code}: {reason.detail}" for reason in decision.reasons]
        return _refuse(plan, store, reasons, decision.exit_code)
    store.append("allowed", blessing=decision.blessing)
    return _hand_over(plan, store, source, snapshot)


def _snapshot(plan: PushPlan, run: Path) -> Snapshot:
    canaries = canaries_of(run)
    # A standby has other weights than the ones that are served: nothing to go back to there.
    before = None if plan.target.two_phase else plan.prober.snapshot(canaries)
    return Snapshot(canaries, before)


def _refuse(plan: PushPlan, store: Store, reasons: list[str], code: int) -> PushResult:
    if store.handed:
        return roll_back(store, plan.target, plan.prober, reasons, code)
    return store.abort(reasons, code)


def _hand_over(plan: PushPlan, store: Store, source: Weights, snapshot: Snapshot) -> PushResult:
    if not store.handed:
        store.append("handing_over", snapshot=store.keep_snapshot(snapshot))
    checks: list[SyncCheck] = []
    try:
        plan.target.hand_over(source)
        store.append("handed_over")
        checks = plan.prober.check(source, snapshot.canaries, snapshot.before)
        store.append("checked", checks=[asdict(check) for check in checks])
        wrong = _wrong(checks)
        if not wrong and plan.target.two_phase:
            store.append("activating")
            plan.target.activate(source)
    except Exception as error:  # whatever an engine does: its weights are then not checked
        wrong = [
            str(error) if isinstance(error, AuditError) else f"{type(error).__name__}: {error}"
        ]
    if wrong:
        return roll_back(store, plan.target, plan.prober, wrong, 1, checks)
    return store.commit(source, checks)


def _wrong(checks: Sequence[SyncCheck]) -> list[str]:
    if not any(check.ok for check in checks):
        return ["nothing was checked", *(f"{c.check}: {c.detail}" for c in checks)]
    return [f"{c.check}: {c.detail}" for c in checks if not c.holds]


def roll_back(
    store: Store,
    target: Target,
    prober: Prober,
    reasons: list[str],
    exit_code: int,
    checks: Sequence[SyncCheck] = (),
) -> PushResult:
    """Serve the previous weights again, and see that the engine does. Repeatable.

    Raises RollbackError when it does not; the next command then tries again.
    """
    if not store.handed:
        return store.abort(reasons, exit_code)
    previous = store.previous
    store.append("rolling_back", reasons=reasons)
    found: list[SyncCheck] = []
    try:
        _go_back(store, target, previous)
        if not target.two_phase:
            snapshot = store.snapshot()
            found = prober.check_restored(previous, snapshot.canaries, snapshot.before)
            wrong = _wrong(found)
        else:
            wrong = []
    except Exception as error:
        wrong = [
            str(error) if isinstance(error, AuditError) else f"{type(error).__name__}: {error}"
        ]
    if wrong:
        store.append("lost", reasons=wrong)
        raise RollbackError(
            f"the push was refused ({'; '.join(reasons)}), and the way back failed: "
            + "; ".join(wrong),
            where=f"version {previous.version}",
            fix="take the engine out of traffic; mend it, then: audit push --recover ...",
        )
    store.append("rolled_back", served=describe(previous))
    return PushResult("rolled_back", previous.version, tuple(reasons), (*checks, *found), exit_code)


def _go_back(store: Store, target: Target, previous: Weights) -> None:
    if identify(previous.checkpoint).tensors != previous.tensors:
        raise TargetError("the previous checkpoint was changed", where=str(previous.checkpoint))
    if not target.two_phase:
        target.hand_over(previous)
    elif store.activating:
        target.activate(previous)
