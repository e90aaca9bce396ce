"""``audit key``, ``bless``, ``gate`` and ``push`` as a user types them."""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass
from pathlib import Path

import gate_fixtures as fixtures
import pytest
from conftest import SAMPLES, CommandResult
from typer.testing import CliRunner

from kernel_contracts.errors import AuditError
from mismatch_audit.cli.app import app


@dataclass(frozen=True)
class Said:
    code: int
    text: str


def call(*words: object) -> Said:
    """One command; errors of ours become their message and exit code, as ``main`` has it."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, AuditError):
        return Said(result.exception.exit_code, f"{result.output}error: {result.exception}")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Said(result.exit_code, result.output)


@dataclass(frozen=True)
class World:
    folder: Path

    def at(self, name: str) -> Path:
        return self.folder / name

    def gate(self, **changes: object) -> Said:
        options: dict[str, object] = {
            "weights": self.at("new"), "engine-facts": self.at("facts.json"),
            "contract": self.at("contract.yaml"), "blessing": self.at("run/blessing.dsse.json"),
            "trusted": self.at("keys/audit.pub"),
        } | {name.replace("_", "-"): value for name, value in changes.items()}  # fmt: skip
        words = [w for name, value in options.items() for w in (f"--{name}", value)]
        return call("gate", *words, "--json")


@pytest.fixture
def world(tmp_path: Path) -> World:
    fixtures.checkpoint(tmp_path / "old", seed=1)
    fixtures.checkpoint(tmp_path / "new", seed=2)
    contract = fixtures.contract(tmp_path)
    fixtures.run(tmp_path / "run", tmp_path / "new", contract)
    return World(tmp_path)


def test_key_bless_facts_gate(world: World):
    """The five commands of the documentation: allowed; then an expired blessing, another contract
    and other weights are denied with their codes, and garbage is exit code 2."""
    made = call("key", "new", "--out", world.at("keys"))
    assert made.code == 0
    private = world.at("keys/audit.key")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    shown = call("key", "show", world.at("keys"))
    assert shown.text.strip() in made.text
    blessed = call("bless", world.at("run"), "--key", private, "--expires", "12h")
    assert blessed.code == 0, blessed.text
    assert call("gate", "facts", world.at("run"), "--out", world.at("facts.json")).code == 0
    allowed = world.gate()
    assert allowed.code == 0, allowed.text
    assert json.loads(allowed.text)["decision"] == "allow"
    secret = private.read_text().splitlines()[1]
    for said in (made, shown, blessed, allowed):
        assert secret not in said.text
    other = fixtures.contract(world.at("c"), fixtures.CONTRACT.replace("2.0e-3", "3.0e-3"))
    for changes, code, exit_code in (
        ({"now": "2099-01-01T00:00:00+00:00"}, "expired", 1),
        ({"now": "2001-01-01T00:00:00Z"}, "not_yet_valid", 1),
        ({"contract": other}, "contract_differs", 1),
        ({"weights": world.at("old")}, "weights_differ", 1),
        ({"blessing": world.at("contract.yaml")}, "not_a_blessing", 2),
        ({"blessing": world.at("none")}, "blessing_unreadable", 2),
        ({"weights": world.at("none")}, "weights_unreadable", 2),
        ({"engine_facts": "http://127.0.0.1:9"}, "facts_unreadable", 2),
    ):
        said = world.gate(**changes)
        document = json.loads(said.text)
        assert (said.code, document["decision"]) == (exit_code, "deny")
        assert document["exit_code"] == exit_code
        assert [reason["code"] for reason in document["reasons"]] == [code]
    assert world.gate(now="yesterday").code == 2
    incomplete = call("gate", "--weights", world.at("new"))
    assert incomplete.code == 2
    assert "--trusted" in incomplete.text


@pytest.mark.engine
@pytest.mark.model
def test_first_page_of_the_documentation(quickstart: CommandResult, tmp_path: Path):
    """The commands at the top of docs/gate.md, on the real quickstart run of the sample model."""
    assert quickstart.code == 0
    blessing, facts = tmp_path / "blessing.dsse.json", tmp_path / "engine.json"
    assert call("key", "new", "--out", tmp_path / "keys").code == 0
    key = tmp_path / "keys" / "audit.key"
    blessed = call("bless", quickstart.folder, "--key", key, "--expires", "7d", "--out", blessing)
    assert blessed.code == 0, blessed.text
    assert call("gate", "facts", quickstart.folder, "--out", facts).code == 0
    asked = ["gate", "--weights", "sample", "--trusted", key.with_suffix(".pub"), "--contract",
             SAMPLES / "contracts" / "bf16-serving.yaml", "--blessing", blessing]  # fmt: skip
    allowed = call(*asked, "--engine-facts", facts)
    assert allowed.code == 0, allowed.text
    document = json.loads(facts.read_text())
    document["facts"]["kv_cache_dtype"] = ["fp8_e4m3"]
    facts.write_text(json.dumps(document))
    denied = call(*asked, "--engine-facts", facts)
    assert denied.code == 1
    assert "engine_fact_differs: kv_cache_dtype" in denied.text


def test_passphrase_comes_from_the_environment(world: World, monkeypatch: pytest.MonkeyPatch):
    """Without it, or with another, the key does not open; the words are in no output."""
    monkeypatch.setenv("AUDIT_KEY_PASSPHRASE", "three little words")
    made = call("key", "new", "--out", world.at("keys"), "--name", "ci")
    assert "encrypted, 0600" in made.text
    key = world.at("keys/ci.key")
    assert call("bless", world.at("run"), "--key", key).code == 0
    for wrong in ("", "other"):
        monkeypatch.setenv("AUDIT_KEY_PASSPHRASE", wrong)
        said = call("bless", world.at("run"), "--key", key)
        assert said.code == 2
        assert "three little" not in said.text + made.text


@pytest.mark.parametrize(("verdict", "code"), [("FAIL", 1), ("INCONCLUSIVE", 3), ("UNSOUND", 4)])
def test_bless_refuses_with_the_code_of_the_verdict(world: World, verdict: str, code: int):
    """Said in one line, with what to look at."""
    call("key", "new", "--out", world.at("keys"))
    run = fixtures.run(world.at(verdict), world.at("new"), world.at("contract.yaml"), verdict)
    said = call("bless", run, "--key", world.at("keys/audit.key"))
    assert said.code == code
    assert f"verdict is {verdict}, and only a PASS is blessed; first: S1 on all" in said.text
    assert f"audit show {run}" in said.text


def test_push_by_commands(world: World):
    """A folder that is served through a link: handed over, checked by a command, gone back when
    the check says no; the store then tells what is served."""
    call("key", "new", "--out", world.at("keys"))
    assert call("gate", "facts", world.at("run"), "--out", world.at("facts.json")).code == 0
    link = world.at("serving")
    link.symlink_to("old")
    command = [
        "push", "--source", world.at("new"), "--version", 2, "--run", world.at("run"),
        "--contract", world.at("contract.yaml"), "--key", world.at("keys/audit.key"),
        "--target", f"ln -sfn {{checkpoint}} {link}", "--engine-facts", world.at("facts.json"),
        "--previous", world.at("old"), "--previous-version", 1,
    ]  # fmt: skip
    bad = call(*command, "--check", f"test {link}/x -ef {{checkpoint}}/x", "--store", world.at("s"))
    # The way back is checked by the same command, which says no there as well: lost, and loud.
    assert bad.code == 4, bad.text
    assert "take the engine out of traffic" in bad.text
    check = ["--check", f"test {link}/config.json -ef {{checkpoint}}/config.json"]
    sides = command[command.index("--contract") : command.index("--previous")]
    undone = call("push", *sides, *check, "--store", world.at("s"), "--recover")
    assert undone.code == 0, undone.text
    assert link.resolve() == world.at("old")
    good = call(*command, *check, "--store", world.at("s"), "--json")
    assert good.code == 0, good.text
    assert json.loads(good.text)["status"] == "committed"
    assert link.resolve() == world.at("new")
    assert json.loads(world.at("s/serving.json").read_text())["version"] == 2
    assert "it was served already" in call(*command, *check, "--store", world.at("s")).text


def test_push_that_cannot_start_says_why(world: World):
    """No check, an engine that would end with the command, no audit or two, no previous weights,
    unknown fields: exit code 2, nothing handed over."""
    call("key", "new", "--out", world.at("keys"))
    base = [
        "push", "--source", world.at("new"), "--version", 2, "--key", world.at("keys/audit.key"),
        "--contract", world.at("contract.yaml"), "--store", world.at("s"),
    ]  # fmt: skip
    touch = ["--target", f"touch {world.at('handed')}"]
    check, run = ["--check", "true"], ["--run", world.at("run")]
    for words, said in (
        ([*touch, *run], "nothing would check"),
        (["--target", f"vllm:{world.at('old')}", *run], "ends with it"),
        ([*touch, *check], "needs --run FOLDER or --settings FILE"),
        ([*touch, *check, *run, "--settings", world.at("x.yaml")], "not both"),
        ([*touch, *check, *run], "Without it there is no way back"),
        ([*touch, *check, *run, "--previous", world.at("old")], "go together"),
        (["--target", "x {secret}", *check, *run], "unknown fields"),
        ([*touch, "--engine", "localhost:8000", *run], "not the address of a server"),
    ):
        answer = call(*base, *words)
        assert answer.code == 2, answer.text
        assert said in answer.text
    assert not world.at("handed").exists()
