"""What a weight audit of a live engine costs, on the sample model.

    python benchmarks/live_weights.py [--dtype float32] [--write]

Starts vLLM with the sample model, pushes a copy in which every weight moved by 1% of its tensor's
rms, under audit, and times the parts: reading everything back through the kernels, comparing it bit
by bit, pushing, the whole audit. ``--write`` puts the table into docs/weights.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def moved_copy(source: Path, folder: Path) -> Path:
    """The model one step later, in fp32."""
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(0)
    out = {}
    for name, value in load_file(source / "model.safetensors").items():
        master = value.float()
        noise = torch.randn(master.shape, generator=generator)
        out[name] = master + 0.01 * master.square().mean().sqrt() * noise
    folder.mkdir()
    save_file(out, folder / "model.safetensors")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


def measure(dtype: str) -> list[str]:
    from mismatch_audit.sample_model import sample_model_path
    from mismatch_audit.weights.live.audit import audit_sync
    from mismatch_audit.weights.live.compare import compare_live
    from mismatch_audit.weights.live.process import ProcessEngine
    from mismatch_audit.weights.sides import open_side

    source = sample_model_path()
    with tempfile.TemporaryDirectory() as scratch:
        new = moved_copy(source, Path(scratch) / "new")
        started = time.perf_counter()
        log = Path(scratch) / "engine.log"
        engine = ProcessEngine(source, dtype=dtype, args={"max_model_len": 512}, log_path=log)
        with engine:
            load = time.perf_counter() - started
            started = time.perf_counter()
            engine.read_back(Path(scratch) / "read")
            read = time.perf_counter() - started
            started = time.perf_counter()
            clean = compare_live(open_side(source), engine, Path(scratch) / "again")
            compared = time.perf_counter() - started
            started = time.perf_counter()
            report = audit_sync(engine, new)
            audit = time.perf_counter() - started
    host = f"{len(os.sched_getaffinity(0))} cores ({platform.machine()})"
    blind = report.results["engine_checksums"]
    return [
        f"Measured on {host}, the sample model in {dtype}, {clean.compared} tensors; one run each.",
        "",
        "| work | seconds |",
        "|---|---|",
        f"| start the engine | {load:.1f} |",
        f"| read everything back through the kernels | {read:.1f} |",
        f"| the same and compare it, bit by bit: exit {clean.exit_code} | {compared:.1f} |",
        f"| the loader's part of a push | {report.receipt.seconds:.2f} |",
        f"| a push under audit (4 loads, 2 read-backs): exit {report.exit_code} | {audit:.1f} |",
        "",
        f"That push ended with: {report.cause or 'no finding'}. Of the engine's checksums: "
        f"{blind.detail}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    text = "\n".join(measure(arguments.dtype))
    print(text)
    if arguments.write:
        page = ROOT / "docs" / "weights.md"
        document = page.read_text("utf-8")
        before, _, rest = document.partition("<!-- live-cost -->")
        _, _, after = rest.partition("<!-- /live-cost -->")
        page.write_text(f"{before}<!-- live-cost -->\n{text}\n<!-- /live-cost -->{after}", "utf-8")


if __name__ == "__main__":
    main()
