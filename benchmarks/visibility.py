"""One real training step of the sample model, and how much of it each export serves.

    python benchmarks/visibility.py [--steps 8] [--pushes 4] [--write]

AdamW (lr 1e-6, betas .9 .95, weight decay .1) on fp32 masters that start from the bf16 checkpoint,
on a handful of texts, tied head. Measured after the first step and after the last. ``--write`` puts
the numbers into docs/weights.md. Takes about 5 minutes and 5 GB on two cores.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch

from mismatch_audit.sample_model import sample_model_path
from mismatch_audit.weights.grids import GRIDS, Grid
from mismatch_audit.weights.memory import memory_side
from mismatch_audit.weights.served_loss import LOSS_EXPORTS, mean_loss, serve_in_place
from mismatch_audit.weights.visibility import measure_visibility

ROOT = Path(__file__).resolve().parent.parent
LEARNING_RATE = 1e-6
TEXTS = (
    "To add 17 and 26, first add the tens: 10 and 20 make 30. Then 7 and 6 make 13. Together 43.",
    "The river rises in the hills, runs past three old mills and reaches the sea near the port.",
    "def mean(values):\n    if not values:\n        raise ValueError('no values')\n"
    "    return sum(values) / len(values)\n",
    "If every cat is an animal and Tom is a cat, then Tom is an animal. This follows by syllogism.",
    "Water boils at 100 degrees Celsius at sea level, and at less than that on a high mountain.",
    "She opened the letter slowly, read the first line twice, and put it back into the drawer.",
)


def load() -> tuple[Any, list[list[int]]]:
    """The sample model in fp32 and the token ids of TEXTS."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = sample_model_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    return model, [tokenizer.encode(text) for text in TEXTS]


def masters(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train(model: Any, sequences: list[list[int]], steps: int) -> list[dict[str, torch.Tensor]]:
    """Masters before, after the first, before the last and after the last step."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
    )
    kept = [masters(model)]
    for step in range(1, steps + 1):
        optimizer.zero_grad(set_to_none=True)
        total = sum(len(ids) - 1 for ids in sequences)
        for ids in sequences:
            tokens = torch.tensor([ids])
            loss = model(tokens, labels=tokens).loss * (len(ids) - 1) / total
            loss.backward()
        optimizer.step()
        if step in (1, steps - 1, steps):
            kept.append(masters(model))
    return kept


def measure(
    before: dict[str, torch.Tensor],
    after: dict[str, torch.Tensor],
    origin: dict[str, torch.Tensor],
    grid: Grid,
    pushes: int,
) -> dict[str, Any]:
    config = {"model_type": "llama", "tie_word_embeddings": True}
    report = measure_visibility(
        memory_side("before", before, config),
        memory_side("after", after, config),
        grid,
        memory_side("origin", origin, config),
        pushes,
    )
    return report.to_dict()


def loss_gaps(
    model: Any, master: dict[str, torch.Tensor], sequences: list[list[int]]
) -> dict[str, float]:
    """Loss of the served copy minus that of the master, nats a token, per export, in bf16."""

    def restored() -> None:
        for name, parameter in model.named_parameters():
            parameter.data.copy_(master[name])

    restored()
    base = mean_loss(model, sequences)
    gaps = {"master": base}
    for export in LOSS_EXPORTS:
        restored()
        serve_in_place(model, GRIDS["bf16"], export)
        gaps[export] = mean_loss(model, sequences) - base
    return gaps


def lines(name: str, document: dict[str, Any]) -> list[str]:
    overall = document["overall"]
    lags = overall["lag_pushes"]
    out = [
        f"{name}: {overall['moved_share']:.2%} of {overall['weights'] / 1e6:.1f} M weights moved, "
        f"**{overall['visible_share']:.3%} visible** ({overall['predicted_visible_share']:.3%} "
        f"predicted for uniform phases), gain of this push {overall['gain']:.4f}, gain since the "
        f"start {overall['gain_from_origin']:.4f}, cosine {overall['cosine']:.3f}, noise "
        f"{overall['noise']:.3f}; {overall['delayed_energy_share']:.2%} of the update's energy is "
        f"{document['invisible_updates_are']}; half-step lag p10 {lags['p10']:.0f}, median "
        f"{lags['p50']:.0f}, p90 {lags['p90']:.0f} pushes.",
        "",
        f"| export, {document['pushes']} such pushes | visible weights a push | bytes changed a "
        "push | gain | cosine | noise |",
        "|---|---|---|---|---|---|",
    ]
    for export, effect in overall["exports"].items():
        out.append(
            f"| {export} | {effect['visible_share_per_push']:.3%} | "
            f"{effect['bytes_changed_share_per_push']:.3%} | {effect['gain']:.4f} | "
            f"{effect['cosine']:.3f} | {effect['noise']:.2f} |"
        )
    return [*out, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pushes", type=int, default=4)
    parser.add_argument("--write", action="store_true", help="put the numbers into the docs")
    options = parser.parse_args()
    started = time.perf_counter()
    model, sequences = load()
    before_loss = mean_loss(model, sequences)
    start, first, before_last, last = train(model, sequences, options.steps)
    print(f"{options.steps} steps after {time.perf_counter() - started:.0f} s", flush=True)
    gaps = loss_gaps(model, last, sequences)
    del model
    text = [
        f"SmolLM2-135M-Instruct, AdamW at a learning rate of {LEARNING_RATE:g}, fp32 masters that "
        f"start from the bf16 checkpoint, {sum(map(len, sequences))} tokens a step.",
        "",
        *lines("First step, bf16", measure(start, first, start, GRIDS["bf16"], options.pushes)),
    ]
    print("\n".join(text), flush=True)
    late = lines(
        f"Step {options.steps}, bf16",
        measure(before_last, last, start, GRIDS["bf16"], options.pushes),
    )
    print("\n".join(late), flush=True)
    text += late
    listed = ", ".join(f"{k} {v:+.2e}" for k, v in gaps.items() if k != "master")
    text += [
        f"Loss on the training texts: {before_loss:.6f} before, {gaps['master']:.6f} nats a token "
        f"after {options.steps} steps with the masters; served in bf16 instead: {listed}.",
    ]
    print("\n".join(text[-1:]))
    if options.write:
        from weights import write_between

        write_between(ROOT / "docs" / "weights.md", "visibility", "\n".join(text))
    if not all(math.isfinite(value) for value in gaps.values()):
        raise SystemExit("a loss is not finite")


if __name__ == "__main__":
    main()
