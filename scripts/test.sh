#!/usr/bin/env bash
# Every test that needs no GPU. With arguments, plain pytest with those arguments.
#
# Two runs: the many small tests, then those that start real vLLM engines. Of an engine's 20 seconds most are spent by one
# core, importing; so two at a time, and the tests that share an engine's results stay together (loadscope).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTEST=.venv/bin/pytest

if (($#)); then
    exec "$PYTEST" "$@"
fi

status=0 # both runs happen: one failure must not hide another
"$PYTEST" -m "not e2e and not gpu" --numprocesses auto --dist loadfile || status=$?
if .venv/bin/python -c 'import vllm' 2>/dev/null; then
    "$PYTEST" -m "e2e and not gpu" --numprocesses 2 --dist loadscope --durations 5 || status=$?
else
    echo "vLLM is not installed in .venv: the end-to-end tests were left out."
fi
exit "$status"
