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
# Dozens of processes load the same modules: compiled once, they take half the time to be collected by pytest.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo chaos test postgres machines drills check down clean audit

help:
	@echo "make setup                         the virtual environment and Docker"
	@echo "make demo [MODEL=tiny|smollm2] [SEED=0]   a whole training run on this machine"
	@echo "make check                         lint, format, types, layers"
	@echo "make test                          all tests"
	@echo "make postgres                      the tests of the database, its reports and commands, on PostgreSQL"
	@echo "make audit                         known vulnerabilities of the packages in use; needs the network"
	@echo "make machines                      the tests of Harbor and Terminal-Bench tasks, and the exploit drills"
	@echo "make drills                        two sandbox hosts of which one dies, tasks with services, agent programs"
	@echo "make chaos                         a run that is hit every few seconds, for 20 minutes"
	@echo "make down                          stop the stack"
	@echo "make clean                         stop the stack, remove its state and the virtual environment"

setup: $(INSTALLED)
	@scripts/install-docker.sh

$(INSTALLED): pyproject.toml scripts/setup.sh
	scripts/setup.sh

demo: setup
	scripts/demo.sh "$(MODEL)" "$(SEED)"

# 20 minutes of hits on a real run, after the same run undisturbed.
chaos: setup
	CHAOS_STEPS=$${CHAOS_STEPS:-110} CHAOS_EVERY=$${CHAOS_EVERY:-20} CHAOS_HITS=$${CHAOS_HITS:-60} CHAOS_MOST=100000 \
	  CHAOS_RATIO=$${CHAOS_RATIO:-0.8} CHAOS_ENGINES=$${CHAOS_ENGINES:-2} $(BIN)/pytest tests/chaos -s

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Fails where the database can't be asked: a package that nobody looked at is not called sound. (CI goes on then.)
audit: $(INSTALLED)
	$(BIN)/python scripts/audit.py

# Three processes share the parts' own tests, which wait more than they compute; then a real stack has the machine to
# itself.
test: setup
	$(BIN)/pytest -m "not e2e and not machines and not drills" -n 3 --dist loadscope --no-loadscope-reorder
	$(BIN)/pytest -m e2e tests/chaos tests/e2e

# The same tests as with SQLite. Needs PostgreSQL's server programs, postgres and initdb, in PATH.
postgres: setup
	RATCHET_TEST_DATABASE=postgresql $(BIN)/pytest tests/storage tests/lineage

# The public task formats and the exploit drills, on a Debian that is made here first: 10 minutes or so.
machines: setup
	scripts/install-docker.sh debootstrap
	$(BIN)/pytest -m machines

# Whole runs on a stack of their own, with its policy: 20 minutes or so.
drills: setup
	$(BIN)/pytest -m drills

down:
	@if [ -x $(BIN)/ratchet ]; then $(BIN)/ratchet down; fi

clean: down
	rm -rf .venv "$${RATCHET_HOME:-.ratchet}" .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
