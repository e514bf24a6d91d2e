# make demo | test | lint | types | bench | validate | train-table | docs | clean; each makes its own environment in .venv.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

VENV ?= .venv
JOBS ?= 2
# The first interpreter that is new enough and can make an environment; PYTHON=... chooses another.
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$name -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' > /dev/null 2>&1 && { echo $$name; break; }; done)

RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install -qq --disable-pip-version-check --constraint constraints.txt
LOCKS := pyproject.toml constraints.txt

.PHONY: help demo test lint types imports tests bench validate accuracy calibrate train-table docs samples format clean

help:
	@echo 'make demo       predict the trillion-parameter run on 3,072 Frontier GCDs, beside what was published'
	@echo 'make test       style, types, import directions, tests and doctests, as the continuous integration runs them'
	@echo 'make validate   predictions against every published run and benchmark, with their errors'
	@echo 'make calibrate  fit the calibrations to their published runs again'
	@echo 'make train-table  train many small layouts on this host, and write docs/trained-layouts.md'
	@echo 'make bench      what one prediction costs at each fidelity'
	@echo 'make docs       the documentation as HTML in build/docs'
	@echo 'make samples    put the true output of the commands into README and docs'
	@echo 'make format     format the code'
	@echo 'make clean      remove the environment and everything built'

# --- environments: a stamp file says which parts are installed, and for which folder -----------------------------

# An environment does not survive a move of its folder.
ifneq ($(shell cat $(VENV)/folder 2> /dev/null),$(CURDIR))
.PHONY: $(VENV)/base.stamp
endif

$(VENV)/base.stamp: $(LOCKS)
	@test -n '$(PYTHON)' || { echo 'error: Python 3.11 or newer with its venv module is needed (on Debian: apt install python3-venv)' >&2; exit 1; }
	@echo 'making the environment in $(VENV)'
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --editable .
	@echo '$(CURDIR)' > $(VENV)/folder
	@touch $@

$(VENV)/dev.stamp: $(VENV)/base.stamp
	@echo 'installing what the tests need'
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

$(VENV)/docs.stamp: $(VENV)/base.stamp
	@echo 'installing what the documentation needs'
	@$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

# --- what people run ---------------------------------------------------------------------------------------------

demo: $(VENV)/base.stamp
	@$(RUN) -m exatwin simulate frontier-1t

test: lint imports types tests

lint: $(VENV)/dev.stamp
	@echo '--- style'
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

imports: $(VENV)/dev.stamp
	@echo '--- import directions'
	@$(VENV)/bin/lint-imports

# Type checkers do not follow an editable install, so they read a plain one.
types: $(VENV)/dev.stamp
	@echo '--- types'
	@rm -rf build/lib build/plain
	@$(PIP) --no-build-isolation --no-deps --target build/plain .
	@rm -rf build/lib build/bdist.*
	@MYPYPATH=build/plain $(RUN) -m mypy -p exatwin.topology -p exatwin.scenarios -p exatwin.sim -p exatwin.twin -p exatwin.report -p exatwin.trainer -m exatwin.cli

tests: $(VENV)/dev.stamp
	@echo '--- tests'
	@$(RUN) -m pytest -n $(JOBS)

format: $(VENV)/dev.stamp
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

validate: $(VENV)/base.stamp
	@$(RUN) -m exatwin validate
	@$(RUN) -m exatwin validate --network

# Predict all published runs, and write what they miss by into docs/accuracy.md and scenarios/validation/bounds.yaml.
accuracy: $(VENV)/base.stamp
	@$(RUN) -m exatwin.report.accuracy

# Fit the calibrations again and write the figures into sim/fits/.
calibrate: $(VENV)/dev.stamp
	@$(RUN) -m exatwin.report.fits --write

# Train layouts of small models on this host, and write what came out into docs/trained-layouts.md.
train-table: $(VENV)/dev.stamp
	@$(RUN) -m exatwin.report.layout_runs

bench: $(VENV)/base.stamp
	@$(RUN) -m exatwin.report.bench

docs: $(VENV)/docs.stamp
	@$(RUN) -m sphinx -q -W --keep-going -b html docs build/docs
	@echo 'build/docs/index.html'

# Write what the commands print into the pages that show it.
samples: $(VENV)/dev.stamp
	@$(RUN) tests/test_docs.py
	@$(RUN) -m exatwin.report.runs_where

clean:
	rm -rf $(VENV) build dist exatwin.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
