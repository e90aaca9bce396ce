"""How many tokens a second the checks and the staleness measurement take in, on one core.

    python benchmarks/rollout_checks.py

Batches of 128 sequences of 1024 tokens (200 of them prompt) in groups of 8, as Arrow arrays in
memory: decoding a file comes on top. "bare" has both log-probs, versions and a loss mask; "full"
every column that a check reads.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.checks import all_checks
from mismatch_audit.rollouts.schema import Header, sequence_schema
from mismatch_audit.rollouts.staleness import Staleness

ROWS, LENGTH, PROMPT, BATCHES = 128, 1024, 200, 48


def record(step: int, full: bool) -> pa.RecordBatch:
    """One batch of a synthetic log (random ids and log-probs, noise of bf16 size)."""
    rng = np.random.default_rng(step)
    n = ROWS * LENGTH
    response = np.tile(np.arange(LENGTH) >= PROMPT, ROWS)
    sampler = -rng.exponential(0.5, n).astype(np.float32)
    noise = rng.normal(0, 0.02, (5, n)).astype(np.float32)
    names = [f"{step}-{i}" for i in range(ROWS)]
    scalars = {
        "step": np.full(ROWS, step // 4),
        "sample_id": names,
        "group_id": [f"{step}-{i // 8}" for i in range(ROWS)],
        "prompt_len": np.full(ROWS, PROMPT),
        "weights_version_max": np.full(ROWS, step // 4),
        "trainer_version": np.full(ROWS, step // 4),
        "finish_reason": ["stop"] * ROWS,
    }
    lists = {
        "token_ids": rng.integers(0, 150_000, n),
        "loss_mask": response,
        "sampler_logprob": pa.array(sampler, mask=~response),
        "trainer_logprob": pa.array(sampler + noise[0], mask=~response),
    }
    if full:
        scalars |= {
            "environment": ["maths", "code"] * (ROWS // 2),
            "modality": ["text"] * ROWS,
            "engine": ["engine-1"] * ROWS,
            "run_id": ["run"] * ROWS,
            "n_left_pad": np.arange(ROWS) % 16,
            "num_cached_tokens": np.arange(ROWS) % 8 * 16,
            "microbatch_rows": np.full(ROWS, 4),
            "engine_age": np.full(ROWS, step // 4),
            "temperature": np.ones(ROWS),
            "top_p": np.ones(ROWS),
            "top_k": np.zeros(ROWS, int),
            "sequence_advantage": (-1.0) ** np.arange(ROWS),
        }
        lists |= {
            "origin": response.astype(np.int8),
            "routing_changed": rng.random(n) < 0.1,
            "applied_weight": pa.array(np.exp(noise[0]), mask=~response),
        }
        for k, name in enumerate(("current", "rescore", "ref"), start=1):
            lists[f"{name}_logprob"] = pa.array(sampler + noise[k], mask=~response)
    schema = sequence_schema()
    offsets = pa.array(np.arange(0, n + 1, LENGTH, dtype=np.int32))
    columns = {k: pa.array(v, type=schema.field(k).type) for k, v in scalars.items()}
    for name, value in lists.items():
        inner = pa.array(value).cast(schema.field(name).type.value_type)
        columns[name] = pa.ListArray.from_arrays(offsets, inner)
    return pa.RecordBatch.from_pydict(columns)


def rate(records: list[pa.RecordBatch], take: Callable[[TokenBatch], None]) -> float:
    """Million tokens a CPU second."""

    def batches() -> Iterator[TokenBatch]:
        for i in range(BATCHES):
            yield TokenBatch(records[i % len(records)])

    take(TokenBatch(records[0]))
    start = time.process_time()
    for batch in batches():
        take(batch)
    return BATCHES * ROWS * LENGTH / (time.process_time() - start) / 1e6


def main() -> None:
    print("| log | checks | staleness | both | finish (s) | peak memory |")
    print("|---|---|---|---|---|---|")
    for name, full in (("bare", False), ("full", True)):
        records = [record(step, full) for step in range(8)]
        checks, staleness = all_checks(), Staleness()

        def run_checks(batch: TokenBatch) -> None:
            for check in checks:  # noqa: B023
                check.update(batch)

        def run_both(batch: TokenBatch) -> None:
            run_checks(batch)
            staleness.update(batch)  # noqa: B023

        rates = [rate(records, f) for f in (run_checks, staleness.update, run_both)]
        start = time.process_time()
        for check in checks:
            check.finish(Header(eos_ids=(1,), vocab_size=150_000))
        finish = time.process_time() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        shown = " | ".join(f"{r:.1f} M tokens/s" for r in rates)
        print(f"| {name} | {shown} | {finish:.2f} | {peak:.0f} MiB |", flush=True)


if __name__ == "__main__":
    main()
