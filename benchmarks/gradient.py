"""What measuring the policy gradient's bias costs, and what it finds on the sample model.

    python benchmarks/gradient.py [--prompts 192] [--max-tokens 48] [--threads 2] [--write]

Rollouts are drawn from the sample model with its matrices rounded to 8-bit integers, in
float32: an engine that is off by a known cause, in one process. Prints, on the same tokens: seconds
and peak memory of an ordinary training step (forward, full backward, no optimiser) and of the
measurement; then the bias of every estimator. Exit 1 if the measurement takes more than 3 training
steps or more extra memory than a step and one gradient. --write puts the figures into
docs/gradient.md.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from transformers import AutoTokenizer

from mismatch_audit.gradient import GradientReport, measure_gradient, rollout_advantages
from mismatch_audit.programs.base import Sequence_
from mismatch_audit.programs.batching import pad_batch, token_budget_batches
from mismatch_audit.programs.reference import TransformersReference
from mismatch_audit.prompts import encode_prompts, load_prompts, spread
from mismatch_audit.sample_model import sample_model_path
from mismatch_audit.settings import ReferenceSettings

ROOT = Path(__file__).resolve().parent.parent
DOC = ROOT / "docs" / "gradient.md"
BEGIN, END = "<!-- gradient:begin -->", "<!-- gradient:end -->"
MIB = 1 << 20
STEPS = 3.0


def resident(key: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(key)) * 1024


def measured(function: Callable[[], Any]) -> tuple[float, int, Any]:
    """(seconds, peak resident bytes above the level before, result). Linux."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w", encoding="ascii") as reset:
        reset.write("5")
    before, start = resident("VmRSS"), time.perf_counter()
    result = function()
    return time.perf_counter() - start, resident("VmHWM") - before, result


def served_copy(reference: TransformersReference) -> TransformersReference:
    """The same model with matrices rounded to 8-bit integers, one scale a row, as engines serve."""
    other = TransformersReference(str(reference.path), reference.settings)
    with torch.no_grad():
        for p in other.model.parameters():
            if p.ndim == 2:
                scale = p.abs().amax(1, keepdim=True) / 127
                p.copy_((p / scale).round() * scale)
    return other


def rollouts(
    engine: TransformersReference, prompts: list[Any], max_tokens: int, eos: int, seed: int = 0
) -> tuple[list[Sequence_], dict[str, np.ndarray]]:
    """Responses drawn from the engine at temperature 1, 32 prompts together."""
    generator = torch.Generator().manual_seed(seed)
    sequences: list[Sequence_] = []
    logprob: dict[str, np.ndarray] = {}
    for start in range(0, len(prompts), 32):
        group = prompts[start : start + 32]
        ids, mask, positions = pad_batch([p.token_ids for p in group], engine.pad_id, "left")
        past, tokens, values = None, [], []
        with torch.no_grad():
            for _ in range(max_tokens):
                out = engine.model(
                    input_ids=ids, attention_mask=mask, position_ids=positions,
                    past_key_values=past, use_cache=True, logits_to_keep=1,
                )  # fmt: skip
                past = out.past_key_values
                rows = out.logits[:, -1].double().log_softmax(-1)
                ids = torch.multinomial(rows.exp(), 1, generator=generator)
                tokens.append(ids)
                values.append(rows.gather(1, ids))
                mask = torch.cat([mask, torch.ones_like(ids)], 1)
                positions = positions[:, -1:] + 1
        drawn, scores = torch.cat(tokens, 1), torch.cat(values, 1).numpy()
        for prompt, row, score in zip(group, drawn.tolist(), scores, strict=True):
            n = row.index(eos) + 1 if eos in row else len(row)
            ids_of = (*prompt.token_ids, *row[:n])
            sequences.append(Sequence_(prompt.id, ids_of, len(prompt.token_ids)))
            logprob[prompt.id] = score[:n]
    return sequences, logprob


def reference_logprobs(
    reference: TransformersReference, sequences: list[Sequence_]
) -> dict[str, np.ndarray]:
    from mismatch_audit.compare import log_probs_of

    by_id = {s.sequence_id: s for s in sequences}
    return {
        s.sequence_id: log_probs_of(
            s.hidden, reference.head(), torch.tensor(by_id[s.sequence_id].response)
        )["logprob"].numpy()
        for s in reference.score(sequences)
    }


def training_step(
    reference: TransformersReference, sequences: list[Sequence_], advantage: dict[str, float],
    budget: int,
) -> None:  # fmt: skip
    """Forward, log-probs of the response tokens, backward into every parameter's gradient."""
    model = reference.model
    for batch in token_budget_batches([len(s.token_ids) for s in sequences], budget):
        chosen = [sequences[i] for i in batch]
        ids, mask, positions = pad_batch([s.token_ids for s in chosen], reference.pad_id, "right")
        where_b = torch.cat([torch.full((s.n_response,), b) for b, s in enumerate(chosen)])
        where_t = torch.cat(
            [torch.arange(s.prompt_length - 1, len(s.token_ids) - 1) for s in chosen]
        )
        targets = torch.tensor([t for s in chosen for t in s.response])
        weights = torch.tensor([advantage[s.sequence_id] for s in chosen])[where_b]
        hidden = model.base_model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state
        logits = model.get_output_embeddings()(hidden[where_b, where_t])
        logprob = -torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        (weights * logprob).sum().backward()
    model.zero_grad(set_to_none=True)


def table(report: GradientReport) -> list[str]:
    lines = [
        "| slice | estimator | against | relative bias | interval | bias / noise, at most | "
        "harmless batch | variance | ESS share | prompts |",
        "|" + " --- |" * 10,
    ]
    for row in report.rows():
        upper = "unbounded" if row["upper"] is None else f"{row['upper']:.3f}"
        value, noise = (
            "–" if row[k] is None else f"{row[k]:.3f}"
            for k in ("relative_bias", "bias_to_noise_upper")
        )
        harmless = "any" if row["harmless_batch"] is None else f"{row['harmless_batch']:.0f}"
        lines.append(
            f"| {row['slice']} | {row['estimator']} | {row['target']} | {value} | "
            f"{row['lower']:.3f} to {upper} | {noise} | {harmless} | {row['variance_ratio']:.2f} | "
            f"{row['ess_share']:.2f} | {row['n_prompts']} |"
        )
    return lines


def write(text: str, path: Path = DOC) -> None:
    page = path.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=192)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--budget", type=int, default=1024, help="padded tokens a batch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="rewrite the figures in the page")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = str(sample_model_path())
    reference = TransformersReference(
        path, ReferenceSettings(device="cpu", token_budget=options.budget)
    )
    tokenizer = AutoTokenizer.from_pretrained(path)
    written = spread(load_prompts(ROOT / "samples" / "prompts.jsonl"), options.prompts)
    prompts = encode_prompts(written, tokenizer, 2048, options.max_tokens)
    start = time.perf_counter()
    engine = served_copy(reference)
    sequences, q = rollouts(engine, prompts, options.max_tokens, tokenizer.eos_token_id)
    del engine
    p = reference_logprobs(reference, sequences)
    texts = [tokenizer.decode(s.response, skip_special_tokens=True) for s in sequences]
    made = rollout_advantages(
        [s.sequence_id for s in sequences], texts, [s.n_response for s in sequences],
        [x.metadata for x in written], options.max_tokens,
    )  # fmt: skip
    print(f"rollouts: {time.perf_counter() - start:.0f} s", flush=True)

    used = [s for s in sequences if made.advantage[s.sequence_id] != 0.0]
    steps, runs = [], []
    for _ in range(options.repeat):
        steps.append(
            measured(lambda: training_step(reference, used, made.advantage, options.budget))
        )
        runs.append(measured(lambda: measure_gradient(reference, sequences, q, p, made.advantage)))
    step_s, measure_s = (min(x[0] for x in part) for part in (steps, runs))
    step_peak, measure_peak = (max(x[1] for x in part) for part in (steps, runs))
    report: GradientReport = runs[-1][2]
    gradient = sum(x.nbytes for x in reference.model.parameters())
    tokens = sum(len(s.token_ids) for s in used)
    lines = [
        f"{len(used)} responses, {tokens:,d} tokens with prompts, float32 on {options.threads} "
        f"threads, batches of {options.budget} tokens; the least of {options.repeat} runs each.",
        "",
        f"* training step: {step_s:.1f} s, peak {step_peak / MIB:.0f} MiB above the loaded model",
        f"* measurement: {measure_s:.1f} s ({measure_s / step_s:.2f} steps), peak "
        f"{measure_peak / MIB:.0f} MiB; one gradient is {gradient / MIB:.0f} MiB",
        f"* advantages: {made.positive} positive, {made.negative} negative, {made.zero} zero; "
        f"{made.checked} rewards from checks, {made.neutral} neutral",
        f"* difference from ordinary autograd on one response: "
        f"{report.facts['agreement_with_autograd']:.1e} of its size",
        "",
        *table(report),
    ]
    text = "\n".join(lines)
    print(text)
    if options.write:
        write(text)
    kept = measure_s <= STEPS * step_s and measure_peak <= step_peak + gradient
    print(f"\nwithin {STEPS:g} steps and one extra gradient: {'yes' if kept else 'no'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
