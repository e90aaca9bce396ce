"""Each check catches its fault, and says so with evidence and a remedy.

The faults of the public reports are in test_public_reports.py; here are the others. The clean
twins of all of them are the clean logs of test_rollout_checks_clean.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from public_report_cases import BF16, chain, each, header, unclipped
from rollout_fixtures import EOS, VOCAB, Log, Rows, found, make_log, to_batch

from mismatch_audit.rollouts.checks import all_checks, explain
from mismatch_audit.rollouts.checks.base import CheckResult
from mismatch_audit.rollouts.schema import Header, Origin


def beyond_vocabulary(i: int, row: Rows) -> None:
    row["token_ids"][-1] = VOCAB + i % 3


def double_bos(i: int, row: Rows) -> None:
    row["token_ids"][1] = row["token_ids"][0]


def train_on_prompt(i: int, row: Rows) -> None:
    row["loss_mask"][row["prompt_len"] - 1] = True


def train_on_forced(i: int, row: Rows) -> None:
    row["origin"][-1] = Origin.FORCED


def eos_at_the_limit(i: int, row: Rows) -> None:
    if row["finish_reason"] == "length":
        row["token_ids"][-1] = EOS


def half_copied(i: int, row: Rows) -> None:
    if i % 2:
        row["trainer_logprob"] = row["current_logprob"] = row["sampler_logprob"].copy()


def sentinels(i: int, row: Rows) -> None:
    if i % 5 == 0:
        row["sampler_logprob"][-1] = -9999.0


def infinite(i: int, row: Rows) -> None:
    if i % 5 == 0:
        row["sampler_logprob"][-1] = -np.inf


def last_token_off(i: int, row: Rows) -> None:
    row["trainer_logprob"][-1] -= 0.7 + 0.1 * (i % 5)
    row["current_logprob"] = row["trainer_logprob"].copy()


def few_tokens_off(i: int, row: Rows) -> None:
    at = row["prompt_len"] + i % 11
    if at < len(row["token_ids"]):
        row["trainer_logprob"][at] -= 2.5
    row["current_logprob"] = row["trainer_logprob"].copy()


def masked_out(i: int, row: Rows) -> None:
    row["applied_weight"] = np.zeros(len(row["token_ids"]))


def scaled_down(i: int, row: Rows) -> None:
    row["applied_weight"] = np.full(len(row["token_ids"]), 1 / 128)


def shifted(k: int) -> Callable[[int, Rows], None]:
    def edit(i: int, row: Rows) -> None:
        moved = np.roll(row["trainer_logprob"], k)
        moved[: max(k, 0)] = np.nan
        moved[len(moved) + min(k, 0) :] = np.nan
        row["trainer_logprob"] = row["current_logprob"] = moved

    return edit


def forget_temperature(i: int, row: Rows) -> None:
    row["temperature"] = None


def noisy_big_batches(rows: Rows, t: int) -> np.ndarray:
    return np.where(np.arange(len(rows["step"])) % 2 == 1, 60.0, 1.0)  # micro-batches of 4


def noisy_code(rows: Rows, t: int) -> np.ndarray:
    return np.where(rows["prompt"] % 2 == 1, 8.0, 1.0)


MIXED: dict[str, Any] = {"engine_noise": 0.05, "dtypes": ("float32", "bfloat16")}

FAULTS: list[tuple[str, dict[str, Any], Callable[[Log], Log] | None]] = [
    ("TOKEN_OUTSIDE_VOCABULARY", BF16, each(beyond_vocabulary)),
    ("DOUBLE_BOS", BF16, each(double_bos)),
    ("LOSS_ON_UNSAMPLED", BF16, each(train_on_prompt)),
    ("LOSS_ON_UNSAMPLED", BF16, each(train_on_forced)),
    ("FORCED_EOS", BF16, each(eos_at_the_limit)),
    ("COLUMNS_NOT_INDEPENDENT", BF16, chain(each(half_copied), each(unclipped))),
    ("NONFINITE_LOGPROBS", BF16, each(sentinels)),
    ("NONFINITE_LOGPROBS", BF16, each(infinite)),
    ("SHIFTED_LOGPROBS", BF16, each(shifted(1))),
    ("SHIFTED_LOGPROBS", BF16, each(shifted(-2))),
    ("TRAINER_TEMPERATURE", {**BF16, "temperature": 0.7, "trainer_temperature": 1.0}, None),
    ("RAW_LOGPROBS", {**BF16, "temperature": 2.0, "raw": True}, None),
    ("RAW_LOGPROBS", {**BF16, "temperature": 0.6, "raw": True}, each(forget_temperature)),
    ("RAW_LOGPROBS", {**BF16, "temperature": 0.6, "raw": True, "siblings": 1, "prompts": 40}, None),
    ("TRUNCATED_SUPPORT", {**BF16, "top_k": 5}, None),
    ("TRUNCATED_SUPPORT", {**BF16, "top_p": 0.7, "siblings": 1, "prompts": 40}, None),
    ("REPETITION_PENALTY", {**BF16, "penalty": 1.2}, None),
    ("ENGINE_FALLS_BEHIND", {**BF16, "engine_version": lambda step: 0}, None),
    ("MICROBATCH_VARIANCE", {**BF16, "trainer_noise": 0.002, "trainer_factor": noisy_big_batches},
     None),
    ("ENVIRONMENT_MISMATCH", {**BF16, "noise_factor": noisy_code}, None),
    ("LAST_TOKEN_MISMATCH", BF16, chain(each(last_token_off), each(unclipped))),
    ("HEAVY_TAIL", {**BF16, "engine_noise": 0.005}, chain(each(few_tokens_off), each(unclipped))),
    ("ZERO_GRADIENT", BF16, each(masked_out)),
    ("GRADIENT_SCALED", BF16, each(scaled_down)),
    ("TWO_PRECISIONS", MIXED, None),
    ("UNEXPLAINED_MISMATCH", {**BF16, "engine_noise": 0.3}, None),
    ("UNEXPLAINED_MISMATCH", {"engine_noise": 0.002}, None),
]  # fmt: skip


@pytest.mark.parametrize(("code", "recipe", "edit"), FAULTS, ids=lambda v: str(v)[:24])
def test_the_fault_leads(
    code: str, recipe: dict[str, Any], edit: Callable[[Log], Log] | None
) -> None:
    """The fault's code is the first finding, with evidence and a remedy."""
    log = make_log(**recipe)
    results = (edit(log) if edit else log).results()
    assert found(results)[:1] == [code]
    assert results[0].evidence
    assert results[0].remedy


def test_length_dependent_ratio_is_noted() -> None:
    """The product over a response leaves [1/2, 2] while its geometric mean stays within 10%."""
    log = make_log(**{**BF16, "engine_noise": 0.3, "max_len": 120, "steps": 2})
    assert "LENGTH_DEPENDENT_RATIO" in found(log.results(), notes=True)


def test_a_wrong_tokenizer_is_named() -> None:
    """Prompts must survive decode and encode; the tokenizer that made them lets them."""

    class Letters:
        def __init__(self, base: int) -> None:
            self.base = base

        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(chr(64 + i) for i in ids)

        def encode(self, text: str, **_: Any) -> list[int]:
            return [(ord(c) - self.base) for c in text]

    log = make_log(steps=1)
    for base, status in ((64, "clean"), (65, "found")):
        checks = [c for c in all_checks(Letters(base)) if c.code == "TOKENIZER_MISMATCH"]
        for batch in log.batches():
            checks[0].update(batch)
        assert [r.status for r in checks[0].finish(log.header)] == [status]


def test_weights_of_one_are_no_clipping() -> None:
    """A trainer that corrects nothing writes 1 everywhere: nothing was clipped."""
    log = each(lambda i, row: row.update(applied_weight=np.ones(len(row["token_ids"]))))(
        make_log(**BF16)
    )
    assert found(log.results(), notes=True) == []


def test_stop_strings_are_no_unknown_eos() -> None:
    """Responses that a stop string ends have many last tokens: a note, not an error."""

    def edit(i: int, row: Rows) -> None:
        if row["finish_reason"] == "stop":
            row["token_ids"][-1] = 3 + i % 28

    results = each(edit)(make_log(**BF16)).results()
    assert found(results) == []
    assert "STOP_WITHOUT_EOS" in found(results, notes=True)


def test_partial_shift_is_found() -> None:
    """Every tenth sequence shifted (one worker of ten, say) is enough."""

    def edit(i: int, row: Rows) -> None:
        if i % 10 == 0:
            shifted(-1)(i, row)

    assert found(each(edit)(make_log(**BF16)).results())[:1] == ["SHIFTED_LOGPROBS"]


def test_an_empty_log_is_unobserved_throughout() -> None:
    """No rows: nothing may be called clean."""
    checks = all_checks()
    assert {r.status for c in checks for r in c.finish(Header())} == {"unobserved"}


def test_a_log_without_logprobs_is_unobserved_where_they_matter() -> None:
    """Ids alone: only the checks of ids can say something, and none finds a fault."""
    log = make_log(steps=1).without(
        "sampler_logprob", "trainer_logprob", "rescore_logprob", "current_logprob", "ref_logprob"
    )
    results = log.results()
    assert found(results, notes=True) == []
    clean = {r.code for r in results if r.status == "clean"}
    assert clean <= {
        "TOKEN_OUTSIDE_VOCABULARY", "LOSS_ON_UNSAMPLED", "STOP_WITHOUT_EOS",
        "OLD_POLICY_NOT_BEHAVIOUR",
    }  # fmt: skip


def test_lacks_of_the_source_are_said() -> None:
    """A reader's reason why a column cannot be there reaches the answer."""
    log = header(lacks={"n_left_pad": "packed rows have none"})(make_log(steps=1))
    log = log.without("n_left_pad")
    (result,) = (r for r in log.results() if r.code == "LEFT_PADDING")
    assert result.status == "unobserved"
    assert "packed rows have none" in result.detail


def test_one_cause_leads_and_the_rest_are_its_consequences() -> None:
    """Findings about size line up behind the highest priority; faults of their own do not."""

    def result(code: str, priority: int, status: Any = "found", severity: Any = "error") -> Any:
        return CheckResult(code, code, status, severity, priority=priority)

    ranked = explain(
        [
            result("UNEXPLAINED_MISMATCH", 10),
            result("LEFT_PADDING", 78),
            result("X", 0, "unobserved"),
            result("DOUBLE_BOS", 100),
            result("NONFINITE_LOGPROBS", 45),
            result("Y", 0, "clean"),
        ]
    )
    assert [(r.code, r.consequence_of) for r in ranked] == [
        ("DOUBLE_BOS", ""),
        ("LEFT_PADDING", ""),
        ("NONFINITE_LOGPROBS", ""),
        ("UNEXPLAINED_MISMATCH", "LEFT_PADDING"),
        ("X", ""),
        ("Y", ""),
    ]


def test_batches_may_be_cut_anywhere() -> None:
    """The answers do not depend on how the log is cut into batches of whole prompts."""
    log = make_log(temperature=0.6, raw=True, **BF16)
    log.batch_rows = 40
    one = [(r.code, r.status) for r in log.results()]
    log.batch_rows = 120
    assert [(r.code, r.status) for r in log.results()] == one


def test_null_columns_and_short_rows_are_accepted() -> None:
    """Rows without a response, and columns that are null throughout, break nothing."""
    log = make_log(steps=1, prompts=2)
    for row in log.rows[:3]:
        n = row["prompt_len"]
        for name, value in list(row.items()):
            if isinstance(value, np.ndarray):
                row[name] = value[:n]
    for row in log.rows:
        row["group_id"] = None
        row["temperature"] = None
        row["environment"] = None
    checks = all_checks()
    for check in checks:
        check.update(to_batch(log.rows))
        check.update(to_batch(log.rows[:1]))
    explain([r for check in checks for r in check.finish(log.header)])
