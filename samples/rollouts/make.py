"""Make the sample dumps in this folder: the same sequences as each trainer would dump them.

    python samples/rollouts/make.py [FOLDER]

Pickles name the trainers' classes by the path that the trainers use; none of them is needed. Every
run writes the same content. ``audit`` can be tried on any of the folders.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import sqlite3
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

PAD = 0
TEXTS = [
    ("What is 2 + 3?", [" 2 + 3 = 5.", " The sum is 5."]),
    ("Name a colour of the rainbow.", [" Indigo.", " Green is one of them."]),
    ("Which planet is nearest to the sun?", [" Mercury is.", " It is Mercury."]),
]


@dataclass(frozen=True)
class Sequence:
    """A rollout. Lists of the response; log-probs are None on tokens of the environment."""

    step: int
    group: int
    number: int
    prompt: list[int]
    response: list[int]
    sampled: list[bool]
    sampler: list[float | None]
    trainer: list[float | None]
    advantage: float
    reward: float
    version: int

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.response

    def full(self, name: str, outside: Any, before: Any = None) -> list[Any]:
        """A list of the response made as long as ids; ``outside`` for prompt and environment."""
        values = [outside if value is None else value for value in getattr(self, name)]
        return [outside if before is None else before] * len(self.prompt) + values


def sequences(prompts: int = 3) -> list[Sequence]:
    """Two steps of some prompts with two rollouts each; one rollout holds a tool's answer."""
    random = np.random.default_rng(20)
    made = []
    for step in (1, 2):
        for group in range((step - 1) * prompts, step * prompts):
            prompt = random.integers(5, 40_000, size=int(random.integers(3, 7))).tolist()
            for number in range(2):
                n = int(random.integers(4, 10))
                sampled = [True] * n
                if (step, group, number) == (2, prompts, 0):
                    sampled[2] = sampled[3] = False
                q = np.log(random.uniform(0.05, 0.99, n)).astype(np.float32)
                p = (q + random.normal(0, 0.02, n).astype(np.float32)).clip(max=0)
                sides = [
                    [float(v) if own else None for own, v in zip(sampled, side, strict=True)]
                    for side in (q, p)
                ]
                response = random.integers(5, 40_000, n).tolist()
                scores = (0.5 - number, float(1 - number), step - 1)
                made.append(
                    Sequence(step, group, number, prompt, response, sampled, *sides, *scores)
                )
    return made


def _jsonl(path: Path, lines: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _steps(made: list[Sequence]) -> dict[int, list[Sequence]]:
    return {step: [s for s in made if s.step == step] for step in sorted({s.step for s in made})}


def plain(folder: Path, made: list[Sequence]) -> None:
    """The sequence table of this project, as Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from mismatch_audit.rollouts.schema import HEADER_KEY, sequence_schema

    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "sample_id": f"{s.step}/{s.group}/{s.number}", "group_id": f"{s.step}/{s.group}",
            "step": s.step, "token_ids": s.ids, "prompt_len": len(s.prompt),
            "origin": [0] * len(s.prompt) + [1 if own else 2 for own in s.sampled],
            "loss_mask": [False] * len(s.prompt) + s.sampled, "reward": s.reward,
            "sampler_logprob": s.full("sampler", None), "trainer_logprob": s.full("trainer", None),
            "sequence_advantage": s.advantage, "temperature": 1.0, "top_p": 1.0,
            "weights_version_min": s.version, "weights_version_max": s.version,
            "trainer_version": s.version, "logprobs_mode": "processed_logprobs",
        }
        for s in made
    ]  # fmt: skip
    schema = pa.schema([field for field in sequence_schema() if field.name in rows[0]])
    table = pa.Table.from_pylist(rows, schema=schema)
    dtypes = {"trainer_dtype": "float32", "engine_dtype": "bfloat16"}
    header = json.dumps({"framework": "sample", **dtypes}).encode()
    pq.write_table(table.replace_schema_metadata({HEADER_KEY: header}), folder / "rollouts.parquet")


def prime_rl(folder: Path, made: list[Sequence]) -> None:
    for step, batch in _steps(made).items():
        lines = []
        for i, s in enumerate(batch):
            mask = [False] * len(s.prompt) + s.sampled
            lines.append({
                "schema_version": 1, "step": step, "rank": 0, "micro_step": 0,
                "micro_sequence_idx": i, "export_sequence_idx": i, "env_name": "arithmetic",
                "token_ids": s.ids, "position_ids": list(range(len(s.ids))), "loss_mask": mask,
                "advantages": [s.advantage] * len(mask),
                "inference_logprobs": s.full("sampler", 0.0),
                "trainer_logprobs": s.full("trainer", -1.5),
                "entropy": [0.5] * len(mask), "is_masked": [False] * len(mask),
                "temperatures": [1.0] * len(mask),
            })  # fmt: skip
        _jsonl(folder / f"token_exports/step_{step}/rank_0.jsonl", lines)
        (folder / f"token_exports/step_{step}/STABLE").touch()


def nemo_rl(folder: Path, made: list[Sequence]) -> None:
    longest = max(len(s.ids) for s in made)

    def padded(values: list[Any], filler: Any) -> list[list[Any]]:
        return [values + [filler] * (longest - len(values))]

    for step, batch in _steps(made).items():
        _jsonl(folder / f"train_data_step{step}.jsonl", [
            {
                "content": ["..."], "rewards": [s.reward], "input_lengths": [len(s.ids)],
                "token_ids": padded(s.ids, PAD),
                "token_loss_mask": padded([0] * len(s.prompt) + [int(o) for o in s.sampled], 0),
                "sample_loss_mask": [1.0],
                "advantages": padded([s.advantage] * len(s.ids), 0.0),
                "generation_logprobs": padded(s.full("sampler", 0.0), 0.0),
                "prev_logprobs": padded([0.0, *s.full("trainer", -1.5)[1:]], 0.0), "idx": i,
            }
            for i, s in enumerate(batch)
        ])  # fmt: skip


def arrays(batch: list[Sequence], right_pad: bool = True) -> dict[str, torch.Tensor]:
    """Left-padded prompts, right-padded responses, as most trainers hold a batch."""
    before, after = max(len(s.prompt) for s in batch), max(len(s.response) for s in batch)

    def response(name: str, filler: Any) -> torch.Tensor:
        rows = [[filler if v is None else v for v in getattr(s, name)] for s in batch]
        return torch.tensor([row + [filler] * (after - len(row)) for row in rows])

    ids = response("response", PAD)
    prompts = torch.tensor([[PAD] * (before - len(s.prompt)) + s.prompt for s in batch])
    real = torch.tensor([[i < len(s.response) for i in range(after)] for s in batch])
    prompt_real = torch.tensor(
        [[i >= before - len(s.prompt) for i in range(before)] for s in batch]
    )
    return {
        "ids": torch.cat([prompts, ids], 1), "responses": ids,
        "attention": torch.cat([prompt_real, real], 1).long(),
        "sampled": response("sampled", False).long(), "response": real.long(),
        "sampler": response("sampler", 0.0), "trainer": response("trainer", 0.0),
        "advantages": response("sampled", False) * torch.tensor([[s.advantage] for s in batch]),
    }  # fmt: skip


def _module(name: str, **content: Any) -> Any:
    """A stand-in for a trainer's module while its class is pickled."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
    for key, value in content.items():
        value.__module__, value.__qualname__ = name, key
        setattr(sys.modules[name], key, value)
    return sys.modules[name]


def skyrl(folder: Path, made: list[Sequence]) -> None:
    name = "skyrl.backends.skyrl_train.training_batch"

    def _rebuild_tensor_batch(cls: Any, state: Any) -> Any:
        raise RuntimeError("only its name is pickled")

    class TrainingInputBatch:
        def __init__(self, state: Any) -> None:
            self.state = state

        def __reduce__(self) -> Any:
            return _rebuild_tensor_batch, (TrainingInputBatch, self.state)

    _module(
        name,
        _rebuild_tensor_batch=_rebuild_tensor_batch,
        TrainingInputBatch=TrainingInputBatch,
    )
    target = folder / "dumped_data"
    target.mkdir(parents=True, exist_ok=True)
    for step, batch in _steps(made).items():
        a = arrays(batch)
        tensors = {
            "sequences": a["ids"], "attention_mask": a["attention"], "loss_mask": a["sampled"],
            "response_mask": a["response"], "action_log_probs": a["trainer"],
            "rollout_logprobs": a["sampler"], "advantages": a["advantages"],
        }  # fmt: skip
        state = {
            "batch_dict": {
                key: {
                    "format": "numpy", "data": value.numpy().tobytes(),
                    "dtype": str(value.numpy().dtype), "shape": tuple(value.shape),
                }
                for key, value in tensors.items()
            },
            "batch_size": len(batch), "device": None, "metadata": {"response_length": 9},
        }  # fmt: skip
        path = target / f"global_step_{step}_training_input.pkl"
        path.write_bytes(pickle.dumps(TrainingInputBatch(state)))


def openrlhf(folder: Path, made: list[Sequence]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for step, batch in _steps(made).items():
        a = arrays(batch)
        before = a["ids"].shape[1] - a["responses"].shape[1]

        def shifted(values: torch.Tensor, before: int = before) -> torch.Tensor:
            return torch.cat([torch.zeros(len(values), before - 1, dtype=values.dtype), values], 1)

        torch.save(
            {
                "sequences": a["ids"], "attention_mask": a["attention"],
                "action_mask": shifted(a["sampled"]),
                "rollout_log_probs": shifted(a["sampler"]),
                "action_log_probs": shifted(a["trainer"]),
                "advantages": shifted(a["advantages"]),
                "rewards": torch.tensor([s.reward for s in batch]),
            },
            folder / f"experience_step{step}_rank0.pt",
        )  # fmt: skip


def slime(folder: Path, made: list[Sequence]) -> None:
    for name in ("rollout_data", "train_data"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for step, batch in _steps(made).items():
        samples = [
            {
                "group_index": s.group, "index": i, "prompt": "...", "tokens": s.ids,
                "response": "...", "response_length": len(s.response), "label": None,
                "reward": s.reward, "loss_mask": [int(own) for own in s.sampled],
                "weight_versions": [str(s.version)],
                "rollout_log_probs": [0.0 if v is None else v for v in s.sampler],
                "status": "completed", "metadata": {},
                "prefix_cache_info": {"cached_tokens": 0, "total_prompt_tokens": len(s.prompt)},
            }
            for i, s in enumerate(batch)
        ]  # fmt: skip
        torch.save({"rollout_id": step, "samples": samples}, folder / f"rollout_data/{step}.pt")
        # The trainer orders samples by rank, so that places differ from the rollout's.
        trained = [
            {
                "sample_index": i, "rollout_position": i, "data_parallel_rank": i % 2,
                "tokens": torch.tensor(s.ids), "response_lengths": len(s.response),
                "loss_masks": torch.tensor([int(own) for own in s.sampled]),
                "rollout_log_probs": torch.tensor([0.0 if v is None else v for v in s.sampler]),
                "log_probs": torch.tensor([0.0 if v is None else v for v in s.trainer]),
                "advantages": torch.full((len(s.response),), s.advantage),
            }
            for i, s in sorted(enumerate(batch), key=lambda item: item[0] % 2)
        ]  # fmt: skip
        torch.save(
            {"format_version": 2, "rollout_id": step, "rank": 0, "samples": trained},
            folder / f"train_data/{step}.pt",
        )


def areal(folder: Path, made: list[Sequence]) -> None:
    """As inside ppo_update: logprobs and loss_mask rolled by -1, versions not."""
    folder.mkdir(parents=True, exist_ok=True)
    for step, batch in _steps(made).items():
        longest = max(len(s.ids) for s in batch)

        def padded(rows: list[list[Any]], filler: Any, longest: int = longest) -> torch.Tensor:
            return torch.tensor([row + [filler] * (longest - len(row)) for row in rows])

        mask = padded([[0] * len(s.prompt) + [int(own) for own in s.sampled] for s in batch], 0)
        version = torch.tensor([[s.version] for s in batch])
        torch.save(
            {
                "input_ids": padded([s.ids for s in batch], PAD),
                "attention_mask": padded([[1] * len(s.ids) for s in batch], 0),
                "loss_mask": torch.roll(mask, -1, dims=-1),
                "logprobs": padded([s.full("sampler", 0.0) for s in batch], 0.0).roll(-1, -1),
                "prox_logp": padded([s.full("trainer", 0.0) for s in batch], 0.0).roll(-1, -1),
                "versions": torch.where(mask > 0, version, -1),
                "rewards": torch.tensor([s.reward for s in batch]),
            },
            folder / f"areal_step{step}_batch.pt",
        )


def areal_text(folder: Path, made: list[Sequence]) -> None:
    for task, (prompt, answers) in enumerate(TEXTS):
        _jsonl(folder / f"rollout/3/{task}.jsonl", [
            {
                "task_id": task, "sample_idx": i, "seqlen": 20, "prompt_len": 9, "head_version": 3,
                "tail_version": 3, "reward": 1.0 - i, "prompt": prompt, "completion": answer,
            }
            for i, answer in enumerate(answers)
        ])  # fmt: skip


def _data_proto(module: str, tensors: Any, extra: Any, meta: Any) -> bytes:
    def _make_td(cls: Any, state: Any) -> Any:
        raise RuntimeError("only its name is pickled")

    class TensorDict:
        def __init__(self, state: Any) -> None:
            self.state = state

        def __reduce__(self) -> Any:
            return _make_td, (TensorDict, {"_tensordict": self.state, "_device": None})

    class DataProto:
        def __getstate__(self) -> Any:
            buffer = io.BytesIO()
            torch.save(TensorDict(tensors), buffer)
            return buffer.getvalue(), extra, meta

    _module("tensordict._reductions", _make_td=_make_td)
    _module("tensordict._td", TensorDict=TensorDict)
    _module(module, DataProto=DataProto)
    return pickle.dumps(DataProto())


def verl(folder: Path, made: list[Sequence]) -> None:
    """DataProto.save_to_disk."""
    folder.mkdir(parents=True, exist_ok=True)
    for step, batch in _steps(made).items():
        a = arrays(batch)
        tensors = {
            "input_ids": a["ids"], "responses": a["responses"], "attention_mask": a["attention"],
            "response_mask": a["sampled"], "rollout_log_probs": a["sampler"],
            "old_log_probs": a["trainer"], "advantages": a["advantages"],
            "position_ids": (a["attention"].cumsum(-1) - 1).clamp(min=0),
        }  # fmt: skip
        extra = {"uid": np.array([f"prompt-{s.group}" for s in batch], dtype=object)}
        content = _data_proto("verl.protocol", tensors, extra, {"global_steps": step})
        (folder / f"step_{step}.pkl").write_bytes(content)


def verl_text(folder: Path, made: list[Sequence]) -> None:
    _jsonl(folder / "7.jsonl", [
        {"input": prompt, "output": answer, "gts": None, "score": 1.0 - i, "step": 7, "uid": str(n)}
        for n, (prompt, answers) in enumerate(TEXTS) for i, answer in enumerate(answers)
    ])  # fmt: skip


def roll(folder: Path, made: list[Sequence]) -> None:
    (folder / "train").mkdir(parents=True, exist_ok=True)
    for step, batch in _steps(made).items():
        a = arrays(batch)
        before = a["ids"].shape[1] - a["responses"].shape[1]

        def front(values: torch.Tensor, n: int) -> torch.Tensor:
            return torch.cat([torch.zeros(len(values), n, dtype=values.dtype), values], 1)

        tensors = {
            "input_ids": a["ids"], "attention_mask": a["attention"],
            "response_mask": front(a["sampled"], before),
            "infer_logprobs": front(a["sampler"], before - 1),
            "old_log_probs": front(a["trainer"], before - 1),
            "advantages": front(a["advantages"], before - 1),
            "scores": torch.tensor([s.reward for s in batch]),
        }  # fmt: skip
        content = _data_proto(
            "roll.distributed.scheduler.protocol", tensors, {}, {"global_step": step}
        )
        (folder / f"train/step_{step:06d}.pkl").write_bytes(content)


def roll_text(folder: Path, made: list[Sequence]) -> None:
    rows = [
        (prompt, answer, 1.0 - i) for prompt, answers in TEXTS for i, answer in enumerate(answers)
    ]
    _jsonl(folder / "rollout_dump_data.step_3.jsonl", [{
        "global_step": [3] * len(rows), "id": [str(i) for i in range(len(rows))],
        "prompt": [row[0] for row in rows], "responses": [row[1] for row in rows],
        "scores": [row[2] for row in rows],
    }])  # fmt: skip


def ms_swift(folder: Path, made: list[Sequence]) -> None:
    rows = [
        (prompt, answer, 0.5 - i) for prompt, answers in TEXTS for i, answer in enumerate(answers)
    ]
    _jsonl(folder / "completions.jsonl", [{
        "step": ["3"] * len(rows), "prompt": [row[0] for row in rows],
        "completion": [row[1] for row in rows], "accuracy": [1.0] * len(rows),
        "advantages": [row[2] for row in rows],
    }])  # fmt: skip


def pipeline_rl(folder: Path, made: list[Sequence]) -> None:
    groups: dict[tuple[int, int], list[Sequence]] = {}
    for s in made:
        groups.setdefault((s.step, s.group), []).append(s)
    _jsonl(folder / "streams/actor/0/0/0.jsonl", [
        [
            {
                "text": "...", "n_predicted": 5, "reward": s.reward, "ref_logprobs": [],
                "logprobs": [v for v in s.sampler if v is not None], "input_ids": s.ids,
                "labels": [-100] * len(s.prompt) + [
                    token if own else -100
                    for token, own in zip(s.response, s.sampled, strict=True)
                ],
                "group_id": f"{s.step}-{s.group}", "finished": True,
                "prompt_tokens": len(s.prompt), "output_tokens": len(s.response),
                "metadata": {"model_version": s.version},
            }
            for s in group
        ]
        for group in groups.values()
    ])  # fmt: skip


def trl(folder: Path, made: list[Sequence]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "completions").mkdir(parents=True, exist_ok=True)
    rows = [
        (prompt, answer, 0.5 - i) for prompt, answers in TEXTS for i, answer in enumerate(answers)
    ]
    table = pa.table({
        "step": [5] * len(rows), "prompt": [row[0] for row in rows],
        "completion": [row[1] for row in rows], "accuracy": [1.0] * len(rows),
        "advantage": [row[2] for row in rows],
    })  # fmt: skip
    pq.write_table(table, folder / "completions/completions_00005.parquet")


def martingale(folder: Path, made: list[Sequence]) -> None:
    """Needs ``pip install martingale``; the times of writing are set to 0."""
    from martingale.record import Recorder, SamplerConfig

    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(folder)
    sampler = SamplerConfig(
        temperature=1.0, top_p=1.0, logprobs_mode="processed_logprobs", dtype="bfloat16",
        engine="vllm", temperature_applied=True,
    )  # fmt: skip
    revisions = [
        recorder.publish_revision(f"{step:064x}", b"tokenizer", sampler, step=step)
        for step in sorted({s.version for s in made})
    ]
    for i, s in enumerate(made):
        revision = revisions[s.version].digest
        with recorder.sequence(actor_id=0, sequence_id=f"prompt-{i}", prompt_ids=s.prompt) as draft:
            for token, logprob in zip(s.response, s.sampler, strict=True):
                draft.token(revision, token, 0.0 if logprob is None else logprob)
            draft.reward(s.reward)
        recorder.score(draft.record.digest, revision, [0.0 if v is None else v for v in s.trainer])
    recorder.ledger.close()
    with sqlite3.connect(folder / "tokens.db") as database:
        for table in ("llm_revisions", "sequences"):
            database.execute(f"UPDATE {table} SET created_at = 0")
    database.execute("PRAGMA journal_mode = DELETE")
    database.execute("VACUUM")
    database.close()


WRITERS = {
    "plain": plain,
    "prime-rl": prime_rl, "nemo-rl": nemo_rl, "skyrl": skyrl, "openrlhf": openrlhf,
    "slime": slime, "areal": areal, "areal-text": areal_text, "verl": verl,
    "verl-text": verl_text, "roll": roll, "roll-text": roll_text, "ms-swift": ms_swift,
    "pipeline-rl": pipeline_rl, "trl": trl, "martingale": martingale,
}  # fmt: skip


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, write in WRITERS.items():
        shutil.rmtree(target / name, ignore_errors=True)
        try:
            write(target / name, sequences(3 if name == "martingale" else 34))
        except ImportError as error:
            print(f"{name}: left out ({error})")


if __name__ == "__main__":
    main()
