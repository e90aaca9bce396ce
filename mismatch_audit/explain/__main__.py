"""``python -m mismatch_audit.explain docs/findings.md``: write the index of the pages."""

from __future__ import annotations

import sys
from pathlib import Path

from mismatch_audit.explain import index

BEGIN, END = "<!-- findings: begin -->", "<!-- findings: end -->"


def write(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n{index()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
