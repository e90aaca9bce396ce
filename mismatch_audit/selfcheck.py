"""Is the route to full distributions sound on this engine, today? Asked once, before any prompt.

The hooks that capture hidden states sit on internals of vLLM. One sequence is scored through the
public ``prompt_logprobs=20`` as well, and every one of those values must come out of the captured
rows; so a vLLM that moved its internals stops the run instead of giving wrong rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel_contracts.errors import UnsoundError
from mismatch_audit.chunks import REPORTED_TOLERANCE, Bench
from mismatch_audit.programs.base import Sequence_

if TYPE_CHECKING:
    import torch

TOP = 20


def self_check(bench: Bench, token_ids: list[int]) -> dict[str, Any]:
    """Facts of the check: rows, values compared, largest difference (nats), route.

    Switches the bench to the engine's own logits when its head cannot be re-applied. Raises
    UnsoundError when even those disagree with what the engine reports.
    """
    sequence = Sequence_("self-check", tuple(token_ids), 1)
    scored, top = bench.engine.score_top(sequence, TOP)
    worst, compared = _largest_difference(_logits(bench, scored.hidden), top)
    if not worst <= REPORTED_TOLERANCE and bench.route == "head":
        bench.route = "engine_logits"
        worst, compared = _largest_difference(_logits(bench, scored.hidden), top)
    if not worst <= bench.rounding or compared == 0:
        raise UnsoundError(
            f"captured rows give other log-probs than the engine's public ones: {worst:.3g} nats "
            f"over {compared} values (rounding is {bench.rounding:.3g})",
            where="self-check of the engine",
            fix="this vLLM version or setting is not supported; see docs/engines.md",
        )
    return {
        "rows": sequence.n_response,
        "values": compared,
        "largest_difference": worst,
        "route": bench.route,
    }


def _logits(bench: Bench, hidden: torch.Tensor) -> torch.Tensor:
    if bench.route == "head":
        return bench.engine_head.logits(hidden)
    rows: torch.Tensor = bench.engine.own_logits({"rows": hidden})["rows"]
    return rows


def _largest_difference(
    logits: torch.Tensor, top: list[list[tuple[int, float]]]
) -> tuple[float, int]:
    import torch

    logprobs = torch.log_softmax(logits.float(), -1).cpu()
    differences = [
        abs(float(logprobs[row, token]) - value)
        for row, entries in enumerate(top)
        for token, value in entries
    ]
    return max(differences, default=float("inf")), len(differences)
