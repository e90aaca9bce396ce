"""When is a column of the token table known: before the request is sent, in decode, or only once
the reference has scored it?"""

from __future__ import annotations

from typing import Final, Literal

from kernel_contracts.expressions import Expression, columns
from kernel_contracts.vocabulary import COMPUTED_COLUMNS, TOKEN_COLUMNS

Known = Literal["request", "decode", "never"]

SPAN_COLUMNS: Final = frozenset({"position", "context_length"})
"""Known before the request as an interval over the tokens that it may generate: from the prompt's
length and max_tokens."""

DECODE_COLUMNS: Final = frozenset(
    {"engine_margin", "engine_logprob", "engine_prob", "engine_top1_logprob", "engine_top1",
     "token_id"}
)  # fmt: skip
"""The engine's own account of a token, known once it is drawn."""


def known_when(column: str) -> Known:
    """request: metadata of the prompt, or a span.  decode: the engine's own.  never: it takes the
    reference's row (reference_margin, entropy, drift, flip, ...) or bookkeeping of an audit."""
    if column in SPAN_COLUMNS:
        return "request"
    if column in DECODE_COLUMNS:
        return "decode"
    return "never" if column in TOKEN_COLUMNS or column in COMPUTED_COLUMNS else "request"


def level_of(condition: Expression) -> Known:
    """The latest moment at which a column of the condition becomes known."""
    found = {known_when(name) for name in columns(condition)}
    return "never" if "never" in found else "decode" if "decode" in found else "request"


def never_known(condition: Expression) -> tuple[str, ...]:
    """Columns of the condition that no request ever shows, in order of first use."""
    return tuple(name for name in columns(condition) if known_when(name) == "never")
