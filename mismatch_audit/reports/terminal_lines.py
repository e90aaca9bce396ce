"""Lines of a terminal report: padded columns by display width, wrapped notes, plain fallback.

rich draws tables well, but not rows that span columns; these lines do, and never let rich read
markup in what a model wrote: every line is a Text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from mismatch_audit.reports.advice import SYMBOLS, WORDS
from mismatch_audit.reports.escape import harmless_line, visible

STYLES = {
    "PASS": "green",
    "FAIL": "bold red",
    "INCONCLUSIVE": "yellow",
    "UNOBSERVED": "magenta",
    "ACKNOWLEDGED": "yellow",
    "UNSOUND": "bold red",
    "NOT_COMPARABLE": "bold red",
}
"""The terminal's own palette, which its owner has made readable on its background."""

_PLAIN = str.maketrans(
    {"✔": "+", "✘": "x", "○": "o", "≠": "!", "‖": "|", "–": "-", "…": "~", "·": "-", "⏎": "/",
     "⇥": ">", "→": ">", "⟨": "<", "⟩": ">", "≤": "<", "≥": ">", "꞉": ";", "⁅": "("}
)  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A column of ``Page.columns``: width in cells, and where its text goes."""

    title: str
    width: int
    right: bool = False


class Page:
    """Writes lines of at most ``width`` cells to a console."""

    def __init__(self, console: Console, width: int) -> None:
        self.console = console
        self.width = width
        self.plain = not (console.encoding or "").lower().replace("-", "").startswith("utf")

    def line(self, text: Text | str = "", *, style: str = "") -> None:
        """One line, cut at the page's width."""
        line = text if isinstance(text, Text) else Text(visible(text), style=style)
        line.rstrip()
        line.truncate(self.width, overflow="crop" if self.plain else "ellipsis")
        self.whole(line)

    def whole(self, text: Text) -> None:
        """One line that is never cut: a path must be whole to be of use."""
        plain = harmless_line(text.plain)
        if self.plain:
            plain = "".join(c if ord(c) < 128 else "?" for c in plain.translate(_PLAIN))
        line = Text(plain, style=text.style, spans=text.spans)
        self.console.print(line, soft_wrap=True, highlight=False)

    def heading(self, title: str) -> None:
        """A section's title after an empty line."""
        self.line()
        self.line(Text(title.upper(), style="bold"))

    def note(self, text: str, *, indent: int, style: str = "", first: str = "") -> None:
        """Wrapped text behind an indent; ``first`` stands in the indent of its first line."""
        for i, part in enumerate(_wrap(visible(text), max(20, self.width - indent))):
            lead = pad(first if i == 0 else "", indent)
            self.line(Text.assemble(lead, (part, style)))

    def row(self, columns: Sequence[Column], cells: Sequence[Text | str]) -> None:
        """Cells in their columns, two spaces apart."""
        line = Text()
        for column, cell in zip(columns, cells, strict=True):
            text = cell.copy() if isinstance(cell, Text) else Text(visible(cell))
            if text.cell_len > column.width:
                text.truncate(column.width, overflow="ellipsis")
            gap = " " * (column.width - text.cell_len)
            line.append_text(Text(gap).append_text(text) if column.right else text.append(gap))
            line.append("  ")
        self.line(line)


def verdict_text(verdict: str, *, warn: bool = False) -> Text:
    """Symbol, word and colour, so that any one of them is enough."""
    text = Text(f"{SYMBOLS[verdict]} {WORDS[verdict]}", style=STYLES[verdict])
    if warn and verdict == "PASS":
        text.append(" warn", style="yellow")
    return text


def pad(text: str, width: int) -> str:
    """Text filled with spaces to a width in cells."""
    return text + " " * max(0, width - cell_len(text))


def cut(text: str, width: int, *, tail: bool = False) -> str:
    """Text cut to a width in cells; ``tail`` keeps its end."""
    if cell_len(text) <= width:
        return text
    chars = reversed(text) if tail else iter(text)
    kept, used = [], 1
    for char in chars:
        used += cell_len(char)
        if used > width:
            break
        kept.append(char)
    return "…" + "".join(reversed(kept)) if tail else "".join(kept) + "…"


def _wrap(text: str, width: int) -> list[str]:
    """Words in lines of at most ``width`` cells; a longer word is broken."""
    lines, line = [], ""
    for word in text.split(" "):
        while cell_len(word) > width:
            head = cut(word, width)[:-1]
            lines += [line, head] if line else [head]
            line, word = "", word[len(head) :]
        joined = f"{line} {word}" if line else word
        if cell_len(joined) > width:
            lines.append(line)
            line = word
        else:
            line = joined
    return [*lines, line]
