"""Which program answers a request: the rules of a table, compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mismatch_audit.routing.matching import Facts, Test, compiled
from mismatch_audit.routing.table import REFERENCE, RoutingTable, Rule


@dataclass(frozen=True)
class Decision:
    """target: who answers.  rule: the slice that sent the request away from the engine that would
    have been first; "" when none did.  kept_from: that engine."""

    target: str
    rule: str = ""
    kept_from: str = ""


@dataclass(frozen=True)
class Decider:
    """The rules of one engine. A request whose condition is unknown counts as meeting it."""

    name: str
    rules: tuple[tuple[Test, Rule], ...]

    @classmethod
    def of_rules(cls, name: str, rules: Sequence[Rule]) -> Decider:
        return cls(name, tuple((compiled(rule.condition()), rule) for rule in rules))

    def denied(self, facts: Facts) -> Rule | None:
        """The first rule that keeps the request from the engine."""
        for test, rule in self.rules:
            if test(facts) is not False:
                return rule
        return None

    def undecided(self, facts: Facts) -> bool:
        """Only the engine's own account of the tokens can tell whether a rule applies."""
        found = [(test(facts), rule) for test, rule in self.rules]
        if any(told or (told is None and rule.level == "request") for told, rule in found):
            return False
        return any(told is None for told, _ in found)

    def permits(self, facts: Facts) -> bool:
        return self.denied(facts) is None


@dataclass(frozen=True)
class Decisions:
    """Every engine of a table, in its order of preference."""

    deciders: tuple[Decider, ...]
    by_name: Mapping[str, Decider]

    @classmethod
    def of_table(cls, table: RoutingTable) -> Decisions:
        deciders = tuple(Decider.of_rules(e.name, e.rules) for e in table.engines)
        return cls(deciders, {d.name: d for d in deciders})

    def decide(self, facts: Facts) -> Decision:
        """The first engine that may answer. A rule may name another engine: it answers if its own
        rules permit, and the next in the order is not tried then."""
        first, away = "", ""
        for decider in self.deciders:
            rule = decider.denied(facts)
            if rule is None:
                return Decision(decider.name, first, away)
            if not away:
                first, away = rule.slice, decider.name
            if rule.to != REFERENCE:
                other = self.by_name.get(rule.to)
                if other is not None and other.permits(facts):
                    return Decision(other.name, first, away)
                break
        return Decision(REFERENCE, first, away)
