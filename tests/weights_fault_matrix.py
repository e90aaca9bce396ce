"""Which check sees which weight-sync fault: run every fault, write the table into the docs.

    python -m tests.weights_fault_matrix --write

The same results feed tests/test_weights_sync.py, so the table cannot drift from the tests.
"""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path

from mismatch_audit.weights.sync_audit import PushAudit
from mismatch_audit.weights.sync_faults import MENU, SyncFault, run_fault
from mismatch_audit.weights.workers import single_threaded_torch

DOCS = Path(__file__).resolve().parent.parent / "docs" / "weights.md"
GUARDS = {
    "rollout_sentinel": "G1",
    "dense_self_probe": "G2",
    "expert_probe": "G3",
    "unwritten_scales": "G4",
    "set_audit": "G5",
    "live_dtype": "G6",
    "incoming_dtype": "G7",
}
OTHERS = {
    "anchored_probe": "anchored",
    "read_back": "read-back",
    "canary_push": "canary",
    "version": "version",
    "prefix_cache": "cache",
    "zero_change_push": "zero",
}
COLUMNS = GUARDS | OTHERS
SCHEMES = ("mxfp8", "bf16")


@cache
def result(index: int | None, scheme: str) -> PushAudit:
    """The audit of one fault of the menu (None: the clean twin), run once a process."""
    with single_threaded_torch():
        return run_fault(None if index is None else MENU[index], scheme)


def faults_of(scheme: str) -> list[tuple[int, SyncFault]]:
    return [(i, fault) for i, fault in enumerate(MENU) if scheme in fault.schemes]


def table(scheme: str) -> str:
    """A row per fault; x found, . passed, blank: had nothing to look at."""
    lines = [
        "| fault | " + " | ".join(COLUMNS.values()) + " | named |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    rows = [("clean twin", result(None, scheme))]
    rows += [(fault.title, result(i, scheme)) for i, fault in faults_of(scheme)]
    for title, audit in rows:
        cells = [_cell(audit.results[check].ok) for check in COLUMNS]
        lines.append(f"| {title} | " + " | ".join(cells) + f" | {_short(audit.cause)} |")
    return "\n".join(lines)


def _cell(ok: bool | None) -> str:
    return {True: ".", False: "**x**", None: " "}[ok]


def _short(cause: str) -> str:
    return (cause[:72] + "...") if len(cause) > 75 else cause


def blind_spots(scheme: str) -> str:
    """Per check: what only it found, and how many faults it missed."""
    faults = faults_of(scheme)
    lines = ["| check | found | found by nothing else | missed |", "|---|---|---|---|"]
    for check, short in COLUMNS.items():
        found = [i for i, _ in faults if result(i, scheme).results[check].ok is False]
        alone = [MENU[i].title for i in found if result(i, scheme).failing == [check]]
        missed = len(faults) - len(found)
        lines.append(f"| {check} ({short}) | {len(found)} | {'; '.join(alone) or '-'} | {missed} |")
    return "\n".join(lines)


def text() -> str:
    parts = []
    for scheme in SCHEMES:
        parts += [f"#### {scheme}", "", table(scheme), "", blind_spots(scheme), ""]
    return "\n".join(parts).rstrip()


def between(document: str, marker: str) -> str:
    """What stands between <!-- marker --> and <!-- /marker -->."""
    _, _, rest = document.partition(f"<!-- {marker} -->\n")
    inside, _, _ = rest.partition(f"\n<!-- /{marker} -->")
    return inside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the tables into the docs")
    if parser.parse_args().write:
        document = DOCS.read_text("utf-8")
        before, _, rest = document.partition("<!-- fault-matrix -->")
        _, _, after = rest.partition("<!-- /fault-matrix -->")
        DOCS.write_text(
            f"{before}<!-- fault-matrix -->\n{text()}\n<!-- /fault-matrix -->{after}", "utf-8"
        )
    else:
        print(text())


if __name__ == "__main__":
    main()
