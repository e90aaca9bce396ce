"""What a watch can follow beside a log, what it exports and shows, and its command line."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from in_process import audit
from promotion_fixtures import BUILD, TEXT, WEIGHTS, batch, contract, write_report
from rich.console import Console

from kernel_contracts.errors import InputError
from kernel_contracts.loading import parse_contract
from mismatch_audit.monitor import metrics
from mismatch_audit.monitor.live import render
from mismatch_audit.monitor.observe import observable_clauses
from mismatch_audit.monitor.watch import Watch, watch_identity
from mismatch_audit.monitor.watch_dumps import DumpSource
from mismatch_audit.monitor.watch_state import WatchState
from mismatch_audit.monitor.watch_store import StoreSource
from mismatch_audit.promotion.offline import OfflineEvidence
from mismatch_audit.promotion.store import PromotionStore

RUN = """\
schema: kernel-contracts/v1
name: rl-run
slices:
  environment: {by: environment}
statistical:
  - {id: S1, metric: k3, limit: 1.0e-3, ceiling: 5.0e-3, tail: 0.1}
  - {id: S2, metric: k3, limit: 2.0e-3, ceiling: 6.0e-3, tail: 0.2, slices: [environment]}
escalation:
  - {when: {verdict: FAIL}, action: stop}
"""
CONTRACT = parse_contract(RUN)
CLAUSES = observable_clauses(CONTRACT)


def dump(folder: Path, step: int, *, noise: float = 0.03, rows: int = 80, **changes: Any) -> Path:
    """A trainer's step: four responses a prompt, prompts that recur in every step."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(step)
    path = folder / f"step_{step}.jsonl"
    with path.open("w") as stream:
        for i in range(rows):
            q = -random.exponential(1.0, 10)
            p = q + noise * random.standard_normal(10) - noise**2 / 2
            row = {
                "sample_id": f"{step}-{i}", "group_id": f"g{i // 4}", "step": step,
                "prompt_len": 3, "token_ids": [1, 2, 3, *random.integers(0, 50, 10).tolist()],
                "sampler_logprob": [None] * 3 + q.tolist(), "temperature": 1.0,
                "trainer_logprob": [None] * 3 + p.tolist(),
                "environment": ("code", "math")[i % 2], **changes,
            }  # fmt: skip
            stream.write(json.dumps(row) + "\n")
    return path


def opened(source: Any, state: Path, of: Any = CONTRACT, clauses: Any = CLAUSES) -> Watch:
    return Watch(of, clauses, source, WatchState(state, watch_identity(of, source)), ["a"])


def test_dumps_are_counted_once_each_when_they_are_finished(tmp_path: Path) -> None:
    """The newest file waits until a later one is there; a prompt counts once a step."""
    folder = tmp_path / "dumps"
    for step in (2, 10, 9):
        dump(folder, step)
    watch = opened(DumpSource(folder, CONTRACT, CLAUSES), tmp_path / "s.db")
    assert watch.step() == 2
    assert watch.snapshot.counters["prompts"] == 40
    assert list(watch.snapshot.cursor["files"]) == ["step_2.jsonl", "step_9.jsonl"]
    assert watch.step(final=True) == 1
    assert watch.step(final=True) == 0
    assert watch.snapshot.counters["judged"] == 240
    assert {s.slice for s in watch.view().standings} == {
        "all", "environment=code", "environment=math",
    }  # fmt: skip
    dump(folder, 9, noise=0.5)
    watch.step(final=True)
    assert watch.snapshot.counters["changed after reading"] == 1
    watch.step(final=True)
    assert watch.snapshot.counters["changed after reading"] == 1
    assert watch.snapshot.counters["judged"] == 240


def test_a_settled_file_is_finished(tmp_path: Path) -> None:
    """By the time of its last change."""
    path = dump(tmp_path / "dumps", 1)
    watch = opened(DumpSource(tmp_path / "dumps", CONTRACT, CLAUSES), tmp_path / "s.db")
    assert watch.step() == 0
    old = time.time() - 60
    os.utime(path, (old, old))
    assert watch.step() == 1


def test_other_files_are_noted_and_damaged_dumps_stop_the_watch(tmp_path: Path) -> None:
    """A checkpoint beside the dumps is no dump; half a dump is a mistake, or counted when asked."""
    folder = tmp_path / "dumps"
    dump(folder, 1)
    (folder / "aaa.pt").write_bytes(b"weights")
    watch = opened(DumpSource(folder, CONTRACT, CLAUSES), tmp_path / "s.db")
    watch.step(final=True)
    assert watch.snapshot.counters["files of no known format"] == 1
    assert watch.snapshot.counters["judged"] == 80
    path = dump(folder, 2)
    text = path.read_text().splitlines()
    path.write_text("\n".join([*text[:5], text[5][:40], *text[6:]]) + "\n")
    with pytest.raises(InputError, match="step_2"):
        watch.step(final=True)
    assert watch.snapshot.counters["judged"] == 80
    watch.state.close()
    source = DumpSource(folder, CONTRACT, CLAUSES, skip_bad=True)
    watch = opened(source, tmp_path / "s.db")
    watch.step(final=True)
    assert watch.snapshot.counters["damaged dumps"] == 1
    assert watch.snapshot.counters["judged"] == 80


UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.7}, "temperature"),
    ({"top_p": 0.9}, "truncation"),
    ({"sampler_logprob": None}, "sampler log-probs unknown"),
    ({"trainer_logprob": None}, "trainer log-probs unknown"),
    ({"sampler_logprob": [None] * 3 + [0.0] * 10}, "all 0.0"),
    ({"weights_version_max": 3, "trainer_version": 4}, "other weights"),
    ({"loss_mask": [False] * 13}, "no sampled tokens"),
]


@pytest.mark.parametrize(("change", "reason"), UNUSABLE, ids=[r for _, r in UNUSABLE])
def test_rows_of_a_dump_that_show_nothing(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    """Counted with their reason; no evidence."""
    dump(tmp_path / "dumps", 1, **change)
    watch = opened(DumpSource(tmp_path / "dumps", CONTRACT, CLAUSES), tmp_path / "s.db")
    watch.step(final=True)
    (name,) = [k for k in watch.snapshot.counters if k.startswith("unusable: ")]
    assert reason in name
    assert watch.snapshot.counters[name] == 80
    assert {s.verdict for s in watch.view().standings} == {"UNOBSERVED"}
    assert watch.view().exit_code == 3


def test_a_store_is_followed_over_its_stages(tmp_path: Path) -> None:
    """What `audit ingest` counted, once, and its alarms."""
    url = f"sqlite:///{tmp_path / 'p.db'}"
    of = contract()
    with PromotionStore(url) as store:
        subject = store.start(of, BUILD, WEIGHTS, actor="t")
        report = OfflineEvidence.of(write_report(tmp_path / "run", of))
        assert store.advance(subject, actor="t", offline=report).code == 0
        store.record(subject, batch("shadow", 0, 120), actor="t")
        source = StoreSource(url, of, None)
        watch = opened(source, tmp_path / "s.db", of, observable_clauses(of))
        watch.step()
        assert watch.snapshot.counters["prompts"] == 120
        assert watch.view().exit_code == 0
        assert store.advance(subject, actor="t").code == 0
        store.record(subject, batch("canary", 1000, 300, mean=4e-2), actor="t")
        assert watch.source.backlog(watch.snapshot.cursor) > 0
        watch.step()
        watch.step()
        kept = sum(1 for d in store.decisions(subject))
    assert kept == 4
    assert watch.snapshot.counters["prompts"] > 120
    assert watch.snapshot.counters["repeated"] == 0
    with pytest.raises(InputError, match="another contract"):
        StoreSource(url, contract(TEXT.replace("1.0e-2", "1.1e-2")), None)


def test_metrics_are_served_on_loopback_and_are_those_of_the_dashboard(tmp_path: Path) -> None:
    """Every name in docs/watch.md and in the sample dashboard is served, and none is forgotten."""
    dump(tmp_path / "dumps", 1)
    dump(tmp_path / "dumps", 2, noise=0.2)
    watch = opened(DumpSource(tmp_path / "dumps", CONTRACT, CLAUSES), tmp_path / "s.db")
    watch.step(final=True)
    view = watch.view()
    view.last_row = "2026-01-01T00:00:00Z"
    view.counters["bad lines"] = 1
    exporter = metrics.Exporter(lambda: view, lambda: {"pending": 1}, 0)
    stop = exporter.start()
    try:
        url = f"http://127.0.0.1:{exporter.port}/metrics"
        text = urllib.request.urlopen(url, timeout=10).read().decode()
        with pytest.raises(InputError, match="cannot listen"):
            metrics.Exporter(lambda: view, dict, exporter.port).start()
    finally:
        stop()
    assert (
        'mismatch_audit_watch_verdict{clause="S1",metric="k3",slice="all",verdict="FAIL"} 1.0'
        in text
    )
    assert "mismatch_audit_watch_judged_prompts_total 40.0" in text
    served = set(re.findall(r"^(mismatch_audit_watch_\w+)", text, re.MULTILINE))
    page = (ROOT / "docs" / "watch.md").read_text()
    documented = set(re.findall(r"`(mismatch_audit_watch_\w+)", page))
    assert documented == {n for n in served if not n.endswith("_created")}
    board = json.loads((ROOT / "samples" / "grafana" / "mismatch-audit.json").read_text())
    used = set(re.findall(r"mismatch_audit_watch_\w+", json.dumps(board)))
    assert used
    assert used <= served
    assert all(panel["targets"] for panel in board["panels"] if panel["type"] != "row")


def test_the_live_view_tells_all_and_lets_nothing_through(tmp_path: Path) -> None:
    """Standings, alarms, deliveries; a slice's name cannot move the cursor or set a style."""
    dump(tmp_path / "dumps", 1, noise=0.2, environment="[red]\x1b[2Jx")
    watch = opened(DumpSource(tmp_path / "dumps", CONTRACT, CLAUSES), tmp_path / "s.db")
    watch.step(final=True)
    console = Console(width=140, force_terminal=True, color_system=None, record=True)
    with console.capture() as capture:
        console.print(render(watch.view(), watch.state.deliveries(), 0.05, 3.0))
    text = capture.get()
    assert "\x1b[2J" not in text
    assert "ALARM" in text
    assert "S1 on all -> a: pending after 0 tries" in text
    assert "80 requests judged (20 prompts" in text
    assert "[red]" in text


def test_watch_once_on_the_command_line(tmp_path: Path) -> None:
    """Exit 3 while it is open, 0 when shown, 1 after an alarm whose command ran once."""
    folder, file = tmp_path / "dumps", tmp_path / "c.yaml"
    file.write_text(RUN)
    dump(folder, 1, rows=40)
    arguments = ["watch", folder, "--contract", file, "--once", "--on-alarm",
                 f"sh -c 'echo $AUDIT_CLAUSE >> {tmp_path}/out'"]  # fmt: skip
    first = audit(*arguments)
    assert first.code == 3, first.err
    for step in range(2, 12):
        dump(folder, step)
    second = audit(*arguments, "--json")
    assert second.code == 0, second.out
    assert json.loads(second.out)["counters"]["judged"] == 840
    dump(folder, 12, noise=0.3, rows=400)
    third = audit(*arguments)
    assert third.code == 1
    assert "ALARM" in third.out
    lines = (tmp_path / "out").read_text().split()
    again = audit(*arguments)
    assert again.code == 1
    assert (tmp_path / "out").read_text().split() == lines
    assert set(lines) == {"S1", "S2"}
    wrong = audit("watch", tmp_path / "log.jsonl", "--contract", file, "--once")
    assert wrong.code == 2
    assert "--reference" in wrong.err


def test_views_do_not_change_under_a_scrape(tmp_path: Path) -> None:
    """The exporter's thread reads while the watch counts."""
    for step in range(6):
        dump(tmp_path / "dumps", step, rows=40)
    watch = opened(DumpSource(tmp_path / "dumps", CONTRACT, CLAUSES), tmp_path / "s.db")
    latest = {"view": watch.view()}
    errors: list[BaseException] = []
    done = threading.Event()

    def scrape() -> None:
        try:
            while not done.is_set():
                list(metrics.families(latest["view"], {}))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=scrape)
    thread.start()
    for chunk in watch.source.poll(watch.snapshot.cursor, final=True):
        watch.apply(chunk)
        latest["view"] = watch.view()
    done.set()
    thread.join()
    assert errors == []
