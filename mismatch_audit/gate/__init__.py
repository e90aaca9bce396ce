"""What may be served: signed blessings, the gate that reads them, and the gate around a push.

``guarded_sync`` wraps a trainer's weight sync (push, check, roll back); ``push.run_push`` does the
same for a checkpoint, with a journal that survives a crash; ``bless.bless_run`` signs what an audit
found and ``decide.decide`` answers whether weights on an engine are what was signed.
"""

from mismatch_audit.gate.sync import (
    Served,
    ServedEngine,
    SyncCheck,
    SyncLimits,
    SyncOutcome,
    TrainerSide,
    guarded_sync,
)

__all__ = [
    "Served",
    "ServedEngine",
    "SyncCheck",
    "SyncLimits",
    "SyncOutcome",
    "TrainerSide",
    "guarded_sync",
]
