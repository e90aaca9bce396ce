"""What an audit costs beside the work that it audits, measured in one run.

Plain work: vLLM generates, vLLM prefills the same tokens, transformers runs its forward (logits
included) over the same tokens. The audit does all of that and captures, compares and writes tables.
Rounds alternate, and the best of each is taken, since the machine may be shared.

    python benchmarks/overhead.py [--engine-dtype bfloat16] [--prompts 32] [--rounds 2]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from mismatch_audit.chunks import Bench, run_chunk
from mismatch_audit.prepare import prepare
from mismatch_audit.programs.base import Sampling, Sequence_
from mismatch_audit.programs.batching import pad_batch, token_budget_batches
from mismatch_audit.programs.reference import TransformersReference
from mismatch_audit.programs.vllm_engine import VllmEngine
from mismatch_audit.settings import EngineSettings, RunSettings

SAMPLES = Path(__file__).resolve().parent.parent / "samples"


def forward(reference: TransformersReference, sequences: list[Sequence_]) -> None:
    """transformers' own forward over the same micro-batches."""
    for batch in token_budget_batches(
        [len(s.token_ids) for s in sequences], reference.settings.token_budget
    ):
        rows = [sequences[i].token_ids for i in batch]
        ids, mask, positions = pad_batch(rows, reference.pad_id, "right", reference.device)
        with torch.no_grad():
            reference.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
            )


def timed(job: Callable[[], object]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine-dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    contract = "bf16-serving" if args.engine_dtype == "bfloat16" else "fp32-exact"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = RunSettings(
            prompts=str(SAMPLES / "prompts.jsonl"),
            contract=str(SAMPLES / "contracts" / f"{contract}.yaml"),
            limit=args.prompts,
            engine=EngineSettings(dtype=args.engine_dtype),
        )
        run = prepare(settings, folder / "run", resume=False)
        engine = VllmEngine(
            run.facts["engine"]["model"], settings.engine, workdir=folder, log_path=folder / "log"
        )
        try:
            reference = TransformersReference(run.facts["reference"]["model"], settings.reference)
            engine.wait()
            bench = Bench(reference, engine, reference.head(), engine.head())
            measure(run, bench, args)
        finally:
            engine.close()


def measure(run, bench, args) -> None:  # type: ignore[no-untyped-def]
    sampling = Sampling(max_tokens=args.max_tokens)
    everyone = {p.id for p in run.prompts}
    prompts = [p.token_ids for p in run.prompts]

    def audit() -> None:
        nonlocal table, rows
        table, rows = run_chunk(bench, run.prompts, sampling, everyone)

    table = rows = None
    audit()  # warm-up of every kernel, and the sequences that the plain work repeats
    sequences = [
        Sequence_(r["sequence_id"], tuple(map(int, r["token_ids"])), int(r["prompt_length"]))
        for r in rows.to_dict("records")
    ]
    mean = round(sum(s.n_response for s in sequences) / len(sequences))
    jobs: dict[str, Callable[[], object]] = {
        "vLLM generate": lambda: bench.engine.plain(prompts, mean),
        "vLLM prefill": lambda: bench.engine.plain([s.token_ids for s in sequences], 1),
        "transformers forward": lambda: forward(bench.reference, sequences),
        "audit": audit,
    }
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(args.rounds):
        for name, job in jobs.items():
            best[name] = min(best[name], timed(job))
    plain = sum(seconds for name, seconds in best.items() if name != "audit")
    tokens = sum(len(s.token_ids) for s in sequences)
    print(f"{len(prompts)} prompts, {tokens} tokens, engine {args.engine_dtype}")
    for name, seconds in best.items():
        print(f"  {name:<22}{seconds:8.2f} s")
    print(f"  {'plain work':<22}{plain:8.2f} s")
    print(f"  audit / plain work    {best['audit'] / plain:8.2f} x   (promise: at most 1.25)")


if __name__ == "__main__":
    main()
