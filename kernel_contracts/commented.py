"""A contract as YAML with comments: where the document and each clause come from."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence

from kernel_contracts.contract import Contract
from kernel_contracts.loading import dump_contract

_CLAUSE = re.compile(r"^(?P<indent> *)- \{?id: (?P<id>[^\s,}]+)")
_WIDTH = 98


def commented(
    contract: Contract, header: Sequence[str], comments: Mapping[str, Sequence[str]]
) -> str:
    """YAML that loads back to an equal contract.

    header: lines at the top.  comments: clause id -> lines above that clause; ids that the contract
    does not have are left out.
    """
    lines = [*_comment(header, "")]
    for line in dump_contract(contract).splitlines():
        found = _CLAUSE.match(line)
        if found:
            lines += _comment(comments.get(found["id"], ()), found["indent"])
        lines.append(line)
    return "\n".join(lines) + "\n"


def _comment(texts: Sequence[str], indent: str) -> list[str]:
    lines: list[str] = []
    for text in texts:
        width = _WIDTH - len(indent) - 2
        for part in textwrap.wrap(text, width, subsequent_indent="  ") or [""]:
            lines.append(f"{indent}# {part}".rstrip())
    return lines
