"""Recorded rollouts come from other machines: whatever a file holds, nothing in it is run, nothing
in it takes the process down, the message says where the damage is, and the other files are read."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import sys
import time
import tracemalloc
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernel_contracts.errors import InputError
from mismatch_audit.rollouts.formats import ReadOptions, drain, open_sources
from mismatch_audit.rollouts.formats.base import Problem
from mismatch_audit.rollouts.pickle_scan import scan
from mismatch_audit.rollouts.safe_pickle import Inert, as_array, load_pickle, loads
from mismatch_audit.rollouts.safe_torch import load_torch

GOOD = {
    "token_ids": [5, 6, 7, 8], "loss_mask": [False, False, True, True], "step": 1, "rank": 0,
    "inference_logprobs": [0.0, 0.0, -0.5, -0.25], "trainer_logprobs": [-2.0, -1.0, -0.5, -0.25],
}  # fmt: skip


def line(**changes: Any) -> bytes:
    return json.dumps({**GOOD, **changes}).encode() + b"\n"


def read(path: Path, **options: Any) -> tuple[int, list[str]]:
    """Sequences read and the messages of what could not be."""
    sources, problems = open_sources([path], options=ReadOptions(**options))
    n = sum(batch.n_sequences for source in sources for batch in drain(source, problems.append))
    return n, [str(problem.error) for problem in problems]


# -- lines ------------------------------------------------------------------------------------

DAMAGED: dict[str, tuple[bytes, str]] = {
    "cut off": (line(sample_id="b")[:-40], ":2: the last line is cut off"),
    "not JSON": (b'{"token_ids": [1, 2,, 3]}\n', ":2: not JSON"),
    "text as a token": (line(token_ids=[5, "6", 7, 8]), "token_ids[1]`"),
    "a fraction as a token": (line(token_ids=[5, 6.5, 7, 8]), "Expected `int`, got `float`"),
    "a huge token": (line(token_ids=[5, 2**40, 7, 8]), "token_ids[1] 1099511627776 does not fit"),
    "a negative token": (line(token_ids=[5, -6, 7, 8]), "token_ids[1] is -6, below 0"),
    "an overlong number": (line(token_ids=[5, 999, 7, 8]).replace(b"999", b"9" * 5000), ":2:"),
    "short log-probs": (line(inference_logprobs=[0.0, -0.5]), "2 values for 4 tokens"),
    "a short mask": (line(loss_mask=[True]), "values for 4 tokens"),
    "nested lists": (line(token_ids=[[5, 6], [7, 8]]), "Expected `int`, got `array`"),
    "no tokens": (b'{"loss_mask": [], "inference_logprobs": [], "trainer_logprobs": []}\n',
                  "missing required field `token_ids`"),
    "a list instead": (b"[1, 2, 3]\n", "Expected `object`, got `array`"),
    "invalid UTF-8": (line(env_name="XX").replace(b"XX", b"\xff\xfe"), ":2:"),
    "deep nesting": (b'{"token_ids": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", ":2:"),
    "deep nesting in a field that is not read": (
        line(x="XX").replace(b'"XX"', b"[" * 200_000 + b"]" * 200_000), "nested too deeply"),
    "the same id twice": (line(sample_id="a"), "sample id 'a' appears twice"),
    "another schema": (line(schema_version=99), "schema_version 99 is not known"),
    "NUL bytes": (b"\0" * 4096 + b"\n", ":2:"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_line_is_named_and_the_rest_is_read(name: str, tmp_path: Path) -> None:
    """The rows before the damage stand, the message has file and line, the next file is read."""
    bad, says = DAMAGED[name]
    (tmp_path / "rank_0.jsonl").write_bytes(line(sample_id="a") + bad)
    (tmp_path / "rank_1.jsonl").write_bytes(line(sample_id="c"))
    n, problems = read(tmp_path)
    assert n == 2
    assert len(problems) == 1
    assert "rank_0.jsonl:2" in problems[0]
    assert says in problems[0]


def test_an_endless_line_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    """A sparse file of 10 GiB without a line end: refused after the limit, not read into memory."""
    path = tmp_path / "rank_0.jsonl"
    with path.open("wb") as file:
        file.write(line(sample_id="a"))
        file.truncate(10 << 30)
    tracemalloc.start()
    n, problems = read(path, max_line=1 << 20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert n == 1
    assert "rank_0.jsonl:2: the line is longer than 1024 KiB" in problems[0]
    assert peak < 64 << 20


def test_a_decompression_bomb_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    """256 MiB of zeros in 1 MiB of gzip: unpacked no further than the line limit."""
    path = tmp_path / "rank_0.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(line(sample_id="a"))
        for _ in range(16):
            file.write(bytes(16 << 20))
    tracemalloc.start()
    n, problems = read(path, max_line=1 << 20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (n, len(problems)) == (1, 1)
    assert peak < 64 << 20


def zstd(data: bytes) -> bytes:
    import pyarrow as pa

    return bytes(pa.compress(data, codec="zstd", asbytes=True))


@pytest.mark.parametrize(("end", "pack"), [(".gz", gzip.compress), (".zst", zstd)])
def test_compressed_lines_are_read_and_a_cut_is_told(
    end: str, pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    data = pack(b"".join(line(sample_id=str(i), env_name=os.urandom(50).hex()) for i in range(200)))
    path = tmp_path / f"rank_0.jsonl{end}"
    path.write_bytes(data)
    assert read(path) == (200, [])
    path.write_bytes(data[: len(data) // 2])
    n, problems = read(path)
    assert n < 200
    assert problems
    assert f"rank_0.jsonl{end}" in problems[0]


def test_several_schemas_in_one_folder_do_not_mix(tmp_path: Path) -> None:
    """A file of another kind beside a dump is neither read as one nor an end to reading."""
    (tmp_path / "rank_0.jsonl").write_bytes(line())
    (tmp_path / "metrics.jsonl").write_bytes(b'{"loss": 0.5}\n')
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04 cut off")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1" + bytes(100))
    n, problems = read(tmp_path)
    assert n == 1
    assert sorted(Path(p.split(":")[0]).name for p in problems) == ["broken.parquet", "model.pt"]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff" * 100, b"{}", b"PAR1", b"[]"])
def test_a_file_of_nothing_is_a_problem_and_no_empty_pass(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    n, problems = read(path)
    assert n == 0
    assert len(problems) == 1
    assert "data.jsonl" in problems[0]


def test_a_missing_path_and_an_unknown_format_say_so(tmp_path: Path) -> None:
    assert "no such file" in read(tmp_path / "gone")[1][0]
    assert "File name too long" in read(Path("x" * 5000))[1][0]
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "loop" in read(tmp_path / "loop")[1][0]
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "neither a file nor a folder" in read(tmp_path / "pipe.jsonl")[1][0]
    with pytest.raises(InputError, match="did you mean 'prime-rl'"):
        open_sources([tmp_path], "prime_rl")


# -- pickles ----------------------------------------------------------------------------------


class Calls:
    """An object whose pickle calls a function with arguments."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def bombs(marker: Path) -> dict[str, bytes]:
    """Pickles that write ``marker`` when Python loads them."""
    shell, code = f"touch {marker}", f"open({str(marker)!r}, 'w').close()"
    import subprocess

    made: dict[str, Any] = {
        "os.system": Calls(os.system, shell),
        "subprocess": Calls(subprocess.check_output, ["touch", str(marker)]),
        "builtins.exec": Calls(exec, code),
        "builtins.eval": Calls(eval, f"open({str(marker)!r}, 'w')"),
        "in a list": [1, 2, {"samples": [Calls(os.system, shell)]}],
        "as a key": {("k", Calls(os.system, shell)): 1},
        "as an argument": Calls(Inert, Calls(os.system, shell)),
    }
    found = {
        f"{name}, protocol {protocol}": pickle.dumps(value, protocol)
        for name, value in made.items()
        for protocol in (0, 2, 4, 5)
    }
    text = shell.encode()
    push = b"X" + struct.pack("<I", len(text)) + text
    found["INST"] = b"(" + push + b"ios\nsystem\n."
    found["OBJ"] = b"(cos\nsystem\n" + push + b"o."
    found["dotted name"] = b"\x80\x04\x8c\x08builtins\x8c\x0f__import__.call\x93."
    getattr_ = b"\x80\x04cbuiltins\ngetattr\n(cos\n_wrap_close\nX\x06\x00\x00\x00systemtR."
    found["getattr"] = getattr_
    found["copyreg"] = b"\x80\x02ccopyreg\n_reconstructor\n(cos\nsystem\ncbuiltins\nobject\nNtR."
    return found


NAMES = list(bombs(Path("x")))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_in_a_pickle_is_run(name: str, tmp_path: Path) -> None:
    """Each of these writes a file when Python loads it; here it is refused, with the reason."""
    marker = tmp_path / "it-ran"
    data = bombs(marker)[name]
    with pytest.raises(InputError) as failed:
        loads(data)
    assert not marker.exists()
    assert "never run" in str(failed.value) or "not a readable pickle" in str(failed.value)


def test_the_bombs_are_live(tmp_path: Path) -> None:
    """The control: Python's own unpickler does run them."""
    marker = tmp_path / "it-ran"
    pickle.loads(bombs(marker)["os.system, protocol 4"])
    assert marker.exists()


def test_an_attack_in_a_dump_of_each_kind_is_a_problem_of_that_file(tmp_path: Path) -> None:
    """Through the readers: a pickle named as a dump, a torch file, a torch file in a pickle."""
    marker = tmp_path / "it-ran"
    bomb = Calls(os.system, f"touch {marker}")
    (tmp_path / "global_step_1_training_input.pkl").write_bytes(pickle.dumps({"sequences": bomb}))
    (tmp_path / "rollout_data").mkdir()
    torch.save({"rollout_id": 1, "samples": [bomb]}, tmp_path / "rollout_data/1.pt")
    inner = io.BytesIO()
    torch.save(bomb, inner)
    state = (inner.getvalue(), {}, {})
    kind = type(
        "DataProto", (), {"__getstate__": lambda self: state, "__module__": "verl.protocol"}
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("verl", "verl.protocol"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["verl.protocol"].DataProto = kind  # type: ignore[attr-defined]
        (tmp_path / "batch.pkl").write_bytes(pickle.dumps(kind()))
    n, problems = read(tmp_path)
    assert n == 0
    assert len(problems) == 3
    assert all("system" in problem for problem in problems)
    assert not marker.exists()


def test_a_constructor_of_ours_cannot_be_changed_by_a_pickle(tmp_path: Path) -> None:
    """BUILD sets state on any object, so on what a name stands for too; a change would outlive the
    file. It is refused and the next file reads as before."""
    for name in ("ccollections\nOrderedDict\n", "ctorch\nFloatStorage\n", "cnumpy\ndtype\n"):
        with pytest.raises(InputError):
            loads(b"\x80\x02" + name.encode() + b"}X\x05\x00\x00\x00_makeNsb.")
    value = loads(pickle.dumps({"a": np.arange(3)}))
    assert list(as_array(value["a"])) == [0, 1, 2]


def test_an_unknown_class_is_inert(tmp_path: Path) -> None:
    """A trainer's class that is not installed keeps its content and gets no behaviour."""
    import fractions

    value = loads(pickle.dumps(fractions.Fraction(1, 3)))
    assert isinstance(value, Inert)
    assert value.path == "fractions.Fraction"


SIZES: dict[str, bytes] = {
    "bytes of an exbibyte": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"x.",
    "text of 4 GiB": b"\x80\x04X" + struct.pack("<I", (1 << 32) - 1) + b"x.",
    "a bytearray of a pebibyte": b"\x80\x05\x96" + struct.pack("<Q", 1 << 50) + b"x.",
    "a number of 2 GiB": b"\x80\x02\x8b" + struct.pack("<i", (1 << 31) - 1) + b"x.",
    "a memo of 32 GiB": b"\x80\x02Nr" + struct.pack("<I", (1 << 32) - 1) + b".",
    "a memo in text": b"Np4294967295\n.",
    "a frame of an exbibyte": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N",
    "bytearray(10**12)": b"\x80\x04cbuiltins\nbytearray\n\x8a\x06\x00\x10\xa5\xd4\xe8\x00\x85R.",
    "an array of a tebibyte": pickle.dumps(np.zeros(3)).replace(
        b"K\x03\x85", b"J\xff\xff\xff\x7f\x85"
    ),
    "endless text": b"V" + b"x" * 100_000,
    "no stop": b"\x80\x04N",
    "no opcode": b"\x80\x04\xfe.",
    "empty": b"",
}


@pytest.mark.parametrize("name", SIZES)
def test_declared_sizes_do_not_allocate(name: str, tmp_path: Path) -> None:
    """A few bytes that promise a lot are refused before memory is asked for."""
    tracemalloc.start()
    started = time.monotonic()
    try:
        with pytest.raises((InputError, ValueError)):
            as_array(loads(SIZES[name]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20
    assert time.monotonic() - started < 5


def test_deep_nesting_in_a_pickle_is_no_stack_overflow() -> None:
    assert isinstance(loads(b"\x80\x02" + b"]" * 1 + b"(" * 0 + b"."), list)
    deep = b"\x80\x02" + b"(" * 300_000 + b"t" * 300_000 + b"."
    value = loads(deep)
    assert isinstance(value, tuple)


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_byte_is_read_or_refused_and_never_a_traceback(seed: int, tmp_path: Path) -> None:
    """Random damage to real dumps of both kinds: every outcome is a value or an InputError."""
    random = np.random.default_rng(seed)
    buffer = io.BytesIO()
    content = {"rollout_id": 1, "samples": [{"tokens": torch.arange(9), "x": [0.5] * 5, "s": "a"}]}
    torch.save(content, buffer, _use_new_zipfile_serialization=bool(seed % 2))
    for data, name in ((buffer.getvalue(), "x.pt"), (pickle.dumps(content), "x.pkl")):
        raw = bytearray(data)
        for at in random.integers(0, len(raw), 3):
            raw[at] = int(random.integers(256))
        if seed % 5 == 0:
            raw = raw[: int(random.integers(len(raw)))]
        path = tmp_path / name
        path.write_bytes(bytes(raw))
        try:
            value = load_torch(path) if name.endswith(".pt") else load_pickle(path)
            as_array(value["samples"][0]["tokens"])
        except (InputError, ValueError, TypeError, KeyError, IndexError):
            pass


# -- torch files ------------------------------------------------------------------------------


def _patched(tmp_path: Path, change: Callable[[str, bytes], bytes], compress: bool = False) -> Path:
    """A torch file with one entry changed."""
    torch.save({"x": torch.arange(6, dtype=torch.float32)}, tmp_path / "a.pt")
    path = tmp_path / "b.pt"
    mode = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(path, "w", mode) as new:
        for info in old.infolist():
            new.writestr(info.filename, change(info.filename, old.read(info)))
    return path


def test_a_tensor_cannot_reach_beyond_its_storage(tmp_path: Path) -> None:
    """The shape in the pickle is the file's word; as_strided would read foreign memory by it."""

    def longer(name: str, data: bytes) -> bytes:
        return data.replace(b"K\x06\x85", b"K\x66\x85") if name.endswith("data.pkl") else data

    value = load_torch(_patched(tmp_path, longer))
    with pytest.raises(ValueError, match="reaches beyond its 6 elements"):
        as_array(value["x"])


def test_a_storage_shorter_than_declared_is_refused(tmp_path: Path) -> None:
    def shorter(name: str, data: bytes) -> bytes:
        return data[:8] if name.endswith("data/0") else data

    with pytest.raises(InputError, match="declares 6 elements in 8 bytes"):
        load_torch(_patched(tmp_path, shorter))


def test_a_compressed_torch_file_is_refused(tmp_path: Path) -> None:
    """torch stores; an entry that unpacks to terabytes would be a bomb."""
    with pytest.raises(InputError, match="compressed"):
        load_torch(_patched(tmp_path, lambda _, data: data, compress=True))


def test_the_scan_accepts_what_python_writes() -> None:
    """No false alarm: each protocol, long texts, big numbers, many memo slots, text opcodes."""
    value = {"t": "x" * 70_000, "b": bytes(70_000), "n": 10**400, "f": [0.5] * 3000, "s": {1, 2},
             "m": [[str(i)] for i in range(1000)], "z": None, "y": True}  # fmt: skip
    for protocol in range(6):
        data = pickle.dumps(value, protocol)
        assert scan(data) == len(data)
        assert loads(data) == value


def test_problems_are_typed() -> None:
    """What a reader raises is the error a command prints: one line of what, where and a fix."""
    problem = Problem("x", InputError("what", where="file:3", fix="do this"))
    assert str(problem.error) == "file:3: what\n  fix: do this"
