"""Exact bounds for a proportion of independent prompts."""

from __future__ import annotations

from kernel_contracts.confidence._checks import check_probability
from kernel_contracts.confidence.laws import beta_quantile, binomial_cdf, binomial_sf
from kernel_contracts.errors import InputError


def check_counts(k: int, n: int) -> None:
    """Raise InputError unless 0 <= k <= n and both are whole numbers."""
    if int(k) != k or int(n) != n or not 0 <= k <= n:
        raise InputError(f"need whole numbers 0 <= k <= n, got k={k}, n={n}", where="counts")


def clopper_pearson(k: int, n: int, alpha: float) -> tuple[float, float]:
    """Exact (lower, upper) bounds of a proportion, *each* one-sided at level ``alpha``.

    k: prompts that show the event.  n: prompts.  Each bound alone fails with probability at most
    alpha, so the pair is a 1 - 2 alpha interval.  Upper is the 1 - alpha quantile of
    Beta(k+1, n-k); with k = 0 it is 1 - alpha**(1/n), about 3/n at 5 %.  n = 0 gives (0, 1).

    The n units must be independent: pass prompts, never tokens.  Tokens of one prompt are
    correlated, and on tokens at ICC 0.05 and 100 tokens a prompt each bound holds about 73 % of
    the time where it promises 95 % (docs/error-rates.md).

    Clopper and Pearson, Biometrika 26 (1934).
    """
    check_probability("alpha", alpha)
    check_counts(k, n)
    lower = 0.0 if k == 0 else beta_quantile(alpha, k, n - k + 1)
    upper = 1.0 if k == n else beta_quantile(1.0 - alpha, k + 1, n - k)
    return lower, upper


def proportion_p_value(k: int, n: int, limit: float, *, above: bool) -> float:
    """p-value of the exact binomial test of a proportion against ``limit``.

    above=True tests "proportion <= limit" (small p: the limit is broken), above=False tests
    "proportion >= limit" (small p: the limit is kept).  It rejects at alpha exactly when the
    Clopper-Pearson bound of that side clears the limit.  limit in [0, 1].
    """
    check_counts(k, n)
    if not 0.0 <= limit <= 1.0:
        raise InputError(f"a proportion's limit lies in [0, 1], got {limit}", where="limit")
    if n == 0:
        return 1.0
    return binomial_sf(k - 1, n, limit) if above else binomial_cdf(k, n, limit)
