"""What the live monitor costs: a step's observation by its size, and a TRL run with and without it.

python benchmarks/monitor.py                 # observation only, under a minute
python benchmarks/monitor.py --trl           # a real GRPO run too (tiny model, colocated vLLM)
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
CONTRACT = ROOT / "examples" / "contracts" / "live-float32.yaml"


def observation(sequences: int, tokens: int, record: bool) -> float:
    """Median seconds of ``Monitor.observe`` for one step of that size."""
    from kernel_contracts.loading import load_contract
    from mismatch_audit.trainers.monitor import Monitor
    from mismatch_audit.trainers.step import from_padded

    rng = np.random.default_rng(0)
    shape = (sequences, tokens)
    sampler = -rng.exponential(1.0, shape).astype(np.float32)
    trainer = sampler + 1e-6 * rng.standard_normal(shape).astype(np.float32)
    ones = np.ones(shape, dtype=np.int64)
    with tempfile.TemporaryDirectory() as folder:
        monitor = Monitor(
            load_contract(CONTRACT), record=Path(folder) if record else None, strict=True
        )
        seconds = []
        for step in range(6):
            started = time.perf_counter()
            batch = from_padded(
                ones[:, :256], ones[:, :256], rng.integers(0, 50000, shape), ones,
                tokens={"sampler_logprob": sampler, "trainer_logprob": trainer},
                scalars={"step": step, "group_id": [str(s // 8) for s in range(sequences)],
                         "weights_version_min": step, "weights_version_max": step},
            )  # fmt: skip
            monitor.observe(batch, step=step)
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])  # the first one compiles


def training(steps: int) -> None:
    """The example's clean run, with and without the audit, in one process on one engine."""
    sys.path.insert(0, str(ROOT / "examples"))
    import grpo_trl

    engines = grpo_trl.Engines()
    with tempfile.TemporaryDirectory() as folder:
        model = grpo_trl.make_tiny_model(Path(folder))
        rows: dict[str, list[dict[str, float]]] = {}
        for name, options in (
            ("warm-up", {"audit": False}),
            ("alone", {"audit": False}),
            ("audited", {"weights": 0}),
            ("audited, weights read back", {"weights": 1}),
            ("alone, again", {"audit": False}),
        ):
            out = Path(folder) / name
            done = grpo_trl.run(model=model, out=out, steps=steps, engines=engines, **options)
            rows[name] = [s for s in done.steps[1:] if "step_time" in s]  # the first one compiles
    seconds = {name: quartile([s["step_time"] for s in found]) for name, found in rows.items()}
    alone = min(seconds["alone"], seconds["alone, again"])
    print(
        "\n| run | seconds a step | ratio | of them the audit's | ratio by these |"
        "\n|---|---|---|---|---|"
    )
    for name, found in list(rows.items())[1:]:
        own = quartile(
            [
                s.get("mismatch/seconds", 0.0) + s.get("weights/sync_audit_seconds", 0.0)
                for s in found
            ]
        )
        ratio = seconds[name] / (seconds[name] - own)
        step = seconds[name]
        print(f"| {name} | {step:.3f} | {step / alone:.2f} | {own:.3f} | {ratio:.2f} |")


def quartile(values: list[float]) -> float:
    """The lower quartile: what else runs on the machine only ever adds time."""
    return float(np.quantile(values, 0.25))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    print("| sequences x tokens | seconds a step | with `record` | tokens/s |\n|---|---|---|---|")
    for sequences, tokens in ((32, 16), (64, 512), (256, 1024), (512, 2048)):
        plain, kept = (observation(sequences, tokens, record) for record in (False, True))
        rate = sequences * tokens / plain
        print(f"| {sequences} x {tokens} | {plain:.3f} | {kept:.3f} | {rate:.2g} |")
    if arguments.trl:
        training(arguments.steps)


if __name__ == "__main__":
    main()
