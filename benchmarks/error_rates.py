"""How often a verdict is wrong, how often it finds what it should, and what each interval covers.

    python benchmarks/error_rates.py [--audits 600] [--write | --check]

Simulated audits whose truth is known.  The limit sits *at* the truth for false verdicts, which is
the worst case.  --write replaces the tables in docs/error-rates.md; --check exits 1 when a rule
used for verdicts exceeds its level by more than 3 standard errors.  Under 3 minutes on one core;
seeded, so the same number of audits gives the same tables.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np

from kernel_contracts.confidence import (
    EProcess,
    clopper_pearson,
    cluster_bootstrap,
    e_bh,
    hoeffding,
    holm,
    maurer_pontil,
    mean_bounds,
    mean_test,
    normal_bounds,
    u_statistic_sq_norm,
    wilson,
)

ALPHA = 0.05
TOKENS = 64
SLICES = 8
DOC = Path(__file__).resolve().parent.parent / "docs" / "error-rates.md"
BEGIN, END = "<!-- error-rates:begin -->", "<!-- error-rates:end -->"


class Prompts(NamedTuple):
    """value: [n] per-prompt mean.  count: [n] rows.  event: [n] whether any row shows the event."""

    value: np.ndarray
    count: np.ndarray
    event: np.ndarray


Law = Callable[[np.random.Generator, int], Prompts]
Bounds = Callable[[Prompts], tuple[float, float]]


def generator(*key: object) -> np.random.Generator:
    return np.random.default_rng(crc32(repr(key).encode()))


# --- laws: TOKENS rows a prompt, correlated within the prompt ---------------------------------


def kl_law(icc: float, *, lengths: bool = False) -> Law:
    """Token KL = prompt factor x token factor, both log-normal, with the given ICC and mean 1.

    lengths=True draws 1 to TOKENS rows a prompt, and longer prompts drift more.
    """
    token = np.e - 1  # squared cv of the token factor, sigma = 1
    between = icc * token / (1 - icc * (1 + token))
    sigma = np.sqrt(np.log1p(between))

    def draw(rng: np.random.Generator, n: int) -> Prompts:
        prompt = np.exp(sigma * rng.standard_normal((n, 1)) - sigma**2 / 2)
        rows = prompt * np.exp(rng.standard_normal((n, TOKENS)) - 0.5)
        count = rng.integers(1, TOKENS + 1, n) if lengths else np.full(n, TOKENS)
        used = np.arange(TOKENS) < count[:, None]
        value = (rows * used).sum(1) / count
        if lengths:
            value = value * (0.5 + count / TOKENS)
        return Prompts(np.minimum(value, KL_CEILING), count, (rows > 8).any(1))

    return draw


def rate_law(rate: float, icc: float) -> Law:
    """Token events (flips, exceedances) at ``rate``: beta-binomial with the given ICC."""
    size = 1 / icc - 1

    def draw(rng: np.random.Generator, n: int) -> Prompts:
        hits = rng.binomial(TOKENS, rng.beta(rate * size, (1 - rate) * size, n))
        return Prompts(hits / TOKENS, np.full(n, TOKENS), hits > 0)

    return draw


KL_CEILING = 8.0  # the mean is 1: 1/8 of the ceiling
RATE = 0.05


# --- clause kinds -----------------------------------------------------------------------------


def betting(ceiling: float, *, weighted: bool = False) -> Bounds:
    def bounds(p: Prompts) -> tuple[float, float]:
        found = mean_bounds(
            p.value,
            ceiling=ceiling,
            alpha=ALPHA,
            weights=p.count if weighted else None,
            weight_cap=TOKENS if weighted else None,
        )
        return found.lower, found.upper

    return bounds


def exact_prompts(p: Prompts) -> tuple[float, float]:
    return clopper_pearson(int(p.event.sum()), p.event.size, ALPHA)


def exact_tokens(p: Prompts) -> tuple[float, float]:
    return clopper_pearson(round((p.value * p.count).sum()), int(p.count.sum()), ALPHA)


def wilson_prompts(p: Prompts) -> tuple[float, float]:
    return wilson(int(p.event.sum()), p.event.size, ALPHA)


def mean_truth(p: Prompts) -> float:
    return float(p.value.mean())


def token_truth(p: Prompts) -> float:
    return float((p.value * p.count).sum() / p.count.sum())


def event_truth(p: Prompts) -> float:
    return float(p.event.mean())


@dataclass(frozen=True)
class Clause:
    """One kind of clause: where its data come from, what it promises on, and by which bounds."""

    name: str
    law: Law
    truth: Callable[[Prompts], float]
    bounds: Bounds

    def true_value(self) -> float:
        """The quantity's population value (see `population`)."""
        return population(self.name, self.law, self.truth)


@cache
def population(name: str, law: Law, truth: Callable[[Prompts], float]) -> float:
    """``truth`` over 400 000 prompts (relative error about 0.2 %), once for all tables."""
    rng = generator("truth", name)
    return float(np.mean([truth(law(rng, 20_000)) for _ in range(20)]))


CLAUSES = (
    Clause("share of prompts with a flip", rate_law(0.001, 0.1), event_truth, exact_prompts),
    Clause("token rate, ICC 0.05", rate_law(RATE, 0.05), mean_truth, betting(1.0)),
    Clause("token rate, ICC 0.2", rate_law(RATE, 0.2), mean_truth, betting(1.0)),
    Clause("mean KL per prompt, ICC 0.05", kl_law(0.05), mean_truth, betting(KL_CEILING)),
    Clause("mean KL per prompt, ICC 0.2", kl_law(0.2), mean_truth, betting(KL_CEILING)),
    Clause(
        "token-weighted KL, ratio of sums, ICC 0.2",
        kl_law(0.2, lengths=True),
        token_truth,
        betting(KL_CEILING, weighted=True),
    ),
)
FAULTS = (
    Clause("exact binomial on tokens, ICC 0.05", rate_law(RATE, 0.05), mean_truth, exact_tokens),
    Clause("exact binomial on tokens, ICC 0.2", rate_law(RATE, 0.2), mean_truth, exact_tokens),
    Clause("normal interval, mean KL, ICC 0.2", kl_law(0.2), mean_truth,
           lambda p: normal_bounds(p.value, ALPHA)),
    Clause("bound of prompt means for the token-weighted KL", kl_law(0.2, lengths=True),
           token_truth, betting(KL_CEILING)),
)  # fmt: skip


class Rate(NamedTuple):
    """One row of the false-verdict table."""

    kind: str
    n: int
    nominal: float
    false_fail: float
    false_pass: float
    is_verdict: bool

    def within(self, audits: int) -> bool:
        limit = self.nominal + 3 * np.sqrt(self.nominal * (1 - self.nominal) / audits)
        return max(self.false_fail, self.false_pass) <= limit


def false_verdicts(audits: int, n: int) -> list[Rate]:
    """Rates of FAIL (lower > truth) and PASS (upper < truth) when the truth is the limit."""
    found = []
    for clause in (*CLAUSES, *FAULTS):
        truth, rng = clause.true_value(), generator("false", clause.name)
        pairs = np.array([clause.bounds(clause.law(rng, n)) for _ in range(audits)])
        found.append(
            Rate(
                clause.name,
                n,
                ALPHA,
                float(np.mean(pairs[:, 0] > truth)),
                float(np.mean(pairs[:, 1] < truth)),
                clause in CLAUSES,
            )
        )
    return [*found, *peeking(audits, 2 * n), *many_slices(audits, n)]


def peeking(audits: int, n: int) -> list[Rate]:
    """A decision is taken the first time a look after some prompt allows one."""
    clause = CLAUSES[4]
    truth, rng = clause.true_value(), generator("peeking")
    ever = {"above": 0, "below": 0}
    normal = {"above": 0, "below": 0}
    t = np.arange(1, n + 1)
    for _ in range(audits):
        x = clause.law(rng, n).value
        for side in ever:
            process = EProcess(limit=truth, ceiling=KL_CEILING, side=side, horizon=n)
            for i, value in enumerate(x):
                process.update(float(value), prompt_id=str(i))
            ever[side] += process.rejects(ALPHA)
        mean = np.cumsum(x) / t
        half = 1.645 * np.sqrt(np.maximum(np.cumsum(x**2) / t - mean**2, 0) / np.maximum(t - 1, 1))
        normal["above"] += bool((mean - half > truth)[9:].any())
        normal["below"] += bool((mean + half < truth)[9:].any())
    return [
        Rate("e-process, a look after every prompt", n, ALPHA, ever["above"] / audits,
             ever["below"] / audits, True),
        Rate("normal interval, a look after every prompt from the 10th", n, ALPHA,
             normal["above"] / audits, normal["below"] / audits, False),
    ]  # fmt: skip


def many_slices(audits: int, n: int) -> list[Rate]:
    """SLICES slices that share their prompts, all at the limit: any false decision counts.

    Slice s holds the prompts' values times a slice factor of mean 1, so slices are correlated.
    e-BH controls the false discovery rate, which equals "any" when all nulls are true.  A release
    is false if all slices pass although one is at its limit; the others are at a third of theirs.
    """
    clause = CLAUSES[4]
    rng = generator("slices")
    any_alarm = {"holm": [0, 0], "e-BH": [0, 0], "raw": [0, 0]}
    release = 0

    def draw(size: int) -> np.ndarray:
        x = clause.law(rng, size).value
        return np.minimum(x * np.exp(0.4 * rng.standard_normal((SLICES, size)) - 0.08), KL_CEILING)

    truth = float(np.mean([draw(20_000).mean() for _ in range(20)]))
    for _ in range(audits):
        rows = draw(n)
        for column, side in enumerate(("above", "below")):
            tests = [
                mean_test(x, limit=truth, ceiling=KL_CEILING, side=side, alpha=ALPHA) for x in rows
            ]
            p = [test.p_value for test in tests]
            any_alarm["holm"][column] += bool(holm(p, ALPHA).rejected.any())
            any_alarm["e-BH"][column] += bool(
                e_bh([test.log_e for test in tests], ALPHA).rejected.any()
            )
            any_alarm["raw"][column] += min(p) <= ALPHA
        limits = truth * np.array([1.0, *[3.0] * (SLICES - 1)])
        release += all(
            mean_bounds(x, ceiling=KL_CEILING, alpha=ALPHA).upper <= limit
            for x, limit in zip(rows, limits, strict=True)
        )
    name = f"{SLICES} slices, any of them"
    return [
        Rate(f"{name}, Holm", n, ALPHA, *(v / audits for v in any_alarm["holm"]), True),
        Rate(f"{name}, e-BH", n, ALPHA, *(v / audits for v in any_alarm["e-BH"]), True),
        Rate(f"{SLICES} slices, release of one bad (no correction)", n, ALPHA, 0.0,
             release / audits, True),
        Rate(f"{name}, uncorrected alarms", n, ALPHA, *(v / audits for v in any_alarm["raw"]),
             False),
    ]  # fmt: skip


# --- power ------------------------------------------------------------------------------------

PASSING = (0.25, 0.5, 0.7, 0.9)
FAILING = (1.25, 1.5, 2.0, 3.0)


class Power(NamedTuple):
    """decided: for each ratio truth / limit, the share of audits that decide rightly."""

    kind: str
    n: int
    decided: tuple[float, ...]


def power(audits: int, sizes: tuple[int, ...]) -> list[Power]:
    found = []
    for clause in CLAUSES:
        truth = clause.true_value()
        for n in sizes:
            rng = generator("power", clause.name, n)
            pairs = np.array([clause.bounds(clause.law(rng, n)) for _ in range(audits)])
            passes = [float(np.mean(pairs[:, 1] <= truth / ratio)) for ratio in PASSING]
            fails = [float(np.mean(pairs[:, 0] > truth / ratio)) for ratio in FAILING]
            found.append(Power(clause.name, n, (*passes, *fails)))
    return found


# --- coverage ---------------------------------------------------------------------------------


class Coverage(NamedTuple):
    """Share of audits in which each one-sided bound holds, and upper bound / truth on average."""

    quantity: str
    interval: str
    n: int
    lower: float
    upper: float
    ratio: float
    is_verdict: bool


def kl_intervals() -> dict[str, tuple[Bounds, bool]]:
    return {
        "betting": (betting(KL_CEILING), True),
        "Hoeffding": (lambda p: hoeffding(p.value, ceiling=KL_CEILING, alpha=ALPHA), False),
        "empirical Bernstein": (
            lambda p: maurer_pontil(p.value, ceiling=KL_CEILING, alpha=ALPHA),
            False,
        ),
        "normal": (lambda p: normal_bounds(p.value, ALPHA), False),
        "cluster bootstrap": (lambda p: cluster_bootstrap(p.value, ALPHA, resamples=300), False),
    }


def coverage(audits: int, sizes: tuple[int, ...]) -> list[Coverage]:
    kl = Clause("mean KL per prompt, ICC 0.2", kl_law(0.2), mean_truth, betting(KL_CEILING))
    rate = Clause("token rate, ICC 0.2", rate_law(RATE, 0.2), mean_truth, betting(1.0))
    share = CLAUSES[0]
    plans = [
        (kl, kl_intervals()),
        (
            rate,
            {
                "betting": (betting(1.0), True),
                "normal": (lambda p: normal_bounds(p.value, ALPHA), False),
                "cluster bootstrap": (
                    lambda p: cluster_bootstrap(p.value, ALPHA, resamples=300),
                    False,
                ),
                "Clopper-Pearson on tokens": (exact_tokens, False),
            },
        ),
        (
            share,
            {"Clopper-Pearson": (exact_prompts, True), "Wilson": (wilson_prompts, False)},
        ),
    ]
    found = []
    for clause, intervals in plans:
        truth = clause.true_value()
        for n in sizes:
            rng = generator("coverage", clause.name, n)
            batches = [clause.law(rng, n) for _ in range(audits)]
            for name, (bounds, is_verdict) in intervals.items():
                pairs = np.array([bounds(p) for p in batches])
                found.append(
                    Coverage(
                        clause.name,
                        name,
                        n,
                        float(np.mean(pairs[:, 0] <= truth)),
                        float(np.mean(pairs[:, 1] >= truth)),
                        float(np.mean(pairs[:, 1]) / truth),
                        is_verdict,
                    )
                )
    return [*found, *norm_coverage(audits, sizes)]


def norm_coverage(audits: int, sizes: tuple[int, ...]) -> list[Coverage]:
    """Squared norm of a mean gradient: value -+ 1.645 jackknife errors, and the plug-in."""
    found = []
    for n in sizes:
        rng = generator("norm", n)
        mean = np.zeros(200)
        mean[0] = 0.3
        held = np.zeros(4)
        upper = plug_in = 0.0
        for _ in range(audits):
            x = mean + 0.5 * rng.standard_normal((n, 200)) * rng.lognormal(-0.32, 0.8, (n, 1))
            u = u_statistic_sq_norm(x)
            half = 1.645 * u.standard_error
            held += (
                u.value - half <= 0.09,
                u.value + half >= 0.09,
                u.plug_in - half <= 0.09,
                u.plug_in + half >= 0.09,
            )
            upper, plug_in = upper + u.value + half, plug_in + u.plug_in + half
        held /= audits
        name = "squared norm of a mean vector"
        found += [
            Coverage(name, "U-statistic, jackknife", n, held[0], held[1],
                     upper / audits / 0.09, False),
            Coverage(name, "plug-in, same error", n, held[2], held[3],
                     plug_in / audits / 0.09, False),
        ]  # fmt: skip
    return found


# --- output -----------------------------------------------------------------------------------

Table = tuple[str, list[str], list[list[str]]]


def tables(
    rates: list[Rate], powers: list[Power], covers: list[Coverage], audits: int
) -> list[Table]:
    slack = 3 * np.sqrt(ALPHA * (1 - ALPHA) / audits)

    def mark(covered: float) -> str:
        return f"{covered:.3f}" + (" under" if covered < 1 - ALPHA - slack else "")

    return [
        (
            "False verdicts with the truth at the limit",
            ["rule", "prompts", "nominal", "false FAIL", "false PASS", "level kept", "used for"],
            [
                [r.kind, str(r.n), f"{r.nominal:.2f}", f"{r.false_fail:.3f}", f"{r.false_pass:.3f}",
                 "yes" if r.within(audits) else "NO", "verdicts" if r.is_verdict else "nothing"]
                for r in rates
            ],
        ),
        (
            "Share of audits that decide rightly, by truth / limit",
            ["clause", "prompts", *(f"PASS at {v:g}" for v in PASSING),
             *(f"FAIL at {v:g}" for v in FAILING)],
            [[p.kind, str(p.n), *(f"{v:.2f}" for v in p.decided)] for p in powers],
        ),
        (
            "Coverage of each one-sided bound, nominal 0.95",
            ["quantity", "interval", "prompts", "lower", "upper", "upper / truth", "used for"],
            [
                [c.quantity, c.interval, str(c.n), mark(c.lower), mark(c.upper), f"{c.ratio:.2f}",
                 "verdicts" if c.is_verdict else "display"]
                for c in covers
            ],
        ),
    ]  # fmt: skip


def markdown(found: list[Table], audits: int) -> str:
    lines = [f"{audits} simulated audits a row, {TOKENS} tokens a prompt, level {ALPHA}.", ""]
    for title, head, rows in found:
        lines += [f"### {title}", "", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def show(found: list[Table]) -> None:
    for title, head, rows in found:
        widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
        print(f"\n{title}")
        for line in (head, ["-" * w for w in widths], *rows):
            print("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())


def write(text: str, path: Path = DOC) -> None:
    """Replace what lies between the two markers of the page; the prose around them stays."""
    page = path.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")


def simulate(audits: int) -> tuple[list[Rate], list[Table]]:
    rates = false_verdicts(audits, 100)
    powers, covers = power(audits, (60, 150, 300)), coverage(audits, (30, 100, 300))
    return rates, tables(rates, powers, covers, audits)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--audits", type=int, default=600, help="simulated audits a row")
    parser.add_argument("--write", action="store_true", help="rewrite the tables in the page")
    parser.add_argument("--check", action="store_true", help="exit 1 if a level is not kept")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    rates, found = simulate(options.audits)
    show(found)
    if options.write:
        write(markdown(found, options.audits))
    broken = [r.kind for r in rates if r.is_verdict and not r.within(options.audits)]
    print(f"\n{time.perf_counter() - start:.0f} s; levels not kept: {broken or 'none'}")
    return 1 if options.check and broken else 0


if __name__ == "__main__":
    sys.exit(main())
