# Everything a contributor runs. `make` alone lists the targets.

VENV ?= .venv
# The first interpreter that is new enough; PYTHON=... overrides.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
STAMP := $(VENV)/.outrider-ready

# Set by many containers. The environment is installed uncompiled, so that every process of a server, or of a test run,
# would compile torch and vLLM for itself, for ever.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-all test-unit mutants test-cuda-build test-gpu lint format protos clean

help:  ## List these targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Make .venv with everything in it, for CPU or GPU as found (ACCELERATOR=cpu|gpu decides)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "outrider: Python 3.11 or newer is needed and not on PATH; set PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "Making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python deploy/setup_environment.py $(if $(ACCELERATOR),--accelerator $(ACCELERATOR))
	@touch $@

demo: $(STAMP)  ## Fetch a small model, serve it, show one answer with speculation and the same without, compared
	@$(BIN)/python -m outrider.deploy.demo

serve: $(STAMP)  ## Serve a preset or a configuration file (CONFIG=smollm2)
	@exec $(BIN)/outrider serve $(or $(CONFIG),smollm2)

test: $(STAMP)  ## Unit, integration and fault tests but for exhaustive sweeps; installs Chromium for the page's where it is missing and this is root
	@$(BIN)/python tests/install_chromium.py
	@exec $(BIN)/python tests/run_parts.py -m "not exhaustive" $(PYTEST_ARGS)

test-all: $(STAMP)  ## The same with the exhaustive sweeps and what takes minutes for one claim
	@$(BIN)/python tests/install_chromium.py
	@exec $(BIN)/python tests/run_parts.py $(PYTEST_ARGS)

test-unit: $(STAMP)  ## Unit tests only, on every core: no engine
	@exec $(BIN)/python tests/run_parts.py --only unit -m "not exhaustive" $(PYTEST_ARGS)

mutants: $(STAMP)  ## Small faults in the product, 80 by default, which the unit tests should see (MUTANTS="--seed 1 --area link")
	@exec $(BIN)/python -m tests.mutants $(MUTANTS)

test-cuda-build:  ## What can be shown of the CUDA path without a GPU: vLLM's CUDA build on a virtual one, in .venv-cuda (9 GB)
	@exec $(PYTHON) -m tests.cuda_build

test-gpu: $(STAMP)  ## What GPUs can show: kernels, links, then engines, as many as GPUs allow; a table and gpu-report.txt at the end
	@exec $(BIN)/python -m tests.gpu --need-gpu $(PYTEST_ARGS)

lint: $(STAMP)  ## Ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p .mypy_tree/outrider
	@cd .mypy_tree/outrider && ln -sfn ../../actors actors && ln -sfn ../../cluster cluster && ln -sfn ../../deploy deploy \
		&& ln -sfn ../../protos/outrider/v1 v1 && ln -sfn ../../protos/outrider/__init__.py __init__.py
	$(BIN)/mypy

format: $(STAMP)  ## Apply ruff's fixes and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(STAMP)  ## Regenerate the gRPC stubs beside the .proto files
	$(BIN)/python protos/generate.py

clean:  ## Remove .venv, caches and build outputs (fetched models stay)
	rm -rf $(VENV) build dist *.egg-info .hypothesis .pytest_cache .ruff_cache .mypy_cache .mypy_tree
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
