"""Recorded rollouts: what an RL trainer wrote down, read into one table, checked and judged."""
