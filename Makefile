# Two commands for a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all lint docs clean

demo: $(VENV)/.demo
	$(BIN)/hypersphere demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n 2 -m "not slow and not gpu"

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n 2

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.demo
	$(BIN)/hypersphere docs

$(VENV)/.made:
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[workbench]"
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) runs
