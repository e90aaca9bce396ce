"""Synthetic rollout logs of a small policy whose logits are known, so that every fault is exact.

The policy has a body (a hidden vector a context, the last three tokens) and a head. Weights of
version v are the initial ones plus v steps in a fixed direction. The engine samples from its own,
slightly noisy, logits; what it writes down and what the trainer scores are separate settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.checks import all_checks, explain
from mismatch_audit.rollouts.checks.base import CheckResult
from mismatch_audit.rollouts.schema import LISTS, SCALARS, Header, Origin, sequence_schema

VOCAB, WIDTH, CONTEXTS = 32, 8, 997
BOS, EOS, NEWLINE = 0, 1, 2

Rows = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """How a log comes about. Clean by default: float32 kernels, weights in step.

    engine_version, trainer_version: step -> version; head_version, body_version: of the engine's
    head, and of its body in every other context. divided: the trainer takes log p / T.
    engine_noise, trainer_noise: sd of the noise on each logit. noise_factor(rows, position) -> [R]
    multiplies the engine's; trainer_factor the trainer's. learning: size of one weight update.
    dtypes: of trainer and engine, in the header.  row_version(rows) -> [R]: overrides the
    engine's version a row.  claims: the log gives the trainer's version as the engine's.
    """

    seed: int = 0
    steps: int = 6
    prompts: int = 10
    siblings: int = 4
    max_len: int = 28
    prompt_len: tuple[int, int] = (4, 12)
    engine_noise: float = 2e-6
    trainer_noise: float = 0.0
    temperature: float = 1.0
    trainer_temperature: float | None = None
    rescore_temperature: float | None = None
    raw: bool = False
    top_p: float = 1.0
    top_k: int = 0
    penalty: float = 1.0
    learning: float = 0.1
    dtypes: tuple[str, str] = ("float32", "float32")
    engine_version: Callable[[int], int] = lambda step: step
    trainer_version: Callable[[int], int] = lambda step: step
    head_version: Callable[[int], int] | None = None
    body_version: Callable[[int], int] | None = None
    divided: bool = False
    row_version: Callable[[Rows], np.ndarray] | None = None
    noise_factor: Callable[[Rows, int], np.ndarray] | None = None
    trainer_factor: Callable[[Rows, int], np.ndarray] | None = None
    claims: bool = False

    def claimed(self, step: int, meta: Rows, i: int) -> int:
        return self.trainer_version(step) if self.claims else int(meta["engine_version"][i])


@dataclass
class Log:
    """Rows as dicts of scalars and per-token lists, and the header."""

    rows: list[Rows]
    header: Header
    batch_rows: int = 64

    def batches(self) -> Iterator[TokenBatch]:
        for start in range(0, len(self.rows), self.batch_rows):
            yield to_batch(self.rows[start : start + self.batch_rows], start)

    def results(self) -> list[CheckResult]:
        """What every check says of the log, the leading cause first."""
        checks = all_checks()
        for batch in self.batches():
            for check in checks:
                check.update(batch)
        return explain([r for check in checks for r in check.finish(self.header)])

    def without(self, *columns: str) -> Log:
        rows = [{k: v for k, v in row.items() if k not in columns} for row in self.rows]
        return Log(rows, self.header, self.batch_rows)


def to_batch(rows: list[Rows], first_row: int = 0) -> TokenBatch:
    schema = sequence_schema()
    names = [f.name for f in schema if any(f.name in row for row in rows)]
    arrays = []
    for name in names:
        values = [_plain(row.get(name), name) for row in rows]
        arrays.append(pa.array(values, type=schema.field(name).type))
    record = pa.RecordBatch.from_arrays(arrays, schema=pa.schema([schema.field(n) for n in names]))
    return TokenBatch(record, source="synthetic", first_row=first_row)


def _plain(value: Any, name: str) -> Any:
    if value is None or name in SCALARS:
        return value.item() if hasattr(value, "item") else value
    if LISTS[name].startswith("float"):
        return [None if v != v else float(v) for v in np.asarray(value, dtype=np.float64)]
    return np.asarray(value).tolist()


class Policy:
    """Logits of (context, version) as hidden vector times head, both moving with the version."""

    def __init__(self, seed: int, learning: float) -> None:
        rng = np.random.default_rng(seed)
        # contexts differ in confidence, as those of a language model do
        scale = rng.choice([0.5, 1.0, 2.0, 4.0], CONTEXTS)[:, None]
        self.body = rng.normal(size=(CONTEXTS, WIDTH)) * scale / np.sqrt(WIDTH)
        self.head = rng.normal(size=(VOCAB, WIDTH)) * 1.5
        self.body_move = learning * rng.normal(size=self.body.shape) / np.sqrt(WIDTH)
        self.head_move = learning * 0.2 * rng.normal(size=self.head.shape)

    def logits(self, context: np.ndarray, body: np.ndarray, head: np.ndarray) -> np.ndarray:
        """``[R, V]``: body, head: versions a row."""
        hidden = self.body[context] + body[:, None] * self.body_move[context]
        z = hidden @ self.head.T + head[:, None] * (hidden @ self.head_move.T)
        z[:, EOS] = 1.0  # so that lengths vary
        z[:, BOS] = -30.0
        return z


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def truncate(logp: np.ndarray, top_p: float, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Renormalised log-probs on the kept support, and the mass kept ``[R]``."""
    if top_p >= 1.0 and not top_k:
        return logp, np.ones(len(logp))
    order = np.argsort(-logp, axis=-1)
    ranked = np.take_along_axis(np.exp(logp), order, -1)
    keep_ranked = np.cumsum(ranked, -1) - ranked < top_p
    if top_k:
        keep_ranked[:, top_k:] = False
    keep = np.zeros_like(keep_ranked)
    np.put_along_axis(keep, order, keep_ranked, -1)
    mass = (np.exp(logp) * keep).sum(-1)
    return np.where(keep, logp - np.log(mass)[:, None], -np.inf), mass


def make_log(recipe: Recipe | None = None, **changes: Any) -> Log:
    """A log by the recipe (or the default one with changes)."""
    r = replace(recipe or Recipe(), **changes)
    policy = Policy(r.seed, r.learning)
    rng = np.random.default_rng([r.seed, 1])
    rows: list[Rows] = []
    for step in range(r.steps):
        rows += _step(r, policy, rng, step)
    header = Header(
        framework="synthetic",
        format="synthetic",
        eos_ids=(EOS,),
        vocab_size=VOCAB,
        tied_head=False,
        position_type="rope",
        trainer_dtype=r.dtypes[0],
        engine_dtype=r.dtypes[1],
    )
    return Log(rows, header)


def _step(r: Recipe, policy: Policy, rng: np.random.Generator, step: int) -> list[Rows]:
    count = r.prompts * r.siblings
    meta: Rows = {"step": np.full(count, step), "sibling": np.arange(count) % r.siblings}
    lengths = rng.integers(r.prompt_len[0], r.prompt_len[1] + 1, r.prompts)
    prompts = [np.r_[BOS, rng.integers(3, VOCAB, n - 1)] for n in lengths]
    meta["prompt_len"] = np.repeat(lengths, r.siblings)
    meta["prompt"] = np.arange(count) // r.siblings
    meta["n_left_pad"] = rng.integers(0, 4, count) * rng.integers(0, 4, count)
    block = 4
    meta["num_cached_tokens"] = np.where(
        meta["sibling"] > 0, meta["prompt_len"] // block * block, 0
    )
    meta["engine_version"] = (
        r.row_version(meta) if r.row_version else np.full(count, r.engine_version(step))
    )
    engine, trainer = meta["engine_version"], np.full(count, r.trainer_version(step))
    head = engine if r.head_version is None else np.full(count, r.head_version(step))
    tokens = np.zeros((count, max(lengths) + r.max_len), dtype=np.int64)
    for i in range(count):
        tokens[i, : meta["prompt_len"][i]] = prompts[meta["prompt"][i]]
    names = (
        "sampler_logprob",
        "trainer_logprob",
        "rescore_logprob",
        "ref_logprob",
        "entropy",
        "kept_mass",
    )
    out = {name: np.full((count, r.max_len), np.nan) for name in names}
    done = np.zeros(count, dtype=bool)
    used = np.zeros(count, dtype=np.int64)
    at = np.arange(count)
    seen = np.zeros((count, VOCAB), dtype=bool)
    for i in range(count):
        seen[i, prompts[meta["prompt"][i]]] = True
    for t in range(r.max_len):
        place = meta["prompt_len"] + t
        context = (
            tokens[at, place - 1] * 7 + tokens[at, place - 2] * 131 + tokens[at, place - 3] * 577
        ) % CONTEXTS
        factor = r.noise_factor(meta, t) if r.noise_factor else np.ones(count)
        noise = rng.normal(size=(count, VOCAB)) * (r.engine_noise * factor)[:, None]
        body = engine
        if r.body_version:
            body = np.where(context % 2 == 0, r.body_version(step), engine)
        z = policy.logits(context, body, head) + noise
        raw = log_softmax(z)
        shown = z
        if r.penalty != 1.0:  # as engines do: positive logits divided, negative multiplied
            shown = np.where(seen, np.where(z > 0, z / r.penalty, z * r.penalty), z)
        drawn, mass = truncate(log_softmax(shown / r.temperature), r.top_p, r.top_k)
        gumbel = rng.gumbel(size=drawn.shape)
        choice = np.argmax(drawn + gumbel, axis=-1)
        own = rng.normal(size=(count, VOCAB)) * r.trainer_noise
        if r.trainer_factor:
            own = own * r.trainer_factor(meta, t)[:, None]
        zt = policy.logits(context, trainer, trainer) + own
        tt = r.temperature if r.trainer_temperature is None else r.trainer_temperature
        p = log_softmax(zt) / tt if r.divided else log_softmax(zt / tt)
        rescore = policy.logits(context, trainer, trainer)
        rescore = rescore + rng.normal(size=rescore.shape) * r.engine_noise
        rt = r.temperature if r.rescore_temperature is None else r.rescore_temperature
        init = np.zeros(count, dtype=np.int64)
        values = {
            "sampler_logprob": (raw if r.raw else drawn)[at, choice],
            "trainer_logprob": p[at, choice],
            "rescore_logprob": log_softmax(rescore / rt)[at, choice],
            "ref_logprob": log_softmax(policy.logits(context, init, init) / tt)[at, choice],
            "entropy": -(np.exp(p) * p).sum(-1),
            "kept_mass": mass,
        }
        live = ~done
        for name, value in values.items():
            out[name][live, t] = value[live]
        tokens[at[live], place[live]] = choice[live]
        seen[at[live], choice[live]] = True
        used[live] += 1
        done |= choice == EOS
    return [_row(r, meta, tokens, out, used, step, i) for i in range(count)]


def _row(
    r: Recipe,
    meta: Rows,
    tokens: np.ndarray,
    out: dict[str, np.ndarray],
    used: np.ndarray,
    step: int,
    i: int,
) -> Rows:
    n, m = int(meta["prompt_len"][i]), int(used[i])
    ids = tokens[i, : n + m]
    pad = np.full(n, np.nan)
    row: Rows = {name: np.concatenate([pad, value[i, :m]]) for name, value in out.items()}
    row |= {
        "run_id": "run-0",
        "engine": "engine-1",
        "step": step,
        "sample_id": f"{step}-{i}",
        "group_id": f"{step}-{meta['prompt'][i]}",
        "environment": ("maths", "code")[int(meta["prompt"][i]) % 2],
        "modality": ("text", "image")[int(meta["prompt"][i]) // 2 % 2],
        "weights_version_min": r.claimed(step, meta, i),
        "weights_version_max": r.claimed(step, meta, i),
        "trainer_version": r.trainer_version(step),
        "engine_age": step,
        "prompt_len": n,
        "n_left_pad": int(meta["n_left_pad"][i]),
        "num_cached_tokens": int(meta["num_cached_tokens"][i]),
        "microbatch_rows": 1 + i % 2 * 3,
        "temperature": r.temperature,
        "top_p": r.top_p,
        "top_k": r.top_k,
        "min_p": 0.0,
        "repetition_penalty": r.penalty,
        "logprobs_mode": "raw_logprobs" if r.raw else "processed_logprobs",
        "finish_reason": "stop" if ids[-1] == EOS else "length",
        "sequence_advantage": float((-1) ** i),
        "token_ids": ids,
        "origin": np.repeat([int(Origin.PROMPT), int(Origin.SAMPLED)], [n, m]),
        "loss_mask": np.arange(n + m) >= n,
        "turn_index": np.zeros(n + m, dtype=int),
        "current_logprob": row["trainer_logprob"].copy(),
        "routing_changed": np.arange(n + m) % 7 == 0,
    }
    # what a correction would apply: the truncated importance weight
    row["applied_weight"] = np.minimum(np.exp(row["trainer_logprob"] - row["sampler_logprob"]), 2.0)
    return row


def found(results: list[CheckResult], *, notes: bool = False) -> list[str]:
    """Codes found, the leading cause first."""
    return [r.code for r in results if r.status == "found" and (notes or r.severity != "note")]


@dataclass
class Outcome:
    """What one fixture gave, for the table in the documentation."""

    led: str
    others: list[str] = field(default_factory=list)


CLEAN_KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"engine_noise": 0.03, "trainer_noise": 0.01, "dtypes": ("bfloat16", "bfloat16")},
    "noisy trainer": {
        "engine_noise": 2e-6,
        "trainer_noise": 0.03,
        "dtypes": ("bfloat16", "bfloat16"),
    },
    "temperature": {
        "temperature": 0.6,
        "engine_noise": 0.02,
        "dtypes": ("bfloat16", "bfloat16"),
    },
    "asynchronous": {
        "steps": 8,
        "engine_version": lambda step: max(0, step - 1),
        "engine_noise": 0.02,
        "dtypes": ("bfloat16", "bfloat16"),
    },
    "one step": {"steps": 1, "engine_noise": 0.02, "dtypes": ("bfloat16", "bfloat16")},
    "few prompts": {"steps": 3, "prompts": 3},
    "no siblings": {
        "siblings": 1,
        "prompts": 40,
        "engine_noise": 0.02,
        "dtypes": ("bfloat16", "bfloat16"),
    },
    "long run": {
        "steps": 24,
        "prompts": 4,
        "siblings": 2,
        "engine_noise": 0.02,
        "dtypes": ("bfloat16", "bfloat16"),
    },
    "learns fast": {"learning": 0.5, "engine_noise": 0.02, "dtypes": ("bfloat16", "bfloat16")},
}
"""Recipes of logs without a fault."""
