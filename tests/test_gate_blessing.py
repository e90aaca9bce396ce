"""Blessings: what is signed, who may sign, and that nothing but the signed statement passes."""

from __future__ import annotations

import base64
import json
import os
import stat
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import gate_fixtures as fixtures
import pytest
import weights_zoo as zoo
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_contracts.errors import InputError
from mismatch_audit.gate.bless import NotBlessed, bless_run, duration
from mismatch_audit.gate.decide import Decision, Request, decide, open_blessing
from mismatch_audit.gate.envelope import MAX_ENVELOPE_BYTES, PAYLOAD_TYPE, pae, seal, unseal
from mismatch_audit.gate.facts import EngineFacts, facts_of, pinned, read_facts, write_facts
from mismatch_audit.gate.keys import key_id, load_private, load_trusted, new_key
from mismatch_audit.gate.statement import decode
from mismatch_audit.gate.strict import Malformed, canonical

NOW = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)


@dataclass(frozen=True)
class Blessed:
    """A blessed run and the request that is allowed."""

    folder: Path
    run: Path
    key: Path
    request: Request

    def ask(self, **changes: Any) -> Decision:
        return decide(replace(self.request, **changes))

    def codes(self, **changes: Any) -> set[str]:
        decision = self.ask(**changes)
        assert not decision.allow
        assert decision.exit_code in (1, 2)
        return {reason.code for reason in decision.reasons}

    def with_bytes(self, raw: bytes, name: str = "changed.json") -> Path:
        path = self.folder / name
        path.write_bytes(raw)
        return path

    def resigned(self, change: Any) -> Path:
        """The statement after ``change(document)``, signed anew with the trusted key."""
        document = json.loads(unseal(self.request.blessing.read_bytes()).payload)
        change(document)
        return self.with_bytes(seal(canonical(document), load_private(self.key)), "resigned.json")


@pytest.fixture(scope="module")
def blessed(tmp_path_factory: pytest.TempPathFactory) -> Blessed:
    folder = tmp_path_factory.mktemp("gate")
    weights = fixtures.checkpoint(folder / "weights")
    contract = fixtures.contract(folder)
    run = fixtures.run(folder / "run", weights, contract)
    key = new_key(folder / "keys", "ci")
    blessing = bless_run(run, load_private(key.private), now=NOW).path
    write_facts(facts_of(str(run)), folder / "engine.json")
    trusted = folder / "trusted"
    trusted.mkdir()
    (trusted / "ci.pub").write_bytes(key.public.read_bytes())
    request = Request(weights, folder / "engine.json", contract, blessing, trusted, NOW)
    return Blessed(folder, run, key.private, request)


def test_clean_control_is_allowed(blessed: Blessed):
    """The audited weights on the audited engine under the audited contract, in time."""
    decision = blessed.ask()
    assert decision.allow, decision.reasons
    assert decision.exit_code == 0
    assert decision.signed_by == key_id(load_private(blessed.key).public_key())


def test_statement_binds_what_was_audited(blessed: Blessed):
    """An in-toto statement with the digests of weights, contract, report, prompts, and both
    programs; no path of the machine and no bytes of the private key are in it."""
    raw = blessed.request.blessing.read_bytes()
    statement = decode(unseal(raw).payload)
    assert statement.predicate.verdict == "PASS"
    assert {row.clause for row in statement.predicate.verdicts} == {"S1", "O1"}
    assert statement.predicate.programs.engine["kv_cache_dtype"] == ["auto"]
    document = json.loads(unseal(raw).payload)
    assert document["_type"] == "https://in-toto.io/Statement/v1"
    assert str(blessed.folder) not in json.dumps(document)
    assert "hf_token" not in json.dumps(document)
    secret = blessed.key.read_text().splitlines()[1]
    assert secret not in raw.decode()
    assert secret not in json.dumps(document)


def test_other_implementation_verifies_the_envelope(blessed: Blessed):
    """The envelope is DSSE and not something of our own: securesystemslib verifies it."""
    dsse = pytest.importorskip("securesystemslib.dsse")
    from securesystemslib.signer import SSlibKey

    public = next(iter(load_trusted(blessed.request.trusted).values()))
    document = json.loads(blessed.request.blessing.read_bytes())
    key = SSlibKey.from_crypto(public, keyid=document["signatures"][0]["keyid"])
    envelope = dsse.Envelope.from_dict(document)
    assert list(envelope.verify([key], 1)) == [key.keyid]
    envelope.payload += b" "
    with pytest.raises(Exception, match="do not match"):
        envelope.verify([key], 1)


@pytest.mark.parametrize(
    ("verdict", "code"), [("FAIL", 1), ("INCONCLUSIVE", 3), ("UNOBSERVED", 3), ("UNSOUND", 4)]
)
def test_only_a_pass_is_blessed(blessed: Blessed, tmp_path: Path, verdict: str, code: int):
    """Exit code of the verdict, and no file."""
    run = fixtures.run(tmp_path / "run", blessed.request.weights, blessed.request.contract, verdict)
    with pytest.raises(NotBlessed, match=verdict) as caught:
        bless_run(run, load_private(blessed.key))
    assert caught.value.exit_code == code
    assert not (run / "blessing.dsse.json").exists()


def test_run_that_does_not_speak_of_these_weights_is_not_blessed(blessed: Blessed, tmp_path: Path):
    """Other weights, a manifest of other weights, an injected fault, another contract in the
    report, a report without its run, an engine that does not tell its cache: each is refused."""
    key = load_private(blessed.key)
    other = fixtures.checkpoint(tmp_path / "other", seed=1)
    with pytest.raises(InputError, match="not the weights that this run audited"):
        bless_run(blessed.run, key, weights=other)
    manifest = _manifest(other, tmp_path)
    with pytest.raises(InputError, match="this manifest is not of the weights"):
        bless_run(blessed.run, key, weights=manifest)

    def fresh(name: str, **engine: Any) -> Path:
        weights, contract = blessed.request.weights, blessed.request.contract
        return fixtures.run(tmp_path / name, weights, contract, **engine)

    with pytest.raises(InputError, match="fault was injected"):
        bless_run(fresh("injected", inject={"stale_weights": 0.1}), key)
    with pytest.raises(InputError, match="does not know its engine's kv_cache_dtype"):
        bless_run(fresh("blind", kv_cache_dtype=[]), key)
    run = fresh("swapped")
    report = json.loads((run / "report.json").read_text())
    report["contract"]["digest"] = fixtures.DIGEST
    (run / "report.json").write_text(json.dumps(report))
    with pytest.raises(InputError, match="not the one that its digest names"):
        bless_run(run, key)
    run = fresh("loose")
    (run / "run.json").unlink()
    with pytest.raises(InputError, match=r"no run\.json"):
        bless_run(run, key)


def test_acknowledged_violation_ends_the_blessing_with_its_day(blessed: Blessed, tmp_path: Path):
    """It is listed for what it is, and holds no longer than somebody answers for it; afterwards
    there is no blessing at all."""
    text = fixtures.CONTRACT + (
        "acknowledge: [{clause: S1, who: ops, why: known, until: 2026-01-04}]\n"
    )
    contract = fixtures.contract(tmp_path / "c", text)
    rows = {"S1": {"verdict": "ACKNOWLEDGED"}}
    run = fixtures.run(tmp_path / "run", blessed.request.weights, contract, rows=rows)
    key = load_private(blessed.key)
    statement = bless_run(run, key, now=NOW).statement
    assert [row.verdict for row in statement.predicate.verdicts] == ["ACKNOWLEDGED", "PASS"]
    assert statement.predicate.expires == "2026-01-05T00:00:00Z"
    early = bless_run(run, key, now=NOW, lifetime=timedelta(hours=1)).statement
    assert early.predicate.expires == "2026-01-02T13:00:00Z"
    with pytest.raises(NotBlessed, match="which is over"):
        bless_run(run, key, now=NOW + timedelta(days=3))


def _manifest(weights: Path, folder: Path, name: str = "m.json") -> Path:
    from mismatch_audit.weights.digest import build_manifest
    from mismatch_audit.weights.sides import open_side

    build_manifest(open_side(weights), "none").write(folder / name)
    return folder / name


def test_weights_in_other_files_are_the_same_weights(blessed: Blessed, tmp_path: Path):
    """Digests are of tensors: other shards and a manifest pass, one changed value does not."""
    tensors = zoo.cast(zoo.llama_weights(0, fixtures.TINY))
    shards = zoo.write_sharded(tmp_path / "shards", tensors)
    (shards / "config.json").write_text(json.dumps(fixtures.TINY))
    assert blessed.ask(weights=shards).allow
    decision = blessed.ask(weights=_manifest(blessed.request.weights, tmp_path))
    assert decision.allow
    assert "manifest" in decision.notes[0]
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][3, 5] *= 2
    assert blessed.codes(weights=zoo.write(tmp_path / "one", tensors, fixtures.TINY)) == {
        "weights_differ"
    }


def test_every_swap_is_denied_with_its_reason(blessed: Blessed, tmp_path: Path):
    """Other weights, engine build, KV cache, contract, key, time: one code each, and all of them
    when all are wrong at once."""

    def engine(**changes: Any) -> EngineFacts:
        return EngineFacts(fixtures.facts(**changes), "engine", "2026-01-02T12:00:00Z")

    assert blessed.ask(engine=engine()).allow
    assert blessed.codes(engine=engine(version="0.33.0")) == {"engine_fact_differs"}
    assert blessed.codes(engine=engine(kv_cache_dtype=["fp8_e4m3"])) == {"engine_fact_differs"}
    assert blessed.codes(engine=engine(speculative="ngram")) == {"engine_fact_unknown"}
    assert blessed.codes(engine=engine(enforce_eager=1)) == {"engine_fact_differs"}
    blind = fixtures.facts()
    del blind["attention"]
    assert blessed.codes(engine=EngineFacts(blind, "", "")) == {"engine_fact_missing"}
    assert "engine_fact_missing" in blessed.codes(engine=EngineFacts({}, "", ""))
    assert blessed.codes(engine=engine(dtype="float16")) == {"engine_fact_differs", "contract_pair"}
    other = fixtures.contract(tmp_path / "c", fixtures.CONTRACT.replace("2.0e-3", "2.1e-3"))
    assert blessed.codes(contract=other) == {"contract_differs"}
    stranger = new_key(tmp_path / "keys").public
    assert blessed.codes(trusted=stranger) == {"unknown_key"}
    assert blessed.codes(now=NOW + timedelta(days=7)) == {"expired"}
    assert blessed.ask(now=NOW + timedelta(days=7, seconds=-1)).allow
    assert blessed.codes(now=NOW - timedelta(seconds=61)) == {"not_yet_valid"}
    assert blessed.ask(now=NOW - timedelta(seconds=60)).allow
    everything = blessed.codes(
        weights=fixtures.checkpoint(tmp_path / "w", 3), contract=other,
        engine=engine(version="1"), now=NOW + timedelta(days=400),
    )  # fmt: skip
    assert everything == {"weights_differ", "contract_differs", "engine_fact_differs", "expired"}


def test_changed_config_or_tokenizer_is_denied(blessed: Blessed, tmp_path: Path):
    """The same tensors under another rope_theta or with generation defaults: another policy."""
    tensors = zoo.cast(zoo.llama_weights(0, fixtures.TINY))
    rope = zoo.write(tmp_path / "rope", tensors, {**fixtures.TINY, "rope_theta": 5e5})
    assert blessed.codes(weights=rope) == {"config_differs"}
    sampling = zoo.write(tmp_path / "sampling", tensors, fixtures.TINY)
    (sampling / "generation_config.json").write_text('{"temperature": 0.6}')
    assert blessed.codes(weights=sampling) == {"config_differs"}


def test_missing_and_unreadable_inputs_deny(blessed: Blessed, tmp_path: Path):
    """Nothing there, a folder, a pipe, garbage: denied with exit code 2, never a hang or a yes."""
    gone, pipe = tmp_path / "gone", tmp_path / "pipe"
    os.mkfifo(pipe)
    garbage = tmp_path / "garbage.json"
    garbage.write_bytes(b"\x00\xff{")
    for name, code in (
        ("weights", "weights_unreadable"), ("engine", "facts_unreadable"),
        ("contract", "contract_unreadable"), ("trusted", "trusted_unreadable"),
        ("blessing", "blessing_unreadable"),
    ):  # fmt: skip
        for path in (gone, garbage, tmp_path):
            decision = blessed.ask(**{name: path})
            assert not decision.allow
            assert decision.exit_code == 2
            assert {r.code for r in decision.reasons} <= {code, "not_a_blessing"}
    for name in ("engine", "trusted", "blessing"):
        assert blessed.ask(**{name: pipe}).exit_code == 2


def test_hostile_envelopes_are_denied(blessed: Blessed):
    """Duplicate keys, trailing bytes, huge files, other types, signatures and spellings: the same
    statement and signature in any other bytes is not the blessing."""
    raw = blessed.request.blessing.read_bytes()
    document = json.loads(raw)
    sign = load_private(blessed.key)
    twice = raw.replace(b'{"payload":', b'{"payload":"","payload":', 1)
    two = {**document, "signatures": document["signatures"] * 2}
    other_type = {**document, "payloadType": "text/plain"}
    stripped = {**document, "signatures": []}
    nested = b'{"payload":' + b"[" * 5000 + b"]" * 5000 + b"}"
    indented = json.dumps(document, indent=1).encode()
    payload = unseal(raw).payload
    duplicate = payload.replace(b'"verdict":"PASS"', b'"verdict":"FAIL","verdict":"PASS"', 1)
    cases = {
        "duplicate_key": [twice, seal(duplicate, sign)],
        "trailing_bytes": [raw + b"x", raw + raw, seal(payload + b"{}", sign)],
        "not_canonical": [raw + b"\n", raw[:-1], b" " + raw, indented,
                          seal(payload + b"\n", sign), seal(b" " + payload, sign)],
        "payload_type": [canonical(other_type) + b"\n"],
        "signature_count": [canonical(two) + b"\n", canonical(stripped) + b"\n"],
        "not_a_blessing": [b"", b"[]", b"null", b"{}", raw[:-40], nested, b"\xef\xbb\xbf" + raw],
        "blessing_unreadable": [raw + b" " * MAX_ENVELOPE_BYTES],
    }  # fmt: skip
    for code, variants in cases.items():
        for variant in variants:
            assert blessed.codes(blessing=blessed.with_bytes(variant)) == {code}, variant[:80]


def test_signature_is_of_type_and_payload(blessed: Blessed):
    """A signature made for another payload type does not carry over (PAE binds both)."""
    raw = blessed.request.blessing.read_bytes()
    document, payload = json.loads(raw), unseal(raw).payload
    sign = load_private(blessed.key)
    other = sign.sign(pae(payload, "text/plain"))
    document["signatures"][0]["sig"] = base64.b64encode(other).decode()
    changed = blessed.with_bytes(canonical(document) + b"\n")
    assert blessed.codes(blessing=changed) == {"bad_signature"}
    assert pae(b"ab", "t") == b"DSSEv1 1 t 2 ab"
    assert PAYLOAD_TYPE == "application/vnd.in-toto+json"


def test_even_a_trusted_key_cannot_sign_nonsense(blessed: Blessed):
    """Signed anew with the trusted key: unknown schema versions, missing and unknown fields, a
    verdict that is no pass, a lifetime of decades. All denied."""

    def at(*path: Any, value: Any = None) -> Any:
        def change(document: Any) -> None:
            for key in path[:-1]:
                document = document[key]
            if value is None:
                del document[path[-1]]
            else:
                document[path[-1]] = value

        return change

    unknown = (
        at("_type", value="https://in-toto.io/Statement/v2"),
        at("predicateType", value="urn:mismatch-audit:blessing:v2"),
        at("predicate", "schema_version", value="2"),
    )
    for change in unknown:
        assert blessed.codes(blessing=blessed.resigned(change)) == {"unknown_schema"}
    malformed = [
        at("predicate", "verdict", value="FAIL"),
        at("predicate", "verdicts", 0, "verdict", value="INCONCLUSIVE"),
        at("predicate", "verdicts", value=[]),
        at("predicate", "expires", value="2040-01-01T00:00:00Z"),
        at("predicate", "expires", value="2026-02-30T00:00:00Z"),
        at("predicate", "expires", value="2025-01-01T00:00:00Z"),
        at("predicate", "extra", value=1),
        at("subject", 0, "digest", value={}),
        at("subject", value=[]),
        at("predicate", "programs", "engine", value={}),
        at("predicate", "tool", "name", value="other"),
    ]
    document = json.loads(unseal(blessed.request.blessing.read_bytes()).payload)
    malformed += [at("predicate", name) for name in document["predicate"]]
    malformed += [at(name) for name in ("subject", "predicate")]
    for change in malformed:
        codes = blessed.codes(blessing=blessed.resigned(change))
        assert codes <= {"malformed_statement", "unknown_schema"}


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for k, v in value.items() for leaf in _leaves(v, (*path, k))]
    if isinstance(value, list) and value:
        return [leaf for i, v in enumerate(value) for leaf in _leaves(v, (*path, i))]
    return [path]


def test_every_field_of_the_statement_is_under_the_signature(blessed: Blessed):
    """Each leaf of payload and envelope changed in turn, in canonical spelling: always denied, and
    a payload's change always by its signature."""
    raw = blessed.request.blessing.read_bytes()
    document = json.loads(unseal(raw).payload)
    for path in _leaves(document):
        changed = json.loads(json.dumps(document))
        holder = changed
        for key in path[:-1]:
            holder = holder[key]
        old = holder[path[-1]]
        holder[path[-1]] = (
            not old if isinstance(old, bool) else old + 1 if isinstance(old, int | float)
            else f"{old}x" if isinstance(old, str) else "x"
        )  # fmt: skip
        envelope = json.loads(raw)
        envelope["payload"] = base64.b64encode(canonical(changed)).decode()
        codes = blessed.codes(blessing=blessed.with_bytes(canonical(envelope) + b"\n"))
        assert codes == {"bad_signature"}, path


def test_every_byte_of_the_file_counts(blessed: Blessed):
    """Each byte of the file changed in four ways (low bit, case bit, high bit, to a quote), left
    out, and doubled, whatever it is (brace, quote, base64, digit, newline): nothing opens."""
    raw = blessed.request.blessing.read_bytes()
    keys = load_trusted(blessed.request.trusted)
    assert open_blessing(raw, keys)[1].predicate.verdict == "PASS"
    for at, byte in enumerate(raw):
        rest = raw[at + 1 :]
        for put in {byte ^ 1, byte ^ 0x20, byte ^ 0x80, ord('"')} - {byte}:
            with pytest.raises(Malformed):
                open_blessing(raw[:at] + bytes([put]) + rest, keys)
        for put in (b"", bytes([byte, byte])):
            with pytest.raises(Malformed):
                open_blessing(raw[:at] + put + rest, keys)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_other_payload_passes_under_the_signature(blessed: Blessed, data: st.DataObject):
    """Bytes of the payload replaced, cut or put in, in a well-spelt envelope with the old
    signature: never opened."""
    raw = blessed.request.blessing.read_bytes()
    payload = unseal(raw).payload
    at = data.draw(st.integers(0, len(payload)))
    cut = data.draw(st.integers(0, 40))
    put = data.draw(st.binary(max_size=40).filter(lambda b: b != payload[at : at + cut]))
    envelope = json.loads(raw)
    envelope["payload"] = base64.b64encode(payload[:at] + put + payload[at + cut :]).decode()
    changed = canonical(envelope) + b"\n"
    if changed != raw:  # e.g. "aa" cut and "a" put in before another "a"
        with pytest.raises(Malformed, match="not of this statement"):
            open_blessing(changed, load_trusted(blessed.request.trusted))


def test_every_byte_of_the_signature_counts(blessed: Blessed):
    """Each of the 512 bits flipped, and base64 with spare bits set: denied."""
    raw = blessed.request.blessing.read_bytes()
    document = json.loads(raw)
    sig = base64.b64decode(document["signatures"][0]["sig"])
    keys = load_trusted(blessed.request.trusted)
    for bit in range(8 * len(sig)):
        changed = bytearray(sig)
        changed[bit // 8] ^= 1 << bit % 8
        document["signatures"][0]["sig"] = base64.b64encode(changed).decode()
        with pytest.raises(Exception, match="not of this statement"):
            unseal(canonical(document) + b"\n").verify(keys)
    text = base64.b64encode(sig).decode()
    spare = text[:-3] + chr(ord(text[-3]) + 1) + "=="
    assert base64.b64decode(spare) == sig
    document["signatures"][0]["sig"] = spare
    path = blessed.with_bytes(canonical(document) + b"\n")
    assert blessed.codes(blessing=path) == {"not_canonical"}


def test_private_key_is_private(tmp_path: Path):
    """0600 whatever the umask; never overwritten; a passphrase is needed where one was set; a key
    that others can read, or one of another kind, is refused; no message holds key bytes."""
    old = os.umask(0)
    try:
        key = new_key(tmp_path / "keys", "ci", b"secret words")
    finally:
        os.umask(old)
    assert stat.S_IMODE(key.private.stat().st_mode) == 0o600
    assert key_id(load_private(key.private, b"secret words").public_key()) == key.keyid
    body = key.private.read_text().splitlines()[1]
    for attempt in (None, b"wrong"):
        with pytest.raises(InputError) as caught:
            load_private(key.private, attempt)
        assert body not in str(caught.value)
        assert "wrong" not in str(caught.value).replace("wrong passphrase", "")
    with pytest.raises(InputError, match="never overwritten"):
        new_key(tmp_path / "keys", "ci")
    key.private.chmod(0o640)
    with pytest.raises(InputError, match="chmod 600"):
        load_private(key.private, b"secret words")
    for name in ("../up", "a/b", "", ".hidden", "x" * 65, "a\nb"):
        with pytest.raises(InputError, match="cannot name a key"):
            new_key(tmp_path / "keys", name)


def test_trusted_folder_holds_public_ed25519_keys_only(tmp_path: Path):
    """No key, a private key, an RSA key, a link out of the folder: nobody is trusted."""
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    folder = tmp_path / "trusted"
    folder.mkdir()
    with pytest.raises(InputError, match="nobody is trusted"):
        load_trusted(folder)
    key = new_key(tmp_path / "keys")
    (folder / "a.pub").write_bytes(key.private.read_bytes())
    with pytest.raises(InputError, match="private key among"):
        load_trusted(folder)
    public = rsa.generate_private_key(65537, 2048).public_key()
    (folder / "a.pub").write_bytes(
        public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    with pytest.raises(InputError, match="not an Ed25519"):
        load_trusted(folder)
    (folder / "a.pub").unlink()
    (folder / "a.pub").symlink_to(key.public)
    with pytest.raises(InputError, match="leads out"):
        load_trusted(folder)


def test_facts_file_round_trip_and_strictness(tmp_path: Path, blessed: Blessed):
    """Paths and digests of weights are no engine facts; duplicate keys and extra fields are
    refused."""
    found = read_facts(blessed.request.engine)  # type: ignore[arg-type]
    assert found.facts == pinned(fixtures.facts())
    assert "model" not in found.facts
    path = tmp_path / "facts.json"
    text = blessed.request.engine.read_text()  # type: ignore[union-attr]
    for changed in (text.replace('{"facts"', '{"x":1,"facts"', 1), text + "x",
                    text.replace('"source":', '"source":"a","source":', 1)):  # fmt: skip
        path.write_text(changed)
        with pytest.raises(InputError):
            read_facts(path)


def test_lifetimes():
    """Minutes, hours and days within a year; nothing else."""
    assert duration("7d") == timedelta(days=7)
    assert duration("90m") == timedelta(minutes=90)
    for text in ("", "0d", "-1d", "7", "1y", "367d", "1e3d", "9999999999d"):
        with pytest.raises(InputError):
            duration(text)
