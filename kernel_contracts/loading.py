"""Contract files: read with every mistake named by file, line and field; written; digested.

load_contract(path)            a Contract, or ContractFileError with all mistakes
check_file(path)               (Contract or None, problems) for a linter
parse_contract(text, where)    the same from a text
dump_contract(contract)        YAML that loads back to an equal contract
contract_digest(contract)      sha256 of the resolved document
contract_json_schema()         JSON Schema (draft 2020-12) of the file
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from kernel_contracts.contract import Contract
from kernel_contracts.cross_checks import Mistake, Place, cross_check
from kernel_contracts.errors import ContractError, InputError
from kernel_contracts.lint import lint
from kernel_contracts.schema_places import closest_key, explain, keys_at
from kernel_contracts.yaml_source import MAX_BYTES, Source, YamlMistake, read_yaml, write_yaml

_CLAUSE_ORDER = ("id", "probe", "metric", "exceeds", "share", "limit", "at_least", "warn")


@dataclass(frozen=True)
class Problem:
    """A mistake (severity error) or something doubtful (warning) at a line of a file."""

    file: str
    line: int
    field: str
    message: str
    fix: str = ""
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        place = (
            f"{self.file}:{self.line}:{self.field}" if self.field else f"{self.file}:{self.line}"
        )
        kind = "" if self.severity == "error" else "warning: "
        fix = f" ({self.fix})" if self.fix else ""
        return f"{place}: {kind}{self.message}{fix}"


class ContractFileError(ContractError):
    """A contract file with mistakes; ``problems`` holds them all."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "a mistake" if count == 1 else f"{count} mistakes"
        super().__init__(
            f"{head} in the contract\n" + "\n".join(f"  {p}" for p in self.problems),
            fix="`audit contract schema` and docs/contract.md list every field",
        )


def load_contract(path: str | Path) -> Contract:
    """The contract of a file.

    Raises InputError when the file cannot be read, ContractFileError naming every mistake in it.
    """
    contract, problems = check_file(path)
    return _sound(contract, problems)


def parse_contract(text: str, where: str = "contract") -> Contract:
    """The contract of a text; ``where`` names it in errors. Raises ContractFileError."""
    contract, problems = check_text(text, where)
    return _sound(contract, problems)


def check_file(
    path: str | Path, prompts: int | None = None
) -> tuple[Contract | None, list[Problem]]:
    """(the contract, or None when it has mistakes; mistakes and warnings by line).

    prompts: how many an audit will have, for warnings about limits that they cannot certify.
    Raises InputError when the file cannot be read.
    """
    path = Path(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(
            f"cannot read the contract: {error.strerror or error}",
            where=str(path),
            fix="give the path of a contract file; samples/contracts/ holds some",
        ) from error
    if len(raw) > MAX_BYTES:
        raise InputError(f"larger than {MAX_BYTES // 1024} KB: not a contract", where=str(path))
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError("not UTF-8 text", where=f"{path}:{line}") from error
    return check_text(text, str(path), prompts)


def check_text(
    text: str, where: str = "contract", prompts: int | None = None
) -> tuple[Contract | None, list[Problem]]:
    """As check_file, for a text."""
    try:
        source = read_yaml(text)
    except YamlMistake as error:
        return None, [Problem(where, error.line, "", error.message)]
    if not isinstance(source.data, dict):
        return None, [Problem(where, 1, "", "a contract is a mapping of keys to values")]
    errors = [*source.mistakes, *_respell(source, (), source.data)]
    contract: Contract | None = None
    try:
        contract = Contract.model_validate(source.data)
    except ValidationError as error:
        errors += _model_mistakes(error, source)
        errors += [(source.line(m.place), m) for m in cross_check(source.data)]
    if errors:
        return None, [_problem(where, *e) for e in _ordered(errors)]
    if contract is None:  # the rules between parts failed only in the model: a bug of ours
        raise ContractError("the contract contradicts itself", where=where)
    doubts = [(source.line(m.place), m) for m in lint(contract, prompts)]
    return contract, [_problem(where, *d, severity="warning") for d in _ordered(doubts)]


def dump_contract(contract: Contract) -> str:
    """The contract as YAML, defaults left out; it loads back to an equal contract."""
    document = contract.model_dump(
        mode="json", by_alias=True, exclude_defaults=True, exclude_none=True
    )
    for section in ("numerical", "statistical", "runtime", "observability"):
        if section in document:
            document[section] = [_clause_order(clause) for clause in document[section]]
    return write_yaml(document)


def contract_digest(contract: Contract) -> str:
    """SHA-256 (hex) of the resolved document's canonical JSON: sorted keys, no spaces.

    Spelling a default out, comments, layout and the order of keys do not change it.
    """
    text = json.dumps(
        contract.document(),
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    )
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def contract_json_schema() -> dict[str, Any]:
    """JSON Schema of a contract file, for editors. Rules between fields are checked on loading."""
    schema = _closed(Contract.model_json_schema(by_alias=True))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:kernel-contracts:v1",
        **schema,
    }


def _closed(node: Any) -> Any:
    """Mappings whose keys follow a pattern take no other keys (pydantic leaves that open)."""
    if isinstance(node, list):
        return [_closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    closed = {key: _closed(value) for key, value in node.items()}
    return {"additionalProperties": False, **closed} if "patternProperties" in node else closed


def _sound(contract: Contract | None, problems: list[Problem]) -> Contract:
    if contract is None:
        raise ContractFileError(p for p in problems if p.severity == "error")
    return contract


def _model_mistakes(error: ValidationError, source: Source) -> list[tuple[int, Mistake]]:
    found = []
    for item in error.errors():
        if item["type"] == "cross":
            continue  # told one by one by cross_check, with their places
        mistake = explain(item)
        unknown = item["type"] == "extra_forbidden"
        found.append((source.line(mistake.place, of_key=unknown), mistake))
    return found


def _respell(source: Source, place: Place, value: Any) -> Iterator[tuple[int, Mistake]]:
    """Each misspelt key is a mistake, and is then read as the key that was meant: otherwise one
    slip would be told as several, and what it holds not be checked at all."""
    if isinstance(value, dict):
        for key in [k for k in value if k not in keys_at(place)] if keys_at(place) else []:
            meant = closest_key(key, place)
            if meant is not None and meant not in value:
                here = (*place, key)
                yield (
                    source.line(here, of_key=True),
                    Mistake(here, f"unknown key {key!r}", f"did you mean {meant}?"),
                )
                source.rename(place, key, meant)
        for key in list(value):
            yield from _respell(source, (*place, key), value[key])
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _respell(source, (*place, index), item)


def _ordered(found: list[tuple[int, Mistake]]) -> list[tuple[int, Mistake]]:
    unique = {(line, m.field, m.message): (line, m) for line, m in found}
    return sorted(unique.values(), key=lambda f: (f[0], f[1].field))


def _problem(
    where: str, line: int, mistake: Mistake, severity: Literal["error", "warning"] = "error"
) -> Problem:
    return Problem(where, line, mistake.field, mistake.message, mistake.fix, severity)


def _clause_order(clause: dict[str, Any]) -> dict[str, Any]:
    first = {key: clause[key] for key in _CLAUSE_ORDER if key in clause}
    return {**first, **clause}
