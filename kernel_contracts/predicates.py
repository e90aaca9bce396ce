"""The language of ``where``: parsed by hand into a small tree, never handed to an evaluator.

    or_expr    := and_expr ("or" and_expr)*
    and_expr   := not_expr ("and" not_expr)*
    not_expr   := "not" not_expr | comparison
    comparison := sum (("==" | "!=" | "<" | "<=" | ">" | ">=") sum)*
                | sum ["not"] "in" "[" literal ("," literal)* "]"
                | sum "is" ["not"] "null"
    sum        := product (("+" | "-") product)*
    product    := unary (("*" | "/") unary)*
    unary      := "-" unary | number | text | "true" | "false" | column
                | "abs" "(" sum ")" | "(" or_expr ")"

A chain ``0.1 <= x < 0.5`` means ``0.1 <= x and x < 0.5``. A column whose name is not an identifier
is written in backticks.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection

from kernel_contracts.expressions import (
    KEYWORDS,
    Absolute,
    Arithmetic,
    Both,
    Column,
    Comparison,
    Condition,
    Either,
    Expression,
    In,
    IsNull,
    Negate,
    Not,
    Number,
    Text,
    Truth,
    Value,
)
from kernel_contracts.predicate_tokens import HINTS, PredicateError, Token, tokenize, unquote

__all__ = ["PredicateError", "closest", "kind_of", "parse"]

MAX_DEPTH = 24
"""Parentheses, negations and signs inside one another."""

_COMPARE = ("==", "!=", "<=", ">=", "<", ">")


def parse(text: str, known: Collection[str] | None = None) -> Condition:
    """The tree of a ``where`` expression.

    known: the columns there are; None leaves names unchecked.  Raises PredicateError, pointing at
    the character, for syntax, an unknown column or values of the wrong kind.
    """
    parser = _Parser(text, known)
    start = parser.token
    node = parser.condition(parser.expression(), start)
    if parser.token.kind != "end":
        raise parser.error(f"unexpected {parser.token.text!r}", fix=HINTS.get(parser.token.text))
    return node


def closest(name: str, known: Collection[str]) -> str:
    """``did you mean ...`` for a misspelt name, or the names there are."""
    folded = {k.casefold(): k for k in sorted(known)}
    near = difflib.get_close_matches(name.casefold(), list(folded), n=1, cutoff=0.6)
    if near:
        return f"did you mean {folded[near[0]]}?"
    return "known: " + ", ".join(sorted(known)) if known else ""


def kind_of(node: Expression) -> str:
    """number, text, boolean, or "" where only the data tells (a bare column)."""
    match node:
        case Number() | Negate() | Absolute() | Arithmetic():
            return "number"
        case Text():
            return "text"
        case Column():
            return ""
    return "boolean"


class _Parser:
    """Recursive descent over the token list; ``depth`` counts what is nested, for its limit."""

    def __init__(self, text: str, known: Collection[str] | None) -> None:
        self.text, self.known = text, known
        self.tokens = tokenize(text)
        self.at = self.depth = 0

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def take(self, *texts: str) -> Token | None:
        """The next token if it is one of these. A quoted text keeps its quotes, so never is."""
        token = self.token
        if token.text not in texts or token.kind == "end":
            return None
        self.at += 1
        return token

    def need(self, text: str, why: str) -> None:
        if not self.take(text):
            raise self.error(f"expected {text!r} {why}, found {self.token.text or 'the end'!r}")

    def error(
        self, message: str, token: Token | None = None, fix: str | None = None
    ) -> PredicateError:
        return PredicateError(message, self.text, (token or self.token).offset, fix)

    def nested(self, rule: Callable[[], Expression]) -> Expression:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error(f"nested more than {MAX_DEPTH} deep")
        node = rule()
        self.depth -= 1
        return node

    # Conditions ---------------------------------------------------------------------------------
    def expression(self) -> Expression:
        parts = self.joined("or", self.conjunction)
        if isinstance(parts, list):
            return Either(_flat(parts, Either))
        return parts

    def conjunction(self) -> Expression:
        parts = self.joined("and", self.negation)
        if isinstance(parts, list):
            return Both(_flat(parts, Both))
        return parts

    def joined(self, word: str, rule: Callable[[], Expression]) -> Expression | list[Condition]:
        start = self.token
        node = rule()
        if self.token.text != word:
            return node
        parts = [self.condition(node, start)]
        while self.take(word):
            start = self.token
            parts.append(self.condition(rule(), start))
        return parts

    def negation(self) -> Expression:
        if self.take("not"):
            start = self.token
            return Not(self.condition(self.nested(self.negation), start))
        return self.comparison()

    def comparison(self) -> Expression:
        start = self.token
        left = self.sum()
        if self.token.text in _COMPARE:
            return self.chain(self.value(left, start))
        if self.take("is"):
            negated = self.take("not") is not None
            self.need("null", "after `is`")
            return IsNull(self.value(left, start), negated)
        negated = self.token.text == "not" and self.tokens[self.at + 1].text == "in"
        self.at += negated
        if self.take("in"):
            return self.membership(self.value(left, start), negated)
        return left

    def chain(self, left: Value) -> Expression:
        links: list[Condition] = []
        while operator := self.take(*_COMPARE):
            start = self.token
            right = self.value(self.sum(), start)
            kinds = {kind_of(left), kind_of(right)} - {""}
            if len(kinds) > 1:
                raise self.error(f"compares {kind_of(left)} with {kind_of(right)}", operator)
            if operator.text not in ("==", "!=") and kinds & {"text", "boolean"}:
                raise self.error(
                    f"{kinds.pop()} values have no order", operator, "use ==, != or in"
                )
            links.append(Comparison(operator.text, left, right))
            left = right
        return links[0] if len(links) == 1 else Both(tuple(links))

    def membership(self, operand: Value, negated: bool) -> In:
        self.need("[", "after `in`")
        items: list[Number | Text | Truth] = []
        while not items or self.take(","):
            start = self.token
            node = self.sum()
            if not isinstance(node, Number | Text | Truth):
                raise self.error("a list holds plain numbers, texts, true or false", start)
            if items and type(node) is not type(items[0]):
                raise self.error("a list holds values of one kind", start)
            items.append(node)
        self.need("]", "at the end of the list")
        if kind_of(operand) not in ("", kind_of(items[0])):
            raise self.error(
                f"looks for {kind_of(operand)} in a list of {kind_of(items[0])}", start
            )
        return In(operand, tuple(items), negated)

    def condition(self, node: Expression, start: Token) -> Condition:
        if isinstance(node, Comparison | In | IsNull | Not | Both | Either | Column | Truth):
            return node
        raise self.error(
            "a condition is needed here, this is a value", start, "compare it: `... > 0`"
        )

    # Values -------------------------------------------------------------------------------------
    def value(self, node: Expression, start: Token) -> Value:
        if isinstance(node, Number | Text | Truth | Column | Negate | Absolute | Arithmetic):
            return node
        raise self.error("a value is needed here, this is a condition", start)

    def number(self, node: Expression, start: Token) -> Value:
        value = self.value(node, start)
        if kind_of(value) in ("text", "boolean"):
            raise self.error(f"a number is needed here, this is {kind_of(value)}", start)
        return value

    def sum(self) -> Expression:
        return self.left_to_right(("+", "-"), self.product)

    def product(self) -> Expression:
        return self.left_to_right(("*", "/"), self.unary)

    def left_to_right(self, signs: tuple[str, ...], rule: Callable[[], Expression]) -> Expression:
        start = self.token
        node = rule()
        while operator := self.take(*signs):
            left, after = self.number(node, start), self.token
            node = Arithmetic(operator.text, left, self.number(rule(), after))
        return node

    def unary(self) -> Expression:
        if self.take("-"):
            start = self.token
            operand = self.number(self.nested(self.unary), start)
            return Number(0.0 - operand.value) if isinstance(operand, Number) else Negate(operand)
        return self.primary()

    def primary(self) -> Expression:
        token = self.token
        self.at += token.kind != "end"
        match token.kind:
            case "number":
                if not math.isfinite(float(token.text)):
                    raise self.error("the number is too large", token)
                return Number(float(token.text))
            case "text":
                return Text(unquote(token, self.text))
            case "quoted_name":
                return self.column(token.text[1:-1], token)
            case "name":
                return self.word(token)
        if token.text == "(":
            node = self.nested(self.expression)
            self.need(")", "to close the parenthesis")
            return node
        raise self.error(
            f"a column or a value is needed here, found {token.text or 'the end'!r}", token
        )

    def word(self, token: Token) -> Expression:
        if token.text in ("true", "false"):
            return Truth(token.text == "true")
        if token.text == "null":
            raise self.error("null is not a value", token, "write `is null` or `is not null`")
        if self.token.text == "(":
            if token.text != "abs":
                raise self.error(
                    f"no function {token.text!r}", token, "the only function is abs(...)"
                )
            self.at += 1
            start = self.token
            operand = self.number(self.nested(self.sum), start)
            self.need(")", "to close abs(")
            return Absolute(operand)
        if token.text in KEYWORDS:
            raise self.error(f"{token.text!r} cannot stand here", token)
        return self.column(token.text, token)

    def column(self, name: str, token: Token) -> Column:
        if self.known is not None and name not in self.known:
            raise self.error(f"no column {name!r}", token, closest(name, self.known))
        return Column(name)


def _flat(parts: list[Condition], joined: type[Both] | type[Either]) -> tuple[Condition, ...]:
    """(a and b) and c is a and b and c: one canonical tree."""
    flat: list[Condition] = []
    for part in parts:
        flat += part.operands if isinstance(part, joined) else (part,)
    return tuple(flat)
