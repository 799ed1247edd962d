# Every target sets up .venv first, from the exact versions in constraints.txt, and again when those change.

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

export MLFLOW_DISABLE_TELEMETRY := true

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint proto clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo '  ARGS="..."      goes to the command of demo and test'
	@echo '  PIP_ARGS="..."  goes to pip install, for example an index that has CPU builds of torch'
	@echo '  PYTHON=...      interpreter that makes .venv, 3.11 or newer'

setup: $(INSTALLED) ## Install Paceline and its tools into .venv

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(INSTALLED) ## Tune a job on this machine, from training the policy to the table
	$(BIN)/paceline demo $(ARGS)

# Tests run more workers than there are cores, so a second thread in each would only take turns with the first.
test: $(INSTALLED) ## Run every test, the slow ones too
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)

lint: $(INSTALLED) ## Check format, style, types and the direction of imports
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

proto: $(INSTALLED) ## Generate the stubs from proto/paceline/v1/*.proto
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python proto/generate.py

clean: ## Remove caches and build outputs; .venv and tracking stores stay
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(wildcard runtime env tuner proto tests experiments) -name __pycache__ -prune -exec rm -rf {} +
