"""The gate: may these weights be served on this engine under this contract, today?

Every reason to deny is told. Nothing missing is ever read as a yes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_contracts.errors import AuditError
from mismatch_audit.gate.envelope import MAX_ENVELOPE_BYTES, NotAnEnvelope, unseal
from mismatch_audit.gate.facts import EngineFacts, differences, read_facts
from mismatch_audit.gate.keys import load_trusted
from mismatch_audit.gate.statement import Statement, decode, write_time
from mismatch_audit.gate.strict import Malformed, read_limited, sha256
from mismatch_audit.gate.weights import WeightsIdentity, identify

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

CLOCK_SKEW = timedelta(seconds=60)
"""A signer's clock may be ahead of the gate's by this much. None is granted after the expiry."""

UNREADABLE = {
    "not_a_blessing",
    "blessing_unreadable",
    "trusted_unreadable",
    "contract_unreadable",
    "facts_unreadable",
    "weights_unreadable",
}
"""Reasons that mean bad input (exit 2) rather than a denial (exit 1)."""


@dataclass(frozen=True)
class Reason:
    """Why not. code: stable, for scripts."""

    code: str
    detail: str


@dataclass(frozen=True)
class Request:
    """What is asked. engine: a facts file, facts at hand, or what asks a live engine for them. All
    others are paths."""

    weights: Path
    engine: Path | EngineFacts | Callable[[], EngineFacts]
    contract: Path
    blessing: Path
    trusted: Path
    now: datetime | None = None


@dataclass(frozen=True)
class Decision:
    """allow only without any reason. signed_by, expires: known once the signature holds.

    notes: what was not looked at. blessing: SHA-256 of its file.
    """

    reasons: tuple[Reason, ...]
    notes: tuple[str, ...] = ()
    signed_by: str | None = None
    expires: str | None = None
    contract: str | None = None
    weights: str | None = None
    blessing: str | None = None

    @property
    def allow(self) -> bool:
        seen = self.signed_by and self.weights and self.contract
        return not self.reasons and bool(seen)

    @property
    def exit_code(self) -> int:
        """0 allow, 1 deny, 2 deny because an input could not be read at all."""
        return 0 if self.allow else 2 if {r.code for r in self.reasons} & UNREADABLE else 1

    def to_dict(self) -> dict[str, Any]:
        return {
            "decision": "allow" if self.allow else "deny",
            "exit_code": self.exit_code,
            "reasons": [{"code": r.code, "detail": r.detail} for r in self.reasons],
            "notes": list(self.notes),
            "signed_by": self.signed_by,
            "expires": self.expires,
            "contract": self.contract,
            "weights": self.weights,
            "blessing": self.blessing,
        }


def decide(request: Request) -> Decision:
    """Allow or deny, with every reason; never raises for what the request names.

    The signature comes first: of a statement that is not signed by a trusted key nothing is read.
    """
    reasons: list[Reason] = []
    known: dict[str, Any] = {}
    statement = _signed(request, reasons, known)
    weights = _read("weights_unreadable", reasons, lambda: identify(request.weights))
    facts = _read("facts_unreadable", reasons, lambda: _facts(request.engine))
    contract = _read("contract_unreadable", reasons, lambda: _contract(request.contract))
    notes: tuple[str, ...] = ()
    if weights is not None:
        known["weights"] = weights.tensors
        if weights.config is None:
            notes = ("a manifest says nothing of config, tokenizer and generation files",)
    if statement is not None:
        reasons += _window(statement, request.now or datetime.now(UTC))
        if contract is not None:
            reasons += _same_contract(statement, contract)
        if weights is not None:
            reasons += _same_weights(statement, weights)
        if facts is not None:
            blessed = statement.predicate.programs.engine
            reasons += [Reason(*item) for item in differences(blessed, facts.facts)]
    if contract is not None and facts is not None:
        reasons += _pair(contract, facts)
    return Decision(tuple(reasons), notes, **known)


def _read(code: str, reasons: list[Reason], job: Any) -> Any:
    """A result, or None and a reason. Whatever goes wrong in reading an input denies."""
    try:
        return job()
    except AuditError as error:
        where = f"{error.where}: " if error.where else ""
        reasons.append(Reason(code, f"{where}{error.what}"))
    except Exception as error:
        reasons.append(Reason(code, f"{type(error).__name__} while reading it"))
    return None


def _signed(request: Request, reasons: list[Reason], known: dict[str, Any]) -> Statement | None:
    """The statement, once a trusted key's signature over exactly these bytes holds."""
    trusted = _read("trusted_unreadable", reasons, lambda: load_trusted(request.trusted))
    raw = _read(
        "blessing_unreadable",
        reasons,
        lambda: read_limited(request.blessing, MAX_ENVELOPE_BYTES, "a blessing"),
    )
    if raw is None:
        return None
    known["blessing"] = sha256(raw)
    try:
        if trusted is None:
            unseal(raw)
            return None
        keyid, statement = open_blessing(raw, trusted)
    except NotAnEnvelope as error:
        reasons.append(Reason("not_a_blessing", error.what))
        return None
    except Malformed as error:
        reasons.append(Reason(error.code, error.what))
        return None
    known["signed_by"] = keyid
    known["expires"] = statement.predicate.expires
    known["contract"] = statement.predicate.contract.digest
    return statement


def open_blessing(raw: bytes, trusted: Mapping[str, Ed25519PublicKey]) -> tuple[str, Statement]:
    """(keyid, what that trusted key signed). Raises Malformed for anything else."""
    envelope = unseal(raw)
    envelope.verify(trusted)
    return envelope.keyid, decode(envelope.payload)


def _facts(engine: Path | EngineFacts | Callable[[], EngineFacts]) -> EngineFacts:
    if isinstance(engine, EngineFacts):
        return engine
    return read_facts(engine) if isinstance(engine, Path) else engine()


def _contract(path: Path) -> Any:
    from kernel_contracts.loading import load_contract

    return load_contract(path)


def _window(statement: Statement, now: datetime) -> Iterator[Reason]:
    start, end = statement.predicate.window
    if now < start - CLOCK_SKEW:
        yield Reason("not_yet_valid", f"issued {write_time(start)}, now {write_time(now)}")
    if now >= end:
        yield Reason("expired", f"expired {write_time(end)}, now {write_time(now)}")


def _same_contract(statement: Statement, contract: Any) -> Iterator[Reason]:
    from kernel_contracts.loading import contract_digest

    blessed, digest = statement.predicate.contract, contract_digest(contract)
    if blessed.digest != digest or blessed.name != contract.name:
        yield Reason(
            "contract_differs",
            f"blessed under {blessed.name} ({blessed.digest[:12]}), "
            f"asked for {contract.name} ({digest[:12]})",
        )


def _same_weights(statement: Statement, weights: WeightsIdentity) -> Iterator[Reason]:
    if statement.tensors != weights.tensors:
        yield Reason(
            "weights_differ",
            f"blessed {statement.tensors[:12]}, {weights.source} is {weights.tensors[:12]}",
        )
    config = statement.predicate.config
    if weights.config is not None and weights.config != config:
        yield Reason(
            "config_differs",
            "config, tokenizer or generation files beside the weights are not the audited ones",
        )


def _pair(contract: Any, facts: EngineFacts) -> Iterator[Reason]:
    """The contract's own demands on the engine."""
    from mismatch_audit.identity import check_facts

    try:
        check_facts("engine", contract.pair.engine, facts.facts, contract.name)
    except AuditError as error:
        yield Reason("contract_pair", error.what)
