"""Checks of meaning on recorded rollouts: each names one cause, with evidence and a fix."""
