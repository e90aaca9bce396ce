"""The C allocator's thresholds, for a process that makes arrays of one size again and again."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc takes no more


def keep_freed_memory(most: int = 1 << 30) -> bool:
    """Let freed arrays of up to 32 MiB be used again, instead of giving them back to the system and
    having every page of the next one zeroed: 7 % of the time of an audit of recorded rollouts.

    most: bytes that may lie unused.  False where the C library has no such setting.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # musl
        return False
    return bool(
        mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and mallopt(_TRIM_THRESHOLD, most)
    )
