"""How fast dumps are read, and why JSON lines are decoded with msgspec.

    python benchmarks/rollout_formats.py [--sequences 2000] [--tokens 512] [--write]

One dump a format with the same number of random tokens; each is read to the end; processor time,
the best of three runs. --write puts the tables into docs/rollout-formats.md, between its markers.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mismatch_audit.rollouts.formats import drain, open_sources
from mismatch_audit.rollouts.formats.prime_rl import _Line
from mismatch_audit.rollouts.pickle_scan import scan

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "samples" / "rollouts"))

import make  # noqa: E402

PAGE = ROOT / "docs" / "rollout-formats.md"
BEGIN, END = "<!-- speed:begin -->\n", "<!-- speed:end -->"
READ = ("prime-rl", "nemo-rl", "slime", "skyrl", "openrlhf", "areal", "verl", "roll", "pipeline-rl")


def sequences(n: int, tokens: int) -> list[Any]:
    random = np.random.default_rng(0)
    made = []
    for i in range(n):
        half = tokens // 2
        q = (-random.exponential(0.5, half)).tolist()
        p = (np.array(q) + random.normal(0, 0.02, half)).tolist()
        ids = random.integers(5, 40_000, tokens).tolist()
        made.append(
            make.Sequence(
                1, i // 8, i % 8, ids[:half], ids[half:], [True] * half, q, p, 0.5, 1.0, 0
            )
        )
    return made


def best(work: Callable[[], Any], times: int = 3) -> float:
    took = []
    for _ in range(times):
        start = time.process_time()
        work()
        took.append(time.process_time() - start)
    return min(took)


def read_all(path: Path) -> None:
    sources, problems = open_sources([path])
    for source in sources:
        for _ in drain(source, problems.append):
            pass
    assert not problems


def formats(folder: Path, made: list[Any]) -> str:
    total = sum(len(s.ids) for s in made)
    lines = ["| dump | MiB | seconds | million tokens/s |", "|---|---:|---:|---:|"]
    for name in READ:
        make.WRITERS[name](folder / name, made)
        size = sum(f.stat().st_size for f in (folder / name).rglob("*") if f.is_file())
        took = best(lambda path=folder / name: read_all(path))
        lines.append(f"| {name} | {size / 2**20:.0f} | {took:.2f} | {total / took / 1e6:.1f} |")
    return "\n".join(lines)


def decoders(path: Path) -> str:
    import pyarrow.json as pajson

    data = path.read_bytes()
    rows = data.splitlines()
    typed, untyped = msgspec.json.Decoder(_Line), msgspec.json.Decoder()
    options = pajson.ReadOptions(block_size=8 << 20)
    work: dict[str, Callable[[], Any]] = {
        "json": lambda: [json.loads(row) for row in rows],
        "msgspec, untyped": lambda: [untyped.decode(row) for row in rows],
        "msgspec, typed (used)": lambda: [typed.decode(row) for row in rows],
        "pyarrow.json, all columns": lambda: pajson.read_json(io.BytesIO(data), options),
    }
    lines = [f"| decoding {len(data) / 2**20:.0f} MiB of token export | seconds |", "|---|---:|"]
    lines += [f"| {name} | {best(one):.2f} |" for name, one in work.items()]
    return "\n".join(lines)


def pickles() -> str:
    data = pickle.dumps([float(i) for i in range(5_000_000)], 2)
    lines = ["| a pickled list of 5 million floats | seconds |", "|---|---:|"]
    lines.append(f"| the pass over its opcodes | {best(lambda: scan(data)):.2f} |")
    lines.append(f"| Python's unpickler | {best(lambda: pickle.loads(data)):.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = sequences(chosen.sequences, chosen.tokens)
        tables = [formats(folder, made)]
        tables.append(decoders(folder / "prime-rl/token_exports/step_1/rank_0.jsonl"))
        tables.append(pickles())
    shape = f"{chosen.sequences:,} sequences of {chosen.tokens} tokens"
    head = f"{shape}, processor seconds of one process:"
    text = "\n\n".join([head, *tables]) + "\n"
    print(text)
    if chosen.write:
        page = PAGE.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        PAGE.write_text(before + BEGIN + text + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
