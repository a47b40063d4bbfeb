# Everything sets itself up in .venv on first use (a few minutes) and is quick afterwards. `make help` lists the targets.

SHELL := /bin/bash
BIN := .venv/bin
# Somebody's PYTHONPATH must not decide which packages are tested.
export PYTHONPATH :=
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench clean

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/\1\t\2/' | expand -t 10

setup: ## .venv with kvdisk, its tools and vLLM's CPU build; instant when nothing changed
	@scripts/setup.sh

demo: setup ## real vLLM on tiny models: cold, warm, after a restart, and with a damaged disk
	@$(BIN)/kvdisk demo $(ARGS)

test: setup ## everything that needs no GPU, vLLM end to end included (ARGS="-k name" for pytest)
	@scripts/test.sh $(ARGS)

check: setup ## ruff, formatting, mypy --strict, layering
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict kvdisk
	$(BIN)/pytest -q tests/test_architecture.py

format: setup ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## every bar on this checkout's disk, 15 minutes (ARGS="--root DIR --only compare,scale --full")
	@$(BIN)/python -c 'import matplotlib' 2>/dev/null || $(BIN)/python -m pip install --quiet 'matplotlib>=3.8' || true
	@$(BIN)/python bench/run.py --env-dir .venv/peers $(ARGS)

clean: ## remove .venv and what the tools left behind
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
