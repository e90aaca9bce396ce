#!/usr/bin/env bash
# One audit inside a CI job. Never fails by itself: the verdict goes to GITHUB_OUTPUT and a later step
# fails the job, so that the report is uploaded and commented on first.
set -uo pipefail
arguments=()
while IFS= read -r line; do
  [ -n "$line" ] && arguments+=("$line")
done <<<"${ARGUMENTS:-}"
[ -n "${BASELINE:-}" ] && arguments+=(--baseline "$BASELINE")
audit run "$SETTINGS" --out "$OUT" --overwrite --format github "${arguments[@]}"
code=$?
verdict=ERROR
if [ -f "$OUT/report.json" ]; then
  verdict=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["verdict"])' "$OUT/report.json")
  audit report "$OUT" --format junit --out "$OUT/junit.xml"
  audit report "$OUT" --format sarif --out "$OUT/audit.sarif"
fi
{
  echo "exit-code=$code"
  echo "verdict=$verdict"
} >>"${GITHUB_OUTPUT:-/dev/stdout}"
