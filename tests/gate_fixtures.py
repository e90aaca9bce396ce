"""A finished run without programs, for the tests of the gate: real digests, made-up numbers.

``expected_logprobs`` stands for an engine: log-probs that are a function of a checkpoint's tensors,
so that other weights give other numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import weights_zoo as zoo

from kernel_contracts.loading import contract_digest, load_contract
from mismatch_audit.gate.weights import identify
from mismatch_audit.identity import weights_digest
from mismatch_audit.reports.record import Record, save_record
from mismatch_audit.rundir import digest_of
from mismatch_audit.tokens import sequence_schema, token_schema, write_part

CONTRACT = """\
schema: kernel-contracts/v1
name: gate-test
pair:
  reference: {dtype: float32}
  engine: {dtype: bfloat16}
statistical:
  - {id: S1, metric: kl_engine_reference, limit: 2.0e-3}
observability:
  - {id: O1, min_prompts: 4}
"""
DIGEST = "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c"
TINY = {**zoo.LLAMA, "num_hidden_layers": 1}
SEQUENCES = [[7 + i, 8, 9 + i, 10, 11 + i, 12, 13] for i in range(6)]
PROMPT = 3


AUDITED = {
    "route": "head", "head_check": 5e-5, "requested": {"hf_token": "secret"},
    "sampling": {"temperature": 1.0}, "self_check": {"rows": 25},
}  # fmt: skip
"""What an audit adds to its engine's facts."""


def facts(**changes: Any) -> dict[str, Any]:
    """What an engine tells of itself."""
    return {
        "program": "vllm", "version": "0.32.0", "torch": "2.13.0", "dtype": "bfloat16",
        "runner": "v1", "kv_cache_dtype": ["auto"], "quantization": None,
        "logprobs_mode": "raw_logprobs", "attention": ["CPUAttentionBackendImpl"],
        "block_size": 128, "max_num_seqs": 256, "enforce_eager": True,
    } | changes  # fmt: skip


def checkpoint(folder: Path, seed: int = 0) -> Path:
    """A tiny bf16 Llama."""
    return zoo.write(folder, zoo.cast(zoo.llama_weights(seed, TINY)), TINY)


def expected_logprobs(tensors: str, sequences: list[list[int]]) -> list[list[float]]:
    """Log-probs of tokens 1.. of each sequence, by a checkpoint's digest."""
    found = []
    for ids in sequences:
        seed = int(tensors[:12], 16) + sum((i + 1) * t for i, t in enumerate(ids))
        found.append([float(-v) for v in np.random.default_rng(seed).exponential(1, len(ids) - 1)])
    return found


def contract(folder: Path, text: str = CONTRACT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "contract.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def run(
    folder: Path,
    weights: Path,
    contract_path: Path,
    verdict: str = "PASS",
    rows: dict[str, dict[str, Any]] | None = None,
    **engine: Any,
) -> Path:
    """The folder of an audit of ``weights`` with this verdict. engine: changes of its facts. rows:
    changes of measurements, by clause."""
    settings = {
        "model": str(weights),
        "prompts": "prompts.jsonl",
        "contract": str(contract_path),
        "engine": {"program": "vllm", "dtype": "bfloat16", "inject": engine.pop("inject", {})},
    }
    files, tensors = weights_digest(weights), identify(weights).tensors
    own = {"model": str(weights), "weights": files, "tokenizer": DIGEST}
    judged = load_contract(contract_path)
    measured = [
        {
            "clause": clause, "slice": "all", "metric": metric, "section": section, "value": 1e-4,
            "lower": 0.0, "upper": 2e-4, "limit": 2e-3, "n_prompts": 6, "n_tokens": 24,
            "verdict": verdict,
        } | (rows or {}).get(clause, {})
        for clause, metric, section in (
            ("S1", "kl_engine_reference", "statistical"), ("O1", "missing", "observability"),
        )
    ]  # fmt: skip
    record = Record.model_validate(
        {
            "verdict": verdict,
            "exit_code": {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3, "UNOBSERVED": 3, "UNSOUND": 4}[
                verdict
            ],
            "started": "2026-01-01T10:00:00+00:00",
            "finished": "2026-01-01T10:02:00+00:00",
            "contract": {
                "name": judged.name,
                "digest": contract_digest(judged),
                "document": judged.document(),
            },
            "identities": {
                "reference": own | {"program": "transformers", "dtype": "float32"},
                "engine": own | facts() | AUDITED | engine,
            },
            "counts": {"prompts": 6, "sequences": 6, "tokens": 24},
            "measurements": measured,
            "digests": {
                "settings": digest_of(settings),
                "prompts": DIGEST,
                "reference_weights": files,
                "engine_weights": files,
            },
        }
    )
    (folder / "tokens").mkdir(parents=True)
    (folder / "sequences").mkdir()
    save_record(record, folder / "report.json")
    (folder / "run.json").write_text(
        json.dumps({"digest": digest_of({"settings": settings}), "spec": {"settings": settings}})
    )
    _tables(folder, tensors)
    return folder


def _tables(folder: Path, tensors: str) -> None:
    tokens, sequences = [], []
    for i, (ids, row) in enumerate(
        zip(SEQUENCES, expected_logprobs(tensors, SEQUENCES), strict=True)
    ):
        names = {"prompt_id": f"p{i}", "sequence_id": f"p{i}/0"}
        response = row[PROMPT - 1 :]
        sequences.append(
            names | {"prompt_length": PROMPT, "response_length": len(response), "token_ids": ids}
        )
        for at, value in enumerate(response):
            for path in ("decode", "prefill"):
                tokens.append(
                    names
                    | {"position": at, "token_id": ids[PROMPT + at], "path": path,
                       "context_length": PROMPT + at, "engine_logprob": value,
                       "reference_logprob": value}
                )  # fmt: skip
    name = "part-00000.parquet"
    write_part(pd.DataFrame(sequences), sequence_schema(), folder / "sequences" / name)
    write_part(pd.DataFrame(tokens), token_schema(), folder / "tokens" / name)
