"""How far the margins of the two programs may differ, and how often that does not hold."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_contracts.contract import Contract
from mismatch_audit.reports.record import Record


@dataclass(frozen=True)
class Safety:
    """drift: nats.  missed: upper bound of the share that drifts further.  text: where from."""

    drift: float
    missed: float
    text: str


def drift_safety(record: Record, contract: Contract) -> Safety | None:
    """The smallest drift that the audit bears out; None when it measured none.

    A kept promise "drift exceeds X on at most a share of the tokens" gives X with that share's
    upper bound. Otherwise the largest drift seen: of n prompts drawn alike, the next one exceeds
    their maximum with a probability of at most 1 - alpha^(1/n), with confidence 1 - alpha (the
    maximum as a tolerance bound; whatever the law).
    """
    found = []
    for clause in contract.numerical:
        if clause.metric != "drift" or clause.exceeds is None:
            continue
        for row in record.measurements:
            if row.clause == clause.id and row.slice == "all" and row.verdict == "PASS":
                upper = 1.0 if row.upper is None else row.upper
                text = (
                    f"{clause.id}: drift above {clause.exceeds:g} on at most {upper:.2g} of tokens"
                )
                found.append(Safety(clause.exceeds, upper, text))
    return min(found, key=lambda s: s.drift) if found else _largest_seen(record, contract.alpha)


def _largest_seen(record: Record, alpha: float) -> Safety | None:
    n = record.counts.prompts
    for chain in record.chain:
        if chain.slice != "all" or chain.route != "sup" or not n:
            continue
        for link in chain.rows:
            if link.quantity.startswith("largest drift") and link.measured is not None:
                missed = 1.0 - alpha ** (1.0 / n)
                text = (
                    f"largest drift of {n} prompts, {link.measured:.3g} nats: at most {missed:.2g} "
                    f"of prompts drift further (confidence {1 - alpha:g})"
                )
                return Safety(link.measured, missed, text)
    return None
