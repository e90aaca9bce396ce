"""Which mirrored requests can be judged, and why the others cannot. None is dropped silently."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from mismatch_audit.monitor.traffic import TrafficRow

UNIT_KEY = "prompt_id"
"""Metadata that says which prompt a request is a sample of. Several responses to one prompt are not
independent and count as one; without it every request is a prompt of its own."""

ALL_ZERO = 4
"""So many log-probs that are all exactly 0.0 are a writer's stand-in for unknown ones."""

T = TypeVar("T")


@dataclass(frozen=True)
class Fit:
    """What the reference can take. weights_version: the one that the reference stands for; None
    takes any, and unknown ones too."""

    vocab_size: int
    max_positions: int
    weights_version: int | str | None = None


def why_unusable(row: TrafficRow, fit: Fit) -> str | None:
    """The first reason why a request shows nothing about q against p, or None.

    Estimates from sampled tokens hold only for tokens drawn from q itself: at temperature 1, with
    no truncation. Under another temperature or a truncated support the same formulas say nothing
    of the promise, so such rows are unobserved and not "nearly" right.
    """
    if not row.response_token_ids:
        return "no response tokens"
    if row.engine_logprobs is None:
        return "engine log-probs unknown"
    if any(v is None for v in row.engine_logprobs):
        return "engine log-probs unknown for some tokens"
    if len(row.engine_logprobs) >= ALL_ZERO and not any(row.engine_logprobs):
        return "engine log-probs all 0.0: unknown ones are null"
    if row.temperature != 1.0:
        return f"drawn at temperature {row.temperature:g}: no samples of q"
    if not row.whole_distribution:
        return "drawn with truncation (top_p, top_k): no samples of q"
    if fit.weights_version is not None and row.weights_version != fit.weights_version:
        return "weights version unknown" if row.weights_version is None else "other weights"
    if max(max(row.prompt_token_ids), max(row.response_token_ids)) >= fit.vocab_size:
        return "a token outside the reference's vocabulary"
    if len(row.prompt_token_ids) + len(row.response_token_ids) > fit.max_positions:
        return "longer than the reference's context"
    return None


def unit_of(row: TrafficRow) -> str:
    """The prompt that a request counts for."""
    given = row.metadata.get(UNIT_KEY)
    return row.request_id if given is None else str(given)


def groups(rows: Iterable[T], unit: Callable[[T], str]) -> Iterator[list[T]]:
    """Consecutive rows of one unit. The last group is given when the rows end."""
    open_group: list[T] = []
    for row in rows:
        if open_group and unit(row) != unit(open_group[0]):
            yield open_group
            open_group = []
        open_group.append(row)
    if open_group:
        yield open_group
