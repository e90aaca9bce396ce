"""The kinds of checks: each turns an argument into a function from a response to [0, 1].

A maker raises ValueError when its argument makes no sense.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable

Score = Callable[[str], float]

MAX_COST = 2e7
"""Steps that a regular expression may take on one response, about half a second."""
MAX_TEXT = 500
"""Characters of a response that a regular expression sees."""

# 1,234.5 and 1234.5 and -6 and the 72 of 72km, but not the 5 of 3.5 or of x5.
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\d)")
_BULLET = re.compile(r"\s*(?:[-*•+]|\d{1,2}[.)])\s+\S")
_SENTENCE_END = re.compile(r"[.!?…]+(?=[\s\"'”’)*]|\Z)|[。！？]+")
_TOKEN = re.compile(
    r"(?P<escape>\\.)|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<group>\((?:\?(?:[:=!]|<[=!]|P?.)?)?)"
    r"|(?P<close>\))|(?P<repeat>[*+?]|\{(?P<low>\d*)(?P<comma>,?)(?P<high>\d*)\})|(?P<bar>\|)|.",
    re.DOTALL,
)


def _choices(argument: str, separator: str) -> list[str]:
    choices = [choice.strip() for choice in argument.split(separator)]
    if not all(choices):
        raise ValueError("needs at least one text, and none of them empty")
    return choices


def _whole(argument: str) -> int:
    if not argument.isascii() or not argument.isdigit() or int(argument) == 0:
        raise ValueError(f"needs a whole number from 1, found {argument!r}")
    return int(argument)


def _number(argument: str) -> Score:
    try:
        target = float(argument)
    except ValueError:
        raise ValueError(f"needs a number, found {argument!r}") from None
    if not math.isfinite(target):
        raise ValueError(f"needs a finite number, found {argument!r}")

    def score(text: str) -> float:
        found = [float(n.replace(",", "")) for n in _NUMBER.findall(text.replace("−", "-"))]
        hits = [math.isclose(n, target, rel_tol=1e-9, abs_tol=1e-9) for n in found]
        return 1.0 if hits and hits[-1] else 0.5 if any(hits) else 0.0

    return score


def _contains(argument: str) -> Score:
    choices = [choice.casefold() for choice in _choices(argument, "|")]
    return lambda text: float(any(choice in text.casefold() for choice in choices))


def _contains_exact(argument: str) -> Score:
    choices = _choices(argument, "|")
    return lambda text: float(any(choice in text for choice in choices))


def _absent(argument: str) -> Score:
    found = _contains(argument)
    return lambda text: 1.0 - found(text) if text else 0.0


def _starts(argument: str) -> Score:
    (start,) = _choices(argument, "\0")
    return lambda text: float(text.casefold().startswith(start.casefold()))


def _ends(argument: str) -> Score:
    (end,) = _choices(argument, "\0")
    return lambda text: float(text.casefold().endswith(end.casefold()))


def _one_of(argument: str) -> Score:
    choices = [choice.casefold() for choice in _choices(argument, ",")]

    def score(text: str) -> float:
        words = [word.casefold() for word in re.findall(r"\w+", text)]
        if " ".join(words) in choices:
            return 1.0
        return 0.5 if words and words[0] in choices else 0.0

    return score


def _order(argument: str) -> Score:
    items = [_word(item) for item in _choices(argument, ",")]

    def score(text: str) -> float:
        at = found = 0
        for item in items:
            if match := item.search(text, at):
                found, at = found + 1, match.end()
        return found / len(items)

    return score


def _word(text: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(text)}(?!\w)", re.IGNORECASE)


def _count(argument: str) -> Score:
    text, _, number = argument.rpartition("=")
    (word,) = map(_word, _choices(text, "\0"))
    return _near(_whole(number), lambda response: len(word.findall(response)))


def _near(target: int, measure: Callable[[str], int]) -> Score:
    """1 at the target, less by |found - target| / target, not below 0."""
    return lambda text: max(0.0, 1.0 - abs(measure(text) - target) / target)


def _max_words(argument: str) -> Score:
    limit = _whole(argument)
    return lambda text: min(1.0, max(0.0, 2.0 - _words(text) / limit)) if text else 0.0


def _min_words(argument: str) -> Score:
    least = _whole(argument)
    return lambda text: min(1.0, _words(text) / least)


def _words(text: str) -> int:
    return len(text.split())


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def _counter(measure: Callable[[str], int]) -> Callable[[str], Score]:
    return lambda argument: _near(_whole(argument), measure)


def _bullets(text: str) -> int:
    return sum(bool(_BULLET.match(line)) for line in _lines(text))


def _sentences(text: str) -> int:
    """Stretches with a letter or digit between sentence ends; 3.5 and e.g.x end none."""
    return sum(any(map(str.isalnum, part)) for part in _SENTENCE_END.split(text))


def _paragraphs(text: str) -> int:
    return sum(bool(part.strip()) for part in re.split(r"\n[ \t]*\n", text))


def _acrostic(argument: str) -> Score:
    if not argument.isalpha():
        raise ValueError(f"needs a word, found {argument!r}")
    letters = argument.casefold()

    def score(text: str) -> float:
        found = [line.strip(" \t*_\"'-")[:1].casefold() for line in _lines(text)]
        hits = sum(a == b for a, b in zip(letters, found, strict=False))
        return hits / max(len(letters), len(found))

    return score


def _case(argument: str) -> Score:
    if argument not in ("lower", "upper"):
        raise ValueError(f"needs lower or upper, found {argument!r}")
    right = str.islower if argument == "lower" else str.isupper

    def score(text: str) -> float:
        letters = [c for c in text if c.islower() or c.isupper()]
        return sum(map(right, letters)) / len(letters) if letters else 0.0

    return score


def _json(argument: str) -> Score:
    keys = _choices(argument, ",") if argument else []

    def score(text: str) -> float:
        body = re.sub(r"\A```(?:json)?[ \t]*\n(.*?)\n?```\Z", r"\1", text, flags=re.DOTALL)
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            return 0.0
        if not keys:
            return 1.0
        return sum(key in value for key in keys) / len(keys) if isinstance(value, dict) else 0.0

    return score


def _table(argument: str) -> Score:
    columns = _whole(argument)

    def score(text: str) -> float:
        lines = _lines(text)
        for header, rule in itertools.pairwise(lines):
            if "|" in header and {"|", "-"} <= set(rule) <= set("|-: \t"):
                return float(len(header.strip().strip("|").split("|")) == columns)
        return 0.0

    return score


def _regex(argument: str) -> Score:
    pattern = safe_pattern(argument)
    return lambda text: float(pattern.search(text[:MAX_TEXT]) is not None)


def safe_pattern(source: str) -> re.Pattern[str]:
    """Compile a pattern whose worst case is bounded. Raises ValueError for any other.

    No repeated group, no look-around, no back-reference: what is left costs at most
    start positions x the product of the repetitions x 2 for each alternative and optional item,
    and that must stay within MAX_COST on MAX_TEXT characters.
    """
    if not source or len(source) > 200:
        raise ValueError("needs a pattern of 1 to 200 characters")
    try:
        pattern = re.compile(source)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    cost = 1.0 if source.startswith("^") and "|" not in source else float(MAX_TEXT)
    previous = ""
    for token in _TOKEN.finditer(source):
        kind = token.lastgroup or ""
        text = token.group()
        if token["group"] and text not in ("(", "(?:"):
            raise ValueError(f"only plain groups are allowed, found {text!r}")
        if token["escape"] and text[1].isdigit() and text[1] != "0":
            raise ValueError("back-references are not allowed")
        if token["bar"] or text == "?":
            cost *= 2
        elif token["repeat"]:
            if previous == ")":
                raise ValueError("a repeated group is not allowed")
            high = token["high"] or ("" if token["comma"] or text in "*+" else token["low"])
            cost *= min(int(high), MAX_TEXT) if high else MAX_TEXT
        previous = text if kind else "."
    if cost > MAX_COST:
        raise ValueError("the pattern may take too long: use fewer * and +, or begin it with ^")
    return pattern


KINDS: dict[str, Callable[[str], Score]] = {
    "number": _number,
    "contains": _contains,
    "contains_exact": _contains_exact,
    "absent": _absent,
    "starts": _starts,
    "ends": _ends,
    "one_of": _one_of,
    "order": _order,
    "count": _count,
    "words": _counter(_words),
    "max_words": _max_words,
    "min_words": _min_words,
    "lines": _counter(lambda text: len(_lines(text))),
    "bullets": _counter(_bullets),
    "sentences": _counter(_sentences),
    "paragraphs": _counter(_paragraphs),
    "acrostic": _acrostic,
    "case": _case,
    "json": _json,
    "table": _table,
    "regex": _regex,
}
"""Kind -> maker of its scoring function."""
