"""One file per format of recorded rollouts: each reads a trainer's dump into the sequence table."""

from mismatch_audit.rollouts.formats.base import Detection, Problem, ReadOptions, Source
from mismatch_audit.rollouts.formats.registry import (
    READERS,
    detect,
    drain,
    explain,
    open_sources,
    reader,
)

__all__ = [
    "READERS",
    "Detection",
    "Problem",
    "ReadOptions",
    "Source",
    "detect",
    "drain",
    "explain",
    "open_sources",
    "reader",
]
