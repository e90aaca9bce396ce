"""Canaries of a push: sequences that the audit scored, with the log-probs its engine gave them.

The audited engine ran these very weights, so that a live engine which serves them must repeat its
numbers up to rounding. The prefill path is what ``LiveEngine.logprobs`` takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kernel_contracts.errors import InputError
from mismatch_audit.gate.checks import LogProbs

MAX_CANARIES = 16


@dataclass(frozen=True)
class Canary:
    """token_ids with the prompt; expected: log-probs (nats) of the response's tokens."""

    token_ids: tuple[int, ...]
    prompt_length: int
    expected: tuple[float, ...]


def canaries_of(run: Path, count: int = MAX_CANARIES) -> list[Canary]:
    """The run's sequences that were scored on both paths, spread over the run; those of the decode
    path where prefill was not asked. Raises InputError when there is none."""
    from mismatch_audit.tokens import read_parts

    parts = sorted((run / "tokens").glob("part-*.parquet"))
    if not parts:
        raise InputError("no token tables, so no canaries", where=str(run))
    tokens = read_parts(parts)
    sequences = read_parts([run / "sequences" / part.name for part in parts])
    scored = tokens[tokens["engine_logprob"].notna()]
    prefill = scored[scored["path"] == "prefill"]
    rows = prefill if len(prefill) else scored[scored["path"] == "decode"]
    found = []
    for sequence_id, group in rows.sort_values("position").groupby("sequence_id"):
        one = sequences[sequences["sequence_id"] == sequence_id]
        if len(one) != 1 or len(group) != int(one["response_length"].iloc[0]):
            continue
        values = group["engine_logprob"].to_numpy(dtype=np.float64)
        ids = tuple(int(t) for t in one["token_ids"].iloc[0])
        start = int(one["prompt_length"].iloc[0])
        if start > 0 and len(values) and np.isfinite(values).all():
            found.append(Canary(ids, start, tuple(float(v) for v in values)))
    if not found:
        raise InputError("no sequence was scored whole, so no canaries", where=str(run))
    step = max(1, len(found) // count)
    return found[::step][:count]


def responses(canaries: Sequence[Canary], scored: LogProbs) -> list[list[float]]:
    """Of log-probs of tokens 1.. the response's own. A row of another length stays as it is, and
    the check then says so."""
    return [
        list(row[c.prompt_length - 1 :]) if len(row) == len(c.token_ids) - 1 else list(row)
        for c, row in zip(canaries, scored, strict=False)
    ]
