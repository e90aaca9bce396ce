"""``audit promote``: exit codes, words and JSON, as a pipeline sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from in_process import audit
from promotion_fixtures import BUILD, TEXT, batch, contract, write_report

from mismatch_audit.promotion.store import PromotionStore


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, Path]:
    (tmp_path / "contract.yaml").write_text(TEXT)
    write_report(tmp_path / "run", contract())
    return f"sqlite:///{tmp_path / 'p.db'}", tmp_path


def start(store: str, folder: Path) -> int:
    done = audit(
        "promote", "advance", "--store", store, "--contract", folder / "contract.yaml",
        "--build", BUILD, "--report", folder / "run", "--actor", "ci",
    )  # fmt: skip
    return done.code


def test_a_promotion_from_start_to_rollback(files: tuple[str, Path]) -> None:
    """0 advanced, 3 refused, 1 broken; status and history tell it."""
    store, folder = files
    assert audit("promote", "status", "--store", store).code == 2
    assert start(store, folder) == 0
    refused = audit("promote", "advance", "--store", store)
    assert refused.code == 3
    assert "0 prompts of 60" in refused.out
    with PromotionStore(store) as opened:
        opened.record(opened.pick(None), batch("shadow", 0, 120), actor="t")
    advanced = audit("promote", "advance", "--store", store, "--json")
    assert advanced.code == 0
    assert json.loads(advanced.out)["stage"] == "canary"
    status = audit("promote", "status", "--store", store)
    assert status.code == 0
    assert "stage canary" in status.out
    assert "lacks 0 prompts of 60" in status.out
    back = audit("promote", "rollback", "--store", store, "--reason", "a bad night")
    assert back.code == 0
    history = json.loads(audit("promote", "history", "--store", store, "--json").out)
    assert [d["action"] for d in history] == ["start", "advance", "advance", "rollback"]
    assert history[1]["actor"] == "ci"
    assert "a bad night" in audit("promote", "history", "--store", store).out
    assert audit("promote", "verify", "--store", store).code == 0
    again = audit("promote", "advance", "--store", store, "--report", folder / "run")
    assert again.code == 3
    assert "audit again" in again.out


def test_mistakes_are_told_in_one_message(files: tuple[str, Path]) -> None:
    """No traceback; exit 2."""
    store, folder = files
    half = audit("promote", "advance", "--store", store, "--build", BUILD)
    plain = folder / "plain.yaml"
    plain.write_text(TEXT[: TEXT.index("promotion:")])
    ruleless = audit(
        "promote", "advance", "--store", store, "--contract", plain, "--build", BUILD,
        "--report", folder / "run",
    )  # fmt: skip
    assert start(store, folder) == 0
    unknown = audit("promote", "status", "--store", store, "--subject", "nobody")
    backwards = audit(
        "promote", "rollback", "--store", store, "--reason", "x", "--to", "full"
    )  # fmt: skip
    for done, words in (
        (half, "needs --contract, --build and --report"),
        (ruleless, "says nothing about promotion"),
        (unknown, "no subject called 'nobody'"),
        (backwards, "rollback from shadow to full"),
    ):
        assert done.code == 2, done.err
        assert words in done.err
        assert "Traceback" not in done.err
        assert "fix:" in done.err
