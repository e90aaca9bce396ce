"""Prompts come in as written, or not at all, and both programs get the same token ids.

The argument: (1) the same records in JSONL, CSV and Parquet give the same prompts; (2) every kind
of mistake is named with its file and line, all of a file at once, and no file whatever raises
anything but InputError; (3) a limit stays balanced over domains and only ever adds prompts; (4) the
chat template and its BOS are applied once; (5) the sample file keeps its promises.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernel_contracts.errors import InputError
from mismatch_audit.prompts import (
    EncodedPrompt,
    Prompt,
    encode_prompts,
    load_prompts,
    prompts_digest,
    spread,
)

SAMPLES = Path(__file__).parents[1] / "samples" / "prompts.jsonl"
DOMAINS = (
    "arithmetic",
    "code",
    "factual",
    "instruction",
    "creative",
    "multilingual",
    "long_context",
    "dialogue",
)


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    """The records in the format that the suffix names."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), "utf-8")
    elif path.suffix == ".parquet":
        pd.DataFrame(records).to_parquet(path)
    else:
        names = list(dict.fromkeys(name for record in records for name in record))
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            for record in records:
                cells = {
                    n: json.dumps(v) if isinstance(v, list | bool) else v for n, v in record.items()
                }
                writer.writerow(cells)
    return path


def placeless(prompts: list[Prompt]) -> list[Prompt]:
    return [dataclasses.replace(prompt, where="", line=0) for prompt in prompts]


TEXT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40
).filter(lambda text: text.strip() != "")
CONTENT = st.one_of(
    st.fixed_dictionaries({"prompt": TEXT}),
    st.fixed_dictionaries({"prompt": TEXT, "template": st.just("none")}),
    st.fixed_dictionaries({"token_ids": st.lists(st.integers(0, 49151), min_size=1, max_size=5)}),
    st.fixed_dictionaries(
        {
            "messages": st.lists(
                st.fixed_dictionaries({"role": st.just("user"), "content": TEXT}),
                min_size=1,
                max_size=3,
            )
        }
    ),
)
METADATA = st.fixed_dictionaries(
    {},
    optional={
        # A CSV file cannot tell text that looks like a number from a number: begin with a letter.
        "domain": st.sampled_from(["code", "maths", 'Überraschung, "wörtlich"\nzweizeilig']),
        "level": st.integers(-(10**15), 10**15),
        "share": st.floats(-1e6, 1e6).map(lambda x: round(x, 3) + 0.0625),
        "hard": st.booleans(),
    },
)
RECORDS = st.lists(
    st.builds(lambda content, metadata: content | metadata, CONTENT, METADATA),
    min_size=1,
    max_size=6,
    unique_by=lambda record: json.dumps(
        {k: record[k] for k in ("prompt", "messages", "token_ids", "template") if k in record}
    ),
)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(records=RECORDS, with_ids=st.booleans())
def test_every_format_gives_the_same_prompts(
    records: list[dict[str, Any]], with_ids: bool, tmp_path: Path
) -> None:
    if with_ids:
        records = [{"id": f"id {i}", **record} for i, record in enumerate(records)]
    jsonl, table, parquet = (
        load_prompts(write(tmp_path / f"prompts{suffix}", records))
        for suffix in (".jsonl", ".csv", ".parquet")
    )
    assert placeless(jsonl) == placeless(table) == placeless(parquet)
    assert [prompt.line for prompt in jsonl] == list(range(1, len(records) + 1))
    for record, prompt in zip(records, jsonl, strict=True):
        assert prompt.prompt == record.get("prompt")
        assert prompt.messages == record.get("messages")
        assert prompt.token_ids == record.get("token_ids")
        assert prompt.metadata == {
            k: record[k] for k in ("domain", "level", "share", "hard") if k in record
        }
        assert prompt.id == record.get("id", prompt.id)
    again = load_prompts(write(tmp_path / "again.jsonl", records[::-1]))
    assert [p.id for p in again] == [p.id for p in jsonl][::-1], "ids hang on content, not place"


def test_csv_lines_count_records_over_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_bytes(b'\xef\xbb\xbfid,prompt,zip\r\na,"one\r\ntwo",007\r\n\r\nb,three,100\r\n')
    first, second = load_prompts(path)
    assert (first.line, second.line) == (2, 5)
    assert first.prompt == "one\r\ntwo"
    assert (first.metadata, second.metadata) == ({"zip": "007"}, {"zip": "100"})


def test_a_prompt_longer_than_a_csv_reader_likes(tmp_path: Path) -> None:
    """The csv module stops at 128 KB a cell unless told otherwise, and is put back afterwards."""
    limit = csv.field_size_limit()
    (prompt,) = load_prompts(write(tmp_path / "p.csv", [{"prompt": "word " * 60_000}]))
    assert len(prompt.prompt or "") == 300_000
    assert csv.field_size_limit() == limit


GOOD = '{"id": "good", "prompt": "Fine."}'
BAD_LINES: list[tuple[str, str]] = [
    ('{"prompt": "x"', "malformed JSON at column"),
    ("not json", "malformed JSON at column 1"),
    ('["prompt"]', "expected a JSON object, found a list"),
    ('"prompt"', "expected a JSON object, found text"),
    ('{"prompt": "x", "prompt": "y"}', "key 'prompt' is given twice"),
    ('{"prompt": "x", "share": NaN}', "NaN is not JSON"),
    ('{"id": "x"}', "none of prompt, messages and token_ids is given"),
    ('{"prompt": null}', "none of prompt, messages and token_ids is given"),
    ('{"prompt": "x", "messages": []}', "prompt and messages are both given"),
    ('{"prompt": "x", "token_ids": [1]}', "prompt and token_ids are both given"),
    ('{"prompt": "x", "messages": [], "token_ids": []}', "all three are given"),
    ('{"prompt": ""}', "prompt is empty"),
    ('{"prompt": " \\n\\t"}', "prompt is empty"),
    ('{"prompt": 7}', "prompt must be text, found an integer"),
    ('{"prompt": "half \\ud83d pair"}', "half of a surrogate pair"),
    ('{"messages": "hi"}', "messages must be a list, found text"),
    ('{"messages": []}', "messages is empty"),
    ('{"messages": ["hi"]}', "must hold objects, but number 1 is text"),
    ('{"messages": [{"role": "robot", "content": "x"}]}', "needs a role of system, developer"),
    ('{"messages": [{"content": "x"}]}', "found None"),
    ('{"messages": [{"role": "user"}]}', "number 1: content must be text, found null"),
    ('{"messages": [{"role": "user", "content": [{}]}]}', "content must be text, found a list"),
    ('{"messages": [{"role": "user", "content": " "}]}', "number 1: content is empty"),
    ('{"messages": [{"role": "user", "content": "x", "img": 1}]}', "unknown key 'img'"),
    ('{"messages": [{"role": "assistant", "content": "x"}]}', "nothing is left to generate"),
    ('{"token_ids": "1 2"}', "token_ids must be a list, found text"),
    ('{"token_ids": []}', "token_ids is empty"),
    ('{"token_ids": [1, 2.0]}', "item 1 is a number: 2.0"),
    ('{"token_ids": [1, "2"]}', "item 1 is text: '2'"),
    ('{"token_ids": [true]}', "item 0 is a boolean: True"),
    ('{"token_ids": [1, -2]}', "must not be negative, but item 1 is -2"),
    ('{"prompt": "x", "template": "jinja"}', "template must be chat or none, found 'jinja'"),
    (
        '{"messages": [{"role": "user", "content": "x"}], "template": "none"}',
        "messages need a chat template",
    ),
    ('{"prompt": "x", "tags": ["a"]}', "column 'tags' holds a list"),
    ('{"prompt": "x", "source": {"a": 1}}', "column 'source' holds an object"),
    ('{"prompt": "x", "drift": 1}', "column 'drift' is one of the audit's own"),
    ('{"prompt": "x", "abs_dlp": 1}', "column 'abs_dlp' is one of the audit's own"),
    ('{"prompt": "x", "n": 1e999}', "column 'n': inf is out of range"),
    ('{"prompt": "x", "n": 9223372036854775808}', "is out of range"),
    ('{"prompt": "x", " ": 1}', "a column has no name"),
    ('{"prompt": "x", "id": ""}', "id is empty"),
    ('{"prompt": "x", "id": true}', "id must be text, found a boolean"),
    ('{"prompt": "x", "id": ["a"]}', "id must be text, found a list"),
    ('{"prompt": "x", "id": "a\\nb"}', "printable characters"),
    ('{"prompt": "x", "id": "good"}', "id 'good' is already used at"),
]


@pytest.mark.parametrize(("line", "words"), BAD_LINES)
def test_a_mistake_is_named_with_file_and_line(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n", "utf-8")
    with pytest.raises(InputError) as caught:
        load_prompts(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert words in caught.value.what
    assert caught.value.exit_code == 2

    path.write_text(f"{GOOD}\n\n", "utf-8")
    assert [prompt.id for prompt in load_prompts(path)] == ["good"], "the rest of the file is fine"


def test_parquet_and_csv_rows_are_named(tmp_path: Path) -> None:
    parquet = write(tmp_path / "p.parquet", [{"prompt": "x"}, {"prompt": ""}])
    with pytest.raises(InputError, match=r"p\.parquet row 2: prompt is empty"):
        load_prompts(parquet)
    for cells, words in (
        ("a,b,c", "3 cells under 2 column names"),
        ("a", "1 cells under 2"),
        ("a,[1", "token_ids: malformed JSON"),
        ("a,[1]", "prompt and token_ids are both given"),
    ):
        (tmp_path / "p.csv").write_text(f"prompt,token_ids\nfine,\n{cells}\n")
        with pytest.raises(InputError, match=r"p\.csv:3: ") as caught:
            load_prompts(tmp_path / "p.csv")
        assert words in caught.value.what


def test_all_mistakes_of_a_file_are_shown_up_to_twenty(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join([GOOD, *(line for line, _ in BAD_LINES)]), "utf-8")
    with pytest.raises(InputError) as caught:
        load_prompts(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: {len(BAD_LINES)} mistakes\n")
    assert text.count(f"{path}:") == 1 + 20, "the heading, then twenty places"
    assert f"... and {len(BAD_LINES) - 20} more" in text
    assert "write one JSON object a line" in text, "the remedies come once each"


def test_columns_keep_one_type(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "a", "n": 1}\n{"prompt": "b", "n": 2.5}\n'
        '{"prompt": "c"}\n{"prompt": "d", "n": "many"}\n{"prompt": "e", "n": true}\n'
    )
    with pytest.raises(InputError) as caught:
        load_prompts(path)
    for line, kind in ((4, "text"), (5, "a boolean")):
        assert f"{path}:{line}: column 'n' holds {kind} here and a number at {path}:1" in str(
            caught.value
        )


def test_the_same_prompt_twice_needs_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}])
    with pytest.raises(InputError, match=r"p\.jsonl:3: the same prompt as at .*p\.jsonl:1"):
        load_prompts(path)
    twins = [{"id": 1, "prompt": "a"}, {"id": 2, "prompt": "a"}]
    assert [p.id for p in load_prompts(write(tmp_path / "ok.jsonl", twins))] == ["1", "2"]


def test_files_that_cannot_be_read_at_all(tmp_path: Path) -> None:
    def refused(name: str, content: bytes | None, words: str) -> None:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=words) as caught:
            load_prompts(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)

    refused("gone.jsonl", None, "no such prompt file")
    refused("p.txt", b"x", r"unknown kind of prompt file '\.txt'")
    refused("p.json", b"[]", "one JSON object a line")
    refused("noname", b"", "unknown kind of prompt file 'noname'")
    refused("a.jsonl", b"", "the prompt file is empty")
    refused("b.jsonl", b"\n \r\n", "the prompt file is empty")
    refused("a.csv", b"", "the prompt file is empty")
    refused("b.csv", b"id,prompt\n", "the prompt file is empty")
    refused("c.csv", b'id,prompt\na,"never closed\n', "malformed CSV")
    refused("d.csv", b"prompt,prompt\na,b\n", "column names must be given and differ: 'prompt'")
    refused("c.jsonl", GOOD.encode() + b'\n{"prompt": "caf\xe9"}\n', r"c\.jsonl:2: not UTF-8: byte")
    refused("d.jsonl", GOOD.encode("utf-16"), "not UTF-8")
    refused("a.parquet", b"", "not a readable Parquet file")
    refused("b.parquet", b"PAR1 no, it is not PAR1", "not a readable Parquet file")
    pd.DataFrame({"prompt": []}).to_parquet(tmp_path / "c.parquet")
    refused("c.parquet", None, "the prompt file is empty")
    pd.DataFrame({"prompt": [b"bytes"]}).to_parquet(tmp_path / "d.parquet")
    refused("d.parquet", None, r"d\.parquet row 1: prompt must be text, found bytes")
    times = pd.DataFrame({"prompt": ["x"], "when": pd.to_datetime(["2024-01-01"])})
    times.to_parquet(tmp_path / "e.parquet")
    refused("e.parquet", None, "column 'when' holds a (datetime|Timestamp)")


FIELDS = st.sampled_from(
    ["id", "prompt", "messages", "token_ids", "role", "content", "template", "domain", "tv", ""]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=8,
)


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    content=st.binary(max_size=80)
    | st.lists(JSON.map(json.dumps), max_size=3).map(lambda lines: "\n".join(lines).encode()),
    suffix=st.sampled_from([".jsonl", ".csv", ".parquet"]),
)
def test_no_file_raises_anything_but_input_errors(
    content: bytes, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"fuzz{suffix}"
    path.write_bytes(content)
    refusal, prompts = "", []
    try:
        prompts = load_prompts(path)
    except InputError as error:
        refusal = str(error)
    assert str(path) in refusal or prompts
    assert len({prompt.id for prompt in prompts}) == len(prompts)


@settings(deadline=None)
@given(
    domains=st.lists(st.sampled_from(["a", "b", "c", None]), max_size=30),
    limit=st.integers(0, 35),
)
def test_spread_is_balanced_and_only_ever_adds(domains: list[str | None], limit: int) -> None:
    prompts = [
        Prompt(str(i), prompt="x", metadata={} if domain is None else {"domain": domain})
        for i, domain in enumerate(domains)
    ]
    taken = spread(prompts, limit)
    assert len(taken) == min(limit, len(prompts))
    assert spread(prompts, limit + 1)[: len(taken)] == taken
    everything = spread(prompts, None)
    assert sorted(everything, key=lambda p: int(p.id)) == prompts
    found, available = (
        Counter(p.metadata.get("domain") for p in some) for some in (taken, prompts)
    )
    for domain, total in available.items():
        # No domain waits while another one is two ahead of it.
        assert found[domain] == total or found[domain] >= max(found.values(), default=0) - 1
        own = [p for p in prompts if p.metadata.get("domain") == domain]
        assert [p for p in taken if p.metadata.get("domain") == domain] == own[: found[domain]]


WORDS = ["<s>", "<u>", "<a>", "</s>", "<unk>", *"abcdefgh"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<u> ' if m.role == 'user' else '<a> ' }}{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def tiny_tokenizer(*, adds_bos: bool = True, template: str | None = TEMPLATE) -> Any:
    """A real fast tokenizer of 13 words; like many, it puts a BOS before every text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<u>", "<a>"]})
    tokenizer.chat_template = template
    return tokenizer


def encode(prompt: Prompt, tokenizer: Any, **options: Any) -> list[int]:
    sizes = {"max_context": 100, "max_new_tokens": 10} | options
    (encoded,) = encode_prompts([prompt], tokenizer, **sizes)
    assert encoded.n_prompt_tokens == len(encoded.token_ids)
    assert (encoded.id, encoded.metadata) == (prompt.id, prompt.metadata)
    return encoded.token_ids


def test_the_template_and_its_bos_are_applied_once() -> None:
    """The tokenizer adds a BOS and so does its template: together they must give one."""
    a, b = WORDS.index("a"), WORDS.index("b")
    tokenizer = tiny_tokenizer()
    assert tokenizer.encode(f"<s> {'a'}") == [0, 0, a], "the trap is set"
    text = Prompt("t", prompt="a b", metadata={"domain": "x"})
    spoken = Prompt("m", messages=[{"role": "user", "content": "a b"}])
    assert encode(text, tokenizer) == encode(spoken, tokenizer) == [0, 1, a, b, 2]
    assert encode(Prompt("r", prompt="a b", template="none"), tokenizer) == [0, a, b]
    assert encode(Prompt("r", prompt="<s> a b", template="none"), tokenizer) == [0, a, b]
    assert encode(text, tiny_tokenizer(adds_bos=False)) == [0, 1, a, b, 2]
    assert encode(text, tiny_tokenizer(template=None)) == [0, a, b]
    assert encode(Prompt("i", token_ids=[3, 0, 0]), tokenizer) == [3, 0, 0], "as they are"
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "a"},
    ]
    assert encode(Prompt("d", messages=turns), tokenizer) == [0, 1, a, 2, b, 1, a, 2]


def test_what_cannot_be_encoded_is_named() -> None:
    tokenizer = tiny_tokenizer()

    def refused(prompt: Prompt, words: str, tokenizer: Any = tokenizer, **options: Any) -> None:
        with pytest.raises(InputError, match=words) as caught:
            encode(prompt, tokenizer, **options)
        assert caught.value.where == (prompt.where or f"prompt {prompt.id!r}")

    spoken = Prompt("m", messages=[{"role": "user", "content": "a"}], where="p.jsonl:4")
    refused(spoken, "no chat template", tiny_tokenizer(template=None))
    refused(Prompt("m", messages=[{"role": "tool", "content": "a"}]), "no tools here")
    refused(Prompt("m", prompt="<s> <s> a", template="none"), "begins with two BOS tokens")
    twice = "{{ bos_token }} " + TEMPLATE
    refused(spoken, "begins with two BOS tokens", tiny_tokenizer(template=twice))
    refused(Prompt("v", token_ids=[1, 13]), "token id 13 of prompt 'v' is outside .* of 13")
    refused(spoken, "is outside the vocabulary of 2", vocab_size=2)
    refused(
        Prompt("long", token_ids=[3] * 91),
        "prompt 'long' has 91 tokens and may grow by 10, but the context holds 100",
    )
    assert len(encode(Prompt("fits", token_ids=[3] * 90), tokenizer)) == 90


def test_all_prompts_that_do_not_fit_are_named() -> None:
    prompts = [
        Prompt(f"p{i}", token_ids=[3] * i, line=i, where=f"p.jsonl:{i}") for i in range(1, 60)
    ]
    with pytest.raises(InputError) as caught:
        encode_prompts(prompts, tiny_tokenizer(), 30, 10)
    assert "39 mistakes" in str(caught.value)
    assert "p.jsonl:21: prompt 'p21' has 21 tokens" in str(caught.value)
    assert "p.jsonl:20:" not in str(caught.value)
    assert "... and 19 more" in str(caught.value)
    assert "lower max_tokens" in str(caught.value)


def test_digest_sees_every_change() -> None:
    base = [
        EncodedPrompt("a", [1, 2], {"domain": "x"}, 2),
        EncodedPrompt("b", [3], {"domain": "y", "n": 1}, 1),
    ]
    changed = [
        base[::-1],
        base[:1],
        [dataclasses.replace(base[0], id="c"), base[1]],
        [dataclasses.replace(base[0], token_ids=[1, 3]), base[1]],
        [dataclasses.replace(base[0], token_ids=[12]), base[1]],
        [base[0], dataclasses.replace(base[1], metadata={"domain": "y", "n": 2})],
        [base[0], dataclasses.replace(base[1], metadata={"domain": "y", "n": "1"})],
    ]
    digests = {prompts_digest(prompts) for prompts in [base, *changed]}
    assert len(digests) == 1 + len(changed)
    reordered = dataclasses.replace(base[1], metadata={"n": 1, "domain": "y"})
    assert prompts_digest([base[0], reordered]) == prompts_digest(base)


def test_sample_prompts_are_as_promised() -> None:
    prompts = load_prompts(SAMPLES)
    assert Counter(p.metadata["domain"] for p in prompts) == dict.fromkeys(DOMAINS, 28)
    for prompt in prompts:
        assert prompt.id.startswith(f"{prompt.metadata['domain']}-")
        assert prompt.metadata["difficulty"] in ("easy", "medium", "hard")
        assert prompt.metadata["expects"] in ("short", "long")
        assert len(str(prompt.metadata["language"])) == 2
        assert ("check" in prompt.metadata) or prompt.metadata["domain"] not in (
            "arithmetic",
            "instruction",
        )
        assert (prompt.prompt is not None) == (prompt.metadata["domain"] == "long_context")
        if prompt.messages is not None:
            assert prompt.messages[0]["role"] == "system"
            assert len(prompt.messages) >= (4 if prompt.metadata["domain"] == "dialogue" else 2)
    assert len({p.metadata["language"] for p in prompts}) >= 20
    first = spread(prompts, 60)
    assert set(Counter(p.metadata["domain"] for p in first).values()) == {7, 8}


def test_sample_prompts_do_not_repeat_themselves() -> None:
    """No opening is shared and no sentence of a long prompt occurs twice anywhere."""
    prompts = load_prompts(SAMPLES)
    texts = [p.prompt or p.messages[-1]["content"] for p in prompts]  # type: ignore[index]
    assert len({text[:40] for text in texts}) == len(texts)
    sentences: Counter[str] = Counter()
    for prompt in prompts:
        if prompt.metadata["domain"] == "long_context":
            lines = (prompt.prompt or "").replace("\n", ". ").split(". ")
            sentences.update(line.strip() for line in lines if len(line.strip()) > 25)
    assert len(sentences) > 320
    assert [sentence for sentence, n in sentences.items() if n > 1] == []


@pytest.mark.model
def test_sample_prompts_under_the_sample_tokenizer() -> None:
    """Lengths as described in samples/README.md; ids equal to the tokenizer's own tokenised
    template; ordinary prompts lose nothing on the way."""
    from transformers import AutoTokenizer

    from mismatch_audit.sample_model import sample_model_path

    tokenizer = AutoTokenizer.from_pretrained(sample_model_path())
    prompts = load_prompts(SAMPLES)
    encoded = encode_prompts(prompts, tokenizer, 8192, 256)
    for prompt, result in zip(prompts, encoded, strict=True):
        messages = prompt.messages or [{"role": "user", "content": prompt.prompt}]
        own = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert result.token_ids == own
        assert result.token_ids[0] == tokenizer.bos_token_id
        for message in messages:
            assert message["content"] in tokenizer.decode(result.token_ids)
        least, most = 20, 110
        if prompt.metadata["domain"] == "long_context":
            # The first 17 are of middle length, so that a short run on a slow CPU stays short.
            middle = int(prompt.id.rpartition("-")[2]) <= 17
            least, most = (110, 170) if middle else (330, 520)
        assert least <= result.n_prompt_tokens <= most, prompt.id
