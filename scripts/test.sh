#!/usr/bin/env bash
# Every test that needs no GPU. With arguments, plain pytest with those arguments.
#
# Two runs: the many small tests on all cores, then those that start real vLLM engines, one at a time, since an engine
# takes every core it finds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTEST=.venv/bin/pytest

if (($#)); then
    exec "$PYTEST" "$@"
fi

"$PYTEST" -m "not e2e and not gpu" --numprocesses auto --dist loadfile
if .venv/bin/python -c 'import vllm' 2>/dev/null; then
    "$PYTEST" -m "e2e and not gpu" --durations 5
else
    echo "vLLM is not installed in .venv: the end-to-end tests were left out."
fi
