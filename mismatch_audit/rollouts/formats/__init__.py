"""One file per format of recorded rollouts: each reads a trainer's dump into the sequence table."""
