"""How large the mismatch is, where nothing better explains it."""

from __future__ import annotations

import numpy as np

from mismatch_audit.rollouts.checks.base import CheckResult
from mismatch_audit.rollouts.checks.series import change
from mismatch_audit.rollouts.checks.strata import Strata
from mismatch_audit.rollouts.checks.streaming import Streaming
from mismatch_audit.rollouts.checks.view import TokenView
from mismatch_audit.rollouts.schema import Header

LOW = ("bfloat16", "float16", "fp8", "float8", "mxfp8")
LIMITS = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 0.03, "fp8": 0.05}
"""Mean |log p - log q| that a pair of clean kernels stays under, by the coarser dtype."""
TWO_PRECISIONS = 0.15
"""A bf16 engine under a float32 trainer was measured at 0.035 to 0.057 nats, 0.3 at most."""
STOP_KL = 1.0


class Level(Streaming):
    """Two precisions (symmetric, there from step 0, level) or something that no check names."""

    code = "UNEXPLAINED_MISMATCH"
    title = "the mismatch is above what clean kernels give"
    priority = 10
    remedy = "Run the live audit on a few prompts of this log: it sees whole distributions."

    def __init__(self) -> None:
        super().__init__()
        self.abs, self.signed, self.k3, self.ratio = Strata(), Strata(), Strata(), Strata()
        self.series = Strata()
        self.lagging = 0

    def see(self, tokens: TokenView) -> None:
        zero = np.zeros(len(tokens.n), dtype=np.int64)
        fresh = tokens.lag == 0  # what staleness does is measured apart
        self.lagging += int((~fresh).sum())
        n = np.where(fresh, tokens.n, 0)
        for strata, x in (
            (self.abs, tokens.sum_abs),
            (self.signed, tokens.sum_d),
            (self.k3, tokens.sum_k3),
            (self.ratio, tokens.sum_ratio),
        ):
            strata.add(zero, tokens.clusters, n, x)
        step = tokens.scalar("step").astype(np.int64)
        doubt = np.where(fresh, tokens.sum_doubt, 0)
        self.series.add(step, tokens.clusters, doubt, tokens.sum_abs)

    def judge(self, header: Header) -> list[CheckResult]:
        size, k3, signed = self.abs.mean(0), self.k3.mean(0), self.signed.mean(0)
        if size.clusters < 2 and self.lagging:
            return [self.too_little("every comparable row is stale: needs rows at lag 0")]
        if size.clusters < 2:
            return [self.too_little("needs comparable tokens of 2 prompts")]
        dtypes = [d for d in (header.trainer_dtype, header.engine_dtype) if d]
        limit = max((limit_of(d) for d in dtypes), default=LIMITS["bfloat16"])
        row = {
            "mean_abs_log_ratio": size.value,
            "mean_log_ratio": signed.value,
            "k3": k3.value,
            "mean_p_over_q": self.ratio.mean(0).value,
            "limit": limit,
            "trainer_dtype": header.trainer_dtype,
            "engine_dtype": header.engine_dtype,
        }
        if k3.beyond(STOP_KL):
            text = f"k3 is {k3.value:.3g}: stop the run, no correction helps here"
            return [self.found(text, [row])]
        unequal = len({limit_of(d) for d in dtypes}) > 1
        symmetric = abs(signed.value) < 0.2 * size.value
        if (
            (unequal or not dtypes or size.beyond(limit))
            and 3e-3 < size.value < TWO_PRECISIONS
            and symmetric
            and change(self.series) is None
            and (not dtypes or any(limit_of(d) >= LIMITS["float16"] for d in dtypes))
        ):
            if unequal:
                text = f"{header.engine_dtype} engine under a {header.trainer_dtype} trainer"
            else:
                text = "as large as a bf16 engine under a float32 trainer gives"
            return [
                self.found(
                    f"{text}: mean |log p - log q| {size.value:.3g}, symmetric, from the start",
                    [row],
                    code="TWO_PRECISIONS",
                    title="the two sides compute in different precisions",
                    severity="warning" if unequal else "note",
                    priority=20,
                    remedy="Set the engine's dtype to the trainer's (an engine's 'auto' follows "
                    "the checkpoint), or run both sides in float16.",
                )
            ]
        if size.beyond(limit):
            return [self.found(f"mean |log p - log q| {size.value:.3g} over {limit:g}", [row])]
        return [self.clean(f"mean |log p - log q| {size.value:.3g} within {limit:g}", [row])]


def limit_of(dtype: str) -> float:
    """Mean |log p - log q| that clean kernels of a dtype stay under, nats."""
    name = dtype.removeprefix("torch.")
    if name in LIMITS:
        return LIMITS[name]
    return LIMITS["fp8"] if "8" in name and name not in LIMITS else LIMITS["bfloat16"]
