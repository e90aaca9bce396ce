"""Throughput and memory of ``audit weights`` against reading and hashing the same files.

    python benchmarks/weights.py [--gib 1.5] [--write]

Writes a synthetic fp32 master and bf16 copies of it (equal; every tensor stale by a little), then
measures, with the files in the page cache and as many threads as cores, in turns so that other
work on the machine hits all alike:
* the baseline: read both files in 1 MiB pieces and hash them, with each hash that is installed;
* the comparison, equal and with every tensor different; the manifest.
Speed counts the bytes of both files. Peak memory is of a fresh process per measurement.
``--write`` puts the table into docs/weights.md.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PIECE = 1 << 20
RUNS = 3


def build(folder: Path, gib: float) -> None:
    """Master, equal copy and slightly stale copy, in two shards each."""
    import torch
    from safetensors.torch import save_file

    hidden, inner = 2048, 8192
    layers = max(2, int(gib * 2**30 / 4 / (4 * hidden * hidden + 3 * hidden * inner)))
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "vocab_size": 1024,
        "tie_word_embeddings": True,
    }
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.02

    for part in range(2):
        weights = {}
        if part == 0:
            weights["model.embed_tokens.weight"] = normal(1024, hidden)
        for layer in range(part, layers, 2):
            p = f"model.layers.{layer}."
            for leaf in "qkvo":
                weights[f"{p}self_attn.{leaf}_proj.weight"] = normal(hidden, hidden)
            weights[f"{p}mlp.gate_proj.weight"] = normal(inner, hidden)
            weights[f"{p}mlp.up_proj.weight"] = normal(inner, hidden)
            weights[f"{p}mlp.down_proj.weight"] = normal(hidden, inner)
        for name, scale in (("master", None), ("equal", 1.0), ("stale", 1.0003)):
            target = folder / name
            target.mkdir(exist_ok=True)
            (target / "config.json").write_text(json.dumps(config))
            own = (
                weights
                if scale is None
                else {n: (w * scale).to(torch.bfloat16) for n, w in weights.items()}
            )
            save_file(own, target / f"model-{part + 1:05d}-of-00002.safetensors")


def files_of(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.glob("*.safetensors"))


def hashes() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {"sha256": hashlib.sha256, "blake2b": hashlib.blake2b}
    if importlib.util.find_spec("blake3"):
        import blake3

        found["blake3"] = blake3.blake3
    return found


def read_and_hash(paths: list[Path], make: Callable[[], Any]) -> None:
    """Both files on every core: each worker hashes its own slices of every file."""
    threads = len(os.sched_getaffinity(0))

    def work(index: int) -> None:
        for path in paths:
            size = path.stat().st_size
            begin, end = size * index // threads, size * (index + 1) // threads
            digest, piece = make(), bytearray(PIECE)
            with path.open("rb", buffering=0) as handle:
                handle.seek(begin)
                while begin < end:
                    count = handle.readinto(memoryview(piece)[: min(PIECE, end - begin)])
                    digest.update(memoryview(piece)[:count])
                    begin += count

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))


def measure(what: str, folder: Path) -> dict[str, Any]:
    """One measurement in this process: best of RUNS, and the peak resident memory."""
    master, served = folder / "master", folder / ("stale" if what == "stale" else "equal")
    paths = files_of(master, served)
    work: Callable[[], Any]
    if what in hashes():
        work = lambda: read_and_hash(paths, hashes()[what])  # noqa: E731
    else:
        from mismatch_audit.weights.compare import compare_sides
        from mismatch_audit.weights.digest import build_manifest
        from mismatch_audit.weights.sides import open_side

        if what == "manifest":
            paths = files_of(master)
            work = lambda: build_manifest(open_side(master), "bf16")  # noqa: E731
        else:

            def work() -> None:
                report = compare_sides(open_side(master), open_side(served))
                wrong = report.exit_code != (1 if what == "stale" else 0)
                if wrong:
                    raise SystemExit(f"{what}: exit code {report.exit_code}")

    size = sum(path.stat().st_size for path in paths)
    times, cpu = [], []
    for _ in range(RUNS):
        started, used = time.perf_counter(), time.process_time()
        work()
        times.append(time.perf_counter() - started)
        cpu.append(time.process_time() - used)
    return {
        "what": what,
        "gb_per_s": size / min(times) / 1e9,
        "gb_per_core_s": size / min(cpu) / 1e9,
        "peak_mb": peak_memory(),
        "bytes": size,
    }


def peak_memory() -> float:
    """Resident megabytes at the peak, mapped file pages included. (ru_maxrss would count the
    parent's, which a child inherits.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return float("nan")


def child(what: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--measure", what, "--folder", str(folder)],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def table(results: dict[str, dict[str, Any]], rounds: int) -> str:
    base = [name for name in ("sha256", "blake2b", "blake3") if name in results]
    fastest = max(base, key=lambda name: results[name]["gb_per_s"])
    lines = [
        f"Measured on {len(os.sched_getaffinity(0))} cores ({platform.machine()}), files of "
        f"{results['equal']['bytes'] / 2**30:.1f} GiB together in the page cache; the best of "
        f"{rounds} rounds of {RUNS} runs.",
        "",
        f"| work | GB/s | GB per core-second | of reading + {fastest} | peak memory, MB |",
        "|---|---|---|---|---|",
    ]
    names = {
        "equal": "compare, every tensor equal",
        "stale": "compare, every tensor different",
        "manifest": "manifest (cast to bf16, SHA-256; bytes of the master)",
    }
    for name, result in results.items():
        label = names.get(name, f"read both files, {name}")
        ratio = result["gb_per_s"] / results[fastest]["gb_per_s"]
        lines.append(
            f"| {label} | {result['gb_per_s']:.2f} | {result['gb_per_core_s']:.2f} | {ratio:.0%} "
            f"| {result['peak_mb']:.0f} |"
        )
    return "\n".join(lines)


def write_between(path: Path, marker: str, text: str) -> None:
    """Replaces what stands between <!-- marker --> and <!-- /marker -->."""
    before, _, rest = path.read_text("utf-8").partition(f"<!-- {marker} -->")
    _, _, after = rest.partition(f"<!-- /{marker} -->")
    path.write_text(f"{before}<!-- {marker} -->\n{text}\n<!-- /{marker} -->{after}", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.5, help="size of the fp32 master")
    parser.add_argument("--write", action="store_true", help="put the table into docs/weights.md")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="build the files here and keep them")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.folder)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = options.keep or Path(name)
        if not (folder / "stale").is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            build(folder, options.gib)
        order = [*hashes(), "equal", "stale", "manifest"]
        results: dict[str, dict[str, Any]] = {}
        for _ in range(options.rounds):
            for what in order:
                one = child(what, folder)
                best = results.setdefault(what, one)
                for key in ("gb_per_s", "gb_per_core_s", "peak_mb"):
                    best[key] = max(best[key], one[key])
    text = table(results, options.rounds)
    print(text)
    base = max(results[name]["gb_per_s"] for name in hashes())
    slow = [w for w in ("equal", "stale") if results[w]["gb_per_s"] < 0.6 * base]
    large = [w for w in ("equal", "stale") if results[w]["peak_mb"] > 1024]
    if options.write:
        write_between(ROOT / "docs" / "weights.md", "throughput", text)
    if slow or large:
        raise SystemExit(f"below 60%: {slow}; above 1 GB: {large}")


if __name__ == "__main__":
    main()
