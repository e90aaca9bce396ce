"""Rewards tell good responses from bad ones, in [0, 1], for every kind of check.

The argument: each kind has responses that keep it, break it and keep it in part; arguments that
make no sense are refused before a run; a hostile pattern or response cannot take long; the checks
of the sample arithmetic agree with Python's own arithmetic; and advantages are centred, scale-free
and NaN exactly where no reward is known.
"""

from __future__ import annotations

import math
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_contracts.errors import InputError
from mismatch_audit.prompts import Prompt, load_prompts
from mismatch_audit.reward_checks import KINDS
from mismatch_audit.rewards import advantages, parse_check, reward, safe_pattern, validate_checks

SAMPLES = Path(__file__).parents[1] / "samples" / "prompts.jsonl"

TABLE = "| Animal | Legs |\n|---|---|\n| spider | 8 |"

CASES: list[tuple[str, str, float]] = [
    ("number:42", "The answer is 42.", 1.0),
    ("number:42", "20 + 22 = 42", 1.0),
    ("number:42", "**42**", 1.0),
    ("number:42", "42 comes from 20 and 22", 0.5),
    ("number:42", "The answer is 420, or 142, or 4.2, or x42", 0.0),
    ("number:42", "forty-two", 0.0),
    ("number:42", "", 0.0),
    ("number:2350", "It is 2,350 metres", 1.0),
    ("number:28.8", "Each pays $28.80!", 1.0),
    ("number:72", "72km/h", 1.0),
    ("number:-5", "It was −5 °C", 1.0),
    ("number:5", "It was -5 °C", 0.0),
    ("number:4", "10-4", 1.0),
    ("contains:Paris", "It is paris, of course", 1.0),
    ("contains:Paris", "It is Lyon", 0.0),
    ("contains:autumn|fall", "in the Fall", 1.0),
    ("contains:10:15", "at 10:15 sharp", 1.0),
    ("contains_exact:LANTERN", "LANTERN", 1.0),
    ("contains_exact:LANTERN", "lantern", 0.0),
    ("absent:rain", "Drops on the roof", 1.0),
    ("absent:rain", "Rainy days", 0.0),
    ("absent:rain", "", 0.0),
    ("starts:Dear neighbour", "dear neighbour, your drums", 1.0),
    ("starts:Dear neighbour", "Hello, dear neighbour", 0.0),
    ("ends:That is all.", "Owls hoot. That is all.", 1.0),
    ("ends:That is all.", "That is all. Owls hoot.", 0.0),
    ("one_of:red,green", "Green.", 1.0),
    ("one_of:red,green", "Green is my favourite", 0.5),
    ("one_of:red,green", "I like green", 0.0),
    ("order:a,b,c,d", "a, b, c, d", 1.0),
    ("order:a,b,c,d", "a b d c", 0.75),
    ("order:a,b,c,d", "d c b a", 0.25),
    ("order:2,4", "24", 0.0),
    ("count:echo=3", "echo Echo echo", 1.0),
    ("count:echo=3", "echo echoes", 1 / 3),
    ("count:echo=3", "echo " * 7, 0.0),
    ("words:6", "Lost the key. Kept the door.", 1.0),
    ("words:6", "Lost it.", 1 / 3),
    ("max_words:4", "one two three", 1.0),
    ("max_words:4", "one two three four five", 0.75),
    ("max_words:4", "w " * 8, 0.0),
    ("max_words:4", "", 0.0),
    ("min_words:4", "one two", 0.5),
    ("min_words:4", "one two three four five", 1.0),
    ("lines:3", "a\n\nb\nc", 1.0),
    ("lines:3", "a\nb", 2 / 3),
    ("lines:3", "a b c", 1 / 3),
    ("bullets:2", "Pack:\n- a map\n- a rope", 1.0),
    ("bullets:2", "1. a map\n2) a rope", 1.0),
    ("bullets:2", "a map and 2 ropes -- done", 0.0),
    ("sentences:2", "It costs 3.5 euros. Is it dear?", 1.0),
    ("sentences:2", "One. Two. Three.", 0.5),
    ("sentences:2", "One... two", 1.0),
    ("sentences:1", "これは文です。", 1.0),
    ("paragraphs:2", "For.\nStill for.\n\nAgainst.", 1.0),
    ("paragraphs:2", "For.\nAgainst.", 0.5),
    ("acrostic:MOON", "Milk\nover\n\nOld\nnights", 1.0),
    ("acrostic:MOON", "Milk\nover\nthe\nnight", 0.75),
    ("acrostic:MOON", "Milk over old nights", 0.25),
    ("case:lower", "hello there", 1.0),
    ("case:lower", "HELLO", 0.0),
    ("case:upper", "ABc1", 2 / 3),
    ("case:upper", "123", 0.0),
    ("json", "[2, 4, 6]", 1.0),
    ("json", '```json\n{"a": 1}\n```', 1.0),
    ("json", "{'a': 1}", 0.0),
    ("json", "[" * 5000, 0.0),
    ("json:city,country", '{"city": "Lisbon", "country": "Portugal"}', 1.0),
    ("json:city,country", '{"city": "Lisbon"}', 0.5),
    ("json:city,country", '["city", "country"]', 0.0),
    ("table:2", TABLE, 1.0),
    ("table:3", TABLE, 0.0),
    ("table:2", "Animal, Legs\nspider, 8", 0.0),
    ("regex:^[a-z ]+$", "hello there", 1.0),
    ("regex:^[a-z ]+$", "Hello.", 0.0),
    ("max_words:2 & contains:bonjour", "Bonjour!", 1.0),
    ("max_words:2 & contains:bonjour", "Salut", 0.5),
]


@pytest.mark.parametrize(("check", "response", "expected"), CASES)
def test_good_bad_and_partial_responses(check: str, response: str, expected: float) -> None:
    assert reward({"check": check}, response) == pytest.approx(expected)


def test_every_kind_has_a_response_that_keeps_it_and_one_that_does_not() -> None:
    found: dict[str, set[bool]] = {kind: set() for kind in KINDS}
    for check, _, expected in CASES:
        if " & " not in check:
            found[check.partition(":")[0]].add(expected == 1.0)
    assert all(outcomes == {True, False} for outcomes in found.values()), found


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ("numbr:4", "did you mean 'number'"),
        ("", "unknown check ''"),
        ("number:many", "needs a number, found 'many'"),
        ("number:nan", "needs a finite number"),
        ("number:", "needs a number"),
        ("contains:", "none of them empty"),
        ("contains:a||b", "none of them empty"),
        ("starts:", "none of them empty"),
        ("max_words:0", "needs a whole number from 1"),
        ("lines:-3", "needs a whole number from 1"),
        ("lines:²", "needs a whole number from 1"),
        ("count:echo", "none of them empty"),
        ("count:=3", "none of them empty"),
        ("acrostic:A B", "needs a word"),
        ("case:title", "needs lower or upper"),
        ("regex:", "needs a pattern"),
        ("regex:(", "not a regular expression"),
        ("json & ", "unknown check ''"),
    ],
)
def test_arguments_without_sense_are_refused(check: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_check(check)
    assert words in str(caught.value)


def test_checks_are_validated_before_a_run() -> None:
    prompts = [
        Prompt("a", prompt="x", metadata={"check": "number:1"}, where="p.jsonl:1"),
        Prompt("b", prompt="x"),
        Prompt("c", prompt="x", metadata={"check": "lines:none"}, where="p.jsonl:3"),
        Prompt("d", prompt="x", metadata={"check": 7}, where="p.jsonl:4"),
    ]
    assert validate_checks(prompts[:2]) == 1
    with pytest.raises(InputError) as caught:
        validate_checks(prompts)
    assert "p.jsonl:3: check 'lines:none': needs a whole number" in str(caught.value)
    assert "p.jsonl:4: a check must be text, found an integer" in str(caught.value)


def test_no_check_is_no_reward_and_not_zero() -> None:
    for metadata in ({}, {"check": None}, {"check": math.nan}, {"domain": "code"}):
        assert reward(metadata, "anything") is None


@given(
    check=st.sampled_from(sorted({check for check, _, _ in CASES})),
    response=st.text(max_size=80) | st.sampled_from([response for _, response, _ in CASES]),
)
def test_rewards_stay_in_the_unit_interval(check: str, response: str) -> None:
    value = reward({"check": check}, response)
    assert value is not None
    assert 0.0 <= value <= 1.0
    assert value == reward({"check": check}, f"\n {response}\t"), "outer blanks do not matter"


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+$",
        r"(a|aa)*b",
        r"(?:a{1,9}){9}",
        r"a*a*a*b",
        r".*x.*y",
        r"\w+\s+\w+",
        r"(a)\1",
        r"(?=a)a",
        r"(?P<n>a)",
        r"(?x) a",
        r"a*?a*?a*?",
        "|".join("ab" * 20),
        "a" * 201,
    ],
)
def test_patterns_without_a_bound_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"allowed|too long|characters"):
        safe_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"2021-03-05",
        r"^[a-z ]+$",
        r"\b\d{4}-\d{2}-\d{2}\b",
        r"^\w+ is \w+",
        r"[)(|*+]{1,3}x?",
        r"(yes|no)\.?$",
        r"\(\d+\)",
    ],
)
def test_ordinary_patterns_are_allowed(pattern: str) -> None:
    assert safe_pattern(pattern).pattern == pattern


def test_hostile_responses_take_no_time() -> None:
    """Each kind on texts made for backtracking: measured 0.5 s for all of them together, where one
    cubic search over 20,000 characters would take hours."""
    texts = [
        "a" * 20_000,
        "-" * 20_000 + "x",
        "|" + "-|" * 9_999 + "x\n" + "|" + "-" * 9_000 + "x",
        "1," * 10_000,
        "9" * 20_000 + "x",
        "a\n" * 10_000,
        "\n \t" * 6_000,
        "." * 20_000,
        "`" * 20_000,
        "[" * 20_000,
        " " * 20_000 + "x",
    ]
    checks = {check for check, _, _ in CASES} | {r"regex:[ab]*c[de]{1,9}x"}
    started = time.perf_counter()
    for check in checks:
        for text in texts:
            reward({"check": check}, text)
    assert time.perf_counter() - started < 10.0


ANSWERS: dict[str, object] = {
    "arithmetic-01": 17 + 26,
    "arithmetic-02": 12 * 5,
    "arithmetic-03": 103 - 48,
    "arithmetic-04": 20 - 2 * 7,
    "arithmetic-05": 4 * 2,
    "arithmetic-06": max(0.7, 0.65),
    "arithmetic-07": ", ".join(map(str, range(10, 0, -1))),
    "arithmetic-08": 2.5 * 60,
    "arithmetic-09": round(math.pi, 2),
    "arithmetic-10": "10:15",
    "arithmetic-11": 23 * 19,
    "arithmetic-12": 180 / 2.5,
    "arithmetic-13": 240 * 15 / 100,
    "arithmetic-14": f"{8 * 13} and {2 * (8 + 13)}",
    "arithmetic-15": (27 + 9) / 4,
    "arithmetic-16": Fraction("0.375"),
    "arithmetic-17": Fraction(3, 4) + Fraction(5, 6),
    "arithmetic-18": -6 + 11,
    "arithmetic-19": round(86.40 / 3, 2),
    "arithmetic-20": 2 * 1000 + 350,
    "arithmetic-21": 80 * 3 // 4 * 11 // 10,
    "arithmetic-22": 1000 % 37,
    "arithmetic-23": 1 / (Fraction(1, 6) + Fraction(1, 12)),
    "arithmetic-24": sum(range(51)),
    "arithmetic-25": 240 * 3 // 8,
    "arithmetic-26": f"{156:b}",
    "arithmetic-27": (41 - 7) // 2,
    "arithmetic-28": sum(15 + 5 * month for month in range(6)),
    "long_context-11": 4 * 2 + 5 + 4,
    "long_context-17": 620 + 480 + 150 - 310 - 85 - 240 - 165 - 60 - 200,
}


def test_sample_checks_agree_with_arithmetic() -> None:
    """The right answer earns 1 and one that is off earns less, for every arithmetic sample."""
    prompts = load_prompts(SAMPLES)
    assert validate_checks(prompts) >= 56
    by_id = {prompt.id: prompt for prompt in prompts}
    assert {i for i in by_id if i.startswith("arithmetic")} <= set(ANSWERS)
    for name, answer in ANSWERS.items():
        metadata = by_id[name].metadata
        text = f"{answer:g}" if isinstance(answer, float) else str(answer)
        assert reward(metadata, text) == 1.0, name
        assert reward(metadata, "77") < 1.0, name  # type: ignore[operator]


INSTRUCTIONS: dict[str, tuple[str, str]] = {
    "instruction-01": ("Apple\nPear\nFig", "Here are three fruits: apple, pear and fig. Enjoy!"),
    "instruction-05": ('{"city": "Lisbon", "country": "Portugal"}', "Lisbon, Portugal"),
    "instruction-10": ("It shows north. Walkers use it.", "A compass is a thing that points."),
    "instruction-13": ("[2, 4, 6, 8, 10]", "2, 4, 6, 8, 10"),
    "instruction-14": ("Milk\nover\nold\nnight", "The moon\nis\nvery\nround"),
    "instruction-16": ("Owls are quiet. They see well. That is all.", "Owls are quiet."),
    "instruction-18": ("hello to you", "Hello!"),
    "instruction-23": (TABLE + "\n| dog | 4 |\n| hen | 2 |", "spider 8, dog 4, hen 2"),
    "instruction-27": ("eoeia", "e, o, e, i, a"),
    "instruction-28": ("Grey drops\ntap the window\nall night", "Rain, rain, go away"),
}


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_sample_instructions_reward_whoever_follows_them(name: str) -> None:
    good, bad = INSTRUCTIONS[name]
    metadata = next(p.metadata for p in load_prompts(SAMPLES) if p.id == name)
    assert reward(metadata, good) == 1.0
    assert reward(metadata, bad) < 1.0  # type: ignore[operator]


REWARDS = st.lists(
    st.one_of(st.none(), st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=30
)


@given(rewards=REWARDS)
def test_batch_advantages_are_centred_and_unknown_stays_unknown(
    rewards: list[float | None],
) -> None:
    result = advantages(rewards)
    known = [r for r in rewards if r is not None]
    assert [math.isnan(a) for a in result] == [r is None for r in rewards]
    if known:
        np.testing.assert_allclose(np.nansum(result), 0, atol=1e-9)
        centred = np.array(known) - np.mean(known)
        np.testing.assert_allclose(result[~np.isnan(result)], centred, atol=1e-12)


@settings(deadline=None)
@given(
    values=st.lists(st.lists(st.floats(0, 1), min_size=2, max_size=6), min_size=1, max_size=5),
    scale=st.floats(0.1, 10),
    shift=st.floats(-5, 5),
)
def test_group_advantages_forget_shift_and_scale(
    values: list[list[float]], scale: float, shift: float
) -> None:
    rewards = [r for group in values for r in group]
    groups = [f"p{i}" for i, group in enumerate(values) for _ in group]
    result = advantages(rewards, groups, epsilon=0.0)
    moved = advantages([scale * r + shift for r in rewards], groups, epsilon=0.0)
    for i, group in enumerate(values):
        mine = result[[g == f"p{i}" for g in groups]]
        assert abs(mine.sum()) < 1e-6
        if np.ptp(group) == 0:
            assert (mine == 0).all()
        elif np.ptp(group) > 1e-3:
            assert np.std(mine, ddof=1) == pytest.approx(1.0)
            others = moved[[g == f"p{i}" for g in groups]]
            np.testing.assert_allclose(others, mine, atol=1e-6)


def test_group_advantages_by_hand() -> None:
    """The order of the responses does not matter, None takes no part, equal rewards give 0 although
    0.1 has no exact mean in binary."""
    result = advantages(
        [1.0, 0.1, 0.0, None, 0.1, 0.1], ["a", "b", "a", "a", "b", "b"], epsilon=0.0
    )
    half = 0.5 / math.sqrt(0.5)
    np.testing.assert_allclose(result, [half, 0, -half, math.nan, 0, 0])
    plain = advantages([1.0, 0.0, 1.0, 1.0], ["a", "a", "b", "b"], normalise=False)
    np.testing.assert_allclose(plain, [0.5, -0.5, 0, 0])


def test_advantages_refuse_what_would_be_meaningless() -> None:
    with pytest.raises(InputError, match="every group has one response"):
        advantages([1.0, 0.0, None], ["a", "b", "b"])
    with pytest.raises(InputError, match="3 rewards but 2 groups"):
        advantages([1.0, 0.0, 1.0], ["a", "b"])
    for wrong in (math.nan, math.inf):
        with pytest.raises(InputError, match="must be finite"):
            advantages([1.0, wrong])
    assert advantages([]).shape == (0,)
    assert np.isnan(advantages([None, None], ["a", "b"])).all()
