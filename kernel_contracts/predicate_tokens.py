"""Words and signs of a ``where`` expression, and the error that points into its text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kernel_contracts.errors import ContractError

MAX_LENGTH = 2000
MAX_TOKENS = 400
"""Bounds that keep a hostile expression cheap; a real predicate uses a tenth of them."""

_TOKEN = re.compile(
    r"""
      (?P<space>[ \t\r\n]+)
    | (?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?![A-Za-z_0-9.]))
    | (?P<name>[A-Za-z_][A-Za-z0-9_.]*)
    | (?P<quoted_name>`[^`\n]+`)
    | (?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    | (?P<operator>==|!=|<=|>=|<(?!>)|>|[-+*/()\[\],])
    """,
    re.VERBOSE | re.ASCII,
)
HINTS = {
    "=": "write == to compare",
    "&": "write `and`",
    "|": "write `or`",
    "!": "write `not`",
    "<>": "write !=",
    '"': "the quote is not closed",
    "'": "the quote is not closed",
    "`": "the backtick is not closed",
    "AND": "write `and`",
    "OR": "write `or`",
    "NOT": "write `not`",
    "IN": "write `in`",
    "IS": "write `is null`",
}
"""What people write in other languages, and how it is written here."""

_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/"}
_ESCAPES |= {"\\": "\\", '"': '"', "'": "'"}


class PredicateError(ContractError):
    """A ``where`` expression that does not parse. offset: index of the character at fault."""

    def __init__(self, message: str, text: str, offset: int, fix: str | None = None) -> None:
        shown = "".join(c if c.isprintable() else " " for c in text)
        start = max(0, offset - 60)
        line, caret = shown[start : start + 90], " " * (offset - start) + "^"
        super().__init__(
            f"{message} (column {offset + 1})\n    {line}\n    {caret}", fix=fix or None
        )
        self.message, self.offset = message, offset


@dataclass(frozen=True)
class Token:
    """kind: number, name, quoted_name, text, operator or end. text: as written, with quotes."""

    kind: str
    text: str
    offset: int


def tokenize(text: str) -> list[Token]:
    """All tokens and a last one of kind ``end``. Raises PredicateError, also beyond the bounds."""
    if len(text) > MAX_LENGTH:
        raise PredicateError(f"longer than {MAX_LENGTH} characters", text, MAX_LENGTH)
    tokens = list(_scan(text))
    if len(tokens) > MAX_TOKENS:
        offset = tokens[MAX_TOKENS].offset
        raise PredicateError(f"more than {MAX_TOKENS} words and signs", text, offset)
    return tokens


def unquote(token: Token, text: str) -> str:
    """What a quoted text stands for. Escapes are those of JSON, and the single quote's."""

    def replace(match: re.Match[str]) -> str:
        code = match.group(1)
        value = chr(int(code[1:], 16)) if len(code) == 5 else _ESCAPES.get(code)
        if value is None or "\ud800" <= value <= "\udfff":
            raise PredicateError(f"unknown escape \\{code}", text, token.offset + 1 + match.start())
        return value

    return _ESCAPE.sub(replace, token.text[1:-1])


def _scan(text: str) -> Iterator[Token]:
    offset = 0
    while offset < len(text):
        match = _TOKEN.match(text, offset)
        if match is None:
            bad = "<>" if text.startswith("<>", offset) else text[offset]
            if bad in "0123456789":
                raise PredicateError("not a number", text, offset)
            raise PredicateError(f"unexpected {bad!r}", text, offset, HINTS.get(bad))
        if match.lastgroup != "space":
            yield Token(match.lastgroup or "", match.group(), offset)
        offset = match.end()
    yield Token("end", "", len(text))
