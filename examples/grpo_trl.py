"""GRPO with TRL and a colocated vLLM on a CPU, audited while it trains; faults on request.

    python examples/grpo_trl.py                        # a clean run: exit code 0
    python examples/grpo_trl.py --fault no_sync        # the audit names the cause: exit code 1
    python examples/grpo_trl.py --fault all            # every fault, a table

A tiny random llama is made on the spot; ``--model sample`` or ``--model PATH`` takes a real one.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Before vLLM is imported: one process, no compiler, a small KV cache.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

HERE = Path(__file__).resolve().parent
CONTRACT = HERE / "contracts" / "live-float32.yaml"
FAULTS = {
    "none": "nothing is wrong",
    "no_sync": "the weight sync moves no weights",
    "stale_head": "the weight sync leaves out the output head",
    "temperature_semantics": "temperature 2, but log-probs from before it (raw_logprobs)",
    "prefix_cache": "the prefix cache is kept across weight syncs",
    "bf16_sampler": "the sampler runs in bfloat16, the trainer in float32",
}
PROMPTS = 8
GENERATIONS = 4
BLOCK = 32


@dataclass
class Outcome:
    """One run. causes: codes the audit named, the strongest first. metrics: of the last step."""

    fault: str
    exit_code: int
    verdict: str
    causes: list[str]
    metrics: dict[str, float]
    seconds: float
    steps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def step_seconds(self) -> list[float]:
        """Of each training step: generation, weight sync, audit and update together."""
        return [step["step_time"] for step in self.steps if "step_time" in step]


def make_tiny_model(folder: Path) -> Path:
    """A two-layer random llama in float32 whose tokens are bytes. Its head is not tied: vLLM's
    reload does not pack a tied head again on a CPU."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<bos>", "<eos>"]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate([*special, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(alphabet) + 3, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
        tie_word_embeddings=False, initializer_range=0.2, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, dtype="float32",
    )  # fmt: skip
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


def prompts() -> list[str]:
    """Eight prompts of more than two cache blocks each; every step asks them all again."""
    return [f"{i}: " + "say something with many different letters in it, please. " * 2
            for i in range(PROMPTS)]  # fmt: skip


def variety(completions: list[str], **_: Any) -> list[float]:
    """The reward: how many different characters a completion has."""
    return [float(len(set(text))) for text in completions]


class Engines:
    """vLLM engines by dtype and log-probs mode, so that several runs in one process share them.

    TRL gives vLLM no dtype (a float32 checkpoint is then served in bfloat16 on a CPU) and asks for
    processed log-probs; both are set here, where a fault wants another.
    """

    def __init__(self) -> None:
        self.built: dict[tuple[str, str], Any] = {}

    def make(self, dtype: str, mode: str, **arguments: Any) -> Any:
        """In the place of ``vllm.LLM`` in TRL: a new engine, or one of before with the model's own
        weights again."""
        from vllm import LLM

        from mismatch_audit.trainers.trl_engine import ColocatedEngine, shield_llvmlite

        shield_llvmlite()
        if (dtype, mode) in self.built:
            llm = self.built[dtype, mode]
            ColocatedEngine(argparse.Namespace(llm=llm)).push(Path(arguments["model"]), 0)
            return llm
        arguments |= {"dtype": dtype, "logprobs_mode": mode, "enforce_eager": True,
                      "block_size": BLOCK}  # fmt: skip
        self.built[dtype, mode] = LLM(**arguments)
        return self.built[dtype, mode]


def break_sync(fault: str, generation: Any) -> None:
    """The CPU's weight sync, or what a fault leaves of it, in place of TRL's own."""
    from mismatch_audit.trainers.trl_engine import cpu_sync

    def stale_head() -> None:
        whole = generation._iter_named_params
        generation._iter_named_params = lambda: (x for x in whole() if "lm_head" not in x[0])
        try:
            cpu_sync(generation)
        finally:
            del generation._iter_named_params

    def keep_cache() -> None:
        reset, generation.llm.reset_prefix_cache = generation.llm.reset_prefix_cache, lambda: True
        try:
            cpu_sync(generation)
        finally:
            generation.llm.reset_prefix_cache = reset

    broken = {
        "no_sync": generation.llm.reset_prefix_cache,
        "stale_head": stale_head,
        "prefix_cache": keep_cache,
    }
    generation.sync_weights = broken.get(fault, functools.partial(cpu_sync, generation))


def run(
    fault: str = "none",
    *,
    model: Path,
    out: Path,
    steps: int = 6,
    engines: Engines | None = None,
    weights: int = 1,
    guard: bool = False,
    act: bool = False,
    audit: bool = True,
    learning_rate: float = 1e-3,
) -> Outcome:
    """One training run under one fault. Writes the audit's report and rollouts under ``out``."""
    import torch
    import trl.generation.vllm_generation as backend
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from mismatch_audit.trainers.trl import attach

    started = time.perf_counter()
    engines = engines or Engines()
    hot = fault == "temperature_semantics"
    backend.LLM = functools.partial(
        engines.make,
        "bfloat16" if fault == "bf16_sampler" else "float32",
        "raw_logprobs" if hot else "processed_logprobs",
    )
    config = GRPOConfig(
        output_dir=str(out / "trainer"), use_vllm=True, vllm_mode="colocate", use_cpu=True,
        per_device_train_batch_size=PROMPTS * GENERATIONS, num_generations=GENERATIONS,
        max_completion_length=16, max_steps=steps, logging_steps=1, report_to=[],
        save_strategy="no", learning_rate=learning_rate, lr_scheduler_type="constant", bf16=False,
        gradient_checkpointing=False, disable_tqdm=True, vllm_max_model_length=192,
        vllm_gpu_memory_utilization=0.05, temperature=2.0 if hot else 1.0, seed=1,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=variety,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts()}),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    break_sync(fault, trainer.vllm_generation)
    if not audit:
        trainer.train()
        return Outcome(
            fault, 0, "", [], {}, time.perf_counter() - started, trainer.state.log_history
        )
    audited = attach(
        trainer,
        contract=CONTRACT,
        out=out,
        record=out / "rollouts",
        actions=("warn", "mask", "skip_step", "hold_push", "stop") if act else ("warn",),
        weights=weights,
        guard=out / "pushes" if guard else None,
        strict=True,
    )
    trainer.train()
    report = audited.report()
    audited.detach()
    causes = [f.code for f in report.findings if f.severity != "note"]
    logs = [h for h in trainer.state.log_history if "mismatch/abs_dlp" in h]
    kept = (
        "mismatch/abs_dlp",
        "mismatch/k3",
        "weights/read_back_equal",
        "weights/stale_after_step",
    )
    return Outcome(
        fault, report.exit_code, report.verdict, list(dict.fromkeys(causes)),
        {k: v for k, v in (logs[-1] if logs else {}).items() if k in kept},
        time.perf_counter() - started, logs,
    )  # fmt: skip


def run_all(arguments: argparse.Namespace) -> int:
    """Every fault in a process of its own; 0 when the clean run passes and each fault does not."""
    rows = []
    for fault in FAULTS:
        out = arguments.out / fault
        command = [sys.executable, __file__, "--fault", fault, "--model", str(arguments.model),
                   "--steps", str(arguments.steps), "--out", str(out)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            found = json.loads((out / "outcome.json").read_text(encoding="utf-8"))
        except OSError:
            sys.stderr.write(done.stderr[-4000:])
            return 2
        rows.append(found)
        show(found)
    wrong = [r["fault"] for r in rows if (r["exit_code"] == 0) != (r["fault"] == "none")]
    if wrong:
        print(f"not as it should be: {', '.join(wrong)}")
    return 1 if wrong else 0


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    numbers = "  ".join(f"{k.split('/')[-1]} {v:.3g}" for k, v in row["metrics"].items())
    print(
        f"{row['fault']:22} exit {row['exit_code']}  {row['verdict']:12} "
        f"{', '.join(row['causes'][:3]) or '-':50} {numbers}  {row['seconds']:.0f} s",
        flush=True,
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--fault", choices=[*FAULTS, "all"], default="none",
                        help="\n".join(f"{k}: {v}" for k, v in FAULTS.items()))  # fmt: skip
    parser.add_argument("--model", default="tiny", help="tiny, sample, or a model folder")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("runs/grpo"))
    parser.add_argument(
        "--guard", action="store_true", help="check every push, roll back a bad one"
    )
    parser.add_argument("--act", action="store_true", help="carry out what the contract asks for")
    arguments = parser.parse_args()
    if arguments.fault == "all":
        return run_all(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.model == "tiny":
            model = make_tiny_model(Path(scratch))
        else:
            from mismatch_audit.sample_model import resolve_model

            model = Path(resolve_model(arguments.model))
        outcome = run(arguments.fault, model=model, out=arguments.out, steps=arguments.steps,
                      guard=arguments.guard, act=arguments.act)  # fmt: skip
    text = json.dumps(outcome.__dict__, indent=1)
    (arguments.out / "outcome.json").write_text(text, encoding="utf-8")
    show(outcome.__dict__)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
