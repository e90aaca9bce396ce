"""Compiling kernels that release the interpreter lock. No torch: recorded rollouts need none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Any:
    """Compiled on first use and kept on disk (beside its file, or in the user's cache).

    numba's cache watches the function's own file alone, so all that it calls belongs there too.
    """
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # "no locator available": a read-only install and no home directory
        return njit(nogil=True)(function)
