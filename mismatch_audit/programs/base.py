"""What every program gives: sequences in, scored rows and rollouts out.

Rows travel as final hidden states (2 to 4 bytes x width a token) together with the program's own
head, never as ``[T, V]`` logits: 1.2 KB instead of 98 KB a token for a vocabulary of 49,152.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from mismatch_audit.compare.heads import Head
    from mismatch_audit.identity import Identity


@dataclass(frozen=True)
class Sequence_:
    """A prompt with its response: ``token_ids[:prompt_length]`` is the prompt."""

    sequence_id: str
    token_ids: tuple[int, ...]
    prompt_length: int

    @property
    def response(self) -> tuple[int, ...]:
        return self.token_ids[self.prompt_length :]

    @property
    def n_response(self) -> int:
        return len(self.token_ids) - self.prompt_length


@dataclass
class ScoredSequence:
    """Rows that predict the response tokens, in order.

    hidden: ``[n_response, H]`` final hidden states (after the last norm), in the program's dtype.
    reported_logprob: ``[n_response]`` what the program itself says of its tokens (nats), or None.
    n_cached_tokens: prompt tokens that came from a prefix cache.
    """

    sequence_id: str
    hidden: torch.Tensor
    reported_logprob: list[float] | None = None
    n_cached_tokens: int = 0


@dataclass
class Rollout(ScoredSequence):
    """A sampled response and the decode rows that it was drawn from."""

    sequence: Sequence_ = field(default=Sequence_("", (), 0))
    finish_reason: str = ""


@dataclass(frozen=True)
class Sampling:
    """How rollouts are drawn. Temperature 1 and no truncation: the tokens are samples of q."""

    max_tokens: int = 48
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


class Program(Protocol):
    """Anything that evaluates the policy."""

    identity: Identity

    def head(self) -> Head: ...

    def score(self, sequences: Sequence[Sequence_]) -> Iterable[ScoredSequence]: ...

    def close(self) -> None: ...


class Engine(Program, Protocol):
    """A program that also samples."""

    def generate(
        self, prompts: Sequence[tuple[str, Sequence[int]]], sampling: Sampling
    ) -> Iterator[Rollout]: ...

    def facts(self) -> dict[str, Any]: ...
