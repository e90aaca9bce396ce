"""How fast recorded rollouts are audited, beside two ways of doing part of it.

    python benchmarks/rollouts.py         # 100 million tokens: 20 minutes, 8 GB of temporary files
    python benchmarks/rollouts.py --tokens 5e6 --jsonl-tokens 1e6

One synthetic log, written in streams: groups of 8 rollouts, lengths log-normal around 500, noise as
of bf16, every column that the default contract's slices name. Each audit runs in a process of its
own, whose peak memory is shown. Compared with it on the same rows:

* ``martingale`` (PyPI), ``martingale doctor``: reads its own SQLite ledger; token means by lag, no
  slices, no intervals;
* a pandas script: explode the lists, group by, mean; the same slices, no intervals, no clustering.

Both are given fewer tokens, since they hold all of them in memory; rates are tokens per second.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

GROUP, PROMPT = 8, 64


def log(tokens: int, seed: int = 0) -> Iterator[pa.RecordBatch]:
    """Record batches of about a million tokens."""
    rng = np.random.default_rng(seed)
    done = sequence = 0
    while done < tokens:
        s = 1600
        lengths = np.clip(rng.lognormal(6.0, 0.6, s), 8, 4000).astype(np.int32) + PROMPT
        offsets = np.zeros(s + 1, dtype=np.int32)
        np.cumsum(lengths, out=offsets[1:])
        n = int(offsets[-1])
        index = np.arange(n) - np.repeat(offsets[:-1], lengths)
        response = index >= PROMPT
        q = -rng.exponential(0.35, n).astype(np.float32)
        noise = rng.standard_normal(n).astype(np.float32) * (0.01 - 0.02 * np.maximum(q, -3))
        number = sequence + np.arange(s)
        step = number // 1024

        at = pa.array(offsets)
        per_token = partial(_per_token, at)
        logprobs = partial(_logprobs, at, response)
        columns = {
            "step": pa.array(step.astype(np.int32)),
            "sample_id": pa.array([f"s{i}" for i in number]),
            "group_id": pa.array([f"p{i // GROUP}" for i in number]),
            "environment": pa.array(np.array(["math", "code", "chat"])[number // GROUP % 3]),
            "weights_version_min": pa.array(np.maximum(step - number % 3, 0)),
            "weights_version_max": pa.array(step.astype(np.int64)),
            "trainer_version": pa.array(step.astype(np.int64)),
            "prompt_len": pa.array(np.full(s, PROMPT, dtype=np.int32)),
            "microbatch_rows": pa.array((1 << number % 4).astype(np.int32)),
            "num_cached_tokens": pa.array((16 * (number % 5)).astype(np.int32)),
            "temperature": pa.array(np.ones(s, dtype=np.float32)),
            "finish_reason": pa.array(np.where(lengths > 1500, "length", "stop")),
            "reward": pa.array((rng.random(s) < 0.4).astype(np.float32)),
            "sequence_advantage": pa.array(rng.standard_normal(s).astype(np.float32)),
            "modality": pa.array(np.where(number % 7 == 0, "image", "text")),
            "token_ids": per_token(rng.integers(0, 50_000, n), "int32"),
            "origin": per_token(response, "int8"),
            "loss_mask": per_token(response, "bool"),
            "turn_index": per_token(np.minimum(index // 400, 5), "int16"),
            "sampler_logprob": logprobs(q),
            "trainer_logprob": logprobs(q + noise),
            "entropy": logprobs(np.abs(rng.standard_normal(n))),
            "routing_changed": per_token(rng.random(n) < 0.1, "bool"),
        }
        yield pa.RecordBatch.from_pydict(columns)
        done, sequence = done + n, sequence + s


def _per_token(offsets: pa.Array, values: np.ndarray, kind: str) -> pa.Array:
    return pa.ListArray.from_arrays(offsets, pa.array(values.astype(kind)))


def _logprobs(offsets: pa.Array, response: np.ndarray, values: np.ndarray) -> pa.Array:
    inner = pa.array(values.astype(np.float32), mask=~response)
    return pa.ListArray.from_arrays(offsets, inner)


def write_parquet(path: Path, tokens: int) -> int:
    """Returns the tokens written."""
    total, writer = 0, None
    for batch in log(tokens):
        writer = writer or pq.ParquetWriter(path, batch.schema)
        writer.write_batch(batch)
        total += batch.column("token_ids").flatten().__len__()
    if writer:
        writer.close()
    return total


def write_jsonl(path: Path, tokens: int) -> int:
    """Returns the tokens written. Log-probs have 6 digits, as trainers' dumps do."""
    total = 0
    with path.open("w") as file:
        for batch in log(tokens):
            for row in batch.to_pylist():
                for name in ("sampler_logprob", "trainer_logprob", "entropy"):
                    row[name] = [None if v is None else round(v, 6) for v in row[name]]
                file.write(json.dumps(row) + "\n")
                total += len(row["token_ids"])
    return total


def ours(path: Path, out: Path, *options: str) -> dict[str, float]:
    """Seconds and peak memory of ``audit rollouts`` in a process of its own."""
    code = (
        "import resource, sys, time; t = time.perf_counter()\n"
        "from mismatch_audit.cli.app import main\n"
        "sys.argv = ['audit', *sys.argv[1:]]\n"
        "try: main()\n"
        "except SystemExit as e: print('exit', e.code, file=sys.stderr)\n"
        "print('BENCH', time.perf_counter() - t,"
        " *(lambda u: (u.ru_utime + u.ru_stime, u.ru_maxrss))("
        "resource.getrusage(resource.RUSAGE_SELF)), file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", code, "rollouts", str(path), "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    line = next(x for x in done.stderr.splitlines() if x.startswith("BENCH")).split()
    return {"seconds": float(line[1]), "cpu": float(line[2]), "peak_gb": float(line[3]) / 1e6}


def pandas_script(path: Path) -> dict[str, float]:
    """What a notebook does: the same means over six of the slices."""
    code = f"""
import time, resource, numpy as np, pandas as pd
t = time.perf_counter()
f = pd.read_parquet({str(path)!r})
f = f[["step", "environment", "finish_reason", "microbatch_rows", "modality", "group_id",
       "sampler_logprob", "trainer_logprob", "turn_index"]]
f = f.explode(["sampler_logprob", "trainer_logprob", "turn_index"]).dropna()
d = (f.trainer_logprob - f.sampler_logprob).astype(float)
f = f.assign(a=d.abs(), k3=np.expm1(d) - d, m=np.exp(d.abs()))
for by in ("step", "environment", "finish_reason", "microbatch_rows", "modality", "turn_index"):
    f.groupby(by)[["a", "k3", "m"]].mean()
u = resource.getrusage(resource.RUSAGE_SELF)
print(time.perf_counter() - t, u.ru_utime + u.ru_stime, u.ru_maxrss)
"""
    return _run(code)


def martingale_doctor(path: Path, work: Path, tokens: int) -> tuple[int, dict[str, float]]:
    """``martingale doctor`` on the same rows, written into its ledger first (not timed: it hashes
    every token into a chain, which is another job than reading a log)."""
    from martingale.record import Recorder, SamplerConfig

    recorder, done = Recorder(work / "ledger"), 0
    revision = recorder.publish_revision("a" * 64, "b" * 64, SamplerConfig(), step=0).digest
    for row in pq.ParquetFile(path).iter_batches(batch_size=50):
        for i, one in enumerate(row.to_pylist()):
            if done >= tokens:
                break
            n, ids = one["prompt_len"], one["token_ids"]
            with recorder.sequence(0, f"{done}-{i}", ids[:n]) as sequence:
                for token, q in zip(ids[n:], one["sampler_logprob"][n:], strict=True):
                    sequence.token(revision, token, q)
            recorder.score(sequence.record.digest, revision, one["trainer_logprob"][n:])
            done += len(ids) - n
    recorder.ledger.close()
    code = f"""
import contextlib, io, resource, sys, time
from martingale.cli import cli
t = time.perf_counter()
with contextlib.redirect_stdout(io.StringIO()):
    cli(["doctor", "--dir", {str(work / "ledger")!r}], standalone_mode=False)
u = resource.getrusage(resource.RUSAGE_SELF)
print(time.perf_counter() - t, u.ru_utime + u.ru_stime, u.ru_maxrss)
"""
    return done, _run(code)


def _run(code: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, cpu, peak = map(float, done.stdout.split()[-3:])
    return {"seconds": seconds, "cpu": cpu, "peak_gb": peak / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=float, default=1e8)
    parser.add_argument("--jsonl-tokens", type=float, default=1e8)
    parser.add_argument("--others-tokens", type=float, default=2e6)
    parser.add_argument("--ledger-tokens", type=int, default=100_000, help="for martingale")
    parser.add_argument("--folder", type=Path, help="keep the files here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        _measure(Path(folder), options)


def _measure(folder: Path, options: argparse.Namespace) -> None:
    small, parquet, jsonl = folder / "s.parquet", folder / "p.parquet", folder / "j.jsonl"
    n_small = write_parquet(small, int(options.others_tokens))
    ours(small, folder / "warm", "--exit-zero")  # numba's compilation, once a machine
    print(
        f"{'':28}{'M tokens':>9}{'seconds':>9}{'CPU s':>8}{'M tok/s':>9}{'a CPU s':>9}"
        f"{'peak GB':>9}{'ours is':>9}"
    )
    base = 0.0

    def show(name: str, tokens: int, took: dict[str, float]) -> float:
        rate = tokens / took["seconds"]
        times = f"{base / rate:8.1f}x" if base else ""
        print(
            f"{name:28}{tokens / 1e6:9.2f}{took['seconds']:9.1f}{took['cpu']:8.1f}"
            f"{rate / 1e6:9.3f}{tokens / took['cpu'] / 1e6:9.3f}{took['peak_gb']:9.2f}{times}",
            flush=True,
        )
        return rate

    n = write_parquet(parquet, int(options.tokens))
    base = show("ours, Parquet", n, ours(parquet, folder / "a", "--exit-zero"))
    bare = ours(parquet, folder / "b", "--exit-zero", "--no-checks")
    show("ours, Parquet, --no-checks", n, bare)
    parquet.unlink()
    n_json = write_jsonl(jsonl, int(options.jsonl_tokens))
    show("ours, JSONL", n_json, ours(jsonl, folder / "c", "--exit-zero"))
    show("pandas script", n_small, pandas_script(small))
    show("martingale doctor", *martingale_doctor(small, folder, options.ledger_tokens))


if __name__ == "__main__":
    main()
