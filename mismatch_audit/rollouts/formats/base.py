"""What a reader of one format gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kernel_contracts.errors import InputError
from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.schema import Header


@dataclass(frozen=True)
class Detection:
    """A format that fits a path. confidence in (0, 1]; why: what was seen, for people."""

    format: str
    confidence: float
    why: str


@dataclass(frozen=True)
class ReadOptions:
    """batch_tokens: about how many tokens a batch holds (memory bound).  max_line: longest line or
    row, in bytes, that is read at all.  tokenizer: for dumps that hold only text (a tokenizer's
    folder).  fields: renamed columns of a plain file, ours -> theirs."""

    batch_tokens: int = 500_000
    max_line: int = 64 << 20
    tokenizer: Path | None = None
    fields: dict[str, str] = field(default_factory=dict)


@dataclass
class Source:
    """One dump: a file, or a folder that belongs together.

    batches: an iterator that may raise ``InputError`` (file and row named) at a damaged place; what
    came before stands, other sources are still read.  bytes_total: size on disk, for progress.
    bytes_done: of them, behind the batches given so far; None where the reader does not say.
    """

    path: Path
    header: Header
    batches: Iterator[TokenBatch]
    bytes_total: int = 0
    bytes_done: Callable[[], int] | None = None


class Reader(Protocol):
    """A module of this package: ``FORMAT``, ``detect`` and ``read``.

    detect: looks at names and the first bytes only; None where it is something else.
    read: raises InputError for a file that it cannot read at all.
    """

    FORMAT: str

    def detect(self, path: Path) -> Detection | None: ...

    def read(self, path: Path, options: ReadOptions) -> Source: ...


@dataclass(frozen=True)
class Problem:
    """A source, or the rest of one, that could not be read."""

    path: str
    error: InputError
    facts: dict[str, Any] = field(default_factory=dict)
