"""What a valid contract says that its author may not mean."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kernel_contracts.budgets import reward_budget_kl
from kernel_contracts.clauses import (
    Clause,
    NumericalClause,
    ObservabilityClause,
    RuntimeClause,
    StatisticalClause,
)
from kernel_contracts.contract import SECTIONS, Contract
from kernel_contracts.cross_checks import Mistake, Place
from kernel_contracts.expressions import Column, Comparison, Expression, In, columns, walk
from kernel_contracts.predicates import closest, kind_of, parse
from kernel_contracts.vocabulary import COMPUTED_COLUMNS, RECORDED_COLUMNS, TOKEN_COLUMNS

_KINDS = {**TOKEN_COLUMNS, **COMPUTED_COLUMNS, **RECORDED_COLUMNS}


def lint(contract: Contract, prompts: int | None = None) -> list[Mistake]:
    """Doubtful places of a contract, none of which keeps it from being used.

    prompts: how many an audit will have; without it, the contract's own least number.
    """
    return [
        *_too_few_prompts(contract, prompts),
        *_unused_tails(contract),
        *_unused_slices(contract),
        *_slice_columns(contract),
        *_partial_bins(contract),
        *_never_truncates(contract),
        *_over_budget(contract),
        *_nothing_promised_about(contract),
        *_unreachable_rules(contract),
    ]


def fewest_prompts(clause: Clause, alpha: float) -> int:
    """Prompts without which a clause cannot pass on a slice, however good the engine is.

    With n prompts that all show 0 (of a value in [0, 1]), a mean or share of at most x is certain
    to 1 - alpha from n = ln(alpha) / ln(1 - x) on (Clopper-Pearson with no event; no bound for a
    bounded mean needs less). A mean with limit L in [floor, ceiling] scales to
    x = (L - floor) / (ceiling - floor).
    """
    if isinstance(clause, ObservabilityClause):
        return clause.min_prompts
    if isinstance(clause, NumericalClause):
        return 1 if clause.share is None else _no_event_plan(clause.share, alpha)
    target = clause.target
    if target is None or math.isinf(clause.upper_end):
        return 1
    needed = _no_event_plan((target - clause.floor) / (clause.upper_end - clause.floor), alpha)
    return max(needed, _no_event_plan(clause.tail, alpha)) if clause.needs_tail else needed


def _no_event_plan(share: float, alpha: float) -> int:
    return 1 if share >= 1 else math.ceil(math.log(alpha) / math.log1p(-share))


def _placed(contract: Contract) -> Iterator[tuple[Place, Clause]]:
    for section in SECTIONS:
        for index, clause in enumerate(getattr(contract, section)):
            yield (section, index), clause


def _too_few_prompts(contract: Contract, prompts: int | None) -> Iterator[Mistake]:
    least = max((o.min_prompts for o in contract.observability), default=0)
    given = prompts if prompts is not None else least
    if not given:
        return
    whose = "there are" if prompts is not None else "the contract asks for"
    for place, clause in _placed(contract):
        needed = fewest_prompts(clause, contract.alpha)
        if isinstance(clause, ObservabilityClause) and prompts is None:
            continue
        if needed > given:
            field = "share" if isinstance(clause, NumericalClause) else "limit"
            if isinstance(clause, StatisticalClause | RuntimeClause):
                tail = _no_event_plan(clause.tail, contract.alpha) if clause.needs_tail else 0
                field = "tail" if tail == needed else "at_least" if clause.limit is None else field
            if isinstance(clause, ObservabilityClause):
                field = "min_prompts"
            yield Mistake(
                (*place, field),
                f"{clause.id} needs at least {needed} prompts a slice to pass at alpha "
                f"{contract.alpha:g}; {whose} {given}",
                _WIDER[field],
            )


_WIDER = {
    "share": "use more prompts or a larger share",
    "tail": "use more prompts or a larger tail",
    "limit": "use more prompts, or a lower ceiling",
    "at_least": "use more prompts, or a lower ceiling",
    "min_prompts": "use more prompts",
}


def _unused_tails(contract: Contract) -> Iterator[Mistake]:
    for place, clause in _placed(contract):
        if (
            isinstance(clause, StatisticalClause | RuntimeClause)
            and "tail" in clause.model_fields_set
            and not clause.needs_tail
        ):
            yield Mistake(
                (*place, "tail"),
                f"unused: no prompt can be above {clause.metric}'s natural ceiling",
                "give a ceiling, or drop the tail",
            )


def _unused_slices(contract: Contract) -> Iterator[Mistake]:
    used = {"all"}
    for clause in contract.clauses():
        used.update(getattr(clause, "slices", ()))
    for rule in contract.escalation:
        used.update(name for name in (rule.slice, rule.when.slice) if name)
    for name, definition in contract.slices.items():
        one_of = any(u.startswith(f"{c}=") for u in used for c in definition.grouping)
        if name not in used and not one_of:
            yield Mistake(("slices", name), "no clause or rule uses this slice")


def _slice_columns(contract: Contract) -> Iterator[Mistake]:
    for name, definition in contract.slices.items():
        named: list[tuple[Place, str]]
        named = [(("by", i), c) for i, c in enumerate(definition.by or ())]
        named += [(("bins", c), c) for c in definition.bins or ()]
        if definition.where is not None:
            tree = parse(definition.where)
            named += [(("where",), c) for c in columns(tree)]
            for clash in _kind_clashes(tree):
                yield Mistake(("slices", name, "where"), clash)
        for place, column in named:
            near = closest(column, _KINDS) if column not in _KINDS else ""
            if near.startswith("did you mean"):
                yield Mistake(
                    ("slices", name, *place),
                    f"{column} is no column of the token table, so prompts must bring it",
                    near,
                )


def _kind_clashes(tree: Expression) -> Iterator[str]:
    for node in walk(tree):
        sides: tuple[Expression, ...] = ()
        if isinstance(node, Comparison):
            sides = (node.left, node.right)
        elif isinstance(node, In):
            sides = (node.operand, node.items[0])
        kinds = [_KINDS.get(s.name, "") if isinstance(s, Column) else kind_of(s) for s in sides]
        if len(kinds) == 2 and all(kinds) and kinds[0] != kinds[1]:
            yield f"compares {kinds[0]} with {kinds[1]}: an audit will refuse it"


def _partial_bins(contract: Contract) -> Iterator[Mistake]:
    for name, definition in contract.slices.items():
        for column, edges in (definition.bins or {}).items():
            if column in ("reference_prob", "engine_prob") and (edges[0] > 0 or edges[-1] < 1):
                yield Mistake(
                    ("slices", name, "bins", column),
                    f"probabilities outside [{edges[0]:g}, {edges[-1]:g}] are in no slice",
                    "start at 0 and end at 1",
                )


def _never_truncates(contract: Contract) -> Iterator[Mistake]:
    threshold = contract.budget.tis_threshold
    for clause in contract.numerical:
        if threshold is None or clause.metric not in ("drift", "abs_dlp") or not clause.exceeds:
            continue
        if threshold >= math.exp(clause.exceeds):
            yield Mistake(
                ("budget", "tis_threshold"),
                f"truncation at {threshold:g} is a no-op on every token that keeps {clause.id}: "
                f"its weight is at most e^{clause.exceeds:g} = {math.exp(clause.exceeds):.3g}",
            )


def _over_budget(contract: Contract) -> Iterator[Mistake]:
    budget = contract.budget
    allowed: dict[str, tuple[float, str]] = {}
    if budget.reward_drift and budget.reward_range and budget.horizon:
        if budget.reward_drift >= budget.reward_range:
            yield Mistake(
                ("budget", "reward_drift"), "a drift of the whole reward range promises nothing"
            )
        else:
            kl = reward_budget_kl(budget.reward_drift, budget.reward_range, budget.horizon).limit
            reason = (
                f"a reward drift of {budget.reward_drift:g} in {budget.reward_range:g} over "
                f"{budget.horizon} tokens bears"
            )
            allowed["kl_engine_reference"] = allowed["k3"] = (kl, reason)
    if budget.flip_budget:
        allowed["flip_rate"] = (budget.flip_budget, "the flip budget is")
    if budget.bias_budget:
        allowed["policy_gradient_bias"] = (budget.bias_budget, "the bias budget is")
    for index, clause in enumerate(contract.statistical):
        limit, (bears, reason) = clause.limit, allowed.get(clause.metric, (math.inf, ""))
        if "all" in clause.slices and limit is not None and limit > bears * (1 + 1e-9):
            yield Mistake(
                ("statistical", index, "limit"),
                f"{limit:g} is looser than the budget: {reason} {bears:.3g}",
            )


def _nothing_promised_about(contract: Contract) -> Iterator[Mistake]:
    if not any(c.metric == "nonfinite" for c in contract.numerical):
        yield Mistake(
            (),
            "nothing is promised about non-finite logits",
            "numerical: {id: N0, metric: nonfinite, limit: 0}",
        )
    if not contract.observability:
        yield Mistake(
            (),
            "no observability clause: a verdict may rest on very few prompts",
            "observability: {id: O1, min_prompts: 60}",
        )


def _unreachable_rules(contract: Contract) -> Iterator[Mistake]:
    for index, rule in enumerate(contract.escalation):
        for earlier in contract.escalation[:index]:
            covers = earlier.when.verdict == rule.when.verdict and all(
                getattr(earlier.when, f) in (None, getattr(rule.when, f))
                for f in ("clause", "slice")
            )
            if covers:
                yield Mistake(
                    ("escalation", index, "when"), "an earlier rule answers all of this first"
                )
                break
