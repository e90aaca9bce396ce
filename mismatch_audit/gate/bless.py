"""Signing what an audit found: only a PASS, only weights that it really audited."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_contracts.errors import AuditError, InputError
from mismatch_audit.gate import facts as engine_facts
from mismatch_audit.gate.envelope import seal
from mismatch_audit.gate.statement import (
    FILES,
    MAX_LIFETIME,
    TENSORS,
    ContractBinding,
    Predicate,
    Programs,
    Statement,
    Subject,
    Tool,
    VerdictRow,
    encode,
    write_time,
)
from mismatch_audit.gate.strict import read_limited, sha256, write_atomic
from mismatch_audit.gate.weights import WeightsIdentity, config_digest, identify

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from mismatch_audit.reports.record import Record

BLESSING_NAME = "blessing.dsse.json"
MAX_REPORT_BYTES = 256 << 20
_DURATION = re.compile(r"(\d{1,6})\s*([mhd])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}


class NotBlessed(AuditError):
    """The audit did not pass; exit_code is that of its verdict."""

    def __init__(self, what: str, exit_code: int, **place: str) -> None:
        super().__init__(what, **place)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Blessing:
    """What was signed and where it lies."""

    path: Path
    statement: Statement
    keyid: str


def duration(text: str) -> timedelta:
    """``30m``, ``12h``, ``7d``. Raises InputError."""
    match = _DURATION.fullmatch(text.strip())
    span = timedelta(**{_UNITS[match[2]]: int(match[1])}) if match else timedelta()
    if not timedelta() < span <= MAX_LIFETIME:
        raise InputError(
            f"{text!r} is no lifetime",
            where="--expires",
            fix=f"30m, 12h or 7d, at most {MAX_LIFETIME.days}d",
        )
    return span


def bless_run(
    run: Path,
    key: Ed25519PrivateKey,
    *,
    lifetime: timedelta = timedelta(days=7),
    weights: Path | None = None,
    out: Path | None = None,
    now: datetime | None = None,
) -> Blessing:
    """Sign the run's verdict for its weights; the file goes to ``out`` (default: into the run).

    weights: the audited checkpoint, where it lies now, or its manifest; by default where the run
    found it. Raises NotBlessed when the audit did not pass, InputError when the run cannot be
    trusted to speak of these weights.
    """
    from mismatch_audit.gate.keys import key_id
    from mismatch_audit.reports.record import REPORT_NAME, load_record

    record = load_record(run)
    _check_passed(record, run)
    settings = _settings(run)
    _check_record(record, run, settings)
    statement = _statement(
        record,
        _audited_weights(record, run, weights),
        sha256(read_limited(run / REPORT_NAME, MAX_REPORT_BYTES, "a report")),
        now or datetime.now(UTC),
        lifetime,
    )
    path = out or run / BLESSING_NAME
    write_atomic(path, seal(encode(statement), key))
    return Blessing(path, statement, key_id(key.public_key()))


def _check_passed(record: Record, run: Path) -> None:
    if record.verdict == "PASS":
        return
    wrong = [m for m in record.measurements if m.verdict != "PASS"]
    first = f"; first: {wrong[0].clause} on {wrong[0].slice} is {wrong[0].verdict}" if wrong else ""
    raise NotBlessed(
        f"the audit's verdict is {record.verdict}, and only a PASS is blessed{first}",
        record.exit_code or 1,
        where=str(run),
        fix=f"audit show {run}   says which clauses and what would decide them",
    )


def _settings(run: Path) -> dict[str, Any]:
    """What the run was told, from its own state."""
    from mismatch_audit.rundir import STATE, read_json

    if not (run / STATE).is_file():
        raise InputError(
            f"no {STATE} here, so nothing tells how the report was made",
            where=str(run),
            fix="bless the folder of `audit run`",
        )
    state = read_json(run / STATE)
    spec = state.get("spec") if isinstance(state, dict) else None
    settings = spec.get("settings") if isinstance(spec, dict) else None
    if not isinstance(settings, dict):
        raise InputError("holds no settings", where=str(run / STATE))
    return settings


def _check_record(record: Record, run: Path, settings: dict[str, Any]) -> None:
    """A record whose parts are not of one run is not signed."""
    from pydantic import ValidationError

    from kernel_contracts.contract import Contract
    from kernel_contracts.loading import contract_digest
    from mismatch_audit.rundir import digest_of

    def refuse(what: str) -> InputError:
        return InputError(what, where=str(run), fix="run the audit again")

    try:
        contract = Contract.model_validate(record.contract.document)
    except ValidationError as error:
        raise refuse(f"the report's contract is damaged: {error.errors()[0]['msg']}") from error
    if contract_digest(contract) != record.contract.digest:
        raise refuse("the report's contract is not the one that its digest names")
    if digest_of(settings) != record.digests.get("settings"):
        raise refuse("the report was made under other settings than the folder's")
    if (settings.get("engine") or {}).get("inject"):
        raise refuse("a fault was injected into this run's engine")
    if lacking := engine_facts.missing_core(record.identities.engine):
        raise refuse(f"the run does not know its engine's {', '.join(lacking)}")


def _audited_weights(
    record: Record, run: Path, given: Path | None
) -> tuple[WeightsIdentity, str, str]:
    """(identity, files digest, config digest) of the weights whose files the run hashed."""
    from mismatch_audit.identity import weights_digest

    manifest = given if given is not None and given.suffix == ".json" else None
    said = record.identities.engine.get("model")
    folder = given if given is not None and manifest is None else Path(str(said or ""))
    if not folder.is_dir():
        raise InputError(
            "the checkpoint that was audited is no longer there",
            where=str(folder),
            fix="give its folder with --weights",
        )
    files = weights_digest(folder)
    if files != record.digests.get("engine_weights"):
        raise InputError(
            "not the weights that this run audited (their files have another digest)",
            where=str(folder),
            fix="audit these weights, or give the audited ones with --weights",
        )
    weights = identify(folder)
    if manifest is not None and identify(manifest).tensors != weights.tensors:
        raise InputError(
            "this manifest is not of the weights that this run audited",
            where=str(manifest),
            fix=f"audit weights manifest {folder}",
        )
    config = weights.config or config_digest(folder)
    if config is None:
        raise InputError("no config.json beside the weights", where=str(folder))
    return weights, files, config


def _until(record: Record, now: datetime, lifetime: timedelta) -> datetime:
    """Not beyond the last day on which somebody answers for a violation that was let through."""
    end = now + lifetime
    if not any(m.verdict == "ACKNOWLEDGED" for m in record.measurements):
        return end
    answered = record.contract.document.get("acknowledge") or []
    days = [str(a.get("until")) for a in answered if isinstance(a, dict)]  # type: ignore[union-attr]
    last = datetime.fromisoformat(min(days)).replace(tzinfo=UTC) + timedelta(days=1)
    if last <= now:
        raise NotBlessed(
            f"a violation was acknowledged until {min(days)}, which is over",
            1,
            where=record.contract.name,
            fix="mend it, or acknowledge it anew in the contract and judge again",
        )
    return min(end, last)


def _statement(
    record: Record,
    audited: tuple[WeightsIdentity, str, str],
    report: str,
    now: datetime,
    lifetime: timedelta,
) -> Statement:
    import mismatch_audit

    weights, files, config = audited
    digests = {name: str(record.digests.get(name)) for name in ("prompts", "settings")}
    predicate = Predicate(
        contract=ContractBinding(name=record.contract.name, digest=record.contract.digest),
        programs=Programs(
            reference=engine_facts.pinned(record.identities.reference),
            engine=engine_facts.pinned(record.identities.engine),
        ),
        prompts=digests["prompts"],
        settings=digests["settings"],
        config=config,
        report=report,
        verdict="PASS",
        verdicts=[
            VerdictRow(
                clause=m.clause,
                slice=m.slice,
                metric=m.metric,
                verdict=m.verdict,  # type: ignore[arg-type]  # a PASS has no FAIL and no UNSOUND
                optional=bool(getattr(m, "optional", False)),
            )
            for m in record.measurements
        ],
        issued=write_time(now),
        expires=write_time(_until(record, now, lifetime)),
        tool=Tool(version=mismatch_audit.__version__),
    )
    subject = Subject(name=weights.source, digest={TENSORS: weights.tensors, FILES: files})
    return Statement(subject=[subject], predicate=predicate)
