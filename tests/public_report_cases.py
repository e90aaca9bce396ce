"""Public reports of trainer-engine mismatch, each as a small log with its symptom and a clean twin.

The fixtures reproduce the *mechanism* a report names (which version was served, what was written
down), not its numbers: those depend on the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from rollout_fixtures import EOS, NEWLINE, Log, Recipe, Rows, make_log

from mismatch_audit.rollouts.checks import CheckResult
from mismatch_audit.rollouts.schema import Origin

GITHUB = "https://github.com/"
BF16: dict[str, Any] = {
    "engine_noise": 0.02, "trainer_noise": 0.005, "dtypes": ("bfloat16", "bfloat16"),
}  # fmt: skip
FP32: dict[str, Any] = {}


@dataclass(frozen=True)
class Report:
    """code: what the audit must lead with.  fault: changes of the recipe, a change of each row, or
    both.  base: recipe of both twins.  needs: columns without which the check must say
    UNOBSERVED.  seen: "log", or why a recorded log cannot show it (then code is unobserved)."""

    number: int
    links: tuple[str, ...]
    symptom: str
    code: str
    base: dict[str, Any]
    fault: dict[str, Any]
    edit: Callable[[Log], Log] | None = None
    both_edit: Callable[[Log], Log] | None = None
    needs: tuple[str, ...] = ()
    unseen: str = ""
    drops: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.number}-{self.links[0].split('/')[1]}-{self.links[0].split('/')[-1]}"

    def faulty(self) -> Log:
        log = make_log(replace(Recipe(**self.base), **self.fault))
        log = self.both_edit(log) if self.both_edit else log
        return self.edit(log) if self.edit else log

    def faulty_without_needs(self) -> Log:
        """The same log without the columns that the check needs (ids and names must stay)."""
        log = make_log(replace(Recipe(**self.base), **self.fault), steps=1, prompts=2)
        return log.without(*self.needs)

    def clean(self) -> Log:
        log = copy(clean_log(tuple(sorted(self.base.items(), key=lambda item: item[0]))))
        return self.both_edit(log) if self.both_edit else log


@cache
def clean_log(base: tuple[tuple[str, Any], ...]) -> Log:
    return make_log(**dict(base))


def copy(log: Log) -> Log:
    rows = [
        {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in r.items()} for r in log.rows
    ]
    return Log(rows, replace(log.header), log.batch_rows)


# edits


def each(change: Callable[[int, Rows], None]) -> Callable[[Log], Log]:
    def edit(log: Log) -> Log:
        for i, row in enumerate(log.rows):
            change(i, row)
        return log

    return edit


def drop(*columns: str) -> Callable[[Log], Log]:
    return lambda log: log.without(*columns)


def header(**facts: Any) -> Callable[[Log], Log]:
    return lambda log: Log(log.rows, replace(log.header, **facts), log.batch_rows)


def chain(*edits: Callable[[Log], Log]) -> Callable[[Log], Log]:
    def edit(log: Log) -> Log:
        for one in edits:
            log = one(log)
        return log

    return edit


def sampled(row: Rows) -> np.ndarray:
    return np.flatnonzero(row["origin"] == Origin.SAMPLED)


def lose_values(i: int, row: Rows) -> None:
    """NaN where p is near 1, as an engine gives."""
    certain = np.flatnonzero(np.nan_to_num(row["trainer_logprob"], nan=-9) > -0.01)
    row["sampler_logprob"][certain[::3]] = np.nan


def lose_after_reload(i: int, row: Rows) -> None:
    if row["step"] > 0:
        row["sampler_logprob"][sampled(row)[i % 5 :: 9]] = np.nan


def shift_trainer(i: int, row: Rows) -> None:
    moved = np.r_[row["trainer_logprob"][1:], np.nan]
    row["trainer_logprob"] = row["current_logprob"] = moved


def zero_tail(i: int, row: Rows) -> None:
    at = sampled(row)
    if i % 3 == 0 and len(at) > 8:
        row["sampler_logprob"][at[-5:]] = 0.0


def forced_eos(i: int, row: Rows) -> None:
    """EOS with loss and a placeholder after a response that was cut off."""
    if row["finish_reason"] != "length":
        return
    for name, value in list(row.items()):
        if isinstance(value, np.ndarray):
            row[name] = np.r_[value, value[-1]]
    row["token_ids"][-1] = EOS
    row["sampler_logprob"][-1] = 0.0
    row["trainer_logprob"][-1] = row["current_logprob"][-1] = -4.0 - (i % 7) / 3
    row["finish_reason"] = "stop"


def other_stop(i: int, row: Rows) -> None:
    """The engine stops at a second EOS that the trainer's tokenizer does not name."""
    if row["finish_reason"] == "stop":
        row["token_ids"][-1] = 31


def as_turns(make_next: Callable[[np.ndarray, Rows], np.ndarray]) -> Callable[[Log], Log]:
    """Every sequence gets a second turn whose prompt is made from the first's tokens."""

    def edit(log: Log) -> Log:
        rows: list[Rows] = []
        for row in log.rows:
            first = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in row.items()}
            history = make_next(row["token_ids"], row)
            prompt = np.r_[history, NEWLINE, 5, 6, 7]
            m = len(row["token_ids"]) - row["prompt_len"]
            second = dict(first)
            for name, value in first.items():
                if isinstance(value, np.ndarray) and name != "token_ids":
                    fill = (
                        np.full(len(prompt), np.nan)
                        if value.dtype.kind == "f"
                        else (np.zeros(len(prompt), dtype=value.dtype))
                    )
                    second[name] = np.r_[fill, value[-m:]]
            second["token_ids"] = np.r_[prompt, row["token_ids"][-m:]]
            second["prompt_len"] = len(prompt)
            rows += [first, second]
        return Log(rows, log.header, log.batch_rows)

    return edit


def same_history(ids: np.ndarray, row: Rows) -> np.ndarray:
    return ids


def retokenised(ids: np.ndarray, row: Rows) -> np.ndarray:
    """Two tokens of the response become one other."""
    n = row["prompt_len"]
    if len(ids) - n < 12:
        return ids
    return np.r_[ids[: n + 3], 30 if ids[n + 3] != 30 else 29, ids[n + 5 :]]


def thinking_stripped(ids: np.ndarray, row: Rows) -> np.ndarray:
    """The template drops the first part of the response, as it does with thinking."""
    n = row["prompt_len"]
    return np.r_[ids[:n], ids[n + max(1, (len(ids) - n) // 2) :]]


def multi_turn(separator: bool) -> Callable[[Log], Log]:
    """Prompts hold two rendered turns; responses two sampled turns with one of a tool."""

    def edit(log: Log) -> Log:
        for row in log.rows:
            n = row["prompt_len"]
            if len(row["token_ids"]) - n < 4:
                continue
            rendered = np.array([0, 5, 6, EOS, NEWLINE, 8, 9, EOS, NEWLINE])
            at = n + max(1, (len(row["token_ids"]) - n) // 2)
            between = np.array([EOS, NEWLINE, 11, 12] if separator else [EOS, 11, 12])
            for name, value in list(row.items()):
                if not isinstance(value, np.ndarray):
                    continue
                none = np.nan if value.dtype.kind == "f" else 0
                head = np.full(len(rendered), none, dtype=value.dtype)
                mid = np.full(len(between), none, dtype=value.dtype)
                if name == "token_ids":
                    head, mid = rendered, between
                if name == "origin":
                    mid = np.array([Origin.SAMPLED, *[Origin.ENVIRONMENT] * (len(between) - 1)])
                row[name] = np.r_[head, value[:at], mid, value[at:]]
            row["prompt_len"] = n + len(rendered)
        return log

    return edit


def self_noise(i: int, row: Rows) -> None:
    rng = np.random.default_rng(i)
    noise = 0.02 * rng.normal(size=len(row["trainer_logprob"]))
    row["current_logprob"] = row["trainer_logprob"] + noise


def routed(i: int, row: Rows) -> None:
    """Tokens whose experts changed are ten times as far off."""
    changed = row["routing_changed"]
    d = row["trainer_logprob"] - row["sampler_logprob"]
    row["trainer_logprob"] = np.where(
        changed, row["sampler_logprob"] + 10 * d, row["trainer_logprob"]
    )
    row["current_logprob"] = row["trainer_logprob"].copy()
    unclipped(i, row)


def short_ones_off(i: int, row: Rows) -> None:
    d = row["trainer_logprob"] - row["sampler_logprob"]
    factor = 10 if len(sampled(row)) <= 8 else 1
    row["trainer_logprob"] = row["current_logprob"] = row["sampler_logprob"] + factor * d
    unclipped(i, row)


def copied(i: int, row: Rows) -> None:
    row["trainer_logprob"] = row["current_logprob"] = row["sampler_logprob"].copy()
    unclipped(i, row)


def clipped_narrow(i: int, row: Rows) -> None:
    ratio = np.exp(row["trainer_logprob"] - row["sampler_logprob"])
    row["applied_weight"] = np.where(np.abs(ratio - 1) < 0.02, ratio, 0.0)


def unclipped(i: int, row: Rows) -> None:
    row["applied_weight"] = np.exp(row["trainer_logprob"] - row["sampler_logprob"])


def two_engines(i: int, row: Rows) -> None:
    row["engine"] = "engine-2" if row["step"] >= 3 else "engine-1"


def resumed(i: int, row: Rows) -> None:
    row["run_id"] = "run-1" if row["step"] >= 4 else "run-0"


def engine_lives(i: int, row: Rows) -> None:
    row["engine_age"] = row["step"] % 6


def one_microbatch_noisy(rows: Rows, t: int) -> np.ndarray:
    # rows 1, 3, ... were scored in micro-batches of 4
    return np.where(np.arange(len(rows["step"])) % 2 == 1, 6.0, 1.0)


STALE_CACHED = {
    "row_version": lambda m: np.where(m["num_cached_tokens"] > 0, 0, m["step"]),
    "claims": True,
}
"""Rows with a cached prefix see the first weights' keys and values."""
STALE_IMAGES = {
    "row_version": lambda m: np.where(m["prompt"] // 2 % 2 == 1, 0, m["step"]), "claims": True,
}  # fmt: skip
BASE_SERVED: dict[str, Any] = {"engine_version": lambda step: 0, "claims": True}
NO_VERSIONS = drop("weights_version_min", "weights_version_max", "trainer_version", "ref_logprob")
FROZEN: dict[str, Any] = {"learning": 0.0}

REPORTS: list[Report] = [
    Report(1, ("huggingface/trl/issues/5312",),
           "clean at first, then |d| 10 to 50 times higher: every generate() reloads the base",
           "SYNC_NOT_APPLIED", BF16, BASE_SERVED, both_edit=NO_VERSIONS, needs=("step",)),
    Report(2, ("verl-project/verl/issues/7495",),
           "KL climbs 36 times; pushes carry no adapter and change nothing",
           "ENGINE_SERVES_BASE", BF16, BASE_SERVED, needs=("ref_logprob",)),
    Report(3, ("verl-project/verl/pull/3821",),
           "an adapter is loaded under a random id and never attached",
           "ENGINE_SERVES_BASE", FP32, BASE_SERVED, needs=("ref_logprob",)),
    Report(4, ("modelscope/ms-swift/issues/9855",),
           "requests carry no adapter; the reward never rises; the dump is text alone",
           "ENGINE_SERVES_BASE", BF16, BASE_SERVED,
           edit=drop("sampler_logprob", "trainer_logprob"),
           needs=("sampler_logprob", "trainer_logprob"),
           drops=("sampler_logprob", "trainer_logprob"),
           unseen="the dump holds text, no log-probs"),
    Report(5, ("unslothai/unsloth/pull/8701",),
           "a source patch misses and every rollout comes from the base model",
           "SYNC_NOT_APPLIED", FP32, BASE_SERVED, both_edit=NO_VERSIONS, needs=("step",)),
    Report(6, ("PrimeIntellect-ai/prime-rl/pull/2714",),
           "KL 1e-3 to 2..5 at the first reload; buffers read NaN",
           "RELOAD_CORRUPTS", BF16,
           {"noise_factor": lambda m, t: np.where(m["step"] > 0, 150.0, 1.0)},
           edit=each(lose_after_reload), needs=("step",)),
    Report(7, ("vllm-project/vllm/issues/48312", "vllm-project/vllm/pull/44371"),
           "silent divergence after a reload (buffers, padding, stale pointers)",
           "RELOAD_CORRUPTS", BF16,
           {"noise_factor": lambda m, t: np.where(m["step"] > 0, 12.0, 1.0)}, needs=("step",)),
    Report(8, ("vllm-project/vllm/pull/51665",),
           "a tied head is not updated: 2.7e-6 to 0.023 after the first push",
           "PARTIAL_SYNC", FP32, {"head_version": lambda step: 0},
           both_edit=header(tied_head=True), needs=("ref_logprob",)),
    Report(10, ("verl-project/verl/pull/6896",),
           "packed expert weights are not understood by the reload",
           "PARTIAL_SYNC", FP32, {"body_version": lambda step: 0}, needs=("ref_logprob",)),
    Report(11, ("huggingface/trl/issues/6688",),
           "merging and unmerging an adapter in bf16 drifts with every push, at any learning rate",
           "FROZEN_GROWTH", {**BF16, **FROZEN, "steps": 9},
           {"noise_factor": lambda m, t: 1.0 + 1.0 * m["step"]},
           both_edit=header(correction={"learning_rate": 0}), needs=("step",)),
    Report(13, ("THUDM/slime/issues/1695",),
           "very high log-prob difference for a few steps after a resume",
           "AFTER_RESUME", {**BF16, "steps": 10},
           {"engine_version": lambda step: 0 if step in (4, 5) else step, "claims": True},
           both_edit=chain(each(resumed), drop("ref_logprob")), needs=("run_id",)),
    Report(14, ("PrimeIntellect-ai/prime-rl/pull/1650", "PrimeIntellect-ai/prime-rl/pull/2270"),
           "KL goes wild after some hundred steps: cached system prompts outlive weight updates",
           "STALE_PREFIX_CACHE", BF16, STALE_CACHED, needs=("num_cached_tokens",)),
    Report(15, ("NVIDIA-NeMo/RL/pull/4018",),
           "the mismatch grows with every refit and resets when the engine restarts",
           "GROWS_WITH_ENGINE_AGE", {**BF16, "steps": 12},
           {"noise_factor": lambda m, t: 1.0 + 2.0 * (m["step"] % 6)},
           both_edit=each(engine_lives), needs=("engine_age",)),
    Report(17, ("verl-project/verl/issues/6523",),
           "images come from an encoder cache of older weights",
           "STALE_ENCODER_CACHE", BF16, STALE_IMAGES, needs=("modality",)),
    Report(18, ("huggingface/trl/issues/4159",),
           "T=0.6: ratio of the first token is 2.0, and 0.85 to 1.15 usually",
           "RAW_LOGPROBS", {**BF16, "temperature": 0.6}, {"raw": True},
           needs=("sampler_logprob",)),
    Report(19, ("huggingface/trl/issues/6789", "huggingface/trl/pull/7269"),
           "top_p=0.8, top_k=1024: mean ratio 0.896, the mass kept",
           "TRUNCATED_SUPPORT", BF16, {"top_p": 0.8, "top_k": 1024}, needs=("sampler_logprob",)),
    Report(21, ("PrimeIntellect-ai/prime-rl/pull/697",),
           "log-probs are divided by T instead of the logits",
           "UNNORMALISED_TEMPERATURE", {**BF16, "temperature": 0.6}, {"divided": True},
           needs=("trainer_logprob",)),
    Report(23, ("radixark/miles/pull/1345",),
           "re-scoring goes out at a fixed temperature",
           "RESCORE_TEMPERATURE", {**BF16, "temperature": 0.6}, {"rescore_temperature": 1.0},
           needs=("rescore_logprob",)),
    Report(24, ("huggingface/trl/issues/5224",),
           "decode and re-tokenise between tool calls changes ids",
           "RETOKENISED_TURN", FP32, {}, edit=as_turns(retokenised),
           both_edit=None, needs=("token_ids",)),
    Report(25, ("rllm-org/rllm/pull/272", "rllm-org/rllm/issues/816"),
           "spikes in KL: text is encoded again and log-probs are padded with 0.0",
           "ZERO_FILLED_LOGPROBS", BF16, {}, edit=each(zero_tail), needs=("sampler_logprob",)),
    Report(26, ("verl-project/verl/issues/3720",),
           "the newline after EOS is missing between turns",
           "TURN_SEPARATOR_MISSING", FP32, {}, edit=multi_turn(False), needs=("origin",)),
    Report(27, ("verl-project/verl/issues/6854", "PrimeIntellect-ai/prime-rl/issues/1334",
                "NovaSky-AI/SkyRL/issues/2075"),
           "templates strip earlier thinking, so a turn does not start with the one before",
           "HISTORY_EDITED", FP32, {}, edit=as_turns(thinking_stripped), needs=("token_ids",)),
    Report(29, ("PrimeIntellect-ai/prime-rl/pull/1525",),
           "the trainer's log-probs are those of the next token",
           "SHIFTED_LOGPROBS", BF16, {}, edit=each(shift_trainer), needs=("trainer_logprob",)),
    Report(30, ("NovaSky-AI/SkyRL/pull/758",),
           "an appended EOS has loss and a placeholder log-prob of 0.0",
           "PLACEHOLDER_LAST_TOKEN", BF16, {}, edit=each(forced_eos), needs=("sampler_logprob",)),
    Report(32, ("huggingface/trl/pull/7039",),
           "97% of responses count as cut off: the trainer does not know the EOS they stop at",
           "STOP_WITHOUT_EOS", BF16, {}, edit=each(other_stop), needs=("finish_reason",)),
    Report(34, ("unslothai/unsloth/pull/6738", "unslothai/unsloth-zoo/pull/840"),
           "padded reference off by 2.7 to 3.6 nats, packed exact: no position ids",
           "LEFT_PADDING", BF16,
           {"trainer_factor": lambda m, t: np.where(m["n_left_pad"] > 0, 100.0, 1.0)},
           needs=("n_left_pad",)),
    Report(35, ("huggingface/trl/issues/6800", "huggingface/trl/pull/6819"),
           "sequence log-probs off by 34 nats under left padding",
           "LEFT_PADDING", FP32,
           {"trainer_noise": 0.5, "trainer_factor": lambda m, t: (m["n_left_pad"] > 0) * 1.0},
           needs=("n_left_pad",)),
    Report(36, ("NVIDIA-NeMo/RL/issues/1801",),
           "mean exp|d| up to 6.5e9: fused RoPE keeps bf16 intermediates",
           "GROWS_WITH_POSITION", {**BF16, "max_len": 64},
           {"noise_factor": lambda m, t: 1 + np.where(
               (m["sibling"] + t) % 5 == 0, 2.5, 0.3) * (m["prompt_len"] + t) ** 1.0},
           needs=("sampler_logprob",)),
    Report(38, ("allenai/open-instruct/issues/1473",),
           "the difference grows with a learning rate of 0",
           "FROZEN_GROWTH", {**BF16, **FROZEN, "steps": 9},
           {"noise_factor": lambda m, t: 1.0 + 1.0 * m["step"]}, needs=("step",)),
    Report(39, ("vllm-project/vllm/pull/43419",),
           "mean |d| 0.0032 to 0.00005 once sliding layers get their own RoPE settings",
           "GROWS_WITH_POSITION", {**BF16, "engine_noise": 0.001, "trainer_noise": 0.0001,
                                   "max_len": 64},
           {"noise_factor": lambda m, t: 1 + 0.5 * (m["prompt_len"] + t)},
           needs=("sampler_logprob",)),
    Report(40, ("verl-project/verl/issues/6280", "verl-project/verl/issues/2996",
                "verl-project/verl/issues/2305"),
           "on-policy clip fraction is not 0: the trainer does not reproduce its own log-probs",
           "TRAINER_NOT_REPRODUCIBLE", BF16, {}, edit=each(self_noise),
           needs=("current_logprob",)),
    Report(42, ("NVIDIA/Megatron-LM/issues/4168", "PrimeIntellect-ai/prime-rl/pull/2808"),
           "10% of routers choose other experts per forward; KL .0015 to .0002 with replay",
           "ROUTING_CHANGED", {**BF16, "engine_noise": 0.01}, {}, edit=each(routed),
           needs=("routing_changed",)),
    Report(44, ("PrimeIntellect-ai/prime-rl/pull/2438",),
           "a float32 copy of the head is cached and the first one served for ever",
           "PARTIAL_SYNC", FP32, {"head_version": lambda step: 0}, needs=("ref_logprob",)),
    Report(45, ("huggingface/trl/issues/6166",),
           "the engine gives NaN for tokens of p near 1",
           "NONFINITE_LOGPROBS", BF16, {}, edit=each(lose_values), needs=("sampler_logprob",)),
    Report(47, ("huggingface/trl/issues/5231",),
           "logged ratios are from after the clip",
           "METRIC_AFTER_CLIP", BF16, {}, edit=each(clipped_narrow), both_edit=each(unclipped),
           needs=("applied_weight",)),
    Report(48, ("verl-project/verl/pull/7196", "NovaSky-AI/SkyRL/issues/1870"),
           "mismatch metrics are exactly 0: one column is a copy of the other",
           "COLUMNS_NOT_INDEPENDENT", BF16, {}, edit=each(copied),
           needs=("trainer_logprob",), unseen="equal columns are no evidence about the engine"),
    Report(49, ("PrimeIntellect-ai/prime-rl/pull/2478",),
           "one mismatch metric is a mean of sample means, another a token mean",
           "MEAN_OF_MEANS", {**BF16, "engine_noise": 0.004, "prompts": 40, "siblings": 1}, {},
           edit=each(short_ones_off), needs=("sampler_logprob",)),
    Report(50, ("radixark/miles/pull/1829", "NovaSky-AI/SkyRL/issues/1315"),
           "asynchronous: the denominator is recomputed by the current actor",
           "OLD_POLICY_NOT_BEHAVIOUR", BF16, {"engine_version": lambda step: max(0, step - 2)},
           edit=drop("applied_weight"), needs=("weights_version_max", "trainer_version")),
    Report(51, ("areal-project/AReaL/issues/1290", "OpenRLHF/OpenRLHF/issues/1108",
                "thinking-machines-lab/tinker-feedback/issues/22"),
           "unstable with one engine or version and fine with another; no cause was settled",
           "ENGINE_VERSION", BF16,
           {"noise_factor": lambda m, t: np.where(m["step"] >= 3, 8.0, 1.0)},
           both_edit=chain(each(two_engines), drop("ref_logprob")), needs=("engine",)),
]  # fmt: skip


def twin_of(report: Report) -> Log:
    """The clean twin; for the token reports, with the same turns rendered rightly."""
    log = report.clean()
    if report.number in (24, 27):
        return as_turns(same_history)(log)
    if report.number == 26:
        return multi_turn(True)(log)
    return log


# results, each worked out once


@cache
def _outcome(number: int) -> tuple[CheckResult, ...]:
    (report,) = (r for r in REPORTS if r.number == number)
    return tuple(report.faulty().results())


def outcome(report: Report) -> list[CheckResult]:
    """What the audit says of the faulty log."""
    return list(_outcome(report.number))


_TWINS: dict[Any, list[CheckResult]] = {}


def twin_results(report: Report) -> list[CheckResult]:
    """What the audit says of the clean twin; twins of one recipe are looked at once."""
    turns = report.number if report.number in (24, 26, 27) else 0
    key = (repr(sorted(report.base.items())), report.both_edit, turns)
    if key not in _TWINS:
        _TWINS[key] = twin_of(report).results()
    return _TWINS[key]


def table() -> str:
    """Markdown: report, symptom, and the check that names it, from the cases' own results."""
    lines = [
        "| Public report | Symptom | What the audit says | Needs |",
        "|---|---|---|---|",
    ]
    for report in REPORTS:
        results = outcome(report)
        shown = next(r for r in results if r.code == report.code)
        if report.unseen:
            said = f"`{report.code}` {shown.status.upper()}: {report.unseen}"
        else:
            lead = next(r for r in results if r.status == "found")
            said = f"`{lead.code}`: {lead.title}"
        links = ", ".join(
            f"[{link.replace('/issues/', '#').replace('/pull/', '#')}]({GITHUB}{link})"
            for link in report.links
        )
        needs = ", ".join(f"`{name}`" for name in report.needs)
        symptom = report.symptom.replace("|", r"\|")
        lines.append(f"| {links} | {symptom} | {said} | {needs} |")
    return "\n".join(lines)
