"""Every code that a report can show has a page, and every page a code: the source is searched."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from typer.testing import CliRunner

from kernel_contracts.errors import InputError
from mismatch_audit.cli.app import app
from mismatch_audit.explain import PARTS, index, page_of, pages
from mismatch_audit.rollouts.checks import turns
from mismatch_audit.weights.findings import CODES
from mismatch_audit.weights.live.report import CODES as LIVE_CODES

CODE = re.compile(r"[A-Z][A-Z0-9_]{3,}")


def emitted() -> set[str]:
    """Codes in the source: ``code="X"`` of a call, ``code = "X"`` of a class, and of tables."""
    found = set(CODES.values()) | set(LIVE_CODES.values())
    found |= {code for code, _, _ in turns._KINDS.values()}
    for file in (ROOT / "mismatch_audit").rglob("*.py"):
        found |= set(_codes(file))
    return found


def _codes(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        keyword = isinstance(node, ast.keyword) and node.arg == "code"
        attribute = isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "code" for t in node.targets
        )
        if keyword or attribute:
            yield from _text(node.value)  # type: ignore[attr-defined]
        if isinstance(node, ast.Dict):
            named = zip(node.keys, node.values, strict=True)
            for key, value in named:
                if isinstance(key, ast.Constant) and key.value == "code":
                    yield from _text(value)


def _text(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.IfExp):
        yield from _text(node.body)
        yield from _text(node.orelse)
    elif (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and CODE.fullmatch(node.value)
    ):
        yield node.value


def test_the_search_finds_what_is_known_to_be_there() -> None:
    assert emitted() >= {"NONFINITE", "BATCH_VARIANT", "SHIFTED_LOGPROBS", "W201"}


def test_every_code_has_a_page_and_every_page_a_code() -> None:
    assert emitted() - set(pages()) == set(), "codes without a page in mismatch_audit/explain/pages"
    assert set(pages()) - emitted() == set(), "pages of codes that nothing emits"


@pytest.mark.parametrize("code", sorted(pages()))
def test_a_page_has_its_four_parts(code: str) -> None:
    """What it is, why it matters, an example and the fix, in this order, none of them empty."""
    text = page_of(code).text
    parts = re.findall(r"^\*\*(.+?)\.\*\* (\S.+)", text, re.MULTILINE)
    assert [name for name, _ in parts] == list(PARTS)
    assert all(len(first) > 5 for _, first in parts)


def test_the_index_in_the_docs_is_current() -> None:
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    assert index() in page, "run: python -m mismatch_audit.explain docs/findings.md"


def test_the_command_prints_the_page_lists_all_and_helps_with_a_typo() -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["explain", "batch-variant"])
    assert shown.exit_code == 0
    assert shown.output.startswith("BATCH_VARIANT: ")
    assert "How to fix it" in shown.output
    listed = runner.invoke(app, ["explain"]).output
    assert all(code in listed for code in pages())
    with pytest.raises(InputError, match="BATCH_VARIENT") as error:
        page_of("BATCH_VARIENT")
    assert "did you mean BATCH_VARIANT?" in str(error.value)
