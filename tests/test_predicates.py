"""The where language: a parsed tree prints back to itself, and means what two oracles say it means.

Together: (1) every tree survives print and parse; (2) its truth on rows with nulls is that of a
row-by-row three-valued evaluator written here from the definition; (3) on rows without nulls the
same text means the same to pandas' own parser; (4) whatever is not in the language is refused with
the character at fault, quickly, and without being run.
"""

from __future__ import annotations

import math
import operator
import time
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_contracts.errors import ContractError
from kernel_contracts.evaluation import evaluate
from kernel_contracts.expressions import (
    Absolute,
    Arithmetic,
    Both,
    Column,
    Comparison,
    Either,
    In,
    IsNull,
    Negate,
    Not,
    Number,
    Text,
    Truth,
    columns,
    to_text,
    walk,
)
from kernel_contracts.predicates import PredicateError, parse

NUMBERS, TEXTS, FLAGS = ("x", "y", "z"), ("name", "a col"), ("flip", "mask")
OPERATORS = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le,
    ">": operator.gt, ">=": operator.ge,
}  # fmt: skip

literals = st.one_of(
    st.integers(-5, 5).map(float),
    st.floats(-1e6, 1e6, allow_nan=False).map(lambda v: v + 0.0),
).map(Number)
texts = st.sampled_from(["code", "a'b", 'say "x"', "", "Ünï\n\\", "and", "\U0001f600"])


def numeric(depth: int) -> st.SearchStrategy[Any]:
    leaf = st.one_of(literals, st.sampled_from(NUMBERS).map(Column))
    if depth == 0:
        return leaf
    below = numeric(depth - 1)
    return st.one_of(
        leaf,
        st.builds(Arithmetic, st.sampled_from("+-*/"), below, below),
        st.builds(Absolute, below),
        st.builds(Negate, below.filter(lambda n: not isinstance(n, Number))),
    )


def conditions(depth: int, *, nulls: bool = True) -> st.SearchStrategy[Any]:
    leaves = [
        st.builds(Comparison, st.sampled_from(list(OPERATORS)), numeric(2), numeric(1)),
        st.builds(In, numeric(1), st.lists(literals, min_size=1, max_size=3).map(tuple),
                  st.booleans()),
        st.sampled_from(FLAGS).map(Column),
    ]  # fmt: skip
    if nulls:
        leaves += [
            st.builds(Comparison, st.sampled_from(["==", "!="]),
                      st.sampled_from(TEXTS).map(Column), texts.map(Text)),
            st.builds(In, st.sampled_from(TEXTS).map(Column),
                      st.lists(texts.map(Text), min_size=1, max_size=3).map(tuple), st.booleans()),
            st.builds(Comparison, st.just("=="), st.sampled_from(FLAGS).map(Column),
                      st.booleans().map(Truth)),
            st.builds(IsNull, st.one_of(numeric(1), st.sampled_from(TEXTS).map(Column)),
                      st.booleans()),
            st.booleans().map(Truth),
        ]  # fmt: skip
    leaf = st.one_of(leaves)
    if depth == 0:
        return leaf
    below = conditions(depth - 1, nulls=nulls)
    several = st.lists(below, min_size=2, max_size=3)
    return st.one_of(
        leaf,
        st.builds(Not, below),
        several.map(lambda parts: Both(flat(parts, Both))),
        several.map(lambda parts: Either(flat(parts, Either))),
    )


def flat(parts: list[Any], kind: type) -> tuple[Any, ...]:
    return tuple(q for p in parts for q in (p.operands if isinstance(p, kind) else (p,)))


def truth(node: Any, row: dict[str, Any]) -> bool | None:
    """Three-valued truth of one row, from the definition: None is unknown."""
    match node:
        case Column(name):
            return row[name]
        case Truth(value):
            return value
        case Not(inner):
            value = truth(inner, row)
            return None if value is None else not value
        case Both(parts):
            values = [truth(p, row) for p in parts]
            return False if False in values else None if None in values else True
        case Either(parts):
            values = [truth(p, row) for p in parts]
            return True if True in values else None if None in values else False
        case IsNull(inner, negated):
            return (number(inner, row) is None) != negated
        case In(inner, items, negated):
            value = number(inner, row)
            return None if value is None else (value in [i.value for i in items]) != negated
    left, right = number(node.left, row), number(node.right, row)
    return None if left is None or right is None else OPERATORS[node.operator](left, right)


def number(node: Any, row: dict[str, Any]) -> Any:
    match node:
        case Number(value) | Text(value) | Truth(value):
            return value
        case Column(name):
            return row[name]
        case Negate(inner):
            value = number(inner, row)
            return None if value is None else -value
        case Absolute(inner):
            value = number(inner, row)
            return None if value is None else abs(value)
    a, b = number(node.left, row), number(node.right, row)
    if a is None or b is None or (node.operator == "/" and b == 0):
        return None
    try:
        value = {"+": operator.add, "-": operator.sub, "*": operator.mul,
                 "/": operator.truediv}[node.operator](a, b)  # fmt: skip
    except OverflowError:
        value = math.inf
    return None if math.isnan(value) else value


@st.composite
def frames(draw: st.DrawFn, nulls: bool = True) -> pd.DataFrame:
    size = draw(st.integers(1, 6))
    some = (lambda s: st.one_of(st.none(), s)) if nulls else (lambda s: s)
    values = st.one_of(st.integers(-5, 5).map(float), st.floats(-1e3, 1e3, allow_nan=False))
    data = {c: draw(st.lists(some(values), min_size=size, max_size=size)) for c in NUMBERS}
    data |= {c: draw(st.lists(some(texts), min_size=size, max_size=size)) for c in TEXTS}
    data |= {c: draw(st.lists(some(st.booleans()), min_size=size, max_size=size)) for c in FLAGS}
    frame = pd.DataFrame({k: pd.Series(v, dtype=object) for k, v in data.items()})
    for c in NUMBERS:
        frame[c] = frame[c].astype(float)
    return frame


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {k: None if v is None or v != v else v for k, v in row.items()}
        for row in frame.to_dict("records")
    ]


@settings(max_examples=150, deadline=None)
@given(conditions(3))
def test_a_printed_tree_parses_back_to_itself(tree: Any) -> None:
    """Catches wrong precedence, lost parentheses and bad quoting in printer or parser."""
    text = to_text(tree)
    assert parse(text) == tree
    assert set(columns(tree)) <= {*NUMBERS, *TEXTS, *FLAGS}


@settings(max_examples=150, deadline=None)
@given(conditions(2), frames())
def test_truth_with_nulls_is_that_of_a_row_by_row_oracle(tree: Any, frame: pd.DataFrame) -> None:
    """Selected rows are those known to be true, unknown rows those that a null decides."""
    outcome = evaluate(parse(to_text(tree)), frame.__getitem__, len(frame))
    expected = [truth(tree, row) for row in rows_of(frame)]
    assert outcome.selected.tolist() == [e is True for e in expected]
    assert outcome.unknown.tolist() == [e is None for e in expected]


def for_pandas(tree: Any) -> bool:
    """pandas answers a comparison of constants with one value, and divides by zero to infinity."""
    leaves = [n for n in walk(tree) if isinstance(n, Comparison | In)]
    return all(columns(leaf) for leaf in leaves) and "/" not in to_text(tree)


@settings(max_examples=60, deadline=None)
@given(conditions(1, nulls=False).filter(for_pandas), frames(nulls=False))
def test_pandas_own_parser_agrees_where_nothing_is_null(tree: Any, frame: pd.DataFrame) -> None:
    """A second, unrelated parser reads the same text: precedence is the usual one."""
    frame = frame.astype(dict.fromkeys(FLAGS, bool))
    text = to_text(tree)
    outcome = evaluate(parse(text), frame.__getitem__, len(frame))
    assert frame.query(text, engine="python").index.tolist() == list(
        np.flatnonzero(outcome.selected)
    )


def test_a_null_selects_nothing_and_is_counted() -> None:
    """The rule that a report relies on, spelt out: NaN never compares, and is not forgotten."""
    frame = pd.DataFrame({"x": [1.0, np.nan, 3.0], "y": [0.0, 1.0, 0.0]})

    def seen(text: str) -> tuple[list[bool], int]:
        outcome = evaluate(parse(text), frame.__getitem__, 3)
        return outcome.selected.tolist(), int(outcome.unknown.sum())

    assert seen("x < 2") == ([True, False, False], 1)
    assert seen("not x < 2") == ([False, False, True], 1)
    assert seen("x != 1") == ([False, False, True], 1)
    assert seen("x < 2 or y == 1") == ([True, True, False], 0)
    assert seen("x < 2 and y == 0") == ([True, False, False], 0)
    assert seen("x is null or x > 2") == ([False, True, True], 0)
    assert seen("x / y > 0") == ([False, False, False], 3)


def test_a_chain_means_both_comparisons() -> None:
    """``0.1 <= x < 0.5`` is a half-open interval, as people read it."""
    assert parse("0.1 <= x < 0.5") == parse("0.1 <= x and x < 0.5")
    frame = pd.DataFrame({"x": [0.05, 0.1, 0.49, 0.5]})
    outcome = evaluate(parse("0.1 <= x < 0.5"), frame.__getitem__, 4)
    assert outcome.selected.tolist() == [False, True, True, False]


KNOWN = ("reference_margin", "flip", "domain", "x")

REFUSED = [
    ("", 0, "needed here"),
    ("x = 1", 2, "write =="),
    ("x <> 1", 2, "write !="),
    ("x & flip", 2, "write `and`"),
    ("x > 1 AND flip", 6, "write `and`"),
    ("x >", 3, "the end"),
    ("(x > 1", 6, "close the parenthesis"),
    ("x > 1)", 5, "unexpected ')'"),
    ("x + 1", 0, "condition is needed"),
    ("not x + 1", 4, "condition is needed"),
    ("(x > 1) + 1 > 2", 0, "value is needed"),
    ("x > 1 == true", 6, "compares number with boolean"),
    ("x == null", 5, "is null"),
    ("x in [1, null]", 9, "is null"),
    ("x in []", 6, "needed here"),
    ("x in [1, 'a']", 9, "one kind"),
    ("x in [1, x]", 9, "plain numbers"),
    ("abs(x) in ['a']", 11, "in a list of text"),
    ("domain > 'a'", 7, "no order"),
    ("'a' + x > 1", 0, "number is needed"),
    ("domain == 'a", 10, "not closed"),
    ("domain == 'a\\q'", 12, "unknown escape"),
    ("domain == '\\ud800'", 11, "unknown escape"),
    ("exp(x) > 1", 0, "only function is abs"),
    ("__import__('os').system('true')", 16, "unexpected '.'"),
    ("__import__('os') == 1", 0, "no function"),
    ("x.__class__ == 1", 0, "no column"),
    ("lambda: 1", 6, "unexpected ':'"),
    ("reference_margn > 1", 0, "did you mean reference_margin?"),
    ("1.2.3 > x", 0, "not a number"),
    ("1e999 > x", 0, "too large"),
    ("x > 1 # comment", 6, "unexpected '#'"),
    ("x > 1; flip", 5, "unexpected ';'"),
]


@pytest.mark.parametrize(("text", "offset", "message"), REFUSED)
def test_what_is_not_the_language_is_refused_at_its_character(
    text: str, offset: int, message: str
) -> None:
    """One case a rule of the grammar: the offset is what an editor would underline."""
    with pytest.raises(PredicateError) as caught:
        parse(text, KNOWN)
    assert message in str(caught.value)
    assert caught.value.offset == offset
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "text",
    [
        "(" * 5000 + "x" + ")" * 5000,
        "not " * 400 + "flip",
        "-" * 390 + "x > 1",
        "abs(" * 90 + "x" + ")" * 90 + " > 1",
        "x" * 10_000,
        "+".join("x" * 300) + " > 1",
        "'" + "a" * 1998,
        "x in [" + ",".join("1" * 300) + "]",
    ],
)
def test_hostile_expressions_are_refused_quickly(text: str) -> None:
    """Bounds on length, words and depth: no recursion error, no slow scan."""
    start = time.process_time()
    with pytest.raises(PredicateError):
        parse(text)
    assert time.process_time() - start < 0.5


def test_the_longest_sum_within_the_bounds_is_evaluated() -> None:
    """A left-deep tree as long as the bounds allow stays within the recursion limit."""
    text = "+".join("x" * 190) + " > 1"
    outcome = evaluate(parse(text), {"x": pd.Series([1.0, 0.0])}.__getitem__, 2)
    assert outcome.selected.tolist() == [True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("domain > 1", "compares text with number"),
        ("domain == 1", "compares text with number"),
        ("flip == 1", "compares boolean with number"),
        ("x", "holds number, not true or false"),
        ("domain + 1 > 0", "is text, not a number"),
        ("domain in [1]", "among values that are text"),
        ("x == domain", "compares number with text"),
        ("domain < domain", "no order"),
        ("mixed == 'a'", "holds values of kind mixed"),
        ("day == 'a'", "kind datetime"),
        ("big == 1", "beyond 2^53"),
    ],
)
def test_a_column_of_another_kind_is_an_error_not_an_empty_slice(text: str, message: str) -> None:
    """pandas would answer False for every row, and the slice would silently be empty."""
    frame = pd.DataFrame(
        {
            "x": [1.0], "domain": ["code"], "flip": [True], "mixed": pd.Series(["a"], dtype=object),
            "day": [pd.Timestamp("2024-01-01")], "big": [2**60],
        }
    )  # fmt: skip
    frame = pd.concat([frame, frame], ignore_index=True)
    frame["mixed"] = pd.Series(["a", 1], dtype=object)
    with pytest.raises(ContractError, match=message.replace("^", r"\^")):
        evaluate(parse(text), frame.__getitem__, 2)


@pytest.mark.parametrize(
    "column",
    [
        pd.Series([1, None, 3], dtype="Int64"),
        pd.Series([1.0, None, 3.0], dtype="Float64"),
        pd.Series([1.0, np.nan, 3.0]),
        pd.Series([1, None, 3], dtype=object),
        pd.Series([1, None, 3], dtype="int64[pyarrow]"),
    ],
)
def test_every_way_pandas_stores_a_nullable_number_is_read(column: pd.Series) -> None:
    """The table comes from Parquet, a CSV or a converter: the answer must not depend on it."""
    outcome = evaluate(parse("x >= 3"), {"x": column}.__getitem__, 3)
    assert outcome.selected.tolist() == [False, False, True]
    assert outcome.unknown.tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", ["object", "str", "category", "string[pyarrow]"])
def test_every_way_pandas_stores_a_text_is_read(dtype: str) -> None:
    """As for numbers."""
    column = pd.Series(["code", None, "math"], dtype=dtype)
    outcome = evaluate(parse("d in ['code'] or d == 'x'"), {"d": column}.__getitem__, 3)
    assert outcome.selected.tolist() == [True, False, False]
    assert outcome.unknown.tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", ["object", "boolean", "bool[pyarrow]"])
def test_every_way_pandas_stores_a_flag_is_read(dtype: str) -> None:
    """As for numbers; the flip column is nullable where a side had no finite logits."""
    column = pd.Series([True, None, False], dtype=dtype)
    outcome = evaluate(parse("not flip"), {"flip": column}.__getitem__, 3)
    assert outcome.selected.tolist() == [False, False, True]
    assert outcome.unknown.tolist() == [False, True, False]
