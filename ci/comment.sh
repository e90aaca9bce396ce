#!/usr/bin/env bash
# The report's table on the pull request, in one comment that later runs edit.
set -euo pipefail
[ -f "$OUT/report.json" ] || exit 0
audit report "$OUT" --format markdown --out "$OUT/comment.md"
gh pr comment "$PULL" --repo "$REPOSITORY" --body-file "$OUT/comment.md" --edit-last --create-if-none
