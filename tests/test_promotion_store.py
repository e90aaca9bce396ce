"""The promotion store: no stage is left without evidence, and none is kept against it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import sqlalchemy as sa
from promotion_fixtures import BUILD, TEXT, WEIGHTS, batch, contract, judged, write_report

from kernel_contracts.errors import InputError
from mismatch_audit.promotion import schema
from mismatch_audit.promotion.evidence import Batch
from mismatch_audit.promotion.history import Subject
from mismatch_audit.promotion.offline import OfflineEvidence
from mismatch_audit.promotion.stages import STAGES, illegal
from mismatch_audit.promotion.store import PromotionStore


@pytest.fixture
def store(tmp_path: Path) -> PromotionStore:
    return PromotionStore(f"sqlite:///{tmp_path / 'promotion.db'}")


@pytest.fixture
def subject(store: PromotionStore) -> Subject:
    return store.start(contract(), BUILD, WEIGHTS, actor="test")


def report(folder: Path, **options: str) -> OfflineEvidence:
    return OfflineEvidence.of(write_report(folder / "run", contract(), **options))


def to_shadow(store: PromotionStore, subject: Subject, folder: Path) -> None:
    assert store.advance(subject, actor="test", offline=report(folder)).code == 0


def test_a_clean_build_goes_all_the_way(
    store: PromotionStore, subject: Subject, tmp_path: Path
) -> None:
    """Control: an audit that passed, then prompts far under the limit at each stage."""
    to_shadow(store, subject, tmp_path)
    for number, stage in enumerate(("shadow", "canary")):
        counted = store.record(subject, batch(stage, 1000 * number, 120), actor="test")
        assert (counted.prompts, counted.broken) == (120, [])
        outcome = store.advance(subject, actor="test")
        assert (outcome.code, outcome.stage) == (0, STAGES[number + 2]), outcome.message
    with pytest.raises(InputError, match="full traffic already"):
        store.advance(subject, actor="test")
    history = store.decisions(subject)
    assert [d.seq for d in history] == [1, 2, 3, 4]
    assert [d.to_stage for d in history] == list(STAGES)
    assert history[1].evidence["verdict"] == "PASS"
    assert history[2].evidence["exposure"]["prompts"] == 120
    assert store.verify(subject) == []


def test_advance_without_evidence_is_refused(
    store: PromotionStore, subject: Subject, tmp_path: Path
) -> None:
    """No report, an inconclusive report, an empty stage, too few prompts, too few tokens."""
    assert store.advance(subject, actor="test").code == 3
    bad = report(tmp_path, verdict="INCONCLUSIVE")
    assert store.advance(subject, actor="test", offline=bad).code == 3
    to_shadow(store, subject, tmp_path)
    empty = store.advance(subject, actor="test")
    assert (empty.code, empty.decision) == (3, None)
    assert "0 prompts of 60" in empty.message
    store.record(subject, batch("shadow", 0, 59), actor="test")
    assert "59 prompts of 60" in store.advance(subject, actor="test").message
    assert store.decisions(subject)[-1].to_stage == "shadow"


def test_a_failed_audit_does_not_leave_offline(
    store: PromotionStore, subject: Subject, tmp_path: Path
) -> None:
    """Exit code 1, and nothing changes."""
    outcome = store.advance(subject, actor="t", offline=report(tmp_path, verdict="FAIL"))
    assert (outcome.code, outcome.decision) == (1, None)


def test_a_report_of_another_contract_or_other_weights_is_refused(
    store: PromotionStore, subject: Subject, tmp_path: Path
) -> None:
    """Evidence is of the pair that it was made on."""
    other = contract(TEXT.replace("limit: 1.0e-2", "limit: 1.1e-2"))
    with pytest.raises(InputError, match="of contract"):
        store.advance(
            subject, actor="t", offline=OfflineEvidence.of(write_report(tmp_path / "o", other))
        )
    with pytest.raises(InputError, match="of weights"):
        store.advance(subject, actor="t", offline=report(tmp_path, weights="b" * 64))


def test_a_broken_promise_rolls_back_in_the_transaction_that_saw_it(
    store: PromotionStore, subject: Subject, tmp_path: Path
) -> None:
    """Injected fault: prompts at four times the limit. What came after is not counted."""
    to_shadow(store, subject, tmp_path)
    counted = store.record(subject, batch("shadow", 0, 400, mean=4e-2), actor="ingest")
    assert counted.broken
    assert counted.rolled_back_to == "offline"
    assert counted.prompts < 400
    last = store.decisions(subject)[-1]
    assert (last.action, last.to_stage, last.actor) == ("rollback", "offline", "ingest")
    assert last.evidence["verdict"] == "FAIL"
    later = store.record(subject, batch("shadow", 400, 10), actor="ingest")
    assert (later.prompts, later.other_stage) == (0, 10)
    assert store.verify(subject) == []


def test_after_a_rollback_the_old_report_and_the_old_requests_count_for_nothing(
    store: PromotionStore, subject: Subject, tmp_path: Path
) -> None:
    """Else a failed stage could be tried again until it passes."""
    old = report(tmp_path, finished="2026-01-01T00:00:00+00:00")
    assert store.advance(subject, actor="t", offline=old).code == 0
    store.record(subject, batch("shadow", 0, 30), actor="t")
    store.rollback(subject, actor="t", reason="a bad kernel")
    refused = store.advance(subject, actor="t", offline=old)
    assert refused.code == 3
    assert "audit again" in refused.message
    new = report(tmp_path, finished="2999-01-01T00:00:00+00:00")
    assert store.advance(subject, actor="t", offline=new).code == 0
    again = store.record(subject, batch("shadow", 0, 40), actor="t")
    assert (again.prompts, again.repeated) == (10, 30)
    assert store.verify(subject) == []


def test_canary_may_go_back_one_stage(
    store: PromotionStore, subject: Subject, tmp_path: Path
) -> None:
    """on_violation: previous; the shadow stage then starts with no evidence."""
    to_shadow(store, subject, tmp_path)
    store.record(subject, batch("shadow", 0, 120), actor="t")
    assert store.advance(subject, actor="t").code == 0
    counted = store.record(subject, batch("canary", 5000, 400, mean=4e-2), actor="t")
    assert counted.rolled_back_to == "shadow"
    assert store.advance(subject, actor="t").code == 3


def test_a_request_counts_once_and_a_prompt_has_one_value(
    store: PromotionStore, subject: Subject, tmp_path: Path
) -> None:
    """The same log twice; a second answer to a prompt that was counted is no new evidence."""
    to_shadow(store, subject, tmp_path)
    assert store.record(subject, batch("shadow", 0, 10), actor="t").prompts == 10
    second = store.record(subject, batch("shadow", 0, 10), actor="t")
    assert (second.prompts, second.repeated) == (0, 10)
    one = judged(3, 1e-3)
    late = Batch("shadow", [type(one)(one.unit, {"other": ("2026-01-01T00:00:00Z", 5)}, {})])
    assert store.record(subject, late, actor="t").late == 1
    assert store.verify(subject) == []


def test_unusable_requests_hold_the_stage(
    store: PromotionStore, subject: Subject, tmp_path: Path
) -> None:
    """A tenth may be unusable; beyond it the rest may not stand for the traffic."""
    to_shadow(store, subject, tmp_path)
    store.record(subject, batch("shadow", 0, 120), actor="t")
    bad = {f"bad{i}": "truncated sampling" for i in range(13)}
    assert store.record(subject, Batch("shadow", [], bad), actor="t").unusable == 13
    assert store.advance(subject, actor="t").code == 0
    bad = {f"worse{i}": "truncated sampling" for i in range(14)}
    store.record(subject, batch("canary", 9000, 120), actor="t")
    store.record(subject, Batch("canary", [], bad), actor="t")
    refused = store.advance(subject, actor="t")
    assert refused.code == 3
    assert "could not be judged" in refused.message


def test_a_rollback_needs_a_reason_and_an_earlier_stage(
    store: PromotionStore, subject: Subject, tmp_path: Path
) -> None:
    """History says why."""
    to_shadow(store, subject, tmp_path)
    with pytest.raises(InputError, match="reason"):
        store.rollback(subject, actor="t", reason=" ")
    with pytest.raises(InputError, match="from shadow to canary"):
        store.rollback(subject, actor="t", reason="x", to="canary")


FORGERIES = [
    ("gap", sa.delete(schema.decisions).where(schema.decisions.c.seq == 1), "missing"),
    ("stage", sa.update(schema.decisions).where(schema.decisions.c.seq == 2).values(
        to_stage="canary"), "advance from offline to canary"),
    ("value", sa.update(schema.units).where(schema.units.c.seq == 5).values(
        observations='{"S1": {"all": [0.0, 12]}}'), "not that of their observations"),
    ("unit", sa.delete(schema.units).where(schema.units.c.seq == 5), "prompt 5 is missing"),
    ("request", sa.delete(schema.requests).where(schema.requests.c.unit_seq == 5),
     "has not the 1 requests"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "message"), FORGERIES, ids=[f[0] for f in FORGERIES])
def test_verify_finds_a_forged_store(
    store: PromotionStore, subject: Subject, tmp_path: Path, name: str, change: sa.Executable,
    message: str,
) -> None:  # fmt: skip
    """Each injected fault is told; the untouched store is clean."""
    to_shadow(store, subject, tmp_path)
    store.record(subject, batch("shadow", 0, 20), actor="t")
    assert store.verify(subject) == []
    with store.database.writing() as connection:
        connection.execute(change)
    assert message in "; ".join(store.verify(subject)), name


def test_moves(subject: Subject) -> None:
    """Only start, one step ahead, and back."""
    legal = {
        (a, f, t)
        for a in ("start", "advance", "rollback", "skip")
        for f in (None, *STAGES)
        for t in STAGES
        if illegal(a, f, t) is None
    }
    steps = list(itertools.pairwise(STAGES))
    assert legal == {
        ("start", None, "offline"),
        *(("advance", a, b) for a, b in steps),
        *(("rollback", b, a) for i, a in enumerate(STAGES) for b in STAGES[i + 1 :]),
    }


def test_another_build_weights_or_contract_is_another_subject(
    store: PromotionStore, subject: Subject
) -> None:
    """Unless the contract says that the evidence is of the build, whatever weights it serves."""
    assert store.start(contract(), BUILD, WEIGHTS, actor="x").id == subject.id
    assert store.start(contract(), BUILD, "b" * 64, actor="x").id != subject.id
    assert store.start(contract(), "other", WEIGHTS, actor="x").id != subject.id
    free = contract(TEXT + "  weights: any\n")
    one, two = (store.start(free, BUILD, w * 64, actor="x") for w in "ab")
    assert one.id == two.id
    assert one.weights == "any"
    with pytest.raises(InputError, match="3 subjects called"):
        store.pick(BUILD)
    assert store.pick("other").engine_build == "other"


def test_a_store_of_a_later_program_and_a_missing_one_are_refused(
    store: PromotionStore, tmp_path: Path
) -> None:
    """Never written to by guess; a password never shown."""
    url = str(store.database.engine.url)
    with store.database.writing() as connection:
        connection.execute(
            sa.insert(schema.migrations).values(version=99, name="later", applied="2999")
        )
    with pytest.raises(InputError, match="version 99"):
        PromotionStore(url)
    with pytest.raises(InputError, match="no store here"):
        PromotionStore(f"sqlite:///{tmp_path / 'none.db'}", create=False)
    for wrong in ("nonsense://x", "mysql://x/y", "sqlite://", f"sqlite:///{tmp_path}/a/b.db"):
        with pytest.raises(InputError):
            PromotionStore(wrong)
    with pytest.raises(InputError) as told:
        PromotionStore("postgresql://me:secret@127.0.0.1:9/none")
    assert "secret" not in str(told.value)
