"""Live hooks into trainers: each step's tokens, on both sides, are judged while training runs.

``monitor.Monitor`` knows no trainer; ``trl``, ``verl_plugin``, ``skyrl`` and ``slime`` hand it one
step in their framework's own words.
"""
