# `make run` and `make test` do all their own set-up in .venv; nothing else is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTED := $(VENV)/.ready-to-test

.PHONY: run compare test pytest test-slow lint docs notebooks screenshots site bench audit sbom dist clean help

help: ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[report]'
	@touch $(READY)

$(TESTED): $(READY)
	$(PIP) -e '.[dev,flower,ray,text,onnx]'
	# byzfl is the oracle of the robust rules, which need nothing of what it depends on (torchvision, pandas ...)
	$(PIP) --no-deps byzfl
	# its interpreter runs the kernels on a processor; apart, since PyTorch's compiler would import it
	$(PIP) --no-deps --upgrade --target $(VENV)/triton triton
	@touch $(TESTED)

run: $(READY) ## train SimProx over twenty heterogeneous clients on embedded data
	$(BIN)/consilience run recipes/quickstart.toml

compare: $(READY) ## five methods over three seeds on embedded data, and a report of them
	$(BIN)/consilience compare recipes/compare_quick.toml --jobs 2
	$(BIN)/consilience report runs/compare-digits

lint: $(TESTED) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(TESTED) ## everything that must pass, minutes; ruff and mypy beside the tests
	@$(MAKE) --no-print-directory --jobs 2 lint pytest

pytest: $(TESTED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2 --dist loadscope --no-loadscope-reorder

test-slow: $(TESTED) ## the longer checks, such as MNIST accuracy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -n 2 --dist loadscope --no-loadscope-reorder

docs: $(READY) ## rewrite the tables that are read off the code
	$(BIN)/python docs/make_algorithms.py
	$(BIN)/python docs/make_comparison.py
	$(BIN)/python docs/make_architecture.py
	$(BIN)/python docs/make_reproductions.py
	$(BIN)/python docs/make_choosing.py
	$(BIN)/python docs/make_population.py
	$(BIN)/python docs/make_picture.py

notebooks: $(TESTED) ## execute the tutorial's pages and store them as notebooks, minutes
	$(BIN)/python docs/make_notebooks.py

screenshots: $(TESTED) ## take the pictures of pages and dashboard in the documentation, needs Chromium
	$(BIN)/python docs/make_screenshots.py

$(VENV)/.docs: $(READY)
	$(PIP) -e '.[docs]'
	@touch $@

site: $(VENV)/.docs ## the documentation as a site that needs no network, in site/index.html
	$(BIN)/python -m sphinx -q -b html docs site
	@echo site/index.html

bench: $(READY) ## seconds per round of every lane against a loop written by hand, on this machine
	$(BIN)/python benchmarks/lanes.py

$(VENV)/audit/.ready: $(TESTED)  # tools of their own environment: what they need must not change what is audited
	$(PYTHON) -m venv $(VENV)/audit
	@$(VENV)/audit/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pip-audit cyclonedx-bom \
		|| { echo "pip-audit and cyclonedx-bom could not be installed: that needs a package index, once (PIP_INDEX_URL)"; exit 1; }
	@touch $@

audit: $(TESTED) ## licences of the pinned set (offline), and known vulnerabilities (needs the network)
	$(BIN)/python tools/licences.py
	@$(MAKE) --no-print-directory $(VENV)/audit/.ready
	$(BIN)/python tools/vulnerabilities.py $(VENV)/audit/bin/pip-audit "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

sbom: $(VENV)/audit/.ready ## what is installed, as a CycloneDX bill of materials: sbom.cdx.json
	$(VENV)/audit/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON -o sbom.cdx.json $(BIN)/python

$(VENV)/.dist: $(READY)
	$(PIP) -e '.[dist]'
	@touch $@

dist: $(VENV)/.dist ## the wheel and the source archive in dist/, installed and tried in a fresh environment
	rm -rf dist build
	$(BIN)/python -m build .
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python benchmarks/try_dist.py dist

clean: ## remove the environment and caches
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis build site *.egg-info
