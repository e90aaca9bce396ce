"""The contract's models: the documented example parses as written, and each rule refuses its fault.

Together: (1) the example of the design is accepted verbatim, with the stated defaults; (2) for
every rule there is one document that breaks it alone, and is refused at the right field; (3) what
a clause resolves to (ceiling, tail, least prompts) is the arithmetic that the docs state.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from contract_examples import BASE, EXAMPLE
from pydantic import ValidationError

from kernel_contracts.clauses import NumericalClause, RuntimeClause, StatisticalClause
from kernel_contracts.confidence import clopper_pearson, mean_bounds
from kernel_contracts.contract import Contract
from kernel_contracts.lint import fewest_prompts
from kernel_contracts.loading import check_text, parse_contract
from kernel_contracts.vocabulary import METRIC_WORDS, TOKEN_COLUMNS


def changed(*path: str | int, to: Any) -> dict[str, Any]:
    """BASE with one place set (or, for None at a key, taken away)."""
    document = copy.deepcopy(BASE)
    holder: Any = document
    for part in path[:-1]:
        holder = holder.setdefault(part, {}) if isinstance(holder, dict) else holder[part]
    if to is None:
        del holder[path[-1]]
    else:
        holder[path[-1]] = to
    return document


def test_the_documented_example_parses_as_written() -> None:
    """The syntax in the documentation is the syntax; defaults are the stated ones."""
    contract = parse_contract(EXAMPLE)
    assert contract.name == "smollm2-bf16-serving"
    assert contract.alpha == 0.05
    assert contract.pair.engine == {
        "program": "vllm", "dtype": "bfloat16", "logprobs_mode": "raw_logprobs"
    }  # fmt: skip
    assert contract.pair.same == ("weights", "tokenizer")
    assert [c.id for c in contract.clauses()] == ["N1", "N2", "S1", "S2", "S3", "R1", "R2", "O1"]
    assert contract.section_of(contract.clause("R2")) == "runtime"
    s1 = contract.clause("S1")
    assert isinstance(s1, StatisticalClause)
    assert (s1.path, s1.weight, s1.tail, s1.slices) == ("decode", "prompt", 0.05, ("all", "domain"))
    r1 = contract.clause("R1")
    assert isinstance(r1, RuntimeClause)
    assert (r1.metric, r1.tail) == ("kl", 0.15)
    n2 = contract.clause("N2")
    assert isinstance(n2, NumericalClause)
    assert (n2.path, n2.slices, n2.limit) == ("both", ("all",), 0)
    assert contract.escalation[0].to == "reference"
    with pytest.raises(KeyError):
        contract.clause("S9")


def test_the_base_document_is_sound() -> None:
    """Control for the refusals below."""
    Contract.model_validate(BASE)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (changed("schema", to="kernel-contracts/v2"), "schema", "not one of the words"),
    (changed("schema", to=None), "schema", "required"),
    (changed("name", to="two words"), "name", "not a name"),
    (changed("alpha", to=0.0), "alpha", "greater than 0"),
    (changed("alpha", to=0.6), "alpha", "less than or equal to 0.5"),
    (changed("alpha", to="0.05"), "alpha", "a number is needed"),
    (changed("alpha", to=True), "alpha", "a number is needed"),
    (changed("alpha", to=math.nan), "alpha", "finite"),
    (changed("seed", to=-1), "seed", "greater than or equal to 0"),
    (changed("seed", to=1.5), "seed", "whole number"),
    (changed("colour", to=1), "colour", "unknown key"),
    (changed("pair", "engine", to={"args": [1]}), "pair.engine.args", "a fact is"),
    (changed("pair", "engine", to={"x": math.inf}), "pair.engine.x", "a fact is"),
    (changed("slices", "all", to={"by": "x"}), "slices.all", "always means every row"),
    (changed("slices", "a b", to={}), "slices.a b", "not a name"),
    (changed("slices", "x", to={"where": "drift >"}), "slices.x.where", "needed here"),
    (changed("slices", "x", to={"where": "drift = 1"}), "slices.x.where", "write =="),
    (changed("slices", "x", to={"by": []}), "slices.x.by", "must not be empty"),
    (changed("slices", "x", to={"by": 3}), "slices.x.by", "a list is needed"),
    (changed("slices", "x", to={"bins": {"drift": [1]}}), "slices.x.bins.drift", "not be empty"),
    (changed("slices", "x", to={"bins": {"drift": [1, 1]}}), "slices.x.bins.drift", "must rise"),
    (changed("slices", "x", to={"bins": {"drift": list(range(300))}}), "slices.x.bins", "299"),
    (changed("numerical", 0, "metric", to="kl"), "numerical[0].metric", "not one of the words"),
    (changed("numerical", 0, "share", to=None), "numerical[0].exceeds", "needs `share`"),
    (changed("numerical", 0, "exceeds", to=None), "numerical[0].share", "needs `exceeds`"),
    (changed("numerical", 0, "share", to=1.0), "numerical[0].share", "less than 1"),
    (changed("numerical", 0, "exceeds", to=-1.0), "numerical[0].exceeds", "greater than or equal"),
    (changed("numerical", 0, "limit", to=1), "numerical[0].limit", "sample's size"),
    (changed("numerical", 0, to={"id": "N1", "metric": "nonfinite"}), "numerical[0].metric",
     "needs a limit"),
    (changed("numerical", 0, to={"id": "N1", "metric": "nonfinite", "limit": -1}),
     "numerical[0].limit", "greater than or equal"),
    (changed("numerical", 0, to={"id": "N", "metric": "nonfinite", "limit": 0, "share": 0.1}),
     "numerical[0].share", "is a count"),
    (changed("statistical", 0, "limit", to=None), "statistical[0].metric", "needs a `limit`"),
    (changed("statistical", 0, "limit", to=0), "statistical[0].limit", "greater than 0"),
    (changed("statistical", 0, "warn", to=0.003), "statistical[0].warn", "above the limit"),
    (changed("statistical", 0, "at_least", to=0.5), "statistical[0].at_least", "low is good"),
    (changed("statistical", 0, "ceiling", to=0.002), "statistical[0].ceiling", "must be above"),
    (changed("statistical", 0, "tail", to=1.0), "statistical[0].tail", "less than 1"),
    (changed("statistical", 0, "path", to="both_"), "statistical[0].path", "did you mean both?"),
    (changed("statistical", 0, "slices", to=[]), "statistical[0].slices", "must not be empty"),
    (changed("statistical", 0, "slices", to="all"), "statistical[0].slices", "list is needed"),
    (changed("statistical", 0, "slices", to=["domian"]), "statistical[0].slices[0]",
     "did you mean domain?"),
    (changed("statistical", 0, "slices", to=["all", "all"]), "statistical[0].slices[1]",
     "already in this list"),
    (changed("statistical", 0, "id", to="N1"), "statistical[0].id", "already the id"),
    (changed("statistical", 0, to={"id": "S", "metric": "flip_rate", "limit": 1.5}),
     "statistical[0].limit", "never above 1"),
    (changed("statistical", 0, to={"id": "S", "metric": "tv", "limit": 0.1, "ceiling": 2.0}),
     "statistical[0].ceiling", "never above 1"),
    (changed("statistical", 0, to={"id": "S", "metric": "mult_prob_error", "limit": 1.0}),
     "statistical[0].limit", "never below 1"),
    (changed("statistical", 0, to={"id": "S", "metric": "ess_ratio", "limit": 0.3}),
     "statistical[0].limit", "high is good"),
    (changed("statistical", 0, to={"id": "S", "metric": "ess_ratio"}), "statistical[0].metric",
     "needs `at_least`"),
    (changed("statistical", 0,
             to={"id": "S", "metric": "ess_ratio", "at_least": 0.5, "warn": 0.4}),
     "statistical[0].warn", "below at_least"),
    (changed("statistical", 0,
             to={"id": "S", "metric": "policy_gradient_bias", "limit": 0.1, "tail": 0.1}),
     "statistical[0].tail", "no tail"),
    (changed("statistical", 0,
             to={"id": "S", "metric": "policy_gradient_bias", "limit": 0.1, "ceiling": 0.5}),
     "statistical[0].ceiling", "no ceiling"),
    (changed("statistical", 0, "metric", to="nonfinite"), "statistical[0].metric",
     "not one of the words"),
    (changed("runtime", 0, "probe", to="batch"), "runtime[0].probe", "not one of the words"),
    (changed("runtime", 0, "limit", to=None), "runtime[0].limit", "required"),
    (changed("runtime", 0, "warn", to=0.01), "runtime[0].warn", "above the limit"),
    (changed("observability", 0, "min_prompts", to=0), "observability[0].min_prompts", "or equal"),
    (changed("observability", 0, "max_missing", to=1.0), "observability[0].max_missing", "than 1"),
    (changed("observability", 0, "require", to=["engine_logprobs"]),
     "observability[0].require[0]", "did you mean engine_logprob?"),
    (changed("budget", "reward_drift", to=0.1), "budget.reward_drift", "needs `reward_range`"),
    (changed("budget", "horizon", to=0), "budget.horizon", "or equal to 1"),
    (changed("budget", "flip_budget", to=1.0), "budget.flip_budget", "less than 1"),
    (changed("budget", "tis_threshold", to=0.5), "budget.tis_threshold", "or equal to 1"),
    (changed("escalation", to=[{"when": {}, "action": "block"}]), "escalation[0].when.verdict",
     "required"),
    (changed("escalation", to=[{"when": {"verdict": "fail"}, "action": "block"}]),
     "escalation[0].when.verdict", "did you mean FAIL?"),
    (changed("escalation", to=[{"when": {"verdict": "FAIL", "clause": "S2"}, "action": "block"}]),
     "escalation[0].when.clause", "known: N1, O1, R1, S1"),
    (changed("escalation", to=[{"when": {"verdict": "FAIL", "slice": "code"}, "action": "log"}]),
     "escalation[0].when.slice", "no slice 'code'"),
    (changed("escalation", to=[{"when": {"verdict": "FAIL"}, "action": "route"}]),
     "escalation[0].action", "needs `to`"),
    (changed("escalation", to=[{"when": {"verdict": "FAIL"}, "action": "block", "to": "x"}]),
     "escalation[0].to", "goes nowhere"),
    (changed("escalation", to=[{"when": {"verdict": "FAIL"}, "action": "stop", "slice": "all"}]),
     "escalation[0].slice", "whole run"),
    ({"schema": "kernel-contracts/v1", "name": "x"}, "", "promises nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("document", "field", "message"), REFUSED)
def test_each_rule_refuses_its_fault_at_its_field(
    document: dict[str, Any], field: str, message: str
) -> None:
    """One mistake gives one problem, at the field where it is mended."""
    with pytest.raises(ValidationError):
        Contract.model_validate(document)
    contract, problems = check_text(_yaml(document))
    assert contract is None
    assert [p.field for p in problems] == [field], problems
    assert message in str(problems[0])


def _yaml(document: dict[str, Any]) -> str:
    from kernel_contracts.yaml_source import write_yaml

    return write_yaml(document)


def test_a_slice_of_a_grouping_can_be_named_in_a_rule() -> None:
    """domain=code exists only once there are rows; the definition that gives it must exist."""
    rule = {"when": {"verdict": "FAIL", "slice": "domain=code"}, "action": "log"}
    Contract.model_validate(changed("escalation", to=[rule]))
    with pytest.raises(ValidationError, match="no slice 'topic=code'"):
        Contract.model_validate(
            changed("escalation", to=[{**rule, "slice": "topic=code"}]),
        )


def test_a_contract_never_changes() -> None:
    """Its digest stands for it in reports and blessings."""
    contract = Contract.model_validate(BASE)
    with pytest.raises(ValidationError):
        contract.alpha = 0.1  # type: ignore[misc]
    with pytest.raises(ValidationError):
        contract.statistical[0].limit = 1.0  # type: ignore[misc]
    assert isinstance(contract.statistical, tuple)


@pytest.mark.parametrize(
    ("clause", "upper_end", "needs_tail", "floor"),
    [
        ({"metric": "kl_engine_reference", "limit": 0.002}, 0.01, True, 0.0),
        ({"metric": "kl_engine_reference", "limit": 0.002, "ceiling": 0.02}, 0.02, True, 0.0),
        ({"metric": "flip_rate", "limit": 0.1}, 1.0, False, 0.0),
        ({"metric": "flip_rate", "limit": 0.1, "ceiling": 0.5}, 0.5, True, 0.0),
        ({"metric": "flip_rate", "limit": 0.1, "ceiling": 1.0}, 1.0, False, 0.0),
        ({"metric": "mult_prob_error", "limit": 1.05}, 1.25, True, 1.0),
        ({"metric": "ess_ratio", "at_least": 0.5}, 10.0, True, 0.0),
        ({"metric": "policy_gradient_bias", "limit": 0.1}, math.inf, False, 0.0),
    ],
)
def test_the_range_that_a_bound_may_assume(
    clause: dict[str, Any], upper_end: float, needs_tail: bool, floor: float
) -> None:
    """A bound for a bounded mean is worth what its range is: natural, given, or 5 times the limit
    counted from the floor. Where prompts can be above it, a tail is promised too."""
    made = StatisticalClause.model_validate({"id": "S1", **clause})
    assert made.upper_end == pytest.approx(upper_end)
    assert made.needs_tail is needs_tail
    assert made.floor == floor


@pytest.mark.parametrize(
    ("share", "alpha", "expected"),
    [(0.10, 0.05, 29), (0.05, 0.05, 59), (0.02, 0.05, 149), (0.01, 0.05, 299), (0.005, 0.05, 598),
     (0.001, 0.05, 2995), (0.10, 0.01, 44), (0.01, 0.01, 459)],
)  # fmt: skip
def test_fewest_prompts_is_the_plan_without_an_event(
    share: float, alpha: float, expected: int
) -> None:
    """Known zero-failure sample sizes, and the exact binomial bound on either side of them."""
    clause = NumericalClause.model_validate(
        {"id": "N", "metric": "drift", "exceeds": 1.0, "share": share}
    )
    assert fewest_prompts(clause, alpha) == expected
    assert clopper_pearson(0, expected, alpha)[1] <= share
    assert clopper_pearson(0, expected - 1, alpha)[1] > share


@pytest.mark.parametrize("ceiling", [0.004, 0.01, 0.05])
def test_fewer_prompts_than_the_fewest_never_pass_even_at_zero(ceiling: float) -> None:
    """The bound that verdicts use cannot beat the stated minimum: all values 0, one prompt less."""
    clause = StatisticalClause.model_validate(
        {"id": "S", "metric": "k3", "limit": 0.002, "ceiling": ceiling, "tail": 0.9}
    )
    fewest = fewest_prompts(clause, 0.05)
    assert fewest > 1
    assert mean_bounds([0.0] * (fewest - 1), ceiling=ceiling, alpha=0.05).upper > 0.002
    assert mean_bounds([0.0] * (2 * fewest), ceiling=ceiling, alpha=0.05).upper <= 0.002


def test_every_metric_of_the_language_is_described_and_measurable() -> None:
    """The language, the metric table and the token table name the same things."""
    from typing import get_args

    from kernel_contracts import vocabulary
    from kernel_contracts.metrics import METRICS

    named = {
        *get_args(vocabulary.NumericalMetric),
        *get_args(vocabulary.StatisticalMetric),
        *get_args(vocabulary.RuntimeMetric),
    }
    assert named == set(METRIC_WORDS)
    assert named - {"kl"} - vocabulary.GRADIENT_METRICS <= set(METRICS)
    for name in named & set(METRICS):
        assert set(METRICS[name].columns) <= set(TOKEN_COLUMNS)


def test_the_columns_of_the_language_are_those_of_the_token_table() -> None:
    """A column that lint calls unknown must not exist, and one it knows must."""
    from mismatch_audit.tokens import token_schema

    schema = token_schema()
    assert set(TOKEN_COLUMNS) == set(schema.names)
    kinds = {
        n: "text" if str(schema.field(n).type) == "string"
        else "boolean" if str(schema.field(n).type) == "bool" else "number"
        for n in schema.names
    }  # fmt: skip
    assert kinds == TOKEN_COLUMNS
