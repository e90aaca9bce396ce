"""How often a sample contract finds each fault, by the fault's size and the number of prompts.

    python benchmarks/fault_power.py [--audits 20] [--write]

Each fault is put into the real sample model once, on 112 prompts; an audit of n prompts is n of
those drawn with replacement, judged by the whole contract. The share of audits with a FAIL is the
power; on the first row (no fault) it is the rate of false alarms. --write replaces the table in
docs/error-rates.md. About 10 minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np

from kernel_contracts.contract import Contract
from kernel_contracts.loading import load_contract
from kernel_contracts.selftest import testable
from kernel_contracts.verdict import Evidence, judge
from mismatch_audit.selftest import faults
from mismatch_audit.selftest.bench import Bench
from mismatch_audit.selftest.faults import MENU, Fault
from mismatch_audit.selftest.prepare import prepare_bench

ROOT = Path(__file__).resolve().parent.parent
DOC = ROOT / "docs" / "error-rates.md"
BEGIN, END = "<!-- fault-power:begin -->", "<!-- fault-power:end -->"
CONTRACTS = ("bf16-serving", "bf16-strict")
PROMPTS = (60, 120)
BASE = 112


def sized() -> Iterator[tuple[str, str, Fault]]:
    """(fault, size in words, the fault): those of the menu, with sizes where they have one."""
    menu = {fault.name: fault for fault in MENU}
    for value in (0.99, 0.97, 0.95, 0.9):
        change = replace(menu["temperature"], logits=lambda z, t=value: z / t)
        yield "temperature", f"{value:g}", change
    for value in (0.99, 0.95, 0.9, 0.8):
        yield "top_p", f"{value:g}", replace(menu["top_p"], support=faults.top_p_support(value))
    for value in (0.01, 0.02, 0.05):
        change = replace(menu["stale_layer"], model=faults.stale_layer(value))
        yield "stale_layer", f"noise {value:g} of rms", change
    for value in (1.02, 1.1, 1.25):
        change = replace(menu["wrong_rope"], model=faults.rope_scaling(value))
        yield "wrong_rope", f"scaling {value:g}", change
    for name in ("bf16_log_softmax", "fp8_kv", "fp8_weights", "shifted_logprobs", "double_bos"):
        yield name, "", menu[name]


class Pool:
    """A fault's rows, from which audits are drawn: n prompts with replacement, a prompt that is
    drawn twice counts as two."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.rows = list(evidence.tokens.groupby("prompt_id", sort=False).indices.items())
        self.metadata = evidence.prompts.set_index("prompt_id")

    def drawn(self, rng: np.random.Generator, n: int) -> Evidence:
        chosen = [self.rows[i] for i in rng.integers(len(self.rows), size=n)]
        ids = np.repeat([str(k) for k in range(n)], [len(rows) for _, rows in chosen])
        tokens = self.evidence.tokens.iloc[np.concatenate([rows for _, rows in chosen])]
        prompts = self.metadata.loc[[name for name, _ in chosen]].reset_index(drop=True)
        return replace(
            self.evidence,
            tokens=tokens.assign(prompt_id=ids, sequence_id=ids).reset_index(drop=True),
            prompts=prompts.assign(prompt_id=[str(k) for k in range(n)]),
        )


def power(contract: Contract, evidence: Evidence, n: int, audits: int) -> float:
    """Share of audits of n prompts in which some clause fails."""
    rng, pool = np.random.default_rng(n), Pool(evidence)
    part = testable(contract, n).contract
    hits = 0
    for _ in range(audits):
        hits += any(m.verdict == "FAIL" for m in judge(part, pool.drawn(rng, n)))
    return hits / audits


def table(bench: Bench, audits: int) -> str:
    contracts = [load_contract(ROOT / "samples" / "contracts" / f"{c}.yaml") for c in CONTRACTS]
    heads = [f"{c.name}, {n}" for c in contracts for n in PROMPTS]
    n_rows = len(bench.control().tokens)
    lines = [
        f"{audits} audits a cell, prompts drawn from {BASE} ({n_rows} response tokens).",
        "",
        f"| fault | size | KL(q, p) | mean abs dlp | {' | '.join(heads)} |",
        f"| --- | --- | --- | --- |{' --- |' * len(heads)}",
    ]
    cases = [("none", "", bench.control())]
    cases += [(name, size, bench.inject(fault).evidence) for name, size, fault in sized()]
    for name, size, evidence in cases:
        kl = evidence.tokens["kl_engine_reference"].mean()
        gap = evidence.tokens["reference_logprob"] - evidence.tokens["engine_logprob"]
        shares = [power(c, evidence, n, audits) for c in contracts for n in PROMPTS]
        cells = " | ".join(f"{s:.2f}" for s in shares)
        lines.append(f"| {name} | {size} | {kl:.1e} | {gap.abs().mean():.1e} | {cells} |")
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def write(text: str) -> None:
    page = DOC.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    DOC.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--audits", type=int, default=20)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    start = time.perf_counter()
    bench, _ = prepare_bench(
        "sample", ROOT / "samples" / "prompts.jsonl", limit=BASE, max_tokens=16, most=100, seed=0
    )
    text = table(bench, options.audits)
    print(f"{time.perf_counter() - start:.0f} s")
    if options.write:
        write(text)


if __name__ == "__main__":
    main()
