"""What rounding does to the loss: the model with its masters against the model as served.

The only number about visibility that a policy feels. Needs transformers and a model directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kernel_contracts.errors import InputError
from mismatch_audit.weights.grids import BF16, FloatGrid, Grid
from mismatch_audit.weights.rounding import Rounding, nearest
from mismatch_audit.weights.stochastic import Noise, stochastic

LOSS_EXPORTS = ("nearest", "stochastic", "dither")


def serve_in_place(model: Any, grid: Grid, export: str, seed: int = 0, push: int = 0) -> None:
    """Replaces every parameter of a model by its served value (feedback needs a history)."""
    for name, parameter in model.named_parameters():
        values = parameter.data.float()
        matrix = values.reshape(values.shape[0], -1) if values.ndim > 1 else values[None]
        inside = values.ndim > 1 and ".layers." in name
        own: Grid = grid if inside or isinstance(grid, FloatGrid) else BF16
        rounding: Rounding = nearest
        if export == "stochastic":
            rounding = stochastic(name, 0, Noise(seed, push))
        elif export == "dither":
            rounding = stochastic(name, 0, Noise(seed))
        served = own.served(matrix, matrix.abs().max(), rounding).values
        parameter.data.copy_(served.view(values.shape))


def mean_loss(model: Any, sequences: Sequence[Sequence[int]]) -> float:
    """Mean next-token cross-entropy in nats over all predicted tokens of token-id sequences."""
    total, count = 0.0, 0
    with torch.inference_mode():
        for ids in sequences:
            if len(ids) < 2:
                raise InputError("a prompt of fewer than two tokens has no loss")
            tokens = torch.tensor([list(ids)])
            logits = model(tokens).logits[0, :-1].double()
            total += float(
                torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum")
            )
            count += len(ids) - 1
    if not count:
        raise InputError("no prompts: there is no loss to compare")
    return total / count


def served_loss_gap(
    path: Path | str, sequences: Sequence[Sequence[int]], grid: Grid, seed: int = 0
) -> dict[str, float]:
    """Loss of the served copy minus loss of the master, in nats a token, for each export."""
    from transformers import AutoModelForCausalLM

    gaps: dict[str, float] = {}

    def load() -> Any:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return loaded.eval()

    master = mean_loss(load(), sequences)
    gaps["master_loss"] = master
    for export in LOSS_EXPORTS:
        model = load()
        serve_in_place(model, grid, export, seed)
        gaps[export] = mean_loss(model, sequences) - master
    return gaps
