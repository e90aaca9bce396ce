"""Audits of engine builds, and the table before -> the routing table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from kernel_contracts.contract import Contract
from kernel_contracts.errors import InputError, NotComparableError
from kernel_contracts.expressions import Condition, Truth
from kernel_contracts.loading import contract_digest
from mismatch_audit.reports.record import Record
from mismatch_audit.routing.approximate import Approximation, outer, simplify
from mismatch_audit.routing.audited import Audited
from mismatch_audit.routing.conditions import named, texts, unseen
from mismatch_audit.routing.decide import Decider
from mismatch_audit.routing.drift import Safety, drift_safety
from mismatch_audit.routing.features import level_of
from mismatch_audit.routing.mixture import mixture, rerouted_prompts, rerouted_slices
from mismatch_audit.routing.standing import WHOLE, gather, stale, stand
from mismatch_audit.routing.table import (
    REFERENCE,
    SCHEMA,
    Digested,
    EngineRoutes,
    Policy,
    ReportRef,
    RoutingTable,
    Rule,
    SliceState,
)

_FACTS = ("model", "program", "version", "dtype", "weights", "tokenizer", "quantization")


@dataclass(frozen=True)
class Audit:
    """One engine build with its report. digest: SHA-256 of report.json.  audited: its prompts,
    where the run's folder has them."""

    engine: str
    record: Record
    digest: str
    contract: Contract
    audited: Audited | None = None


def build_table(
    audits: Sequence[Audit], policy: Policy, previous: RoutingTable | None, created: str
) -> RoutingTable:
    """The table of several engine builds, in the order of preference.

    Raises NotComparableError when they were audited against different references, InputError when
    a report is older than that of the previous table.
    """
    references = [_facts(audit.record.identities.reference) for audit in audits]
    for audit, reference in zip(audits, references, strict=True):
        differing = [
            k for k in ("weights", "tokenizer") if reference.get(k) != references[0].get(k)
        ]
        if differing:
            raise NotComparableError(
                f"{audit.engine} was audited against another reference: {', '.join(differing)}",
                fix="audit every engine against the reference that will serve",
            )
    return RoutingTable.model_validate(
        {
            "schema": SCHEMA,
            "created": created,
            "reference": references[0],
            "policy": policy,
            "engines": [_engine(audit, policy, previous) for audit in audits],
        }
    )


def _engine(audit: Audit, policy: Policy, previous: RoutingTable | None) -> EngineRoutes:
    record, contract, name = audit.record, audit.contract, audit.engine
    old = previous.engine(name) if previous else None
    same_report = old is not None and old.report.digest == audit.digest
    if old is not None and not same_report:
        _check_order(name, old, record)
    before = {s.slice: s for s in old.slices} if old else {}
    evidence = gather(contract, record.measurements, before)
    known = {key: one for key, one in before.items() if named(contract, key) or key == WHOLE}
    everything = [*evidence.values(), *stale(known, evidence)]
    states = {
        one.name: stand(
            one, before.get(one.name), policy, engine=name, share=_share(record, one.name),
            same_report=same_report,
        )
        for one in everything
    }  # fmt: skip
    safety = drift_safety(record, contract)
    rules = [*_rules(states, contract, name, safety), *_unseen_rules(states, contract, name)]
    decider = Decider.of_rules(name, rules)
    nothing = any(rule.when == "true" for rule in rules)
    moved = (
        rerouted_prompts(audit.audited, decider.permits)
        if audit.audited is not None
        else rerouted_slices(list(states.values()), name, nothing)
    )
    return EngineRoutes(
        name=name,
        identity=_facts(record.identities.engine),
        report=ReportRef(
            digest=audit.digest, verdict=record.verdict, finished=record.finished,
            prompts=record.counts.prompts,
        ),
        contract=Digested(name=contract.name, digest=contract_digest(contract)),
        rules=rules,
        slices=list(states.values()),
        rerouted=moved,
        mixture=mixture(
            contract, record.measurements, states, name, audited=audit.audited,
            kept=decider.permits, nothing_kept=nothing or moved.lower == 1.0,
        ),
        notes=_notes(rules, safety),
    )  # fmt: skip


def _check_order(name: str, old: EngineRoutes, record: Record) -> None:
    if datetime.fromisoformat(record.finished) < datetime.fromisoformat(old.report.finished):
        raise InputError(
            f"this audit of {name} finished before the one in the previous table",
            where=record.finished,
            fix="give the newest run, or leave --previous out",
        )


def _facts(identity: dict) -> dict[str, str]:  # type: ignore[type-arg]
    return {k: str(identity[k]) for k in _FACTS if identity.get(k) is not None}


def _share(record: Record, name: str) -> float | None:
    """Share of the audit's prompts that have rows in the slice."""
    if name == WHOLE or name.startswith("probe "):
        return 1.0
    rows = [r for r in record.measurements if r.slice == name and r.section != "runtime"]
    if not rows or not record.counts.prompts:
        return None
    return min(1.0, max(r.n_prompts for r in rows) / record.counts.prompts)


def _rules(
    states: dict[str, SliceState], contract: Contract, engine: str, safety: Safety | None
) -> list[Rule]:
    """One rule for each slice that is not the engine's, whole traffic first."""
    found = []
    for state in states.values():
        if state.to == engine:
            continue
        one = named(contract, state.slice)
        # A slice that the contract does not know could hold any request.
        condition: Condition = one.condition if one else Truth(True)
        covered = outer(condition, safety.drift if safety else None)
        found.append(_rule(state.slice, covered, state.to, state.reason))
    return sorted(found, key=lambda rule: rule.when != "true")


def _rule(name: str, covered: Approximation, to: str, reason: str) -> Rule:
    if covered.dropped:
        reason = f"{reason}; {', '.join(covered.dropped)} is not known at request time"
    level = level_of(covered.condition)
    when, *also = texts(covered.condition)
    return Rule(
        slice=name, when=when, also=also, to=to,
        level="decode" if level == "decode" else "request", mapping=covered.mapping,
        reason=reason[:2000],
    )  # fmt: skip


def _unseen_rules(states: dict[str, SliceState], contract: Contract, engine: str) -> list[Rule]:
    """Values of ``by`` that were never measured go to the reference: for every definition that the
    audit speaks about."""
    found = []
    for key in contract.slices:
        slices = [
            one for name in states if (one := named(contract, name)) and one.definition == key
        ]
        grouped = [one for one in slices if one.values]
        if not grouped and not any(one.name == key for one in slices):
            continue
        condition = unseen(contract, key, grouped)
        if condition is None:
            continue
        covered = outer(condition, None)
        if simplify(covered.condition) != Truth(False):
            found.append(_rule(f"unseen {key}", covered, REFERENCE, "not in the audit"))
    return found


def _notes(rules: Sequence[Rule], safety: Safety | None) -> list[str]:
    """What a reader must know about rules that are not the slices themselves."""
    found = []
    if safety is not None and any(rule.mapping == "counterpart" for rule in rules):
        found.append(
            f"reference_margin <= m is covered by engine_margin <= m + {safety.drift:.4g}; "
            f"{safety.text}"
        )
    if parents := [r.slice for r in rules if r.mapping == "parent"]:
        found.append(
            f"not known at request time, so the whole parent falls back: {', '.join(parents)}"
        )
    if late := [r.slice for r in rules if r.level == "decode"]:
        found.append(
            f"known in decode only: {', '.join(late)}; a router that does not hand over in the "
            "middle of a response sends such requests away whole, and so they are counted here"
        )
    return found


def same_promises(record: Record, contract: Contract, where: Path) -> Contract:
    """The contract to route by: ``contract`` where its promises are those that were judged.

    Raises InputError when they differ in more than name, description and escalation policy.
    """
    judged = judged_contract(record, where)

    def promises(one: Contract) -> Contract:
        return one.model_copy(update={"escalation": (), "description": "", "name": "x"})

    if contract_digest(promises(judged)) != contract_digest(promises(contract)):
        raise InputError(
            f"the report was judged by other promises ({judged.name})",
            where=str(where),
            fix="`audit judge RUN --contract FILE --out DIR`, then `audit routes DIR`",
        )
    return contract


def judged_contract(record: Record, where: Path) -> Contract:
    """The contract inside a report. Raises InputError when it does not load."""
    try:
        return Contract.model_validate(record.contract.document)
    except ValueError as error:
        raise InputError(
            f"the contract in the report cannot be read: {error}",
            where=str(where),
            fix="audit again with this version, or give --contract FILE",
        ) from error
