"""Ten writers that are killed at random moments leave a history without a scratch."""

from __future__ import annotations

import contextlib
import glob
import multiprocessing
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from promotion_fixtures import BUILD, WEIGHTS, batch, contract, write_report

from mismatch_audit.promotion import schema
from mismatch_audit.promotion.offline import OfflineEvidence
from mismatch_audit.promotion.store import PromotionStore

WRITERS, KILLS, DECISIONS, SECONDS = 10, 20, 12, 300.0
"""The storm lasts until so many kills and decisions: 15 s on two cores at a load of 4, 70 s at 9.
SECONDS only ends a storm in which nothing moves."""


def writer(url: str, report: str, seed: int) -> None:
    """Count overlapping batches, try to advance, now and then roll back; until killed."""
    chance = random.Random(seed)
    evidence = OfflineEvidence.of(Path(report))
    with PromotionStore(url) as store:
        subject = store.start(contract(), BUILD, WEIGHTS, actor=f"writer {seed}")
        while True:
            stage = store.decisions(subject)[-1].to_stage
            dice = chance.random()
            if stage == "offline" or dice < 0.2:
                with contextlib.suppress(Exception):  # full already, or a race that it lost
                    store.advance(subject, actor=f"writer {seed}", offline=evidence)
            elif dice < 0.25:
                with contextlib.suppress(Exception):
                    store.rollback(subject, actor=f"writer {seed}", reason="chance")
            else:
                mean = 4e-2 if chance.random() < 0.05 else 2e-3
                at = chance.randrange(3000)
                store.record(subject, batch(stage, at, 12, mean=mean), actor=f"writer {seed}")


def storm(url: str, report: Path, folder: Path) -> tuple[PromotionStore, int]:
    """Writers killed and replaced; gives the store they leave and the number of kills."""
    context = multiprocessing.get_context("fork")
    chance, kills = random.Random(1), 0

    def spawn(seed: int) -> multiprocessing.process.BaseProcess:
        process = context.Process(target=writer, args=(url, str(report), seed), daemon=True)
        process.start()
        return process

    alive = [spawn(i) for i in range(WRITERS)]
    end = time.monotonic() + SECONDS
    store = PromotionStore(url)
    while kills < KILLS or not _done(store):
        assert time.monotonic() < end, "the writers get nothing done"
        time.sleep(chance.uniform(0.0, 0.6))
        victim = chance.randrange(WRITERS)
        assert alive[victim].is_alive(), "a writer died by itself"
        os.kill(alive[victim].pid or 0, signal.SIGKILL)
        alive[victim].join()
        kills += 1
        alive[victim] = spawn(100 + kills)
    for process in alive:
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    return store, kills


def _done(store: PromotionStore) -> bool:
    history = [d for s in store.subjects() for d in store.decisions(s)]
    return len(history) >= DECISIONS and "rollback" in {d.action for d in history}


def check(store: PromotionStore, kills: int) -> None:
    """Gapless, legal, replayable, nothing counted twice; and the storm did something."""
    subject = store.pick(None)
    assert store.verify(subject) == []
    history = store.decisions(subject)
    assert kills >= KILLS
    assert len(history) >= DECISIONS
    assert {d.action for d in history} == {"start", "advance", "rollback"}
    u, r = schema.units, schema.requests
    with store.database.reading() as connection:
        prompts = connection.scalar(sa.select(sa.func.count()).select_from(u)) or 0
        ids = connection.scalars(sa.select(r.c.request_id).where(r.c.outcome == "counted")).all()
        shown = connection.scalar(sa.select(sa.func.sum(u.c.n_requests))) or 0
    assert prompts > 100
    assert len(ids) == len(set(ids)) == shown


def report_of(folder: Path) -> Path:
    return write_report(folder / "run", contract(), finished="2999-01-01T00:00:00+00:00")


def test_sqlite_survives_killed_writers(tmp_path: Path) -> None:
    """The file is whole after each kill: WAL, one write transaction at a time, taken at once."""
    url = f"sqlite:///{tmp_path / 'promotion.db'}"
    store, kills = storm(url, report_of(tmp_path), tmp_path)
    check(store, kills)
    with store.database.reading() as connection:
        assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"


@pytest.fixture
def postgres(tmp_path: Path) -> Iterator[str]:
    """A server of its own on a free loopback port, or one named by AUDIT_TEST_POSTGRES."""
    if given := os.environ.get("AUDIT_TEST_POSTGRES"):
        yield given
        return
    found = [*sorted(glob.glob("/usr/lib/postgresql/*/bin")), str(shutil.which("initdb") or "")]
    home = next((Path(f) for f in reversed(found) if f and Path(f).is_dir()), None)
    if home is None:
        pytest.skip("no PostgreSQL here; give a URL in AUDIT_TEST_POSTGRES")
    run: list[str] = []
    data = tmp_path / "data"
    if os.getuid() == 0:  # the server refuses to run as root
        try:
            pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("PostgreSQL does not run as root, and there is no user for it")
        run = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        data = Path(f"/var/tmp/audit-test-postgres-{os.getpid()}")
        data.mkdir()
        shutil.chown(data, "postgres", "postgres")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = (
        f"-c listen_addresses=127.0.0.1 -p {port} -c unix_socket_directories={data} -c fsync=off"
    )
    subprocess.run([*run, home / "initdb", "-D", data / "db", "-U", "audit", "-A", "trust", "-N"],
                   check=True, capture_output=True, cwd="/")  # fmt: skip
    server = [*run, home / "pg_ctl", "-D", data / "db", "-w", "-l", data / "log", "-o", options]
    subprocess.run([*server, "start"], check=True, cwd="/", stdout=subprocess.DEVNULL)
    try:
        yield f"postgresql://audit@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run([*server, "-m", "immediate", "stop"], check=True, cwd="/",
                       stdout=subprocess.DEVNULL)  # fmt: skip
        shutil.rmtree(data, ignore_errors=True)


def test_postgresql_survives_killed_writers(postgres: str, tmp_path: Path) -> None:
    """The same storm; here the subject's row is the lock."""
    store, kills = storm(postgres, report_of(tmp_path), tmp_path)
    check(store, kills)
    store.close()
