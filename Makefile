# Everything a person or CI does with this project. `make demo` needs nothing but Linux, Python 3.11 and, for the
# sandboxes, root or a running Docker daemon.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
BIN := .venv/bin
INSTALLED := .venv/.ratchet-installed
MODEL ?= tiny
SEED ?= 0

# Thread pools of two dozen libraries on a few cores cost more than they bring.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help setup demo test check down clean

help:
	@echo "make setup                         the virtual environment and Docker"
	@echo "make demo [MODEL=tiny|smollm2] [SEED=0]   a whole training run on this machine"
	@echo "make check                         lint, format, types, layers"
	@echo "make test                          all tests"
	@echo "make down                          stop the stack"
	@echo "make clean                         stop the stack, remove its state and the virtual environment"

setup: $(INSTALLED)
	@scripts/install-docker.sh

$(INSTALLED): pyproject.toml scripts/setup.sh
	scripts/setup.sh

demo: setup
	scripts/demo.sh "$(MODEL)" "$(SEED)"

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup
	$(BIN)/pytest

down:
	@if [ -x $(BIN)/ratchet ]; then $(BIN)/ratchet down; fi

clean: down
	rm -rf .venv "$${RATCHET_HOME:-.ratchet}" .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
