"""Contract files: what is written is what is read, and no mistake is silent.

Together: (1) any contract survives dump and load; (2) every key of a real file, misspelt, is
reported at its own line with the right word; (3) all mistakes of a file come at once; (4) YAML's
traps (1e-6 as text, "no" as false, a key twice, tags, alias bombs) are closed; (5) the digest
depends on what is promised and on nothing else; (6) the JSON Schema accepts what the loader does.
"""

from __future__ import annotations

import copy
import json
import re
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from contract_examples import BASE, EXAMPLE
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_contracts.contract import Contract
from kernel_contracts.errors import ContractError, InputError
from kernel_contracts.loading import (
    ContractFileError,
    check_file,
    check_text,
    contract_digest,
    contract_json_schema,
    dump_contract,
    load_contract,
    parse_contract,
)
from kernel_contracts.yaml_source import read_yaml, write_yaml

SAMPLES = sorted((Path(__file__).parent.parent / "samples" / "contracts").glob("*.yaml"))

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.\-]{0,8}", fullmatch=True)
text = st.text(max_size=20).filter(lambda t: t.isprintable() or "\n" in t)
positive = st.floats(1e-9, 1e3)
facts = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(-9, 9), text)


@st.composite
def contracts(draw: st.DrawFn) -> Contract:
    labels = draw(st.lists(names.filter(lambda n: n != "all"), max_size=3, unique=True))
    chosen = st.lists(st.sampled_from(["all", *labels]), min_size=1, max_size=2, unique=True)
    definitions = st.one_of(
        st.just({}),
        st.fixed_dictionaries({"by": st.one_of(names, st.lists(names, min_size=1, max_size=2))}),
        st.fixed_dictionaries({"where": st.sampled_from(["drift > 1e-3", "flip", "a == 'no'"])}),
        st.just({"where": "x is null", "by": "odd name: #1", "bins": {"drift": [0, 0.5, 1e3]}}),
    )
    ids = iter(draw(st.permutations([f"C{i}" for i in range(8)])))
    limit = draw(positive)
    statistical = [
        {"id": next(ids), "metric": "k3", "limit": limit, "warn": limit / 2,
         "ceiling": limit * 3, "slices": draw(chosen), "description": draw(text)},
        {"id": next(ids), "metric": "ess_ratio", "at_least": draw(st.floats(0.01, 0.99))},
    ][: draw(st.integers(1, 2))]  # fmt: skip
    return Contract.model_validate(
        {
            "schema": "kernel-contracts/v1",
            "name": draw(names),
            "description": draw(text),
            "pair": {"engine": draw(st.dictionaries(names, facts, max_size=3))},
            "slices": {label: draw(definitions) for label in labels},
            "statistical": statistical,
            "numerical": [{"id": next(ids), "metric": "tv", "exceeds": draw(positive),
                           "share": draw(st.floats(0.001, 0.999)), "slices": draw(chosen)}],
            "observability": [{"id": next(ids), "max_missing": draw(st.floats(0, 0.99))}],
            "budget": draw(st.one_of(st.just({}), positive.map(lambda v: {"bias_budget": v}))),
            "alpha": draw(st.sampled_from([0.05, 0.01, 0.5])),
            "seed": draw(st.integers(0, 2**31)),
        }
    )  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(contracts())
def test_a_contract_survives_dump_and_load(contract: Contract) -> None:
    """Also its resolved document, which is what a report carries, loads and keeps its digest."""
    assert parse_contract(dump_contract(contract)) == contract
    resolved = Contract.model_validate(contract.document())
    assert resolved.document() == contract.document()
    assert contract_digest(resolved) == contract_digest(contract)


plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False),
              st.text(max_size=12), st.sampled_from(["no", "1e-6", "~", "0x1", ".inf", "<<", "=",
                                                      "2024-01-01", "1_000", "010", "null"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3),
                            st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=6), plain, min_size=1, max_size=4))
def test_plain_data_survives_our_yaml(document: dict[str, Any]) -> None:
    """Reader and writer agree on which texts look like numbers, booleans or null."""
    assert read_yaml(write_yaml(document)).data == document


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("1e-6", 1e-6), ("1.0e-6", 1e-6), (".5", 0.5), ("+3", 3), ("010", 10), ("true", True),
        ("no", "no"), ("on", "on"), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"), ("0x10", "0x10"), ("~", None), ("", None), ("'1'", "1"), ("5%", "5%"),
    ],
)  # fmt: skip
def test_plain_values_are_those_of_yaml_1_2(written: str, expected: object) -> None:
    """PyYAML alone makes 1e-6 a text, 010 eight, 1:30 ninety and no false."""
    value = read_yaml(f"x: {written}").data["x"]
    assert value == expected
    assert type(value) is type(expected)


def _keys(document: str) -> list[tuple[int, str]]:
    """(offset, key) of every key in a file whose valid spelling we know."""
    found = []
    start = 0
    for line in document.splitlines(keepends=True):
        if not line.lstrip().startswith("#"):
            words = re.finditer(r"(?:^|(?<=[{\s,]))([a-z_]+)(?=:[ \n])", line)
            found += [
                (start + m.start(), m.group())
                for m in words
                # A slice may be called `engine`: its name is no key of the language.
                if m.group() in KNOWN_KEYS
                and not re.match(r": \{(by|bins|where):", line[m.end() :])
            ]
        start += len(line)
    return found


KNOWN_KEYS = {
    "schema", "name", "pair", "reference", "engine", "same", "slices", "numerical", "statistical",
    "runtime", "observability", "budget", "escalation", "where", "by", "bins", "id", "metric",
    "exceeds", "share", "limit", "warn", "ceiling", "tail", "probe", "min_prompts", "max_missing",
    "require", "reward_range", "reward_drift", "horizon", "flip_budget", "when", "clause",
    "verdict", "action", "to", "slice", "description",
}  # fmt: skip


@pytest.mark.parametrize("path", [None, *SAMPLES], ids=lambda p: p.stem if p else "example")
def test_every_misspelt_key_is_reported_at_its_line_with_the_right_word(path: Path | None) -> None:
    """Each key of each file in turn gets one letter too many. Catches a model that allows extra
    keys anywhere, a lost line, and a suggestion from the wrong level."""
    document = EXAMPLE if path is None else path.read_text(encoding="utf-8")
    keys = _keys(document)
    assert len(keys) > 30
    for offset, key in keys:
        line = document.count("\n", 0, offset) + 1
        spoilt = document[: offset + len(key)] + "x" + document[offset + len(key) :]
        contract, problems = check_text(spoilt, "c.yaml")
        told = [p for p in problems if p.severity == "error" and p.line == line]
        assert contract is None, key
        assert any(f"unknown key '{key}x'" in p.message for p in told), (key, line, problems)
        assert any(p.fix == f"did you mean {key}?" for p in told), (key, line, told)
        assert all(str(p).startswith(f"c.yaml:{line}:") for p in told)


def test_all_mistakes_of_a_file_come_at_once_with_their_lines() -> None:
    """Syntax of a predicate, unknown keys, wrong types, rules of one clause, rules between parts;
    also inside a section whose name is misspelt."""
    document = """\
schema: kernel-contracts/v1
name: broken
slices:
  undecided: {where: "reference_margin <="}
  domain: {by: domian, colour: red}
  domain: {by: domain}
statistcal:
  - {id: S1, metric: kl_engine_referenc, limit: 1e-3, slices: [all, domian]}
  - {id: S1, metric: flip_rate, limit: "0.1"}
  - id: S3
    metric: flip_rate
    limit: 0.1
    warn: 0.2
numerical:
  - {id: N1, metric: drift, exceeds: 1}
  -
runtime: {id: R}
escalation:
  - {when: {clause: S9, verdict: FAIL}, action: route}
alpha: 5%
"""
    contract, problems = check_text(document, "c.yaml")
    assert contract is None
    assert [(p.line, p.field) for p in problems] == [
        (4, "slices.undecided.where"),
        (5, "slices.domain.colour"),
        (6, "slices.domain"),
        (7, "statistcal"),
        (8, "statistical[0].metric"),
        (8, "statistical[0].slices[1]"),
        (9, "statistical[1].id"),
        (9, "statistical[1].limit"),
        (13, "statistical[2].warn"),
        (15, "numerical[0].exceeds"),
        (16, "numerical[1]"),
        (17, "runtime"),
        (19, "escalation[0].action"),
        (19, "escalation[0].when.clause"),
        (20, "alpha"),
    ]
    with pytest.raises(ContractFileError) as caught:
        parse_contract(document, "c.yaml")
    assert caught.value.exit_code == 2
    assert isinstance(caught.value, ContractError)
    assert caught.value.problems == tuple(problems)
    assert "15 mistakes" in str(caught.value)
    assert "c.yaml:13:statistical[2].warn: warn 0.2 is above the limit 0.1" in str(caught.value)


@pytest.mark.parametrize(
    ("document", "line", "message"),
    [
        ("", 1, "empty"),
        ("# only a comment\n", 1, "empty"),
        ("- 1\n", 1, "mapping"),
        ("a: 1\nb: [1,\nc: 2\n", 3, "not valid YAML"),
        ("a: 1\n\tb: 2\n", 2, "not valid YAML"),
        ("a: 1\n---\nb: 1\n", 2, "single document"),
        ("a: *nowhere\n", 1, "undefined alias"),
        ("a: 1\nb: !!python/object/apply:os.system [true]\n", 2, "tags"),
        ("a: !!str 1\n", 1, "tags"),
        ("a: !local 1\n", 1, "tags"),
        ("a: 1\nb: \x01\n", 2, "not valid YAML"),
        ("? [a, b]\n: 1\n", 1, "plain text"),
        ("a: &x [*x]\n", 1, "contains itself"),
        ("a: " + "[" * 2000, 1, "nested more than"),
        ("a: " + "9" * 5000, 1, "not a number"),
    ],
)
def test_what_is_not_a_document_is_one_problem_at_its_line(
    document: str, line: int, message: str
) -> None:
    """Nothing is constructed but plain data, and nothing ends in a traceback."""
    contract, problems = check_text(document, "c.yaml")
    assert contract is None
    assert [p.line for p in problems] == [line]
    assert message in problems[0].message


def test_an_alias_bomb_is_refused_quickly() -> None:
    """Ten levels of ten aliases would be 10^10 values."""
    levels = ["a0: &a0 [1,1,1,1,1,1,1,1,1,1]"]
    levels += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    start = time.process_time()
    _, problems = check_text("\n".join(levels))
    assert "aliases expanded" in problems[0].message
    assert time.process_time() - start < 1.0


def test_an_honest_alias_is_expanded() -> None:
    """Sharing a list of slices is fine, and the digest sees what it stands for."""
    shared = EXAMPLE.replace("slices: [all, domain]", "slices: &both [all, domain]").replace(
        "metric: policy_gradient_bias, limit: 0.05, slices: [all]",
        "metric: policy_gradient_bias, limit: 0.05, slices: *both",
    )
    contract = parse_contract(shared)
    assert contract.statistical[2].slices == ("all", "domain")


def test_files_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    """Missing, a folder, too large, not text: one message each, exit 2."""
    large = tmp_path / "large.yaml"
    large.write_text("# " + "x" * 300_000)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"name: x\nb: \xff\xfe\n")
    for path, message in (
        (tmp_path / "none.yaml", "No such file"),
        (tmp_path, "Is a directory"),
        (large, "not a contract"),
        (binary, "not UTF-8"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            check_file(path)
        assert str(path) in str(caught.value)
        assert caught.value.exit_code == 2


def test_windows_line_ends_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    """Editors add them; lines still count right."""
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + EXAMPLE.replace("\n", "\r\n").encode())
    assert load_contract(path) == parse_contract(EXAMPLE)
    path.write_bytes(b"\xef\xbb\xbf" + EXAMPLE.replace("\n", "\r\n").replace("S3,", "S2,").encode())
    with pytest.raises(ContractFileError, match=r":17:statistical\[2\]\.id"):
        load_contract(path)


def test_the_digest_depends_on_the_promise_only() -> None:
    """Comments, order of keys, layout, the spelling of numbers and predicates, and defaults spelt
    out change nothing; each changed value does."""
    digest = contract_digest(parse_contract(EXAMPLE))
    same = [
        "# a comment\n" + EXAMPLE,
        EXAMPLE.replace("2.0e-3", "0.002"),
        EXAMPLE.replace("reference_margin <= 0.5", "(reference_margin<=.5)"),
        EXAMPLE.replace("{by: domain}", "{by: [domain]}"),
        EXAMPLE.replace("{program: vllm, dtype: bfloat16,", "{dtype: bfloat16, program: vllm,"),
        EXAMPLE.replace("  all: {}\n", "").replace("numerical:", "  all: {}\nnumerical:"),
        EXAMPLE.replace("limit: 2.0e-3, warn: 1.0e-3", "warn: 1.0e-3, ceiling: 0.01, limit: 2e-3"),
        EXAMPLE + "alpha: 0.05\n",
        dump_contract(parse_contract(EXAMPLE)),
        write_yaml(parse_contract(EXAMPLE).document()),
    ]
    assert {contract_digest(parse_contract(t)) for t in same} == {digest}
    other = [
        EXAMPLE.replace("limit: 0.10", "limit: 0.11"),
        EXAMPLE.replace("<= 0.5", "< 0.5"),
        EXAMPLE.replace("bfloat16}", "float16}").replace("dtype: bfloat16", "dtype: float16"),
        EXAMPLE + "alpha: 0.01\n",
        EXAMPLE.replace("action: block", "action: stop"),
    ]
    digests = {contract_digest(parse_contract(t)) for t in other}
    assert len(digests) == len(other)
    assert digest not in digests
    assert re.fullmatch(r"[0-9a-f]{64}", digest)


def test_the_json_schema_is_valid_and_accepts_what_the_loader_accepts() -> None:
    """For editors: draft 2020-12, every field described, unknown keys refused everywhere."""
    schema = contract_json_schema()
    validator = jsonschema.Draft202012Validator(schema)
    jsonschema.Draft202012Validator.check_schema(schema)
    for document in [EXAMPLE, *(p.read_text(encoding="utf-8") for p in SAMPLES)]:
        assert [e.message for e in validator.iter_errors(read_yaml(document).data)] == []
    for wrong in ({"colour": 1}, {"alpha": 2}, {"statistical": [{"id": "S1", "metric": "nope"}]},
                  {"slices": {"a b": {}}}, {"slices": {"x": {"were": "flip"}}},
                  {"schema": "kernel-contracts/v0"}):  # fmt: skip
        document = {**copy.deepcopy(BASE), **wrong}
        assert list(validator.iter_errors(document)), wrong
    models = [schema, *schema["$defs"].values()]
    for model in models:
        assert model["additionalProperties"] is False
        assert model["description"]
        for name, field in model["properties"].items():
            assert field.get("description"), (model["title"], name)
    assert json.loads(json.dumps(schema)) == schema


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: p.stem)
def test_sample_contracts_are_clean_and_say_where_each_limit_comes_from(path: Path) -> None:
    """No mistakes, no doubts at the sample's number of prompts, a reason on every clause."""
    contract, problems = check_file(path, prompts=60 if path.stem == "fp32-exact" else 120)
    assert problems == []
    assert contract is not None
    assert contract.name == path.stem
    assert all(c.description for c in contract.clauses())
    assert any(c.metric == "nonfinite" and c.limit == 0 for c in contract.numerical)


def test_there_are_sample_contracts() -> None:
    """The parametrised tests above would pass on an empty folder."""
    assert {p.stem for p in SAMPLES} >= {"fp32-exact", "bf16-serving", "bf16-strict"}


def test_the_reference_names_every_key_and_word_and_its_example_is_clean() -> None:
    """docs/contract.md is complete: each key of the schema, each word of an enumeration; and what
    it shows can be pasted."""
    page = (Path(__file__).parent.parent / "docs" / "contract.md").read_text(encoding="utf-8")
    schema = contract_json_schema()
    words: set[str] = set()
    for model in [schema, *schema["$defs"].values()]:
        words |= set(model["properties"])
    for listed in re.findall(r'"enum": (\[[^\]]*\])', json.dumps(schema)):
        words |= set(json.loads(listed))
    assert len(words) > 60
    assert {
        w for w in words if not re.search(rf"[`.]{re.escape(w)}`|`{re.escape(w)}\b", page)
    } == set()
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    contract, problems = check_text(example, "docs")
    assert contract is not None
    assert problems == []
