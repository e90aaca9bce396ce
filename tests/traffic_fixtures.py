"""Traffic of a tiny engine: responses that it really sampled, with its own log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from mismatch_audit.monitor.frames import ScoredRow
from mismatch_audit.monitor.traffic import TrafficRow, TrafficWriter
from mismatch_audit.monitor.usable import UNIT_KEY, Fit, unit_of

PROMPT, RESPONSE, VOCAB = 4, 12, 64


def served(
    model: Any, count: int, *, first: int = 0, seed: int = 0, **changes: Any
) -> list[TrafficRow]:
    """Rows of requests ``first``, ``first + 1``, ...; domains alternate."""
    generator = torch.Generator().manual_seed(1000 * seed + first)
    ids = torch.randint(3, VOCAB, (count, PROMPT), generator=generator)
    logprobs = []
    with torch.no_grad():
        for _ in range(RESPONSE):
            rows = torch.log_softmax(model(input_ids=ids).logits[:, -1].double(), -1)
            token = torch.multinomial(rows.exp(), 1, generator=generator)
            logprobs.append(rows.gather(1, token))
            ids = torch.cat([ids, token], 1)
    table = torch.cat(logprobs, 1).tolist()
    base: dict[str, Any] = {
        "stage": "shadow", "engine_build": "build-1", "weights_version": 3, "temperature": 1.0,
        "top_p": 1.0, "top_k": 0, "finish_reason": "length", "n_cached_tokens": 0,
    }  # fmt: skip
    return [
        TrafficRow(
            request_id=f"r{first + i}",
            time=f"2026-01-01T00:{(first + i) // 60 % 60:02d}:{(first + i) % 60:02d}Z",
            prompt_token_ids=tuple(ids[i, :PROMPT].tolist()),
            response_token_ids=tuple(ids[i, PROMPT:].tolist()),
            engine_logprobs=tuple(table[i]),
            metadata={"domain": ("code", "math")[(first + i) % 2]},
            **{**base, **changes},
        )
        for i in range(count)
    ]


def fake_rows(
    count: int, *, first: int = 0, noise: float = 0.03, **changes: Any
) -> list[TrafficRow]:
    """Rows for a reference that is faked by `FakeScorer`; the noise is in the metadata's seed."""
    base: dict[str, Any] = {
        "stage": "full", "engine_build": "build-1", "weights_version": 3, "temperature": 1.0,
        "top_p": 1.0, "top_k": 0, "finish_reason": "stop", "n_cached_tokens": None,
    }  # fmt: skip
    rows = []
    for i in range(first, first + count):
        random = np.random.default_rng([3, i])
        logprobs = -random.exponential(1.0, RESPONSE)
        rows.append(
            TrafficRow(
                request_id=f"r{i}",
                time=f"2026-01-01T{i // 3600 % 24:02d}:{i // 60 % 60:02d}:{i % 60:02d}Z",
                prompt_token_ids=(1, 2),
                response_token_ids=tuple(random.integers(0, VOCAB, RESPONSE).tolist()),
                engine_logprobs=tuple(logprobs.tolist()),
                metadata={"domain": ("code", "math")[i % 2], "noise": noise},
                **{**base, **changes},
            )
        )
    return rows


def write_log(path: Path, rows: list[TrafficRow], **options: Any) -> Path:
    with TrafficWriter(path, **options) as writer:
        for row in rows:
            writer.write(row)
    return path


class FakeScorer:
    """log p = log q + noise of the size in the row's metadata, minus half its variance, so that
    E_q[p/q] is 1: k3 has mean noise^2 / 2. Cheap enough for thousands of requests."""

    facts: ClassVar[dict[str, Any]] = {"weights": "fake", "dtype": "float32"}

    def fit(self, weights_version: int | str | None) -> Fit:
        return Fit(VOCAB, 1000, weights_version)

    def score(self, rows: list[TrafficRow]) -> tuple[list[ScoredRow], dict[str, str]]:
        return [self._one(r) for r in rows], {}

    def _one(self, row: TrafficRow) -> ScoredRow:
        q = np.array(row.engine_logprobs, dtype=np.float64)
        size = float(row.metadata["noise"])
        random = np.random.default_rng([11, int(row.request_id[1:])])
        p = q + size * random.standard_normal(len(q)) - size**2 / 2
        return ScoredRow(
            unit_of(row), row.request_id, row.response_token_ids, len(row.prompt_token_ids), q,
            {"reference_logprob": p},
            {k: v for k, v in row.metadata.items() if k not in (UNIT_KEY, "noise")},
        )  # fmt: skip

    def close(self) -> None:
        """Nothing is held."""
