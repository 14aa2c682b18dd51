# Everything works from a fresh clone: each target sets up .venv first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONFIG ?= digits_dscnn
OUT ?= demo/$(shell date +%Y%m%d_%H%M%S)
NBVAL_TIMEOUT ?= 600

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types imports unit notebooks lab clean

help: ## Show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1	\2/' | expand -t 20

setup: $(STAMP) ## Make .venv and install sgnb with all it needs

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo 'sgnb needs Python 3.11 or newer as "$(PYTHON)"; point to one: make PYTHON=/path/to/python3.12 ...' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo 'This Python cannot make virtual environments. On Debian and Ubuntu: sudo apt-get install python3-venv' >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[notebooks,dev]'
	@touch $@

demo: $(STAMP) ## The main job, headless: baseline against torch.compile on handwritten digits
	$(BIN)/python -m sgnb.benchmark --config-name=$(CONFIG) --out $(OUT)

test: lint types imports unit notebooks ## Lint, types, import contracts, tests and notebooks

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

unit: $(STAMP)
	@command -v chromium chromium-browser google-chrome >/dev/null || \
	  echo 'No Chromium here: the browser tests are skipped. On Debian: sudo apt-get install chromium'
	$(BIN)/python -m pytest

# Its own pytest run: the options of the tests (warnings as errors) are not meant for the cells of a notebook.
notebooks: $(STAMP)
	$(BIN)/python -m pytest -c /dev/null --rootdir=. -p no:cacheprovider --nbval-lax --nbval-cell-timeout=$(NBVAL_TIMEOUT) notebooks

lab: $(STAMP) ## JupyterLab on the first notebook
	$(BIN)/jupyter lab notebooks/00_first_run.ipynb

clean: ## Remove .venv and what the tools have written
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache test-results *.egg-info build dist
