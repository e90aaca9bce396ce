"""How often the interval of a relative gradient bias holds the truth, on pairs with known bias.

    python benchmarks/gradient_coverage.py [--seeds 400] [--write]

Vectors, not models: 100 directions, noise along a spectrum that is strongest along the gradient
itself. Exit 1 if any interval holds the truth in clearly less than 95 % of the seeds. --write puts
the table into docs/gradient.md.
"""

from __future__ import annotations

import argparse
import sys
from math import inf, sqrt
from pathlib import Path

import numpy as np

from mismatch_audit.gradient.relative import relative_bias

DOC = Path(__file__).resolve().parent.parent / "docs" / "gradient.md"
BEGIN, END = "<!-- coverage:begin -->", "<!-- coverage:end -->"

CASES = [
    (24, 1.0, 0.0), (60, 2.0, 0.0), (60, 2.0, 1.0), (200, 2.0, 0.0), (200, 2.0, 1.0),
    (200, 6.0, 0.0),
]  # fmt: skip
"""(prompts, noise of one prompt over the gradient, spread of the logarithm of prompts' sizes)."""
RATIOS = (0.0, 0.05, 0.2, 1.0)


def pair(
    seed: int, ratio: float, n: int, noise: float, heavy: float
) -> tuple[np.ndarray, np.ndarray]:
    """(b, g): |E b| / |E g| = ratio; b's noise is a random third of g's, as of ratios by scores."""
    rng = np.random.default_rng([seed, n])
    mean = np.zeros(100)
    mean[0] = 1.0
    spectrum = 1 / np.sqrt(np.arange(1, 101))
    spectrum *= noise / np.linalg.norm(spectrum)
    size = rng.lognormal(-(heavy**2) / 2, heavy, (n, 1))
    z = rng.standard_normal((n, 100)) * spectrum * size
    return ratio * mean * size + 0.3 * rng.standard_normal((n, 1)) * z, mean * size + z


def row(n: int, noise: float, heavy: float, ratio: float, seeds: int) -> tuple[list[str], float]:
    found = [relative_bias(*pair(seed, ratio, n, noise, heavy)) for seed in range(seeds)]
    below = float(np.mean([r.lower <= ratio for r in found]))
    above = float(np.mean([r.upper >= ratio for r in found]))
    held = below + above - 1
    middle = [float(np.median([getattr(r, k) for r in found])) for k in ("value", "lower", "upper")]
    words = ["unbounded" if x == inf else f"{x:.3f}" for x in middle]
    unresolved = float(np.mean([not r.resolved for r in found]))
    sizes = "equal" if heavy == 0 else "log-normal"
    return [
        str(n), f"{noise:g}", sizes, f"{ratio:g}", f"{held:.3f}", f"{below:.3f}", f"{above:.3f}",
        words[0], f"{words[1]} to {words[2]}", f"{unresolved:.2f}",
    ], held  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=400)
    parser.add_argument("--write", action="store_true", help="rewrite the table in the page")
    options = parser.parse_args()
    head = ["prompts", "noise", "sizes", "true bias", "held", "by the lower end",
            "by the upper end", "median value", "median interval", "unbounded"]  # fmt: skip
    lines = [
        f"{options.seeds} seeds a row, nominal 0.95 (each end 0.975).",
        "",
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
    ]
    worst = 1.0
    for case in CASES:
        for ratio in RATIOS:
            cells, held = row(*case, ratio, options.seeds)
            worst = min(worst, held)
            lines.append("| " + " | ".join(cells) + " |")
    text = "\n".join(lines)
    print(text)
    if options.write:
        before, rest = DOC.read_text(encoding="utf-8").split(BEGIN)
        DOC.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    allowed = 0.95 - 3 * sqrt(0.95 * 0.05 / options.seeds)
    print(f"\nleast coverage {worst:.3f}, allowed {allowed:.3f}")
    return 0 if worst >= allowed else 1


if __name__ == "__main__":
    sys.exit(main())
