"""A contract filled from budgets: limits that the chain of bounds implies, and where from.

Of the routes that keep a reward budget (mean KL, mean TV, drift of every context) one suffices; the
contract promises the mean KL, since it is certified by fewest prompts and is the only one that
real kernels reach over hundreds of tokens. The other routes are shown beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal

from kernel_contracts.budgets import Limit, derive_limits
from kernel_contracts.clauses import NumericalClause, ObservabilityClause, StatisticalClause
from kernel_contracts.commented import commented
from kernel_contracts.contract import Contract
from kernel_contracts.definitions import Budget, EscalationRule, When
from kernel_contracts.lint import fewest_prompts

__all__ = ["Derived", "derive_contract", "round_down"]


@dataclass(frozen=True)
class Derived:
    """limits: every limit with its arithmetic.  promised: clause id -> the limit it holds to.
    contract: filled from them.  text: the contract as YAML with comments."""

    limits: tuple[Limit, ...]
    promised: dict[str, Limit]
    contract: Contract
    text: str


def round_down(value: float, digits: int = 3) -> float:
    """The largest number of so many significant digits that is not above ``value`` (> 0): a limit
    in a file that people read, never looser than what was derived."""
    exact = Decimal(value)
    step = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    short = float(f"{value:.{digits}g}")  # 0.05 is 0.05000000000000000277: keep it as written
    return short if short <= value else float(exact.quantize(step, rounding=ROUND_FLOOR))


def derive_contract(budget: Budget, *, name: str = "derived", alpha: float = 0.05) -> Derived:
    """The contract that a budget implies.

    A flip budget is certified on the rate itself, a bias budget on the measured bias (relative to
    the gradient's norm). Raises InputError when the budget is empty or cannot be kept.
    """
    limits = derive_limits(
        reward_drift=budget.reward_drift,
        reward_range=budget.reward_range or 1.0,
        horizon=budget.horizon,
        flip_budget=budget.flip_budget,
        bias_budget=budget.bias_budget,
        advantage_bound=budget.advantage_bound or 1.0,
        tis_threshold=budget.tis_threshold,
    )
    promised: dict[str, Limit] = {}
    clauses: list[StatisticalClause] = []
    for limit in limits:
        if limit.metric == "kl_engine_reference":
            value = round_down(limit.limit)
            clause = StatisticalClause(
                id=f"S{len(clauses) + 1}", metric="kl_engine_reference", limit=value,
                weight="token", description="Reward budget.",
            )  # fmt: skip
        elif limit.metric == "flip_rate":
            value = round_down(limit.limit)
            clause = StatisticalClause(
                id=f"S{len(clauses) + 1}", metric="flip_rate", limit=value,
                ceiling=_flip_ceiling(value), description="Flip budget.",
            )  # fmt: skip
        else:
            continue
        promised[clause.id] = limit
        clauses.append(clause)
    comments = {i: [f"{x.source} budget:", *x.arithmetic] for i, x in promised.items()}
    if budget.bias_budget is not None:
        clause = StatisticalClause(
            id=f"S{len(clauses) + 1}", metric="policy_gradient_bias", limit=budget.bias_budget,
            description="Bias budget, on the measured bias.",
        )  # fmt: skip
        clauses.append(clause)
        comments[clause.id] = [
            "bias budget: the measured bias of the policy gradient, relative to its norm "
            "(audit run --gradient)"
        ]
    needed = max(fewest_prompts(c, alpha) for c in clauses)
    contract = Contract(
        schema="kernel-contracts/v1",
        name=name,
        description="Limits derived from a stated budget; none comes from an engine under test.",
        numerical=(
            NumericalClause(
                id="N1", metric="nonfinite", limit=0,
                description="Any non-finite logit is a fault, whatever the budget.",
            ),
        ),
        statistical=tuple(clauses),
        observability=(
            ObservabilityClause(
                id="O1", min_prompts=needed,
                description="Fewer prompts cannot certify these limits, however good the engine.",
            ),
        ),
        budget=budget,
        escalation=(
            EscalationRule(when=When(verdict="FAIL"), action="block"),
            EscalationRule(when=When(verdict="INCONCLUSIVE"), action="sample_more"),
        ),
        alpha=alpha,
    )  # fmt: skip
    others = [x for x in limits if x not in promised.values()]
    header = ["Derived from a budget. Each clause says how its limit follows."]
    if others:
        header.append("Not promised here; other routes to the same budgets:")
        header += [
            f"  {x.metric} <= {x.limit:.4g} {x.unit} ({x.applies}; {x.source})" for x in others
        ]
    return Derived(tuple(limits), promised, contract, commented(contract, header, comments))


def _flip_ceiling(limit: float) -> float | None:
    """5 times the limit where that is below 1: a rate's natural ceiling would take 5 times the
    prompts for a limit of a few percent."""
    return round(5 * limit, 12) if 5 * limit < 1 else None
