"""Slices: every row is in the slices that its definition says, and what cannot be known is counted.

Together: (1) the masks of ``by`` and ``bins`` partition the rows that are not missing or outside,
against a row-by-row oracle; (2) a null, an unknown prompt, an empty group and an unknown column are
each told, never dropped; (3) names are stable and never collide.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_contracts.contract import Contract
from kernel_contracts.errors import ContractError, InputError
from kernel_contracts.slices import Slice, resolve


def contract(**slices: object) -> Contract:
    return Contract.model_validate(
        {
            "schema": "kernel-contracts/v1",
            "name": "test",
            "slices": slices,
            "numerical": [{"id": "N1", "metric": "nonfinite", "limit": 0}],
        }
    )


def by_name(found: list[Slice]) -> dict[str, Slice]:
    named = {s.name: s for s in found}
    assert len(named) == len(found), "two slices share a name"
    return named


TOKENS = pd.DataFrame(
    {
        "prompt_id": ["a", "a", "b", "b", "c", "z"],
        "reference_logprob": [0.0, math.log(0.5), math.log(0.05), np.nan, math.log(0.9), -1.0],
        "engine_logprob": [0.0, math.log(0.25), math.log(0.05), -1.0, math.log(0.9), -1.0],
        "reference_margin": [0.1, 0.6, np.nan, 0.5, 0.2, 2.0],
        "flip": [True, False, False, False, True, False],
    }
)
PROMPTS = pd.DataFrame(
    {
        "prompt_id": ["a", "b", "c", "d"],
        "domain": ["code", "math", None, "factual"],
        "level": [1, 2, 2, 3],
    }
)


def test_all_is_there_without_being_declared() -> None:
    """Every clause without slices is about all rows."""
    (everything,) = resolve(contract(), TOKENS)
    assert everything.name == "all"
    assert everything.rows == 6
    assert everything.missing == 0


def test_where_selects_known_rows_and_counts_unknown_ones() -> None:
    """The row with no margin is neither decided nor undecided, and both slices say so."""
    found = by_name(
        resolve(
            contract(
                undecided={"where": "reference_margin <= 0.5"},
                decided={"where": "reference_margin > 0.5"},
            ),
            TOKENS,
        )
    )
    assert found["undecided"].mask.tolist() == [True, False, False, True, True, False]
    assert found["decided"].mask.tolist() == [False, True, False, False, False, True]
    assert found["undecided"].missing == found["decided"].missing == 1


def test_metadata_joins_by_prompt_and_a_value_without_tokens_gives_an_empty_slice() -> None:
    """Prompt d was never scored: its domain has no evidence, and a verdict must be able to say so.
    Prompt c has no domain and prompt z is unknown: their rows are missing."""
    found = by_name(resolve(contract(domain={"by": "domain"}), TOKENS, PROMPTS))
    assert list(found) == ["all", "domain=code", "domain=factual", "domain=math"]
    assert found["domain=code"].mask.tolist() == [True, True, False, False, False, False]
    assert found["domain=math"].mask.tolist() == [False, False, True, True, False, False]
    assert found["domain=factual"].rows == 0
    assert {s.missing for n, s in found.items() if n != "all"} == {2}
    assert found["domain=code"].answers_to("domain")
    assert found["domain=code"].answers_to("domain=code")
    assert not found["domain=code"].answers_to("domain=math")


def test_several_columns_give_the_combinations_that_prompts_have() -> None:
    """A combination that no prompt has is no slice: it would be unobserved for ever."""
    found = resolve(contract(cell={"by": ["domain", "level"]}), TOKENS, PROMPTS)
    assert [s.name for s in found[1:]] == [
        "domain=code,level=1",
        "domain=factual,level=3",
        "domain=math,level=2",
    ]


def test_where_and_by_combine_under_the_definitions_name() -> None:
    """Two definitions may group by one column: the names stay apart."""
    found = by_name(
        resolve(
            contract(domain={"by": "domain"}, flips={"where": "flip", "by": "domain"}),
            TOKENS,
            PROMPTS,
        )
    )
    assert found["flips:domain=code"].mask.tolist() == [True, False, False, False, False, False]
    assert found["flips:domain=math"].rows == 0
    assert found["flips:domain=code"].missing == 1


def test_bins_are_closed_on_the_left_and_the_last_on_both_sides() -> None:
    """A probability of exactly 1 is in the last bin, exactly 0.5 in the bin that starts there."""
    found = by_name(
        resolve(contract(confidence={"bins": {"reference_prob": [0, 0.1, 0.5, 1]}}), TOKENS)
    )
    assert list(found)[1:] == [
        "reference_prob[0,0.1)",
        "reference_prob[0.1,0.5)",
        "reference_prob[0.5,1]",
    ]
    assert found["reference_prob[0.5,1]"].mask.tolist() == [True, True, False, False, True, False]
    assert found["reference_prob[0,0.1)"].mask.tolist() == [False, False, True] + [False] * 3
    assert found["reference_prob[0.1,0.5)"].mask.tolist() == [False] * 5 + [True]
    assert found["reference_prob[0,0.1)"].missing == 1


def test_a_probability_that_rounding_puts_above_one_stays_in_the_last_bin() -> None:
    """Log-softmax in float32 gives log-probs of +1e-8; the token must not fall out of every bin."""
    tokens = pd.DataFrame({"reference_logprob": [1e-8, -1e-8]})
    found = resolve(contract(c={"bins": {"reference_prob": [0, 0.9, 1]}}), tokens)
    assert found[-1].mask.tolist() == [True, True]


def test_an_empty_bin_is_kept() -> None:
    """No evidence in a bin that the author named is told, not skipped."""
    tokens = pd.DataFrame({"drift": [5.0]})
    found = resolve(contract(d={"bins": {"drift": [0, 1, 10]}}), tokens)
    assert [(s.name, s.rows) for s in found[1:]] == [("drift[0,1)", 0), ("drift[1,10]", 1)]


def test_a_column_of_nulls_gives_one_empty_slice() -> None:
    """With no value to group by, the definition still answers to its name."""
    prompts = PROMPTS.assign(domain=None)
    found = resolve(contract(domain={"by": "domain"}), TOKENS, prompts)
    assert [(s.name, s.rows, s.missing) for s in found[1:]] == [("domain", 0, 6)]


def test_computed_columns() -> None:
    """dlp is reference minus engine; a null on either side is a null."""
    found = by_name(
        resolve(
            contract(
                far={"where": "abs_dlp > 0.5"},
                up={"where": "dlp > 0.5"},
                sure={"where": "engine_prob >= 0.9"},
            ),
            TOKENS,
        )
    )
    assert found["far"].mask.tolist() == found["up"].mask.tolist() == [False, True] + [False] * 4
    assert found["far"].missing == 1
    assert found["sure"].mask.tolist() == [True, False, False, False, True, False]


def test_a_token_column_hides_metadata_of_the_same_name() -> None:
    """The measured value wins: a prompt file cannot redefine a margin."""
    prompts = PROMPTS.assign(reference_margin=9.0)
    found = resolve(contract(m={"where": "reference_margin > 5"}), TOKENS, prompts)
    assert found[-1].rows == 0
    grouped = resolve(contract(m={"by": "flip"}), TOKENS, PROMPTS.assign(flip=True))
    assert [(s.name, s.rows) for s in grouped[1:]] == [("flip=false", 4), ("flip=true", 2)]


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ({"by": "domian"}, "did you mean domain?"),
        ({"where": "reference_margn > 1"}, "did you mean reference_margin?"),
        ({"bins": {"levl": [0, 1]}}, "did you mean level?"),
        ({"by": "prompt"}, "did you mean prompt_id?"),
        ({"bins": {"domain": [0, 1]}}, "holds text and has no bins"),
        ({"where": "domain > 1"}, "compares text with number"),
    ],
)
def test_a_wrong_column_names_the_contract_the_slice_and_the_closest(
    definition: dict[str, object], message: str
) -> None:
    """The error is found before any number is shown, and says where to look."""
    with pytest.raises(ContractError) as caught:
        resolve(contract(mine=definition), TOKENS, PROMPTS)
    assert message in str(caught.value)
    assert "contract test: slices.mine" in str(caught.value)


def test_a_computed_column_says_what_it_is_made_of() -> None:
    """Recorded rollouts may lack a side: the fix is that side, not another spelling."""
    with pytest.raises(ContractError, match="computed from engine_logprob"):
        resolve(contract(far={"where": "abs_dlp > 1"}), TOKENS.drop(columns="engine_logprob"))


@pytest.mark.parametrize("column", ["prompt_id", "number"])
def test_too_many_groups_are_refused(column: str) -> None:
    """One slice a prompt is a mistake; 200 groups are the bound, of rows or of prompts."""
    ids = [f"p{i}" for i in range(201)]
    tokens = pd.DataFrame({"prompt_id": ids})
    prompts = pd.DataFrame({"prompt_id": ids, "number": range(201)})
    with pytest.raises(ContractError, match="gives 201 slices; at most 200"):
        resolve(contract(each={"by": column}), tokens, prompts)
    assert len(resolve(contract(each={"by": column}), tokens[:200], prompts[:200])) == 201


def test_too_many_combinations_are_refused() -> None:
    """Each factor is small, the product is not."""
    tokens = pd.DataFrame({"position": range(30), "drift": [1.0] * 30})
    definition = {"by": "position", "bins": {"drift": [0, 1, 2, 3, 4, 5, 6, 7, 8]}}
    with pytest.raises(ContractError, match="gives 240 slices"):
        resolve(contract(each=definition), tokens)


def test_a_prompt_twice_is_refused() -> None:
    """Joining would double its rows, or pick one of two domains."""
    with pytest.raises(InputError, match="'a' is in the prompt table twice"):
        resolve(contract(domain={"by": "domain"}), TOKENS, pd.concat([PROMPTS, PROMPTS[:1]]))


def test_prompt_ids_join_as_text() -> None:
    """A CSV turns the ids 1, 2 into numbers; the token table holds them as text."""
    prompts = pd.DataFrame({"prompt_id": [1, 2], "domain": ["code", "math"]})
    tokens = pd.DataFrame({"prompt_id": ["2", "1"]})
    found = by_name(resolve(contract(domain={"by": "domain"}), tokens, prompts))
    assert found["domain=code"].mask.tolist() == [False, True]


def test_names_of_awkward_values_do_not_collide() -> None:
    """The text "1" and "a,b=c" are quoted, so that no two slices can read the same."""
    values = ["1", "a,b=c", "true", "", " x", 'say "hi"', "long prompt", "math:algebra", "1e5"]
    tokens = pd.DataFrame({"prompt_id": [str(i) for i in range(len(values))]})
    prompts = tokens.assign(domain=values)
    found = by_name(resolve(contract(domain={"by": "domain"}), tokens, prompts))
    assert set(found) == {
        "all", 'domain="1"', 'domain="a,b=c"', 'domain="true"', 'domain=""', 'domain=" x"',
        'domain="say \\"hi\\""', "domain=long prompt", "domain=math:algebra", 'domain="1e5"',
    }  # fmt: skip


def test_an_index_that_is_not_a_range_changes_nothing() -> None:
    """A filtered frame keeps its old index; masks go by place."""
    shuffled = TOKENS.set_axis([5, 3, 3, 9, 0, 1])
    definitions = {
        "domain": {"by": "domain"},
        "u": {"where": "reference_margin <= 0.5 and abs_dlp >= 0"},
        "c": {"bins": {"reference_prob": [0, 0.5, 1]}},
    }
    plain = resolve(contract(**definitions), TOKENS, PROMPTS)
    other = resolve(contract(**definitions), shuffled, PROMPTS)
    for a, b in zip(plain, other, strict=True):
        assert a.name == b.name
        assert a.mask.tolist() == b.mask.tolist()


def test_an_empty_table_gives_empty_slices() -> None:
    """Zero tokens scored is no evidence, and no crash."""
    found = resolve(
        contract(domain={"by": "domain"}, u={"where": "reference_margin <= 0.5"},
                 c={"bins": {"reference_prob": [0, 1]}}),
        TOKENS[:0], PROMPTS,
    )  # fmt: skip
    assert [s.name for s in found] == [
        "all", "domain=code", "domain=factual", "domain=math", "u", "reference_prob[0,1]",
    ]  # fmt: skip
    assert all(s.rows == 0 for s in found)


edges = st.lists(st.integers(-4, 4), min_size=2, max_size=5, unique=True).map(sorted)
numbers = st.one_of(st.none(), st.integers(-5, 5), st.floats(-5, 5, allow_nan=False))


@settings(max_examples=60, deadline=None)
@given(
    edges,
    st.lists(st.tuples(numbers, st.sampled_from(["a", "b", None])), min_size=1, max_size=12),
)
def test_groups_and_bins_partition_the_rows(
    cuts: list[int], rows: list[tuple[float | None, str | None]]
) -> None:
    """Row by row: in the bin and group of its values, or missing, or outside; never in two."""
    tokens = pd.DataFrame(
        {
            "drift": pd.Series([r[0] for r in rows], dtype=float),
            "path": pd.Series([r[1] for r in rows], dtype=object),
        }
    )
    found = resolve(contract(cell={"by": "path", "bins": {"drift": cuts}}), tokens)[1:]
    inside = 0
    for i, (value, path) in enumerate(rows):
        names = [s.name for s in found if s.mask[i]]
        expected = []
        if value is not None and path is not None:
            for a, b in itertools.pairwise(cuts):
                last = b == cuts[-1]
                if a <= value < b or (last and value == b):
                    expected = [f"path={path},drift[{a},{b}{']' if last else ')'}"]
        assert names == expected
        inside += bool(expected)
    nulls = sum(v is None or p is None for v, p in rows)
    assert {s.missing for s in found} == {nulls}
    assert sum(s.rows for s in found) == inside
