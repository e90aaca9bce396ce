"""Writes docs/public-reports.md from the cases of tests/test_public_reports.py.

python benchmarks/public_reports.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from public_report_cases import REPORTS, table  # noqa: E402

PAGE = """# Public reports of mismatch, and the check that names each

Other people's reports of a serving engine and an RL trainer that disagree. For each, a test builds
a small log by the mechanism that the report found, on a policy whose logits are known, and the
audit must lead with the cause in the third column; on a clean twin of the same recipe it must find
nothing. The fixtures show the mechanism, not the report's figures. Where a recorded log cannot show
a fault, the audit must say UNOBSERVED and which columns it needs.

{count} reports; what each check does is on [Checks on recorded rollouts](rollout-checks.md).

{table}

Written by `python benchmarks/public_reports.py` from what the cases give.
"""


def main() -> None:
    text = PAGE.format(count=len(REPORTS), table=table())
    (ROOT / "docs" / "public-reports.md").write_text(text)


if __name__ == "__main__":
    main()
