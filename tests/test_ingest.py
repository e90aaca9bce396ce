"""Mirrored traffic of a tiny engine, re-scored by its reference: judged, counted once, honest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradient_models as tiny
import pytest
from promotion_fixtures import write_report
from traffic_fixtures import served, write_log

from kernel_contracts.errors import InputError, NotComparableError
from kernel_contracts.loading import load_contract
from mismatch_audit.monitor.ingest import IngestResult, IngestSettings, ingest
from mismatch_audit.monitor.ingest_folder import IngestFolder
from mismatch_audit.monitor.rescore import Rescorer
from mismatch_audit.promotion.offline import OfflineEvidence
from mismatch_audit.promotion.store import PromotionStore
from mismatch_audit.settings import ReferenceSettings

CONTRACT = """\
schema: kernel-contracts/v1
name: live
pair: {reference: {dtype: float32}}
slices:
  domain: {by: domain}
  sure: {where: reference_margin > 0.5}
numerical:
  - {id: N0, metric: nonfinite, limit: 0}
statistical:
  - {id: S0, metric: flip_rate, limit: 0.1}
  - {id: S1, metric: k3, limit: 1.0e-2, ceiling: 5.0e-2, tail: 0.2, slices: [all, sure]}
  - {id: S2, metric: mult_prob_error, limit: 1.2, ceiling: 1.5, tail: 0.4, slices: [domain]}
observability:
  - {id: O1, min_prompts: 40, require: [engine_logprob, reference_logprob, flip]}
escalation:
  - {when: {clause: S0, verdict: FAIL}, action: block}
  - {when: {verdict: FAIL}, action: rollback}
promotion:
  shadow: {min_prompts: 60}
"""


class Bench:
    """A reference on disk, and an engine that differs from it by a known size."""

    def __init__(self, folder: Path) -> None:
        self.model = folder / "model"
        self.reference = tiny.llama(self.model, spread=0.1)
        self.good = tiny.perturbed(self.reference, folder / "good", 0.01).model
        self.bad = tiny.perturbed(self.reference, folder / "bad", 0.2).model
        self.contract = folder / "contract.yaml"
        self.contract.write_text(CONTRACT)
        self.scorer = Rescorer(str(self.model), ReferenceSettings(device="cpu"))
        self.scorer.close = lambda: None  # type: ignore[method-assign]  # loaded once for all tests

    def run(self, log: Path, out: Path, **options: Any) -> IngestResult:
        settings = replace(IngestSettings([log], self.contract, out), **options)
        return ingest(settings, lambda: self.scorer, lambda *_: None)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("ingest"))


def verdicts(result: IngestResult) -> dict[str, str]:
    return {f"{m.clause} {m.slice}": m.verdict for m in result.record.measurements}


def test_a_close_engine_passes_and_a_far_one_fails(bench: Bench, tmp_path: Path) -> None:
    """The clean control and the injected fault; clauses on full rows are told as not judged."""
    log = write_log(tmp_path / "good.jsonl", served(bench.good, 120))
    good = bench.run(log, tmp_path / "good")
    assert verdicts(good) == {
        "S1 all": "PASS", "S1 sure": "PASS", "S2 domain=code": "PASS", "S2 domain=math": "PASS",
        "O1 all": "PASS",
    }  # fmt: skip
    assert good.exit_code == 0
    assert [f.title for f in good.record.findings if f.code == "NOT_JUDGED"] == [
        "Not judged on traffic: N0, S0"
    ]
    log = write_log(tmp_path / "bad.jsonl", served(bench.bad, 120))
    bad = bench.run(log, tmp_path / "bad")
    assert bad.exit_code == 1
    assert verdicts(bad)["S1 all"] == "FAIL"
    assert {a["action"] for a in bad.record.actions} == {"rollback"}


def test_numbers_are_those_of_both_programs(bench: Bench, tmp_path: Path) -> None:
    """The reference against itself: every k3 is rounding, and the tables hold each token."""
    log = write_log(tmp_path / "t.jsonl", served(bench.reference.model, 50))
    result = bench.run(log, tmp_path / "run")
    value = next(m.value for m in result.record.measurements if m.clause == "S1")
    assert value is not None
    assert 0 <= value < 1e-9
    assert result.record.counts.tokens == 50 * 12


def test_a_second_run_adds_only_what_is_new(bench: Bench, tmp_path: Path) -> None:
    """A log that grew, and lines that were repeated."""
    rows = served(bench.good, 100)
    log = write_log(tmp_path / "t.jsonl", [*rows[:60], *rows[:10]])
    first = bench.run(log, tmp_path / "run")
    assert (sum(first.outcomes.values()), first.repeated) == (60, 10)
    write_log(log, rows[60:])
    second = bench.run(log, tmp_path / "run")
    assert (sum(second.outcomes.values()), second.repeated) == (40, 70)
    assert second.record.counts.sequences == 100
    assert "REPEATED_LOOK" in {f.code for f in second.record.findings}
    once = bench.run(write_log(tmp_path / "all.jsonl", rows), tmp_path / "once")
    assert [m.value for m in once.record.measurements] == pytest.approx(
        [m.value for m in second.record.measurements]
    )


UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.7}, "temperature 0.7"),
    ({"top_p": 0.9}, "truncation"),
    ({"top_k": 40}, "truncation"),
    ({"engine_logprobs": None}, "log-probs unknown"),
    ({"engine_logprobs": (None, *[-1.0] * 11)}, "unknown for some tokens"),
    ({"engine_logprobs": (0.0,) * 12}, "all 0.0"),
    ({"response_token_ids": (), "engine_logprobs": ()}, "no response tokens"),
    ({"response_token_ids": (64,) * 12}, "vocabulary"),
    ({"prompt_token_ids": (1,) * 60}, "context"),
    ({"weights_version": None}, "weights version unknown"),
]


@pytest.mark.parametrize(("change", "reason"), UNUSABLE, ids=[r for _, r in UNUSABLE])
def test_rows_that_show_nothing_are_unobserved_and_counted(
    bench: Bench, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    """A fifth of the log like this: no promise passes, and the report says why."""
    rows = served(bench.good, 100)
    rows = [r.model_copy(update=change) if i % 5 == 0 else r for i, r in enumerate(rows)]
    result = bench.run(write_log(tmp_path / "t.jsonl", rows), tmp_path / "run")
    assert result.exit_code == 3
    assert set(verdicts(result).values()) <= {"UNOBSERVED", "INCONCLUSIVE"}
    (finding,) = [f for f in result.record.findings if f.code == "UNUSABLE_REQUESTS"]
    assert finding.severity == "warning"
    (evidence,) = finding.evidence
    assert reason in str(evidence["reason"])
    assert evidence["requests"] == 20


def test_a_log_of_nothing_usable_is_unobserved(bench: Bench, tmp_path: Path) -> None:
    """Not an empty pass."""
    log = write_log(tmp_path / "t.jsonl", served(bench.good, 10, temperature=0.5))
    result = bench.run(log, tmp_path / "run")
    assert result.exit_code == 3
    assert result.record.verdict == "UNOBSERVED"


def test_mixed_logs_need_a_choice(bench: Bench, tmp_path: Path) -> None:
    """Two stages, builds or weights are two questions."""
    rows = served(bench.good, 40)
    cases: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
        ({"stage": "canary"}, "--stage", {"stage": "shadow"}),
        ({"engine_build": "build-2"}, "--build", {"build": "build-1"}),
        ({"weights_version": 4}, "--weights-version", {"weights_version": "3"}),
    ]
    for number, (change, option, choice) in enumerate(cases):
        mixed = [r.model_copy(update=change) if i < 20 else r for i, r in enumerate(rows)]
        log = write_log(tmp_path / f"{number}.jsonl", mixed)
        with pytest.raises(InputError, match=option):
            bench.run(log, tmp_path / f"none{number}")
        result = bench.run(log, tmp_path / f"run{number}", **choice)
        assert result.record.counts.sequences == 20
    silent = [r.model_copy(update={"weights_version": None}) for r in rows]
    log = write_log(tmp_path / "silent.jsonl", silent)
    with pytest.raises(InputError, match="does not tell which weights"):
        bench.run(log, tmp_path / "silent")
    trusted = bench.run(log, tmp_path / "trusted", weights_version="any")
    assert trusted.record.counts.sequences == 40


def test_responses_to_one_prompt_are_one_unit(bench: Bench, tmp_path: Path) -> None:
    """metadata prompt_id: four responses a prompt give a quarter of the prompts."""
    rows = [
        r.model_copy(update={"metadata": {**r.metadata, "prompt_id": f"p{i // 4}"}})
        for i, r in enumerate(served(bench.good, 80))
    ]
    result = bench.run(write_log(tmp_path / "t.jsonl", rows), tmp_path / "run")
    assert (result.record.counts.prompts, result.record.counts.sequences) == (20, 80)


def test_a_folder_of_another_contract_or_reference_is_refused(bench: Bench, tmp_path: Path) -> None:
    """Nothing is mixed."""
    log = write_log(tmp_path / "t.jsonl", served(bench.good, 10))
    bench.run(log, tmp_path / "run")
    other = tmp_path / "other.yaml"
    other.write_text(CONTRACT.replace("1.0e-2", "1.1e-2"))
    with pytest.raises(InputError, match="another run; different: contract"):
        bench.run(log, tmp_path / "run", contract=other)
    other.write_text(CONTRACT.replace("dtype: float32", "dtype: bfloat16"))
    with pytest.raises(NotComparableError, match="bfloat16"):
        bench.run(log, tmp_path / "new", contract=other)


def started(bench: Bench, folder: Path) -> str:
    """A store where the build is at shadow."""
    contract = load_contract(bench.contract)
    weights = str(bench.scorer.facts["weights"])
    url = f"sqlite:///{folder / 'promotion.db'}"
    report = write_report(folder / "audit", contract, weights=weights)
    with PromotionStore(url) as store:
        subject = store.start(contract, "build-1", weights, actor="test")
        outcome = store.advance(subject, actor="test", offline=OfflineEvidence.of(report))
        assert outcome.code == 0
    return url


def test_the_store_counts_each_request_once_and_then_lets_the_build_advance(
    bench: Bench, tmp_path: Path
) -> None:
    """Two folders over the same log: the second brings nothing new."""
    url = started(bench, tmp_path)
    log = write_log(tmp_path / "t.jsonl", served(bench.good, 150))
    first = bench.run(log, tmp_path / "one", store=url)
    assert first.counted is not None
    assert first.counted.prompts == 150
    assert first.assessment is not None
    assert first.assessment.verdict == "PASS", first.assessment.lacks
    again = bench.run(log, tmp_path / "two", store=url)
    assert again.counted is not None
    assert (again.counted.prompts, again.counted.repeated) == (0, 150)
    with PromotionStore(url) as store:
        subject = store.pick(None)
        assert store.advance(subject, actor="test").code == 0
        assert store.verify(subject) == []


def test_a_store_that_is_not_there_is_told_before_the_reference_loads(
    bench: Bench, tmp_path: Path
) -> None:
    log = write_log(tmp_path / "t.jsonl", served(bench.good, 3))
    settings = IngestSettings(
        [log], bench.contract, tmp_path / "out", store=f"sqlite:///{tmp_path / 'none.db'}"
    )

    def load() -> Rescorer:
        raise AssertionError("loaded for nothing")

    with pytest.raises(InputError, match="no store here"):
        ingest(settings, load, lambda *_: None)


def test_an_ingest_killed_between_store_and_folder_is_repeated_without_harm(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second batch is in the store and not in the folder: scored again, counted once."""
    url = started(bench, tmp_path)
    log = write_log(tmp_path / "t.jsonl", served(bench.good, 150))
    write, calls = IngestFolder.write, []

    def killed(self: IngestFolder, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        write(self, *arguments)

    monkeypatch.setattr(IngestFolder, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        bench.run(log, tmp_path / "run", store=url)
    monkeypatch.undo()
    result = bench.run(log, tmp_path / "run", store=url)
    assert result.record.counts.sequences == 150
    assert result.counted is not None
    assert (result.counted.prompts, result.counted.repeated) == (22, 64)
    with PromotionStore(url) as store:
        subject = store.pick(None)
        assert store.verify(subject) == []
        found = store.assessment(subject)[1]
    assert found is not None
    assert found.exposure.prompts == 150


def test_a_violation_rolls_back_and_exits_1(bench: Bench, tmp_path: Path) -> None:
    """The far engine at shadow."""
    url = started(bench, tmp_path)
    log = write_log(tmp_path / "t.jsonl", served(bench.bad, 200))
    result = bench.run(log, tmp_path / "run", store=url)
    assert result.counted is not None
    assert result.counted.rolled_back_to == "offline"
    assert result.exit_code == 1
    with PromotionStore(url) as store:
        assert store.decisions(store.pick(None))[-1].actor == "audit ingest"


def test_a_build_that_was_never_started_gets_no_evidence(bench: Bench, tmp_path: Path) -> None:
    """The store is named in the error, with the command that starts it."""
    url = started(bench, tmp_path)
    log = write_log(tmp_path / "t.jsonl", served(bench.good, 5, engine_build="other"))
    with pytest.raises(InputError, match="audit promote advance"):
        bench.run(log, tmp_path / "run", store=url)


def test_an_ingest_report_is_no_audit(bench: Bench, tmp_path: Path) -> None:
    """Its contract has another digest: it cannot take a build out of the stage offline."""
    from mismatch_audit.reports.record import save_record

    log = write_log(tmp_path / "t.jsonl", served(bench.good, 100))
    result = bench.run(log, tmp_path / "run")
    save_record(result.record, tmp_path / "run" / "report.json")
    offline = OfflineEvidence.of(tmp_path / "run")
    contract = load_contract(bench.contract)
    with PromotionStore(f"sqlite:///{tmp_path / 'p.db'}") as store:
        subject = store.start(contract, "build-1", "w", actor="test")
        with pytest.raises(InputError, match="of contract"):
            store.advance(subject, actor="test", offline=offline)
    document = json.loads((tmp_path / "run" / "report.json").read_text())
    assert document["environment"]["source"] == "mirrored traffic"
