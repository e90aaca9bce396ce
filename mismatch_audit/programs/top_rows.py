"""An engine that shows its top k log-probs a row and nothing else: its public interface."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mismatch_audit.programs.base import Sampling, Sequence_
from mismatch_audit.programs.vllm_engine import VllmEngine, request_seed

__all__ = ["Row", "TopRollout", "TopRowsEngine", "VllmTopRows", "sampling_options"]

Row = list[tuple[int, float]]
"""(token id, log-prob in nats) of the k likeliest tokens and of the token itself."""


@dataclass(frozen=True)
class TopRollout:
    """A response with one row a token, on the decode path or (scored again) on the prefill path."""

    sequence: Sequence_
    rows: list[Row]
    n_cached_tokens: int = 0
    finish_reason: str = ""


class TopRowsEngine(Protocol):
    """What a run needs of such an engine. k: log-probs a row."""

    k: int

    def facts(self) -> dict[str, Any]: ...

    def generate(
        self, prompts: Sequence[tuple[str, Sequence[int]]], sampling: Sampling
    ) -> Iterator[TopRollout]: ...

    def score(self, sequences: Sequence[Sequence_]) -> Iterator[TopRollout]: ...

    def new_batch(self) -> None: ...

    def close(self) -> None: ...


def sampling_options(sampling: Sampling) -> dict[str, Any]:
    """As the engine's API names them; a top_k of 0 means none."""
    options: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    return options | ({"top_k": sampling.top_k} if sampling.top_k else {})


class VllmTopRows:
    """Our own vLLM process through its public log-probs."""

    def __init__(self, engine: VllmEngine, k: int) -> None:
        self.engine, self.k = engine, k

    def facts(self) -> dict[str, Any]:
        return self.engine.facts()

    def generate(
        self, prompts: Sequence[tuple[str, Sequence[int]]], sampling: Sampling
    ) -> Iterator[TopRollout]:
        requests = [
            {"prompt": list(ids), "seed": request_seed(sampling.seed, key)} for key, ids in prompts
        ]
        results = self.engine.call(
            "generate_top", requests=requests, sampling=sampling_options(sampling), top=self.k
        )["results"]
        for (key, ids), result in zip(prompts, results, strict=True):
            yield TopRollout(
                Sequence_(key, (*ids, *result["token_ids"]), len(ids)),
                _rows(result["rows"]),
                result["n_cached"],
                result["finish_reason"],
            )

    def score(self, sequences: Sequence[Sequence_]) -> Iterator[TopRollout]:
        requests = [{"token_ids": list(s.token_ids), "start": s.prompt_length} for s in sequences]
        results = self.engine.call("score_rows", requests=requests, top=self.k)["results"]
        for sequence, result in zip(sequences, results, strict=True):
            yield TopRollout(sequence, _rows(result["rows"]), result["n_cached"])

    def new_batch(self) -> None:
        self.engine.new_batch()

    def close(self) -> None:
        self.engine.close()


def _rows(rows: list[list[list[float]]]) -> list[Row]:
    return [[(int(token), float(value)) for token, value in row] for row in rows]
