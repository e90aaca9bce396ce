"""From what a job can bear to the limits of a contract, with the arithmetic shown.

A budget is stated by whoever runs the job (points of reward, share of greedy tokens, gradient
bias); a limit is the largest value of a metric at which a bound of ``kernel_contracts.bounds``
still keeps the budget. Limits never come from the engine under test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kernel_contracts.confidence.laws import binomial_quantile
from kernel_contracts.errors import InputError

__all__ = [
    "Limit",
    "bias_budget_drift",
    "derive_limits",
    "flip_budget_drift",
    "flip_budget_rate",
    "reward_budget_drift",
    "reward_budget_kl",
    "reward_budget_tv",
    "tis_noop_threshold",
]

Applies = Literal["mean per token", "every context", "threshold"]


@dataclass(frozen=True)
class Limit:
    """One derived limit.

    metric: column or clause metric it limits.  unit: of ``limit``.  applies: to the mean over the
    engine's tokens, or to every context (which a clause can only certify but for a share).  source:
    the budget.  arithmetic: lines that show the formula with the numbers in it.
    """

    metric: str
    limit: float
    unit: str
    applies: Applies
    source: str
    arithmetic: tuple[str, ...]


def reward_budget_kl(reward_drift: float, reward_range: float, horizon: int) -> Limit:
    """Mean KL(q||p) per token that keeps |E_P R - E_Q R| <= reward_drift over ``horizon`` tokens.

    kappa <= max(2 b^2, -ln(1 - b^2)) / T, b = reward_drift / reward_range: Pinsker, or where it
    allows more (b > 0.893) Bretagnolle-Huber. Inverts ``bounds.sequence_tv_from_mean_kl``. The mean
    is over the engine's own rollouts, each weighted by its length (KL per rollout over T).
    """
    b, lines = _reward_share(reward_drift, reward_range, horizon)
    pinsker, huber = 2 * b**2, -math.log1p(-(b**2))
    best, name = max((pinsker, "2 b^2"), (huber, "-ln(1 - b^2)"))
    limit = best / horizon
    return Limit(
        "kl_engine_reference", limit, "nats per token", "mean per token", "reward", (
            *lines,
            f"TV over {horizon} tokens <= min(sqrt(T kappa/2), sqrt(1 - e^(-T kappa))) <= b",
            f"KL per response <= max(2 b^2, -ln(1 - b^2)) = max({pinsker:.4g}, {huber:.4g})"
            f" = {best:.4g} nats ({name})",
            f"kappa <= {best:.4g} / {horizon} = {limit:.4g} nats per token",
        ),
    )  # fmt: skip


def reward_budget_drift(reward_drift: float, reward_range: float, horizon: int) -> Limit:
    """Drift of every context that keeps the reward budget: 4 arcosh((1 - b^2)^(-1/(2T))), nats.

    Inverts ``bounds.sequence_tv_from_drift``. About 4 b / sqrt(T).
    """
    b, lines = _reward_share(reward_drift, reward_range, horizon)
    limit = 4 * _arcosh_exp(-math.log1p(-(b**2)) / (2 * horizon))
    return Limit(
        "drift", limit, "nats", "every context", "reward", (
            *lines,
            f"TV over {horizon} tokens <= sqrt(1 - sech^(2T)(D/4)) <= b",
            f"D <= 4 arcosh((1 - {b:.4g}^2)^(-1/{2 * horizon})) = {limit:.4g} nats",
        ),
    )  # fmt: skip


def reward_budget_tv(reward_drift: float, reward_range: float, horizon: int) -> Limit:
    """Mean TV per token that keeps the reward budget: b / T. Inverts
    ``bounds.sequence_tv_from_mean_tv``."""
    b, lines = _reward_share(reward_drift, reward_range, horizon)
    limit = b / horizon
    return Limit(
        "tv", limit, "per token", "mean per token", "reward", (
            *lines,
            f"TV over {horizon} tokens <= T mean TV <= b",
            f"mean TV <= {b:.4g} / {horizon} = {limit:.4g}",
        ),
    )  # fmt: skip


def flip_budget_rate(flip_budget: float, tokens: int = 1) -> Limit:
    """Flip rate per token within a budget: f for single tokens, f / T for whole texts.

    tokens: T if the budget is the share of greedy *texts* of T tokens that may differ. Inverts
    ``bounds.sequence_flip_rate``.
    """
    _share_of(flip_budget, "the flip budget")
    _whole(tokens)
    limit = flip_budget / tokens
    what = "tokens" if tokens == 1 else f"texts of {tokens} tokens"
    return Limit(
        "flip_rate", limit, "share of tokens", "mean per token", "flips", (
            f"budget: {flip_budget:.4g} of greedy {what} may change",
            f"flip rate <= {flip_budget:.4g} / {tokens} = {limit:.4g}",
        ),
    )  # fmt: skip


def flip_budget_drift(
    flip_budget: float,
    margins: npt.ArrayLike,
    *,
    exceed_share: float = 0.0,
    alpha: float = 0.05,
) -> Limit:
    """Drift under which at most the budgeted share of greedy tokens can flip, from margins.

    P(flip) <= P(m <= D) + P(drift > D). margins ``[n]``: the *reference*'s top-1 minus top-2,
    nats, one for each independent context (one per prompt). exceed_share: the share eta by which
    the drift clause may be exceeded; the margins get the rest of the budget. The limit lies just
    under the order statistic that is below the margins' quantile with confidence 1 - alpha
    (P(Binomial(n, share) >= rank) >= 1 - alpha), whatever their law.

    Raises InputError when there are too few margins, or too many ties for any drift to do.
    """
    _share_of(flip_budget, "the flip budget")
    if not 0 <= exceed_share < flip_budget:
        raise InputError(
            f"the exceeding share must lie in [0, {flip_budget:g}), got {exceed_share:g}"
        )
    if not 0 < alpha < 1:
        raise InputError(f"alpha must lie in (0, 1), got {alpha}")
    m = np.sort(np.asarray(margins, np.float64).reshape(-1))
    if bool(np.isnan(m).any()) or bool((m < 0).any()):
        raise InputError("margins must be measured (no NaN) and not negative")
    n, left = len(m), flip_budget - exceed_share
    rank = binomial_quantile(alpha, n, left) if n else 0
    if rank < 1:
        needed = math.ceil(math.log(alpha) / math.log1p(-left)) if left < 1 else 1
        raise InputError(
            f"{n} margins cannot show a share of {left:.4g}",
            fix=f"measure the reference's margin on at least {needed} prompts",
        )
    at = float(m[rank - 1])
    if at == 0:
        raise InputError(
            f"the margin is 0 on at least {rank} of {n} contexts: ties flip at any drift",
            fix="raise the flip budget, or compute the reference's head in higher precision",
        )
    limit = float(np.nextafter(at, 0))
    reserve = f" - {exceed_share:.4g} for drifts beyond the limit" if exceed_share else ""
    return Limit(
        "drift", limit, "nats", "every context", "flips", (
            f"budget: {flip_budget:.4g} of greedy tokens may change{reserve}",
            "a token flips only if its margin is at most the drift: P(flip) <= P(m <= D)",
            f"margin number {rank} of {n} (ascending) is {at:.4g} nats; with confidence"
            f" {1 - alpha:g} at most {left:.4g} of contexts lie below it",
            f"D < {at:.4g} nats",
        ),
    )  # fmt: skip


def bias_budget_drift(bias_budget: float, advantage_bound: float = 1.0, horizon: int = 1) -> Limit:
    """Drift of every context that keeps the policy-gradient bias of unweighted rollouts in budget.

    bias_budget B: natural-gradient norm of the bias, in the advantages' unit; B / A_max is its
    share of the largest natural gradient that advantages up to A_max can have.
    D <= 2 arcosh((1 + (B/A_max)^2)^(1/(2T))), nats: inverts ``bounds.natural_bias_from_drift``.
    """
    _positive(bias_budget, "the bias budget")
    _positive(advantage_bound, "the advantage bound")
    _whole(horizon)
    share = bias_budget / advantage_bound
    limit = 2 * _arcosh_exp(math.log1p(share**2) / (2 * horizon))
    return Limit(
        "drift", limit, "nats", "every context", "bias", (
            f"budget: bias {bias_budget:.4g} of advantages up to {advantage_bound:.4g}:"
            f" B/A_max = {share:.4g}",
            f"bias <= A_max sqrt(chi2) <= A_max sqrt(cosh^(2T)(D/2) - 1), T = {horizon}",
            f"chi2 over {horizon} tokens <= {share:.4g}^2 = {share**2:.4g}",
            f"D <= 2 arcosh((1 + {share**2:.4g})^(1/{2 * horizon})) = {limit:.4g} nats",
        ),
    )  # fmt: skip


def tis_noop_threshold(drift: float, threshold: float | None = None) -> Limit:
    """Threshold C of truncated token weights from which truncation does nothing: C = e^D.

    drift: the contract's limit D, nats. threshold: the one in use; the last line says what it does
    within the contract. See ``bounds.truncation_is_noop``.
    """
    if not 0 <= drift < math.inf:
        raise InputError(f"the drift must lie in [0, inf), got {drift:g}")
    limit = math.exp(drift)
    lines = [
        f"every weight lies within e^-D and e^D = e^{drift:.4g} = {limit:.4g}",
        f"truncation at C >= {limit:.4g} changes no weight while the drift limit holds",
    ]
    if threshold is not None:
        if not threshold >= 1:
            raise InputError(f"the threshold must be at least 1, got {threshold:g}")
        acts = "is a no-op" if threshold >= limit else "can act"
        lines.append(
            f"C = {threshold:.4g} {acts}: it acts from a drift of ln C = {math.log(threshold):.4g}"
        )
    return Limit("tis_threshold", limit, "weight", "threshold", "weights", tuple(lines))


def derive_limits(
    *,
    reward_drift: float | None = None,
    reward_range: float = 1.0,
    horizon: int | None = None,
    flip_budget: float | None = None,
    margins: npt.ArrayLike | None = None,
    bias_budget: float | None = None,
    advantage_bound: float = 1.0,
    tis_threshold: float | None = None,
) -> list[Limit]:
    """Every limit that the given budgets imply. The smallest limit of a metric is the binding one.

    A reward budget needs the horizon. With ``margins`` a flip budget also limits the drift. The
    TIS threshold is held against the tightest drift limit; alone it limits nothing.
    Raises InputError if no budget is given.
    """
    limits: list[Limit] = []
    if reward_drift is not None:
        if horizon is None:
            raise InputError("a reward budget needs a horizon", fix="give --horizon TOKENS")
        limits += [
            route(reward_drift, reward_range, horizon)
            for route in (reward_budget_kl, reward_budget_tv, reward_budget_drift)
        ]
    if flip_budget is not None:
        limits.append(flip_budget_rate(flip_budget))
        if margins is not None:
            limits.append(flip_budget_drift(flip_budget, margins))
    if bias_budget is not None:
        limits.append(bias_budget_drift(bias_budget, advantage_bound, horizon or 1))
    if not limits:
        raise InputError("no budget given", fix="give a reward, flip or bias budget")
    drifts = [limit.limit for limit in limits if limit.metric == "drift"]
    if tis_threshold is not None and drifts:
        limits.append(tis_noop_threshold(min(drifts), tis_threshold))
    return limits


def _reward_share(
    reward_drift: float, reward_range: float, horizon: int
) -> tuple[float, tuple[str, ...]]:
    _positive(reward_drift, "the reward drift")
    _positive(reward_range, "the reward range")
    _whole(horizon)
    if reward_drift >= reward_range:
        raise InputError(
            f"a reward drift of {reward_drift:g} on a range of {reward_range:g} limits nothing",
            fix="give a reward drift below the reward range",
        )
    b = reward_drift / reward_range
    return b, (
        f"budget: b = {reward_drift:.4g} / {reward_range:.4g} = {b:.4g} of the reward range",
    )


def _arcosh_exp(y: float) -> float:
    """arcosh(e^y), y >= 0, without cancellation at small y."""
    excess = math.expm1(y)
    return math.log1p(excess + math.sqrt(excess * (excess + 2)))


def _positive(value: float, name: str) -> None:
    if not 0 < value < math.inf:
        raise InputError(f"{name} must be positive, got {value:g}")


def _share_of(value: float, name: str) -> None:
    if not 0 < value <= 1:
        raise InputError(f"{name} must lie in (0, 1], got {value:g}")


def _whole(value: int) -> None:
    if int(value) != value or value < 1:
        raise InputError(f"a number of tokens must be a whole number >= 1, got {value}")
