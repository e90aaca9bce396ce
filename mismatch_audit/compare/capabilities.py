"""What the machine can run."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from functools import cache


@cache
def loads(module: str) -> bool:
    """Whether a module is installed and loads; a warning says why an installed one does not."""
    if importlib.util.find_spec(module) is None:
        return False
    try:
        importlib.import_module(module)
    except ImportError as error:  # numba refuses a numpy newer than it knows
        warnings.warn(
            f"{module} is installed but does not load ({error}): "
            "comparing rows in plain torch, about 20 times slower",
            stacklevel=2,
        )
        return False
    return True
