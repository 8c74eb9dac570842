# `make run` and `make test` do all their own set-up in .venv; nothing else is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: run test test-slow lint docs site bench clean help

help: ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,flower,ray]'
	@touch $(READY)

run: $(READY) ## train SimProx over twenty unlike clients on embedded data
	$(BIN)/consilience run recipes/quickstart.toml

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint ## everything that must pass, minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2 --dist loadgroup

test-slow: $(READY) ## the longer checks, such as MNIST accuracy
	$(BIN)/python -m pytest -m slow

docs: $(READY) ## rewrite the table of algorithms from the recipes
	$(BIN)/python docs/make_algorithms.py

$(VENV)/.docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

site: $(VENV)/.docs ## the documentation as a site that needs no network, in site/index.html
	$(BIN)/python -m sphinx -q -b html docs site
	@echo site/index.html

bench: $(READY) ## seconds per round of every lane against a loop written by hand, on this machine
	$(BIN)/python benchmarks/lanes.py

clean: ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build site *.egg-info
