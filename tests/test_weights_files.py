"""The checkpoint reader believes no header: every lie ends in an InputError naming file and tensor.

Together the tests say: what is read equals what the reference implementation wrote, and no
damaged, truncated or hostile file gives data, a traceback, or runs code.
"""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from weights_zoo import cast, llama_weights, write, write_ranks, write_sharded

from kernel_contracts.errors import InputError
from mismatch_audit.weights.checkpoint import open_checkpoint
from mismatch_audit.weights.formats import FORMATS, PACKED, torch_dtype
from mismatch_audit.weights.safetensors_file import SafetensorsFile, encode_header, parse_header


def _file(path: Path, header: object, data: bytes = b"\0" * 16, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def _entry(begin: int = 0, end: int = 16, shape=(4,), dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_reads_what_the_reference_writer_wrote(tmp_path: Path) -> None:
    """Every dtype that both know, odd sizes, scalars and empty tensors, bit for bit."""
    tensors = {}
    for code in FORMATS:
        dtype = torch_dtype(code)
        bits = torch.randint(0, 255, (3, 8), dtype=torch.uint8)
        if dtype == torch.bool:
            bits = bits & 1
        tensors[f"t.{code}"] = bits.view(dtype) if dtype != torch.bool else bits.bool()
    tensors["scalar"] = torch.tensor(3.5)
    tensors["empty"] = torch.empty(0, 4)
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert set(file.infos) == set(tensors)
    for name, value in tensors.items():
        own = file.tensor(name)
        assert own.shape == value.shape
        assert own.dtype == value.dtype
        assert own.contiguous().view(-1).view(torch.uint8).tolist() == (
            value.contiguous().view(-1).view(torch.uint8).tolist()
        )
    file.release()
    assert torch.equal(file.tensor("scalar"), tensors["scalar"])  # still readable afterwards


def test_our_header_is_read_by_the_reference_reader(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    head, places = encode_header([("a", "F32", (2, 3)), ("b", "BF16", (5,))], {"format": "pt"})
    body = torch.arange(6.0).numpy().tobytes() + b"\x80\x3f" * 5
    (tmp_path / "x.safetensors").write_bytes(head + body)
    loaded = load_file(tmp_path / "x.safetensors")
    assert torch.equal(loaded["a"], torch.arange(6.0).view(2, 3))
    assert torch.equal(loaded["b"], torch.ones(5, dtype=torch.bfloat16))
    assert places["a"][0] % 64 == 0


LIES = {
    "overlap": ({"a": _entry(0, 16), "b": _entry(8, 24)}, 24, "'b' overlap"),
    "identical ranges": ({"a": _entry(0, 16), "b": _entry(0, 16)}, 16, "overlap"),
    "hole": ({"a": _entry(0, 16), "b": _entry(20, 36)}, 36, "hole of 4 bytes before tensor 'b'"),
    "beyond the end": ({"a": _entry(0, 16), "b": _entry(16, 32)}, 20, "'b': its data ends"),
    "trailing bytes": ({"a": _entry(0, 16)}, 20, "4 bytes after the last tensor"),
    "size against shape": ({"a": _entry(0, 16, (5,))}, 16, "'a': shape [5] of F32 needs 20"),
    "backwards": ({"a": _entry(16, 0)}, 16, "'a': data_offsets end before"),
    "negative": ({"a": _entry(-16, 0)}, 16, "'a': data_offsets"),
    "huge shape": ({"a": _entry(0, 16, (2**62, 2**62))}, 16, "'a': shape"),
    "negative shape": ({"a": _entry(0, 16, (-4,))}, 16, "'a': shape"),
    "boolean shape": ({"a": _entry(0, 4, (True,))}, 4, "'a': shape"),
    "float offsets": ({"a": _entry(0.0, 16)}, 16, "'a': data_offsets"),
    "unknown dtype": ({"a": _entry(dtype="F31")}, 16, "'a': dtype 'F31' is unknown"),
    "packed dtype": ({"a": _entry(dtype="F4")}, 16, "'a': dtype 'F4' packs"),
    "dtype not text": ({"a": _entry(dtype=["F32"])}, 16, "'a': dtype"),
    "extra key": ({"a": {**_entry(), "url": "x"}}, 16, "'a': unknown header keys ['url']"),
    "missing key": ({"a": {"dtype": "F32", "shape": [4]}}, 16, "'a': data_offsets"),
    "entry is a list": ({"a": []}, 0, "'a': its header entry is not a mapping"),
    "empty name": ({"": _entry()}, 16, "the name is empty"),
    "control characters": ({"a\x1b[31m": _entry()}, 16, "not printable"),
    "metadata not text": ({"__metadata__": {"a": 1}, "a": _entry()}, 16, "__metadata__"),
    "a list": ([1], 0, "does not begin with '{'"),
}


@pytest.mark.parametrize("lie", LIES)
def test_every_lie_of_a_header_is_an_input_error_that_names_file_and_tensor(
    tmp_path: Path, lie: str
) -> None:
    header, data_bytes, wanted = LIES[lie]
    path = _file(tmp_path / "x.safetensors", header, b"\0" * data_bytes)
    with pytest.raises(InputError) as error:
        SafetensorsFile(path)
    assert wanted in str(error.value)
    assert "x.safetensors" in str(error.value)
    assert error.value.exit_code == 2


RAW = {
    "not json": b"{'a': 1}",
    "duplicate names": b'{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"a":{}}',
    "nan": b'{"a": NaN}',
    "huge number": b'{"a": ' + b"9" * 6000 + b"}",
    "deep nesting": b'{"a":' + b"[" * 200_000,
    "not utf-8": b'{"\xff": 1}',
}


@pytest.mark.parametrize("case", RAW)
def test_hostile_json_is_an_input_error(tmp_path: Path, case: str) -> None:
    with pytest.raises(InputError):
        SafetensorsFile(_file(tmp_path / "x.safetensors", RAW[case], b""))


def test_truncation_at_any_byte_is_an_input_error(tmp_path: Path) -> None:
    """Cutting a file anywhere, header or data, never gives tensors."""
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(6.0), "b": torch.ones(3)}, path)
    whole = path.read_bytes()
    for size in range(0, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError):
            SafetensorsFile(path)
    path.write_bytes(whole)
    assert set(SafetensorsFile(path).infos) == {"a", "b"}


def test_a_header_length_beyond_the_file_is_refused_before_reading(tmp_path: Path) -> None:
    for length in (2**63, 100_000_001, 4096):
        with pytest.raises(InputError, match="header claims"):
            SafetensorsFile(_file(tmp_path / "x.safetensors", {"a": _entry()}, length=length))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_headers_never_raise_anything_else(data: st.DataObject) -> None:
    """Any mutation is either refused, or still describes disjoint ranges that fill the data."""
    good = json.dumps({"a": _entry(0, 16), "b": _entry(16, 24, (3, 2), "F32")}).encode()
    raw = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        infos, _ = parse_header(bytes(raw), 40, "x")
    except InputError:
        return
    covered = sorted((info.begin, info.end) for info in infos.values())
    assert sum(end - begin for begin, end in covered) == 40


def test_index_and_shards(tmp_path: Path) -> None:
    """A sharded checkpoint opens like one file; every disagreement with its index is an error."""
    weights = cast(llama_weights())
    folder = write_sharded(tmp_path / "ok", weights)
    assert set(open_checkpoint(folder).ranks[0]) == set(weights)
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    name, other = "lm_head.weight", "model-00002-of-00002.safetensors"
    for mapping, wanted in (
        ({**document["weight_map"], "ghost.weight": other}, "ghost.weight"),
        ({k: v for k, v in document["weight_map"].items() if k != name}, "lm_head.weight"),
        ({**document["weight_map"], name: "../../secret"}, "is not a file name"),
        ({**document["weight_map"], name: "gone.safetensors"}, "gone.safetensors"),
        ({**document["weight_map"], name: 3}, "is not a file name"),
        ({}, "no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": mapping}))
        with pytest.raises(InputError, match=wanted):
            open_checkpoint(folder)


def test_two_files_with_one_name_are_ambiguous(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a": torch.ones(2)})
    save_file({"a": torch.zeros(2)}, folder / "other.safetensors")
    with pytest.raises(InputError, match="in two files"):
        open_checkpoint(folder)


def test_a_missing_rank_is_noticed(tmp_path: Path) -> None:
    folder = write_ranks(tmp_path, [{"a": torch.ones(2)}] * 3)
    assert len(open_checkpoint(folder).ranks) == 3
    (folder / "model-rank-1-part-0.safetensors").unlink()
    with pytest.raises(InputError, match="rank's file is missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: None,
        lambda p: p.mkdir(),
        lambda p: (p.mkdir(), (p / "a.gguf").write_bytes(b"x")),
        lambda p: (p.mkdir(), (p / "optimizer.pt").write_bytes(b"x")),
        lambda p: p.with_suffix(".txt").write_text("x"),
    ],
)
def test_nothing_to_open(tmp_path: Path, make) -> None:
    path = tmp_path / "model"
    make(path)
    with pytest.raises(InputError):
        open_checkpoint(path)


class _Evil:
    """Unpickled naively, this writes a file."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.touch, (Path(self.target),))


def test_pickled_code_never_runs(tmp_path: Path) -> None:
    """A .bin with a payload is refused, in torch's format and as a bare pickle."""
    target = tmp_path / "ran"
    torch.save({"a": torch.ones(2), "b": _Evil(str(target))}, tmp_path / "zip.bin")
    (tmp_path / "bare.bin").write_bytes(pickle.dumps({"a": _Evil(str(target))}, protocol=2))
    for name in ("zip.bin", "bare.bin"):
        with pytest.raises(InputError, match=name):
            open_checkpoint(tmp_path / name)
    assert not target.exists()
    assert isinstance(_Evil(str(target)).__reduce__(), tuple)


def test_state_dicts_of_torch(tmp_path: Path) -> None:
    """Plain and wrapped state dicts read; steps and other values beside them are left out."""
    weights = {"a": torch.randn(3, 4), "tied": torch.randn(2)}
    weights["alias"] = weights["tied"]
    for document in (weights, {"state_dict": weights, "step": 3}, {"model": weights}):
        torch.save(document, tmp_path / "m.bin")
        names = open_checkpoint(tmp_path / "m.bin").ranks[0]
        assert set(names) == set(weights)
        assert torch.equal(names["a"].tensor(), weights["a"])
    torch.save([1, 2], tmp_path / "m.bin")
    with pytest.raises(InputError, match="not a state dict"):
        open_checkpoint(tmp_path / "m.bin")
    torch.save({"step": 1}, tmp_path / "m.bin")
    with pytest.raises(InputError, match="no tensors"):
        open_checkpoint(tmp_path / "m.bin")


def test_a_truncated_torch_file_is_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    torch.save({"a": torch.randn(200, 40)}, path)
    whole = path.read_bytes()
    for size in (0, 3, 100, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match=r"m\.bin"):
            open_checkpoint(path)


def test_a_broken_config_is_an_input_error(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a": torch.ones(2)})
    for text in ("{", "[]", '{"a": 1, "a": 2}'):
        (folder / "config.json").write_text(text)
        with pytest.raises(InputError, match=r"config\.json"):
            open_checkpoint(folder)


def test_packed_formats_are_known_but_refused() -> None:
    assert not PACKED & set(FORMATS)
