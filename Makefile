# The commands of the README. Everything they install goes into $(VENV) (Python) or through apt (Slurm, Chromium).

PYTHON ?= python3
VENV ?= .venv
DEMO := .demo
TRIMTAB = $(abspath $(VENV))/bin/trimtab
OTHER_PYTHON ?= python3.12
OTHER_VENV ?= .venv-mcore

.PHONY: help setup demo test lint test-mcore clean
.DELETE_ON_ERROR:

help:
	@echo "make demo        train on a real Slurm on this machine, and report;"
	@echo "                 SCENARIO=? lists what else it can show"
	@echo "make test        run every test"
	@echo "make lint        ruff and mypy"
	@echo "make test-mcore  run the ranks' tests on the Megatron-core of OTHER_PYTHON=$(OTHER_PYTHON)"
	@echo "make clean       remove what these commands made in this directory"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt apt-packages.txt
	./apt-install venv sandbox
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --upgrade "pip>=25.1"
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable ".[train,report]"
	touch $@

$(VENV)/.ready-test: $(VENV)/.ready
	./apt-install browser compiler
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable ".[traces]" --group test --group lint
	touch $@

demo: $(VENV)/.ready
	@rm -rf $(DEMO) && mkdir $(DEMO)
ifdef SCENARIO
	@cd $(DEMO) && $(abspath $(VENV))/bin/python ../examples/demo/scenarios.py "$(SCENARIO)"
else
	@cd $(DEMO) && $(TRIMTAB) sandbox run --profiles profiles -- $(TRIMTAB) submit \
		../examples/demo/job.toml --template cpu-demo --nodes 2 --gpus-per-node 2 --time 0:15:00 --follow
endif

test: $(VENV)/.ready-test
	$(VENV)/bin/python -m pytest

lint: $(VENV)/.ready-test
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

test-mcore:
	$(OTHER_PYTHON) -m venv $(OTHER_VENV)
	$(OTHER_VENV)/bin/pip install --quiet --upgrade "pip>=25.1"
	$(OTHER_VENV)/bin/pip install --quiet --constraint constraints.txt --editable ".[train]" --group test
	$(OTHER_VENV)/bin/python -m pytest tests/megatron_ext

clean:
	rm -rf $(VENV) $(OTHER_VENV) $(DEMO) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
