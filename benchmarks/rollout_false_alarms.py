"""How often the checks of recorded rollouts call a clean log faulty.

    python benchmarks/rollout_false_alarms.py [--seeds 200]

Every kind of clean log in tests/rollout_fixtures.py, over many seeds: the share with an error or a
warning, with its Clopper-Pearson upper bound.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from rollout_fixtures import CLEAN_KINDS, found, make_log

from kernel_contracts.confidence import clopper_pearson


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    seeds = parser.parse_args().seeds
    print("| kind of clean log | logs | with an error or warning | upper 95% | codes |")
    print("|---|---|---|---|---|")
    total, logs = 0, 0
    for kind, recipe in CLEAN_KINDS.items():
        codes: Counter[str] = Counter()
        wrong = 0
        for seed in range(1000, 1000 + seeds):
            names = found(make_log(seed=seed, **recipe).results())
            wrong += bool(names)
            codes.update(names)
        total, logs = total + wrong, logs + seeds
        upper = clopper_pearson(wrong, seeds, 0.05)[1]
        print(f"| {kind} | {seeds} | {wrong} | {upper:.2%} | {dict(codes) or ''} |", flush=True)
    upper = clopper_pearson(total, logs, 0.05)[1]
    print(f"| all | {logs} | {total} | {upper:.2%} | |")


if __name__ == "__main__":
    main()
