# The two commands are `make demo` and `make test`; both set up `.venv` first. Needs Python 3.11 or newer, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
PYTEST_ARGS ?= -n 2

# hatchling and editables build the four distributions; the rest checks them.
TOOLS := hatchling editables pytest pytest-xdist ruff mypy import-linter
PLUGINS := plugins/sft plugins/reward plugins/grpo

.PHONY: help env demo lint test

help:
	@echo "make demo [SEED=0] [SHUFFLE_LABELS=1]   train a policy from preferences, a few minutes on a CPU"
	@echo "make test                               every check and every test"
	@echo "make lint                               the checks alone: ruff, mypy, import layers"
	@echo "make env                                only set up $(VENV)"

env: $(VENV)/installed

# The tools come first and build isolation is off, so that building, too, uses the versions of constraints.txt.
$(VENV)/installed: constraints.txt pyproject.toml $(PLUGINS:%=%/pyproject.toml)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt $(TOOLS)
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[math]' $(PLUGINS:%=-e %)
	@touch $@

demo: env
	@$(BIN)/python examples/quickstart/demo.py --seed $(SEED) $(if $(filter 1,$(SHUFFLE_LABELS)),--shuffle-labels)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)
