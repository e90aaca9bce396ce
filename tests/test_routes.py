"""The routing table keeps every failing and every unseen request from the engine.

Together: (1) what a slice becomes covers it, on random conditions and rows, and a request judged
before its tokens are known is never let through wrongly; (2) slices are found again by their names;
(3) failures leave at once and come back slowly, missing evidence never passes; (4) a table that
says less than it must is refused; (5) the command ties them to reports and contracts.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pandas as pd
import pytest
import report_fixtures as fixtures
from conftest import audit
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kernel_contracts.contract import Contract
from kernel_contracts.errors import InputError, NotComparableError
from kernel_contracts.evaluation import evaluate
from kernel_contracts.expressions import (
    Both,
    Column,
    Comparison,
    Condition,
    Either,
    In,
    Not,
    Number,
    Text,
    Truth,
    columns,
    to_text,
)
from kernel_contracts.predicates import parse
from kernel_contracts.slices import resolve
from mismatch_audit.cli.app import app as cli
from mismatch_audit.reports.record import Record, save_record
from mismatch_audit.routing.approximate import outer, simplify
from mismatch_audit.routing.audited import Audited, load_audited
from mismatch_audit.routing.build import Audit, build_table
from mismatch_audit.routing.conditions import named
from mismatch_audit.routing.decide import Decision, Decisions
from mismatch_audit.routing.features import known_when
from mismatch_audit.routing.matching import Facts, compiled, spans
from mismatch_audit.routing.table import (
    Policy,
    RoutingTable,
    load_routes,
    routes_json_schema,
    save_routes,
    table_digest,
)
from mismatch_audit.rundir import write_json
from mismatch_audit.tokens import sequence_schema, token_schema, write_part

DOMAINS = ("code", "math", "law")
CONTRACT: dict[str, Any] = {
    "schema": "kernel-contracts/v1",
    "name": "routed",
    "slices": {
        "all": {},
        "domain": {"by": "domain"},
        "undecided": {"where": "reference_margin <= 0.5"},
        "rare": {"where": "reference_prob < 0.1 and domain == 'code'"},
        "late": {"where": "context_length >= 100"},
    },
    "statistical": [
        {"id": "S1", "metric": "kl_engine_reference", "limit": 2e-3, "ceiling": 1e-2},
        {"id": "S2", "metric": "kl_engine_reference", "limit": 1e-2, "ceiling": 2e-2,
         "slices": ["domain"]},
        {"id": "S3", "metric": "flip_rate", "limit": 0.1, "slices": ["undecided"]},
    ],
    "budget": {"reward_range": 1.0, "reward_drift": 0.5, "horizon": 64},
    "escalation": [
        {"when": {"clause": "S2", "verdict": "FAIL"}, "action": "route", "to": "reference"},
        {"when": {"clause": "S3", "verdict": "FAIL"}, "action": "route", "to": "reference",
         "slice": "undecided"},
        {"when": {"verdict": "FAIL"}, "action": "block"},
    ],
}  # fmt: skip


def rows(**verdicts: str) -> list[dict[str, Any]]:
    """One passing row for each promise; keyword ``S2_code`` and the like set verdicts."""
    names = [("S1", "all", 90), *(("S2", f"domain={d}", 30) for d in DOMAINS),
             ("S3", "undecided", 80)]  # fmt: skip
    found = []
    for clause, name, n in names:
        key = f"{clause}_{name.split('=')[-1]}"
        verdict = verdicts.get(key, verdicts.get(clause, "PASS"))
        limit = {"S1": 2e-3, "S2": 1e-2, "S3": 0.1}[clause]
        found.append(
            fixtures.row(
                clause=clause, slice=name, n_prompts=n, verdict=verdict, limit=limit,
                metric="flip_rate" if clause == "S3" else "kl_engine_reference",
                value=limit * 0.8, lower=limit * 0.7,
                upper=limit * float(verdicts.get("upper", 0.9)),
            )
        )  # fmt: skip
    return found


def report(
    measurements: list[dict[str, Any]] | None = None,
    contract: dict[str, Any] | None = None,
    **changes: Any,
) -> Record:
    document = fixtures.document("FAIL")
    measurements = rows() if measurements is None else measurements
    document["contract"]["document"] = Contract.model_validate(contract or CONTRACT).document()
    document |= {"measurements": measurements, "actions": [], "findings": []}
    document["counts"] = {"prompts": 90, "sequences": 90, "tokens": 900}
    worst = {m["verdict"] for m in measurements} - {"PASS"}
    if not worst:
        document |= {"verdict": "PASS", "exit_code": 0}
    return Record.model_validate(document | changes)


def table(
    record: Record,
    previous: RoutingTable | None = None,
    *,
    digest: str = "a" * 64,
    audited: Audited | None = None,
    name: str = "engine",
) -> RoutingTable:
    contract = Contract.model_validate(record.contract.document)
    one = Audit(name, record, digest, contract, audited)
    return build_table([one], Policy(), previous, "2026-01-01T00:00:00+00:00")


def answers(made: RoutingTable, prompt_tokens: float = 10, **metadata: Any) -> str:
    facts = Facts(metadata, spans((prompt_tokens, prompt_tokens), 16))
    return Decisions.of_table(made).decide(facts).target


# (1) What a slice becomes covers it -------------------------------------------------------------
NUMBERS = st.integers(-8, 16).map(lambda n: Number(n / 4))
OPERATORS = st.sampled_from(["<", "<=", ">", ">="])


def leaves(*names: str) -> st.SearchStrategy[Condition]:
    number = st.builds(Comparison, OPERATORS, st.sampled_from([Column(n) for n in names]), NUMBERS)
    turned = st.builds(Comparison, OPERATORS, NUMBERS, st.sampled_from([Column(n) for n in names]))
    text = st.builds(
        Comparison, st.sampled_from(["==", "!="]), st.just(Column("domain")),
        st.sampled_from([Text(d) for d in DOMAINS]),
    )  # fmt: skip
    listed = st.builds(
        In, st.just(Column("domain")),
        st.lists(st.sampled_from([Text(d) for d in DOMAINS]), min_size=1, max_size=2).map(tuple),
        st.booleans(),
    )  # fmt: skip
    return number | turned | text | listed


def trees(*names: str) -> st.SearchStrategy[Condition]:
    def grow(inner: st.SearchStrategy[Condition]) -> st.SearchStrategy[Condition]:
        several = st.lists(inner, min_size=2, max_size=3).map(tuple)
        return several.map(Both) | several.map(Either) | inner.map(Not)

    return st.recursive(leaves(*names), grow, max_leaves=8)


def token_rows(n: int, drift: float, seed: int) -> pd.DataFrame:
    """Rows of two programs over 5 tokens whose logits differ by a drift of at most ``drift``."""
    rng = np.random.default_rng(seed)
    p = rng.normal(0, 1, (n, 5))
    d = rng.uniform(0, drift, (n, 5))
    margin = [np.diff(np.sort(x, axis=1)[:, -2:], axis=1)[:, 0] for x in (p, p + d)]
    return pd.DataFrame(
        {
            "reference_margin": margin[0], "engine_margin": margin[1],
            "entropy": rng.uniform(0, 4, n), "position": rng.integers(0, 5, n),
            "domain": rng.choice(DOMAINS, n),
        }
    )  # fmt: skip


@given(
    trees("reference_margin", "entropy", "position"), st.integers(0, 8), st.integers(0, 2**16),
    st.booleans(),
)  # fmt: skip
def test_an_approximation_covers_the_slice(
    condition: Condition, drift: int, seed: int, measured: bool
) -> None:
    """Whatever the condition: where it holds, so does its outer approximation, which names no
    column of the reference. The drift is that of the rows, or not known at all."""
    frame = token_rows(60, drift / 4, seed)
    covered = outer(condition, drift / 4 if measured else None)
    assert all(known_when(name) != "never" for name in columns(covered.condition))

    def holds(one: Condition) -> np.ndarray:
        return evaluate(one, lambda name: frame[name], len(frame)).selected

    assert not (holds(condition) & ~holds(covered.condition)).any()
    unchanged = not {"reference_margin", "entropy"} & set(columns(condition))
    assert (covered.mapping == "exact") is unchanged


def test_without_its_safety_the_margin_would_miss_rows() -> None:
    """The control of the test above: with half the drift, rows of the slice are not covered."""
    frame = token_rows(4000, 2.0, 0)
    inside = frame["reference_margin"] <= 0.5
    for drift, sound in ((2.0, True), (1.0, False)):
        text = to_text(outer(parse("reference_margin <= 0.5"), drift).condition)
        assert text == f"engine_margin <= {0.5 + drift:g}"
        assert (frame["engine_margin"][inside] <= 0.5 + drift).all() == sound


@given(trees("position", "context_length"), st.integers(0, 6), st.integers(1, 6), st.data())
def test_a_request_is_judged_before_its_tokens_soundly(
    condition: Condition, prompt: int, budget: int, data: st.DataObject
) -> None:
    """ "No" before the request means that none of its tokens meets the condition, "yes" that all
    do, by the slices' own evaluation of every token that it could generate."""
    domain = data.draw(st.sampled_from([*DOMAINS, None]))
    steps = np.arange(budget)
    frame = pd.DataFrame(
        {"position": steps, "context_length": prompt + steps, "domain": [domain] * budget}
    )
    outcome = evaluate(condition, lambda name: frame[name], budget)
    metadata = {} if domain is None else {"domain": domain}
    said = compiled(condition)(Facts(metadata, spans((prompt, prompt), budget)))
    if said is False:
        assert not (outcome.selected | outcome.unknown).any()
    if said is True:
        assert outcome.selected.all()
    if budget == 1:
        told = None if outcome.unknown[0] else bool(outcome.selected[0])
        assert said is told


@pytest.mark.parametrize(
    ("text", "metadata", "told"),
    [
        ("domain == 'code'", {"domain": 3}, None),
        ("domain == 'code'", {"domain": True}, None),
        ("domain != 'code'", {}, None),
        ("domain is null", {}, True),
        ("domain is not null", {"domain": "x"}, True),
        ("engine_margin is null", {}, None),
        ("engine_margin <= 1", {}, None),
        ("engine_margin <= 1 and domain == 'law'", {"domain": "code"}, False),
        ("urgent", {"urgent": True}, True),
        ("urgent", {"urgent": "true"}, None),
        ("level * 2 >= 7", {"level": 3.5}, True),
        ("1 / level > 0", {"level": 0}, None),
        ("abs(level - 4) < 1", {"level": 3.5}, True),
        ("level == 2", {"level": float("nan")}, None),
        ("level > 2", {"level": 10**400}, None),
        ("level > 2", {"level": float("inf")}, True),
    ],
)
def test_what_a_request_does_not_show_is_unknown(
    text: str, metadata: dict[str, Any], told: bool | None
) -> None:
    """Absent metadata, values of another kind and columns of decode are unknown, never a no."""
    assert compiled(parse(text))(Facts(metadata)) is told


@given(trees("position"))
def test_simplifying_changes_nothing(condition: Condition) -> None:
    """Without nulls, a simplified condition with constants mixed in selects the same rows."""
    frame = token_rows(40, 0.0, 1)
    mixed = Both((Truth(True), Either((Truth(False), condition)), condition))
    read = lambda name: frame[name]  # noqa: E731
    a, b = (evaluate(one, read, len(frame)).selected for one in (mixed, simplify(mixed)))
    assert (a == b).all()


# (2) Slices by their names ----------------------------------------------------------------------
def test_slices_are_found_again_by_name() -> None:
    """Odd values, numbers that are texts, several columns and bins: the condition read from each
    slice's name selects the slice's rows."""
    contract = Contract.model_validate(
        {
            "schema": "kernel-contracts/v1", "name": "names",
            "statistical": CONTRACT["statistical"][:1],
            "slices": {
                "tag": {"by": "tag"}, "pair": {"by": ["tag", "level"]}, "flag": {"by": "flag"},
                "hard": {"where": "level >= 2", "by": "tag", "bins": {"position": [0, 2, 5]}},
                "edges": {"bins": {"score": [-1.5, 0, 1e-7, 2.5]}}, "few": {"where": "level < 2"},
            },
        }
    )  # fmt: skip
    tags = ["a", "a,b", 'q"x', "1", "true", " pad", "é ü", "x=y", "null", "-3e5", "line\nbreak"]
    rng = np.random.default_rng(0)
    n = 400
    frame = pd.DataFrame(
        {
            "prompt_id": [str(i) for i in range(n)], "tag": rng.choice(tags, n),
            "level": rng.integers(0, 4, n).astype(float), "flag": rng.choice([True, False], n),
            "position": rng.integers(0, 6, n), "score": rng.uniform(-2, 3, n),
        }
    )  # fmt: skip
    found = resolve(contract, frame)
    assert len(found) > 60
    for one in found:
        again = named(contract, one.name)
        assert again is not None, one.name
        selected = evaluate(again.condition, lambda name: frame[name], n).selected
        assert (selected == one.mask).all(), one.name
    for wrong in ("colour=red", "hard:tag=a", "edges[0,1)", "few=1", "tag=a,b", "", "probe"):
        assert named(contract, wrong) is None, wrong


# (3) Standing -----------------------------------------------------------------------------------
def test_a_clean_audit_leaves_everything_to_the_engine_but_the_unseen() -> None:
    made = table(report())
    assert {d: answers(made, domain=d) for d in DOMAINS} == dict.fromkeys(DOMAINS, "engine")
    assert answers(made, domain="poetry") == "reference"
    assert answers(made) == "reference"
    assert [r.slice for r in made.engines[0].rules] == ["unseen domain"]
    assert made.engines[0].rerouted.upper == 0.0


@pytest.mark.parametrize("verdict", ["FAIL", "INCONCLUSIVE", "UNOBSERVED", "UNSOUND"])
def test_a_slice_that_was_not_shown_to_pass_falls_back_alone(verdict: str) -> None:
    """Whatever its verdict but PASS, the slice goes to the reference and no other does."""
    made = table(report(rows(S2_code=verdict)))
    assert answers(made, domain="code") == "reference"
    assert answers(made, domain="math") == "engine"
    assert made.engines[0].rerouted.upper == pytest.approx(1 / 3)


@pytest.mark.parametrize("verdict", ["FAIL", "INCONCLUSIVE", "UNOBSERVED", "UNSOUND"])
def test_a_whole_run_that_does_not_pass_falls_back_whole(verdict: str) -> None:
    made = table(report(rows(S1=verdict)))
    assert {answers(made, domain=d) for d in DOMAINS} == {"reference"}
    assert made.engines[0].rerouted.lower == 1.0
    assert [b.bound for b in made.engines[0].mixture if b.metric == "reward_drift"] == [0.0]


def test_a_slice_of_the_reference_falls_back_by_the_engines_margin() -> None:
    """``undecided`` is covered by the engine's margin with the largest drift seen (1.94) as safety,
    is known in decode only, and says so; without a drift its parent, everything, falls back."""
    made = table(report(rows(S3="FAIL")))
    rule = made.engines[0].rules[0]
    assert (rule.when, rule.level, rule.mapping) == (
        "engine_margin <= 2.44",
        "decode",
        "counterpart",
    )
    assert answers(made, domain="code") == "reference"
    decider = Decisions.of_table(made).by_name["engine"]
    wide = Facts({"domain": "code"}, spans((4, 4), 8), {"engine_margin": 3.0})
    assert decider.permits(wide)
    assert any("1.94" in note for note in made.engines[0].notes)
    blind = table(report(rows(S3="FAIL"), chain=[]))
    assert (blind.engines[0].rules[0].when, blind.engines[0].rules[0].mapping) == ("true", "parent")


def test_a_part_that_is_never_known_leaves_its_parent() -> None:
    """``reference_prob < 0.1 and domain == 'code'``: all of domain code falls back."""
    contract = copy.deepcopy(CONTRACT)
    contract["escalation"].insert(
        0,
        {
            "when": {"clause": "S3", "verdict": "FAIL"},
            "action": "route",
            "to": "reference",
            "slice": "rare",
        },
    )
    made = table(report(rows(S3="FAIL"), contract))
    assert [(r.slice, r.when, r.mapping) for r in made.engines[0].rules][:1] == [
        ("rare", 'domain == "code"', "parent")
    ]
    assert "reference_prob is not known" in made.engines[0].rules[0].reason


@pytest.mark.parametrize("by", ["topic", ["topic", "level"]])
def test_two_hundred_values_take_several_texts(tmp_path: Path, by: Any) -> None:
    """As many as a definition admits, with long names: the table is written, read and obeyed."""
    topics = [f"topic number {i} of a long list of topics" for i in range(200)]
    contract = copy.deepcopy(CONTRACT)
    contract["slices"] = {"all": {}, "topic": {"by": by}}
    contract["statistical"] = [{**CONTRACT["statistical"][0], "slices": ["topic"]}]
    contract["escalation"] = []
    level = "" if by == "topic" else ",level=1"
    measured = [fixtures.row(clause="S1", slice=f"topic={t}{level}") for t in topics]
    made = table(report(measured, contract))
    save_routes(made, tmp_path / "routes.json")
    read = load_routes(tmp_path / "routes.json")
    assert len(read.engines[0].rules[0].also) > 1
    assert {answers(read, topic=t, level=1) for t in topics} == {"engine"}
    assert answers(read, topic="another", level=1) == "reference"
    assert answers(read, level=1) == "reference"
    long = [fixtures.row(clause="S1", slice=f"topic={'x' * 3000}{level}")]
    with pytest.raises(InputError, match="too long"):
        table(report(long, contract))


def test_requests_that_may_grow_into_a_slice_fall_back() -> None:
    contract = copy.deepcopy(CONTRACT)
    contract["escalation"].insert(
        0,
        {
            "when": {"clause": "S3", "verdict": "FAIL"},
            "action": "route",
            "to": "reference",
            "slice": "late",
        },
    )
    made = table(report(rows(S3="FAIL"), contract))
    assert answers(made, prompt_tokens=84, domain="math") == "engine"
    assert answers(made, prompt_tokens=85, domain="math") == "reference"
    assert answers(made, prompt_tokens=200, domain="math") == "reference"


@pytest.mark.parametrize(
    ("rule", "verdict", "target"),
    [
        ({"action": "log"}, "FAIL", "engine"),
        ({"action": "log"}, "UNOBSERVED", "reference"),
        ({"action": "sample_more"}, "INCONCLUSIVE", "reference"),
        ({"action": "quarantine"}, "FAIL", "reference"),
        ({"action": "mask"}, "FAIL", "reference"),
    ],
)
def test_actions(rule: dict[str, Any], verdict: str, target: str) -> None:
    """``log`` lets a known deviation pass, never missing evidence; the rest falls back."""
    contract = copy.deepcopy(CONTRACT)
    contract["escalation"] = [{"when": {"clause": "S2", "verdict": verdict}, **rule}]
    made = table(report(rows(S2_code=verdict), contract))
    assert answers(made, domain="code") == target
    assert answers(made, domain="math") == "engine"


def test_a_block_is_a_block() -> None:
    contract = copy.deepcopy(CONTRACT)
    contract["escalation"] = [{"when": {"verdict": "FAIL"}, "action": "block"}]
    made = table(report(rows(S2_code="FAIL"), contract))
    assert answers(made, domain="math") == "reference"


def later(day: int, measurements: list[dict[str, Any]]) -> Record:
    return report(measurements, finished=f"2025-03-{day:02d}T10:02:41+00:00")


def test_a_failed_slice_comes_back_slowly() -> None:
    """FAIL leaves at once; bounds near their limits take three audits that pass, and INCONCLUSIVE
    starts the count again; the same report twice is one audit."""
    made = table(later(1, rows(S2_code="FAIL")))
    story = [(rows(), 1), (rows(), 2), (rows(S2_code="INCONCLUSIVE"), 0), (rows(), 1), (rows(), 2)]
    for day, (measured, passes) in enumerate(story, start=2):
        made = table(later(day, measured), made, digest=f"{day:064x}")
        state = next(s for s in made.engines[0].slices if s.slice == "domain=code")
        assert (state.held, state.passes, state.to) == (True, passes, "reference")
    again = table(later(6, rows()), made, digest=f"{6:064x}")
    assert answers(again, domain="code") == "reference"
    back = table(later(7, rows()), made, digest=f"{7:064x}")
    assert answers(back, domain="code") == "engine"


def test_a_failed_slice_comes_back_at_once_when_well_within() -> None:
    first = table(later(1, rows(S2_code="FAIL")))
    near = table(later(2, rows(upper=0.81)), first, digest="b" * 64)
    well = table(later(2, rows(upper=0.79)), first, digest="b" * 64)
    assert answers(near, domain="code") == "reference"
    assert answers(well, domain="code") == "engine"


def test_the_undecided_stay_and_the_unseen_come_with_one_pass() -> None:
    """INCONCLUSIVE keeps a slice where it was; one that was only not seen needs one pass."""
    first = table(later(1, rows(S2_law="UNOBSERVED")))
    assert answers(first, domain="law") == "reference"
    second = table(later(2, rows(S2_code="INCONCLUSIVE")), first, digest="b" * 64)
    assert answers(second, domain="code") == "engine"
    assert answers(second, domain="law") == "engine"
    without = [r for r in rows() if r["slice"] != "domain=math"]
    third = table(later(3, without), second, digest="c" * 64)
    assert answers(third, domain="math") == "reference"


def test_a_slice_that_only_a_rule_names_comes_back_too() -> None:
    """``undecided`` without a clause of its own, sent away by S1 on all rows: it comes back when S1
    passes, as any other, and stays away while S1 does not."""
    contract = copy.deepcopy(CONTRACT)
    contract["escalation"].insert(
        0,
        {
            "when": {"clause": "S1", "verdict": "FAIL"},
            "action": "route",
            "to": "reference",
            "slice": "rare",
        },
    )
    audits = (("FAIL", "reference"), ("INCONCLUSIVE", "reference"), ("PASS", "engine"))
    made = None
    for day, (verdict, target) in enumerate(audits, start=1):
        low = rows(S1=verdict, upper=0.5) if verdict == "PASS" else rows(S1=verdict)
        one = report(low, contract, finished=f"2025-03-{day:02d}T10:02:41+00:00")
        made = table(one, made, digest=f"{day:064x}")
        assert answers(made, domain="code") == target
        assert "rare" in {s.slice for s in made.engines[0].slices}
    assert "rare" not in {s.slice for s in table(report(contract=contract)).engines[0].slices}


def test_an_older_audit_does_not_replace_a_newer() -> None:
    newest = table(later(5, rows()))
    with pytest.raises(InputError, match="finished before"):
        table(later(4, rows()), newest, digest="b" * 64)


def test_several_engines_in_order() -> None:
    """The first engine that may answer does; a rule can name another, which must permit it."""
    contract = copy.deepcopy(CONTRACT)
    contract["escalation"][0]["to"] = "slow"
    fast = report(rows(S2_code="FAIL", S2_law="UNOBSERVED"), contract)
    slow = report(rows(S2_math="FAIL"))
    audits = [
        Audit("fast", fast, "a" * 64, Contract.model_validate(fast.contract.document)),
        Audit("slow", slow, "b" * 64, Contract.model_validate(slow.contract.document)),
    ]
    made = build_table(audits, Policy(), None, "2026-01-01T00:00:00+00:00")
    assert [answers(made, domain=d) for d in (*DOMAINS, "art")] == [
        "slow", "fast", "slow", "reference"
    ]  # fmt: skip
    alone = build_table(audits[:1], Policy(), None, "2026-01-01T00:00:00+00:00")
    assert Decisions.of_table(alone).decide(
        Facts({"domain": "code"}, spans((1, 1), 1))
    ) == Decision("reference", "domain=code", "fast")
    other = fixtures.identities()
    other["reference"]["weights"] = "f" * 64
    with pytest.raises(NotComparableError, match="another reference"):
        build_table(
            [audits[0], Audit("x", report(identities=other), "c" * 64, audits[1].contract)],
            Policy(), None, "2026-01-01T00:00:00+00:00",
        )  # fmt: skip


# (4) The file -----------------------------------------------------------------------------------
@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_a_table_is_read_as_it_was_written(tmp_path: Path, suffix: str) -> None:
    made = table(report(rows(S2_code="FAIL", S3="FAIL")))
    file = tmp_path / f"routes{suffix}"
    save_routes(made, file)
    assert load_routes(file) == made
    assert table_digest(load_routes(file)) == table_digest(made)
    if suffix == ".json":
        jsonschema.validate(json.loads(file.read_text()), routes_json_schema())


def _set(document: dict[str, Any], **changes: Any) -> None:
    document["engines"][0]["rules"][0].update(changes)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda d: _set(d, when="reference_margin <= 1"), "not known at request time"),
        (lambda d: _set(d, when="domain =="), "when"),
        (lambda d: _set(d, level="decode"), "level"),
        (lambda d: _set(d, to="../x"), "to"),
        (lambda d: d["engines"][0].update(name="reference"), "reference"),
        (lambda d: d["engines"].append(d["engines"][0]), "given twice"),
        (lambda d: d["engines"].clear(), "engines"),
        (lambda d: d.update(extra=1), "extra"),
        (lambda d: d.update(schema="mismatch-audit/routes/v2"), "schema"),
        (lambda d: d["engines"][0].pop("rules"), "rules"),
        (lambda d: d["engines"][0]["rerouted"].update(lower=float("nan")), "NaN"),
    ],
)
def test_a_table_with_a_fault_is_refused(tmp_path: Path, fault: Any, said: str) -> None:
    made = table(report(rows(S2_code="FAIL")))
    document = made.model_dump(mode="json", by_alias=True)
    fault(document)
    file = tmp_path / "routes.json"
    file.write_text(json.dumps(document))
    with pytest.raises(InputError, match=said):
        load_routes(file)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"schema": 1, "schema": 2}', "[" * 100_000, "\x00", '"' + "x" * 5_000_000],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    for name in ("routes.json", "routes.yaml"):
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError):
            load_routes(tmp_path / name)
    with pytest.raises(InputError):
        load_routes(tmp_path / "absent.json")


# (5) With the run's tables, and the command -----------------------------------------------------
def run_folder(path: Path, code_kl: float) -> Path:
    """A run's folder with 90 prompts of 4 tokens in three domains, code apart from the others."""
    from mismatch_audit.prompts import EncodedPrompt, load_prompts, prompts_digest, spread

    (path / "tokens").mkdir(parents=True)
    (path / "sequences").mkdir()
    lines = [{"id": f"{d}-{i}", "domain": d, "prompt": "x"} for d in DOMAINS for i in range(30)]
    prompts = path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    encoded = [
        EncodedPrompt(p.id, [1, 2, 3], dict(p.metadata), 3)
        for p in spread(load_prompts(prompts), None)
    ]
    settings = {"prompts": str(prompts), "limit": None, "sampling": {"max_tokens": 4}}
    spec = {"settings": settings, "prompts": prompts_digest(encoded)}
    write_json({"digest": "x", "spec": spec}, path / "run.json")
    ids = [p.id for p in encoded]
    write_part(
        pd.DataFrame({"prompt_id": ids, "sequence_id": ids, "prompt_length": 3,
                      "response_length": 4, "token_ids": [[1, 2, 3, 4, 5, 6, 7]] * len(ids)}),
        sequence_schema(), path / "sequences" / "part-00000.parquet",
    )  # fmt: skip
    kl = [code_kl if i.startswith("code") else 1e-3 for i in ids for _ in range(4)]
    write_part(
        pd.DataFrame({"prompt_id": np.repeat(ids, 4), "position": list(range(4)) * len(ids),
                      "path": "decode", "kl_engine_reference": kl}),
        token_schema(), path / "tokens" / "part-00000.parquet",
    )  # fmt: skip
    return path


def test_the_mixture_is_bounded_on_the_runs_own_prompts(tmp_path: Path) -> None:
    """With a third of the prompts moved, the mean over all traffic falls to 2/3 of the others' KL:
    the bound lies above that and below the limit that everything on the engine breaks."""
    audited = load_audited(run_folder(tmp_path / "run", code_kl=8e-3))
    assert audited is not None
    made = table(report(rows(S2_code="FAIL")), audited=audited).engines[0]
    assert made.rerouted.model_dump() == {"lower": 1 / 3, "upper": 1 / 3, "basis": "prompts"}
    direct = next(b for b in made.mixture if "fixed beforehand" in b.method)
    whole = table(report(), audited=audited).engines[0]
    everything = next(b for b in whole.mixture if "fixed beforehand" in b.method)
    assert direct.bound is not None
    assert everything.bound is not None
    assert 2e-3 / 3 < direct.bound < 2e-3 < 10e-3 / 3 < everything.bound
    assert "6.67e-04" in direct.detail or "0.000667" in direct.detail


def test_changed_prompts_are_not_taken_for_the_runs(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", 1e-3)
    prompts = run / "prompts.jsonl"
    prompts.write_text(prompts.read_text().replace('"law"', '"art"'))
    assert load_audited(run) is None
    prompts.unlink()
    assert load_audited(run) is None


def test_a_mixture_with_missing_values_has_no_bound(tmp_path: Path) -> None:
    audited = load_audited(run_folder(tmp_path / "run", float("nan")))
    assert audited is not None
    bounds = table(report(), audited=audited).engines[0].mixture
    assert [b.bound for b in bounds if "missing" in b.detail] == [None, None]
    moved = table(report(rows(S2_code="FAIL")), audited=audited).engines[0].mixture
    assert [b for b in moved if "fixed beforehand" in b.method]


def test_the_command(tmp_path: Path) -> None:
    """Writes a table that its schema admits; exits 1 when nothing is left to the engine, 2 for
    another contract's promises, an unknown suffix or nothing to read."""
    run = tmp_path / "run"
    run.mkdir()
    save_record(report(rows(S2_code="FAIL")), run / "report.json")
    out = tmp_path / "routes.yaml"
    done = audit("routes", run, "--out", out)  # a process, as a user starts it
    assert done.code == 0, done.err
    assert "domain=code" in done.out
    assert 'domain == "code"' in done.out
    assert answers(load_routes(out), domain="math") == "engine"

    def routes(*arguments: str | Path) -> Any:
        return CliRunner().invoke(cli, ["routes", *map(str, arguments)])

    softer = copy.deepcopy(CONTRACT)
    softer["escalation"] = [{"when": {"verdict": "FAIL"}, "action": "block"}]
    file = tmp_path / "contract.yaml"
    file.write_text(json.dumps(softer))
    assert routes(run, "--contract", file, "--previous", out).exit_code == 1
    softer["statistical"][0]["limit"] = 5e-3
    file.write_text(json.dumps(softer))
    for wrong, said in (
        ((run, "--contract", file), "audit judge"),
        ((run, "--out", tmp_path / "routes.txt"), "routes.json"),
        ((), "no run"),
        ((run, run), "2 runs"),
        ((tmp_path / "absent",), "no report"),
    ):
        error = routes(*wrong).exception
        assert isinstance(error, InputError)
        assert said in str(error), error
    jsonschema.Draft202012Validator.check_schema(json.loads(routes("--schema").stdout))


def test_hostile_text_in_a_report_makes_no_harm(tmp_path: Path, capsys: Any) -> None:
    """Slice names, clauses and reasons of a report reach the screen without control characters, and
    a slice that the contract does not know sends everything to the reference."""
    from rich.console import Console

    from mismatch_audit.routing.render import render_routes

    document = fixtures.hostile().model_dump()
    document["contract"]["document"] = Contract.model_validate(CONTRACT).document()
    made = table(Record.model_validate(document))
    assert answers(made, domain="code") == "reference"
    render_routes(made, Console(width=200))
    shown = capsys.readouterr().out
    assert "\x1b]" not in shown
    assert "\x07" not in shown
