"""Faults put into the sync of real, running engines: run every one, write the table into the docs.

    python tests/weights_live_matrix.py --write

The same results feed tests/test_weights_live.py, so the table cannot drift from the tests.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from live_models import CONFIG, INT8, Tensors, master, quantised, stepped, write

from mismatch_audit.weights.live.audit import audit_sync
from mismatch_audit.weights.live.faults import MENU, LiveFault, audit_faulty
from mismatch_audit.weights.live.process import ProcessEngine
from mismatch_audit.weights.live.report import SyncReport

DOCS = Path(__file__).resolve().parent.parent / "docs" / "weights.md"
KINDS = {"fp32": "fp32", "int8": "W8A8 int8 (compressed-tensors)"}
COLUMNS = {
    "version": "version",
    "prefix_cache": "cache",
    "read_back": "read-back",
    "unwritten_scales": "marks",
    "set_audit": "set",
    "live_dtype": "live dtype",
    "incoming_dtype": "incoming",
    "dense_self_probe": "self",
    "anchored_probe": "anchored",
    "finite_logprobs": "finite",
    "zero_change_push": "zero",
    "canary_push": "canary",
}
# A block of 32 lets a prompt of 72 tokens hit the prefix cache.
ARGS = {"block_size": 32, "max_model_len": 256, "max_num_batched_tokens": 512}
UNTIED = {**CONFIG, "tie_word_embeddings": False}


def with_head(weights: Tensors, seed: int) -> Tensors:
    """The same with a head of its own."""
    generator = torch.Generator().manual_seed(seed)
    embedding = weights["model.embed_tokens.weight"]
    head = torch.randn(embedding.shape, generator=generator) / embedding.shape[1] ** 0.5
    return {**weights, "lm_head.weight": head}


@dataclass
class LiveMatrix:
    """One engine per kind, started once; each fault's audit is run once."""

    folder: Path
    engines: dict[str, ProcessEngine] = field(default_factory=dict)
    results: dict[tuple[str, str], SyncReport] = field(default_factory=dict)
    unmended: SyncReport | None = None
    """The clean push into int8 as vLLM is, before ``mend``."""

    def __post_init__(self) -> None:
        old = with_head(master(), 3)
        self.old = write(self.folder / "old", old, UNTIED)
        self.new = write(self.folder / "new", stepped(old, seed=1), UNTIED)
        config = {**UNTIED, "quantization_config": INT8}
        self.start = {
            "fp32": self.old,
            "int8": write(self.folder / "old-int8", quantised(old), config),
        }

    def engine(self, kind: str) -> ProcessEngine:
        if kind not in self.engines:
            engine = ProcessEngine(
                self.start[kind], dtype="float32", args=ARGS, log_path=self.folder / f"{kind}.log"
            )
            self.engines[kind] = engine
            if kind == "int8":
                self.unmended = audit_sync(engine, self.new)
                engine.mend()
        return self.engines[kind]

    def result(self, kind: str, flag: str) -> SyncReport:
        """The audit of one fault ("clean": none), from the old weights to the new."""
        if (kind, flag) not in self.results:
            engine = self.engine(kind)
            engine.push(self.start[kind])
            fault = next((f for f in MENU if f.flag == flag), None)
            if fault is None:
                self.results[kind, flag] = audit_sync(engine, self.new)
            else:
                self.results[kind, flag] = audit_faulty(engine, fault, self.new)
        return self.results[kind, flag]

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


def faults_of(kind: str) -> list[LiveFault]:
    return [f for f in MENU if f.quantised is None or f.quantised == (kind == "int8")]


# The kernel then multiplies with scales that nobody wrote: which checks see it, beside the set and
# the dtypes, depends on what lay in that memory.
UNSTEADY = {"unquantised"}


def table(matrix: LiveMatrix, kind: str) -> str:
    """A row per fault; x found, . passed, blank: does not apply or saw nothing."""
    lines = [
        "| fault | " + " | ".join(COLUMNS.values()) + " | named |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for title, flag in [
        ("clean push", "clean"),
        *((f.title, f.flag) for f in faults_of(kind) if f.flag not in UNSTEADY),
    ]:
        report = matrix.result(kind, flag)
        cells = []
        for check in COLUMNS:
            result = report.results.get(check)
            cells.append({True: ".", False: "**x**", None: " "}[result.ok if result else None])
        # Fitted factors differ in their last digits from machine to machine.
        cause = re.sub(r"\d+\.\d{3,}", lambda hit: f"{float(hit[0]):.3g}", report.cause)
        cause = cause if len(cause) <= 75 else cause[:72] + "..."
        lines.append(f"| {title} | " + " | ".join(cells) + f" | {cause} |")
    return "\n".join(lines)


def text(matrix: LiveMatrix) -> str:
    parts: list[str] = []
    for kind, title in KINDS.items():
        parts += [f"#### vLLM, {title}", "", table(matrix, kind), ""]
    return "\n".join(parts).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the tables into the docs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        matrix = LiveMatrix(Path(folder))
        try:
            tables = text(matrix)
        finally:
            matrix.close()
    if arguments.write:
        document = DOCS.read_text("utf-8")
        before, _, rest = document.partition("<!-- live-matrix -->")
        _, _, after = rest.partition("<!-- /live-matrix -->")
        DOCS.write_text(
            f"{before}<!-- live-matrix -->\n{tables}\n<!-- /live-matrix -->{after}", "utf-8"
        )
    else:
        print(tables)


if __name__ == "__main__":
    main()
