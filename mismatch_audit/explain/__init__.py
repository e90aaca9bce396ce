"""A page for every code that a report can show: what it is, why it matters, an example, the fix.

``pages/*.md``, one file per room, one section (``## CODE: title``) per code; docs/findings.md is
their index. A test holds the pages against the codes that the source can emit.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kernel_contracts.errors import InputError

__all__ = ["PAGES", "PARTS", "Page", "index", "page_of", "pages"]

PAGES = Path(__file__).with_name("pages")
PARTS = ("What it is", "Why it matters", "Example", "How to fix it")
"""Each page has these, in this order."""

_HEAD = re.compile(r"^## ([A-Z][A-Z0-9_]+): (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """code, title: of its heading.  room: the file's name.  text: Markdown under the heading."""

    code: str
    title: str
    room: str
    text: str

    def __str__(self) -> str:
        return f"{self.code}: {self.title}\n\n{self.text}\n"


@cache
def pages() -> dict[str, Page]:
    """Code -> page, room by room. Raises InputError for a code that has two."""
    found: dict[str, Page] = {}
    for file in sorted(PAGES.glob("*.md")):
        text = file.read_text(encoding="utf-8")
        heads = list(_HEAD.finditer(text))
        ends = [head.start() for head in heads[1:]] + [len(text)]
        for head, end in zip(heads, ends, strict=True):
            code, title = head.groups()
            if code in found:
                raise InputError(f"{code} has two pages", where=str(file))
            found[code] = Page(code, title, file.stem, text[head.end() : end].strip())
    return found


def page_of(code: str) -> Page:
    """The page of a code, whatever its case. Raises InputError for a code that has none."""
    known, wanted = pages(), code.strip().upper().replace("-", "_")
    if wanted not in known:
        near = difflib.get_close_matches(wanted, list(known), n=1)
        fix = f"did you mean {near[0]}? " if near else ""
        raise InputError(f"no page for the code {code!r}", fix=f"{fix}`audit explain` lists them")
    return known[wanted]


def index() -> str:
    """The table of docs/findings.md."""
    lines = []
    for room in dict.fromkeys(page.room for page in pages().values()):
        mine = [page for page in pages().values() if page.room == room]
        lines += [f"## {_title(room)}", "", "| code | what |", "| --- | --- |"]
        lines += [
            f"| [`{p.code}`](../mismatch_audit/explain/pages/{room}.md#{_anchor(p)}) | {p.title} |"
            for p in mine
        ]
        lines.append("")
    return "\n".join(lines)


def _title(room: str) -> str:
    first = (PAGES / f"{room}.md").read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("# ")


def _anchor(page: Page) -> str:
    """GitHub's anchor of the page's heading."""
    text = re.sub(r"[^\w\- ]", "", f"{page.code}: {page.title}".lower())
    return text.replace(" ", "-")
