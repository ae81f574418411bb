# Every target makes the environment it needs from nothing, given Python 3.10+ and make.
# A stamp file inside each environment is newer than the requirements it was made from, so that a second call starts
# at once and changed requirements are installed again. `make clean` first when changing PYTHON or CONSTRAINTS.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
PYTEST_ARGS ?=
WORKERS ?= 2
QUICKSTART_ARGS ?=
BENCHMARK_ARGS ?= --short
RELEASES_ARGS ?=
RUN ?=

# one worker a file, so that what a module's tests share is made once; in the order of tests/conftest.py
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# threads that wait for each other without spinning: on a machine that does something else too, ten times as fast
PATIENT = OMP_WAIT_POLICY=PASSIVE
DEV := .venv
OLDEST := .venv-oldest
QUICKSTART := .venv-quickstart
RELEASES := .venv-releases

.DEFAULT_GOAL := help
.PHONY: help quickstart benchmark test lint types test-slow test-oldest test-releases format cards clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

quickstart: $(QUICKSTART)/stamp  ## patch, fine-tune and measure the small bundled model; ends with a table and a plot
	$(PATIENT) $(QUICKSTART)/bin/hf-posenc quickstart $(QUICKSTART_ARGS)

benchmark: $(DEV)/stamp  ## measure what positions cost, the short run; all rows: make benchmark BENCHMARK_ARGS=
	$(PATIENT) $(DEV)/bin/python scripts/benchmark.py $(BENCHMARK_ARGS)

test: lint types  ## lint, types and the test suite, on the pinned versions
	$(DEV)/bin/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

lint: $(DEV)/stamp  ## ruff, both as linter and as format check
	$(DEV)/bin/ruff check .
	$(DEV)/bin/ruff format --check .

types: $(DEV)/stamp  ## mypy --strict
	$(DEV)/bin/mypy --strict hf_posenc

test-slow: $(DEV)/stamp  ## only the tests that need minutes or the network
	$(DEV)/bin/python -m pytest -m slow $(PYTEST_ARGS)

test-oldest: $(OLDEST)/stamp  ## the test suite on the lowest versions the package promises to work with
	$(OLDEST)/bin/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

test-releases: $(RELEASES)/stamp  ## the contract tests on every minor release of transformers in the supported range
	$(RELEASES)/bin/python scripts/releases.py $(RELEASES_ARGS)

format: $(DEV)/stamp  ## let ruff fix and format the code
	$(DEV)/bin/ruff check --fix .
	$(DEV)/bin/ruff format .

cards: $(DEV)/stamp  ## write the cards in model_cards/ again; from a new run: make cards RUN=folder
	$(DEV)/bin/python scripts/cards.py $(RUN)

clean:  ## remove the environments and caches
	rm -rf $(DEV) $(OLDEST) $(QUICKSTART) $(RELEASES) .mypy_cache .ruff_cache .pytest_cache build dist

# $(call install,environment,requirement,constraints)
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "hf-posenc needs Python 3.10 or newer, and $(PYTHON) is %d.%d: call make PYTHON=..." % sys.version_info[:2])'
	@echo "Installing $(2) into $(1) (a few minutes the first time: torch is large)"
	@$(PYTHON) -m venv $(1)
	@$(1)/bin/python -m pip install --disable-pip-version-check -qq -e '$(2)' $(if $(3),-c $(3))
	@touch $(1)/stamp
endef

$(DEV)/stamp: pyproject.toml $(CONSTRAINTS)
	$(call install,$(DEV),.[dev],$(CONSTRAINTS))

$(QUICKSTART)/stamp: pyproject.toml $(CONSTRAINTS)
	$(call install,$(QUICKSTART),.,$(CONSTRAINTS))

$(OLDEST)/stamp: pyproject.toml constraints-oldest.txt
	$(call install,$(OLDEST),.[test],constraints-oldest.txt)

$(RELEASES)/stamp: pyproject.toml $(CONSTRAINTS)
	$(call install,$(RELEASES),.[test],$(CONSTRAINTS))
