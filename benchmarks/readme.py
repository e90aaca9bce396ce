"""Write the terminal report of a run into README.md, between its markers.

make audit && python benchmarks/readme.py runs/quickstart
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console

from mismatch_audit.reports.record import load_record
from mismatch_audit.reports.terminal import render_terminal

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- quickstart:begin -->\n", "<!-- quickstart:end -->"


def main() -> None:
    run = Path(sys.argv[1])
    stream = io.StringIO()
    render_terminal(load_record(run), Console(file=stream, width=100), folder="runs/quickstart")
    body = "\n".join(line.rstrip() for line in stream.getvalue().strip("\n").splitlines())
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    README.write_text(f"{before}{BEGIN}```text\n{body}\n```\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
