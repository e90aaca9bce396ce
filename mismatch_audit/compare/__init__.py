"""The full-vocabulary comparison of two rows of next-token logits.

Nothing here is imported until it is used: torch and numba take seconds to load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mismatch_audit.compare.heads import Head
    from mismatch_audit.compare.rows import (
        COLUMNS,
        compare_hidden,
        compare_logits,
        log_probs_of,
    )

__all__ = ["COLUMNS", "Head", "compare_hidden", "compare_logits", "log_probs_of"]


def __getattr__(name: str) -> Any:
    if name == "Head":
        from mismatch_audit.compare.heads import Head

        return Head
    if name in __all__:
        from mismatch_audit.compare import rows

        return getattr(rows, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
