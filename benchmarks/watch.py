"""How often a watch alarms wrongly, how soon it alarms rightly, and what it costs.

    python benchmarks/watch.py [--runs 400] [--prompts 400]

Alarms: seeded logs whose per-prompt values follow a law with every slice's mean at a factor of the
limit; new slices appear as the log grows, and every prompt is looked at. Printed: the share of logs
in which the clause alarmed, beside tests that are not corrected over slices and beside a normal
interval looked at after every prompt; and the prompts until the alarm. Cost: prompts a second
through observing, testing and storing, for the watch's state and for a promotion store on SQLite.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from kernel_contracts.loading import parse_contract
from mismatch_audit.monitor.frames import ScoredRow
from mismatch_audit.monitor.observe import observable_clauses
from mismatch_audit.monitor.trackers import Book, Plan
from mismatch_audit.monitor.watch import Watch
from mismatch_audit.monitor.watch_source import Chunk, units_of
from mismatch_audit.monitor.watch_state import WatchState
from mismatch_audit.promotion.evidence import Batch, JudgedUnit
from mismatch_audit.promotion.store import PromotionStore

LIMIT, ALPHA, SLICES = 2.0e-3, 0.05, 12
CONTRACT = parse_contract(f"""\
schema: kernel-contracts/v1
name: watch-benchmark
slices: {{domain: {{by: domain}}}}
statistical:
  - {{id: S, metric: k3, limit: {LIMIT}, ceiling: {5 * LIMIT}, tail: 0.3, slices: [domain]}}
  - {{id: T, metric: mult_prob_error, limit: 1.1}}
promotion: {{}}
""")
CLAUSES = observable_clauses(CONTRACT)


def values(random: np.random.Generator, count: int, mean: float) -> np.ndarray:
    """k3 of prompts: gamma with shape 2 (coefficient of variation 0.7), as with some 20 tokens."""
    return random.gamma(2.0, mean / 2.0, count)


def one_log(seed: int, prompts: int, factor: float) -> tuple[int | None, bool, bool]:
    """(prompt of the alarm or None, an uncorrected test alarmed, a normal interval did)."""
    random = np.random.default_rng([5, seed])
    book = Book(CONTRACT, CLAUSES[:1], Plan(ALPHA, 300))
    seen: dict[str, list[float]] = {}
    alarm, normal = None, False
    for at, value in enumerate(values(random, prompts, factor * LIMIT)):
        name = f"domain={random.integers(0, min(SLICES, 1 + at // 8))}"
        clipped = min(float(value), 5 * LIMIT)
        book.update({"S": {name: (float(value), 20)}})
        seen.setdefault(name, []).append(clipped)
        if alarm is None and book.failing():
            alarm = at + 1
        x = np.array(seen[name])
        if len(x) >= 10:
            normal |= bool(x.mean() - 1.645 * x.std(ddof=1) / np.sqrt(len(x)) > LIMIT)
    trackers = book.families["S"].trackers.values()
    return alarm, any(t.p_fail <= ALPHA for t in trackers), normal


def alarms(runs: int, prompts: int) -> None:
    print(f"{runs} logs of {prompts} prompts, up to {SLICES} slices, alpha {ALPHA}\n")
    print("mean/limit  corrected  uncorrected  normal interval  prompts to the alarm (median)")
    for factor in (0.8, 1.0, 1.5, 2.0, 3.0):
        found = [one_log(seed, prompts, factor) for seed in range(runs)]
        raised = [a for a, _, _ in found if a is not None]
        shares = [np.mean([bool(f[i]) for f in found]) for i in range(3)]
        median = f"{np.median(raised):.0f}" if len(raised) > runs / 2 else "-"
        print(f"{factor:10g}  {shares[0]:9.3f}  {shares[1]:11.3f}  {shares[2]:15.3f}  {median:>10}")


class _Nothing:
    """A source that is fed by hand."""

    identity = {"source": "benchmark"}  # noqa: RUF012
    title = "benchmark"

    def backlog(self, cursor: dict) -> int:
        return 0


def cost(count: int = 4000, tokens: int = 200) -> None:
    random = np.random.default_rng(1)
    rows = []
    for i in range(count):
        q = -random.exponential(1.0, tokens)
        p = {"reference_logprob": q + random.normal(0, 0.03, tokens)}
        ids = tuple(range(tokens))
        rows.append(ScoredRow(f"p{i}", f"r{i}", ids, 10, q, p, {"domain": f"d{i % 8}"}))
    parts = [rows[at : at + 64] for at in range(0, count, 64)]
    began = time.perf_counter()
    units = [units_of(CONTRACT, CLAUSES, part) for part in parts]
    observed = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        state = WatchState(Path(folder) / "s.db", {"a": "b"})
        watch = Watch(CONTRACT, CLAUSES, _Nothing(), state)  # type: ignore[arg-type]
        began = time.perf_counter()
        for number, part in enumerate(units):
            watch.apply(Chunk({"at": number}, part))
        kept = time.perf_counter() - began
        state.close()
        with PromotionStore(f"{folder}/p.db") as store:
            subject = store.start(CONTRACT, "b", "w", actor="benchmark")
            with store.database.writing() as connection:
                from mismatch_audit.promotion.history import decide

                decide(connection, subject.id, "advance", "offline", "shadow", "b", "b", {})
            began = time.perf_counter()
            for part in units:
                batch = [
                    JudgedUnit(
                        u.unit,
                        dict.fromkeys(u.requests, ("2026-01-01T00:00:00Z", u.tokens)),
                        u.observations,
                    )
                    for u in part
                ]
                store.record(subject, Batch("shadow", batch), actor="b")
            stored = time.perf_counter() - began
    print(f"\n{count} prompts of {tokens} tokens, 9 tests each way, chunks of 64")
    for name, seconds in (("observe", observed), ("watch's state", kept), ("store", stored)):
        print(f"{name:14} {count / seconds:8.0f} prompts/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--prompts", type=int, default=400)
    asked = parser.parse_args()
    alarms(asked.runs, asked.prompts)
    cost()


if __name__ == "__main__":
    main()
