"""The part of a contract that sampled tokens can show, as a contract of its own.

Its digest differs from the whole contract's, so that a report made by it can never pass for an
audit of all that was promised.
"""

from __future__ import annotations

from collections.abc import Sequence

from kernel_contracts.contract import SECTIONS, Contract
from mismatch_audit.monitor.observe import observable_clauses

SUFFIX = "-sampled"

TRAFFIC_COLUMNS = frozenset(
    {
        "prompt_id", "sequence_id", "position", "context_length", "token_id", "path",
        "weights_version", "engine_logprob", "reference_logprob", "reference_margin",
        "reference_top1", "reference_top1_logprob", "entropy", "n_cached_tokens",
    }
)  # fmt: skip
"""Columns of the token table that re-scored traffic fills."""


def sampled_contract(contract: Contract, names: Sequence[str] | None = None) -> Contract:
    """Only the clauses that sampled tokens can show (of ``names``, if given), with observability
    clauses that ask for what traffic has. Raises InputError where no clause is left."""
    kept = {c.id for c in observable_clauses(contract, names)}
    document = contract.model_dump(
        mode="json", by_alias=True, exclude_defaults=True, exclude_none=True
    )
    document["name"] = contract.name[: 80 - len(SUFFIX)] + SUFFIX
    document.pop("promotion", None)
    for section in SECTIONS[:3]:
        document[section] = [c for c in document.get(section, []) if c["id"] in kept]
    for clause in document.get("observability", []):
        asked = clause.get("require", ["engine_logprob", "reference_logprob"])
        clause["require"] = [c for c in asked if c in TRAFFIC_COLUMNS]
        kept.add(clause["id"])
    document["escalation"] = [
        rule
        for rule in document.get("escalation", [])
        if rule["when"].get("clause") is None or rule["when"]["clause"] in kept
    ]
    document["schema"] = contract.schema_version
    return Contract.model_validate(document)


def not_judged(contract: Contract, judged: Contract) -> list[str]:
    """Ids of the clauses that were left out."""
    kept = {c.id for c in judged.clauses()}
    return [c.id for c in contract.clauses() if c.id not in kept]
