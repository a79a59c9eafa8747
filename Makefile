# Two commands matter: `make demo` shows what a trained model's heads do, `make test` proves the library.
# Everything is set up in .venv by itself; PYTHON=... chooses another interpreter.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Known versions; on the CPU, with one thread a process, tests run side by side.
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
JOBS   ?= 2
export HF_HUB_OFFLINE = 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-all conformance check bench docs clean

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 13

demo: $(VENV)/.demo  ## a trained model reads a sentence: a table here, every head in clearhead-report.html
	@$(BIN)/clearhead see "The animal didn't cross the street because it was too tired." \
		--out clearhead-report.html --force

test: $(VENV)/.dev  ## all tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS)

test-all: $(VENV)/.dev  ## all tests, three-wise instead of pairwise, and 2,000 fuzzed calls; an hour
	@CONFORMANCE=3 FUZZ=2000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS)

conformance: $(VENV)/.dev  ## every case on every path: a table of the worst errors, beside torch's
	@cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m conformance_report

check: $(VENV)/.dev  ## style, types, import order
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(VENV)/.bench  ## ratios against torch and others, side by side; ROWS=dense,decode runs a part; 10 minutes
	@$(BIN)/python -m benchmarks.run $(if $(ROWS),--rows $(ROWS)) $(if $(QUICK),--quick) \
		$(if $(MARKDOWN),--markdown $(MARKDOWN))

docs: $(VENV)/.dev  ## the reference of all public names, in build/docs
	@$(BIN)/python -m pdoc --docformat google --output-directory build/docs clearhead
	@echo "Open build/docs/clearhead.html"

clean:  ## remove what was built, .venv included
	rm -rf $(VENV) clearhead-report.html build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# -- the environment ---------------------------------------------------------------------------------------------

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "clearhead needs Python 3.11 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1 | head -n 1 || true)"; \
		echo "Install it, or name one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
		echo "Python's venv module is missing: on Debian and Ubuntu, apt install python3-venv."; \
		rm -rf $(VENV); exit 1; }
	@touch $@

$(VENV)/.demo: $(VENV)/.python pyproject.toml constraints.txt
	@echo "Installing clearhead, torch and a small trained model into $(VENV); this takes a minute or more ..."
	@$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.python pyproject.toml constraints.txt
	@echo "Installing clearhead with its development tools into $(VENV); this takes a minute or more ..."
	@$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.demo

$(VENV)/.bench: $(VENV)/.python pyproject.toml constraints.txt
	@echo "Installing clearhead with what it is measured against into $(VENV); this takes a minute or more ..."
	@$(PIP) --editable '.[bench]'
	@touch $@
