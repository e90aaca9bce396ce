"""Text of a model, a prompt or a file name, made harmless for each place it is shown in.

Everything in a record may hold hostile text: token texts are model output, prompt ids and slice
names come from files. Every projection passes such text through one of these functions.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

_JOINERS = "\u200c\u200d"  # needed by Indic scripts and emoji; harmless
_MARKDOWN = frozenset("\\`*_[]~$")
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;", "|": "&#124;"}
_APART = {"@": "@\u200b", "#": "\\#\u200b"}
_LINK = re.compile(r"(?i)(?:(?<=://)|(?<=www\.))")
_BLOCK = re.compile(r"^(\s*)([-+=]|\d+(?=[.)]))")


def visible(text: str) -> str:
    """One line without control characters: newline as ⏎, tab as ⇥, others as control pictures;
    bidirectional overrides, invisible format characters and lone surrogates by number."""
    return "".join(map(_visible, text))


def _visible(char: str) -> str:
    code = ord(char)
    if char == "\n":
        return "⏎"
    if char == "\t":
        return "⇥"
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    category = unicodedata.category(char)
    if category in {"Cc", "Cs", "Zl", "Zp", "Co", "Cn"} or (
        category == "Cf" and char not in _JOINERS
    ):
        return f"⟨U+{code:04X}⟩"
    return char


def quoted(text: str) -> str:
    """Visible text in double quotes, so that leading and trailing spaces show."""
    return f'"{visible(text)}"'


def shortened(text: str, width: int, *, tail: bool = False) -> str:
    """At most ``width`` characters; the end that matters less is cut to an ellipsis."""
    if len(text) <= width:
        return text
    return "…" + text[len(text) - width + 1 :] if tail else text[: width - 1] + "…"


def markdown(text: str) -> str:
    """Visible text with Markdown's and HTML's characters escaped, safe within a line or a cell.

    A backslash before the character, as CommonMark has it; entities for what tables and HTML read
    all the same. Hosts look for links, @names and #numbers after rendering, when no escape is
    left: a zero-width space keeps those apart.
    """
    shown = _LINK.sub("\u200b", visible(text))
    return "".join(
        _ENTITIES.get(char) or _APART.get(char) or (f"\\{char}" if char in _MARKDOWN else char)
        for char in shown
    )


def markdown_line(text: str) -> str:
    """As ``markdown``, for text that starts a line: no list and no underline begins there."""
    return _BLOCK.sub("\\1\u200b\\2", markdown(text))


def csv_cell(text: str) -> str:
    """Visible text that no spreadsheet reads as a formula: an apostrophe before = + - @ and the
    full-width forms, also behind spaces. (Tab and carriage return are visible by then.)"""
    shown = visible(text)
    first = unicodedata.normalize("NFKC", shown.lstrip()[:1])
    return f"'{shown}" if first in {"=", "+", "-", "@"} else shown


COMMAND_MARK = "##["
"""GitHub's runner takes a command from this on, anywhere in a line of a log."""


def harmless_line(line: str) -> str:
    """A log line that no CI runner takes for a command, character for character: neither ``::`` at
    its start nor ``##[`` anywhere. Look-alikes stand in."""
    line = line.replace(COMMAND_MARK, "##⁅")
    body = line.lstrip()
    return line.replace("::", "꞉:", 1) if body.startswith("::") else line


def workflow_data(text: str) -> str:
    """The message of a workflow command: %, CR and LF percent-encoded. Other control characters
    and line separators are made visible, so that no line starts inside."""
    encoded = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return visible(encoded)


def workflow_property(text: str) -> str:
    """A property of a workflow command: as its message, and also : and , percent-encoded."""
    return workflow_data(text).replace(":", "%3A").replace(",", "%2C")


def log_lines(parts: Iterable[str]) -> str:
    """Parts as lines, each made visible and harmless in a log: none begins another line."""
    return "\n".join(harmless_line(visible(part)) for part in parts)
